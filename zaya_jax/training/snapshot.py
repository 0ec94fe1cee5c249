"""Copies a run's state for its checkpoints, and makes a state of a copy that was read.

    snapshots = Snapshots(setup.optimizer, states.abstract(config, setup))
    store.save(step, snapshots.take(state), meta, snapshots.locations)
    state = store.restore(step, snapshots.abstract, snapshots.locations, snapshots.to_state)

Three things have the same numbers:

    state       what the steps change: a parameter may lie whole on several devices
    copy        the state's arrays (`checkpoint_arrays`), each device's own part, so that nothing travels
                for a save: ZeRO-1's buckets as they are, and of a parameter that several devices have
                one part on each (`layout.cut_replicas`)
    checkpoint  an array for each weight, and for each of its moments, whatever the mesh; `locations`
                says where they lie in a copy

At a start each device reads its part of a copy, and devices that have the same parameter hand their
parts on.

The copy is made on the devices, in order with the steps. If it does not fit there, by the devices'
own figures, it is made on the host, array by array, while the training waits.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from pallas_kernels import chip
from zaya_jax import trees
from zaya_jax.checkpoint import boxes, layout, writing
from zaya_jax.checkpoint.boxes import LocatedBox, Locations
from zaya_jax.checkpoint.writing import DeviceParts
from zaya_jax.cluster import multihost
from zaya_jax.optim import balance, chain
from zaya_jax.optim.chain import Optimizer
from zaya_jax.training import state as states
from zaya_jax.training.state import REPLICATED


class Snapshots:
    """Takes copies of a run's state, and turns copies into states.

    Made from the abstract state; `abstract` and `locations` describe its copies.
    """

    def __init__(
        self, optimizer: Optimizer, state: Any, say: Callable[[str], None] = lambda message: None
    ):
        self.optimizer, self.say = optimizer, say
        self._params = trees.flat(state["params"], "/")
        self._mesh = next(iter(self._params.values())).sharding.mesh
        arrays = checkpoint_arrays(optimizer, state)
        # A copy, as ShapeDtypeStructs with their shardings.
        self.abstract = arrays | {"params": jax.tree.map(_cut, arrays["params"])}
        self.locations = _locations(optimizer, list(self._mesh.devices.flat), self.abstract)
        # Each device copies its part, or slices it out of what it has.
        self.program: Any = jax.jit(
            lambda arrays: jax.tree.map(jnp.copy, arrays),
            out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract),
        )

    def take(self, state: Any) -> DeviceParts:
        """A copy, made where there is room for it; all processes together, after a step."""
        if self._fits_devices:
            return writing.parts_by_device(self.on_devices(state))
        return self.on_host(state)

    @functools.cached_property
    def _fits_devices(self) -> bool:
        """Whether a copy fits the devices; asked once, since from then on their peak holds a copy
        too."""
        leaves = jax.tree.leaves(self.abstract)
        needed = sum(states.bytes_per_device(x) for x in leaves)
        free = [unused_bytes(device) for device in leaves[0].sharding.addressable_devices]
        known = [x for x in free if x is not None]
        if len(known) < len(free):
            return True
        least = multihost.reduce_figures({"free": float(min(known))}, {"free": np.min})["free"]
        fits = needed <= least
        where = "there" if fits else "on the host, array by array, while the training waits"
        self.say(
            f"the copy that a checkpoint is saved from takes {needed / 2**30:.2f} GiB of each"
            f" device, and the steps leave {least / 2**30:.2f} GiB free: it is made {where}"
        )
        return fits

    def on_devices(self, state: Any) -> Any:
        """A copy on the devices."""
        return self.program(checkpoint_arrays(self.optimizer, state))

    def on_host(self, state: Any) -> DeviceParts:
        """A copy on the host. On a device this takes memory for at most one part of one array."""
        copies: dict[str, dict[jax.Device, Any]] = {}
        abstract = trees.flat(self.abstract)
        for name, x in trees.flat(checkpoint_arrays(self.optimizer, state)).items():
            parts = abstract[name].sharding.addressable_devices_indices_map(x.shape)
            copies[name] = {}
            for shard in x.addressable_shards:
                has = layout.box_of(shard.index, x.shape)
                box = layout.box_of(parts[shard.device], x.shape)
                part = shard.data if box == has else shard.data[layout.within(box, has)]
                # NumPy's `copy`: True always copies, None only if it must. On a CPU the array would
                # be the state's own memory, which the next step takes.
                must_copy = chip.chip_of(shard.device).is_host or None
                copies[name][shard.device] = np.array(writing.to_host(part), copy=must_copy)
        return copies

    def to_state(self, copy: Any) -> dict[str, Any]:
        """A copy as a state, which takes the copy's memory; all processes together."""
        params = trees.flat(copy["params"], "/")
        params |= self._gather(params)
        if self.optimizer.layout.copied:
            params |= self._compute_weights(copy["optimizer"]["weights"])
        everywhere = NamedSharding(self._mesh, REPLICATED)
        figures = {
            name: jax.make_array_from_callback(x.shape, everywhere, x.__getitem__)
            for name, x in self.optimizer.empty_figures().items()
        }
        return {
            "params": trees.nested(params, "/"),
            "optimizer": self.optimizer.state_from_arrays(copy["optimizer"], figures),
            "balance": balance.BalanceState(**copy["balance"]),
        }

    def _gather(self, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Whole parameters, of those that are cut in a copy."""
        abstract = trees.flat(self.abstract["params"], "/")
        shardings = {
            name: self._params[name].sharding
            for name, x in abstract.items()
            if x.sharding != self._params[name].sharding
        }
        if not shardings:
            return {}
        cut = {name: parts[name] for name in shardings}
        return jax.jit(lambda parts: parts, out_shardings=shardings)(cut)

    def _compute_weights(self, master_weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The bfloat16 weights that devices compute with, by path, from the float32 ones that their
        owners keep, by bucket."""
        buckets = self.optimizer.layout
        shardings = {path: self._params[path].sharding for path in buckets.copied}
        mapped = jax.shard_map(
            buckets.copies,
            mesh=self._mesh,
            check_vma=False,
            in_specs=({name: buckets.spec(name) for name in master_weights},),
            out_specs=REPLICATED,
        )
        return jax.jit(mapped, out_shardings=shardings)(master_weights)

    def with_weights_of(self, state: Any, read: Callable[[Any, Locations], Any]) -> Any:
        """A fresh state with the weights and balancing biases of a checkpoint; read(abstract,
        locations) reads these."""
        locations = self.locations.weights()
        abstract = {
            name: x for name, x in trees.flat(self.abstract).items() if name in locations.leaves
        }
        arrays = trees.flat(checkpoint_arrays(self.optimizer, state)) | read(abstract, locations)
        return self.to_state(jax.tree.unflatten(jax.tree.structure(self.abstract), arrays.values()))


def _cut(x: Any) -> Any:
    """An array cut into parts, one for each device that has it."""
    sharding = layout.cut_replicas(x.shape, x.dtype, x.sharding)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def checkpoint_arrays(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a state that go into a checkpoint, in their present layout.

    Of weights that devices have in bfloat16, only the owners' float32 arrays, which are the
    optimizer's.
    """
    params = trees.flat(state["params"], "/")
    copied = optimizer.layout.copied
    return {
        "params": trees.nested({path: x for path, x in params.items() if path not in copied}, "/"),
        "optimizer": optimizer.arrays(state["optimizer"]),
        "balance": state["balance"]._asdict(),
    }


def _locations(optimizer: Optimizer, devices: list[jax.Device], abstract: Any) -> Locations:
    """Where the checkpoint's arrays lie in those of a copy.

    A bucket holds boxes of one kind of state of several weights (in "weights" the parameters
    themselves); every other leaf is an array of the checkpoint.
    """
    leaves = trees.flat(abstract)
    shapes = {weight.path: weight.shape for weight in optimizer.layout.weights}
    arrays: dict[str, Any] = {}
    parts: list[LocatedBox] = []
    for leaf, x in leaves.items():
        kind, _, bucket = leaf.removeprefix("optimizer.").partition(".")
        if kind not in chain.KINDS or bucket not in abstract["optimizer"][kind]:
            arrays[leaf] = x
            parts += boxes.parts_of(leaf, x)
            continue
        group = "params" if kind == "weights" else f"optimizer.{kind}"
        for state_box in optimizer.layout.bucket_of[bucket].state_boxes(bucket):
            name = f"{group}.{state_box.weight.replace('/', '.')}"
            arrays[name] = jax.ShapeDtypeStruct(shapes[state_box.weight], x.dtype)
            device = devices[state_box.device]
            parts.append(LocatedBox(name, state_box.box, leaf, device, state_box.place))
    return Locations(arrays, leaves, parts)


def unused_bytes(device: jax.Device) -> int | None:
    """Memory of a device that nothing has used so far, no step either; None where the device does
    not report it."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "peak_bytes_in_use" not in stats:
        return None
    return stats["bytes_limit"] - stats["peak_bytes_in_use"]
