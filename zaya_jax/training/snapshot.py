"""Copies a run's state for its checkpoints, and makes a state of a copy that was read.

    copies = Copies(setup.optimizer, states.abstract(config, setup))
    store.save(step, copies.take(state), meta, copies.held)
    state, _ = store.restore(step, copies.like, copies.held, copies.place)

Three things have the same numbers:

    state       what the steps change: a parameter may lie whole on several devices
    copy        the state's arrays (`arrays_of`), each device's own part, so that nothing travels for a
                save: ZeRO-1's buckets as they are, and a share each of a parameter that several
                devices have (`layout.spread`)
    checkpoint  an array for each weight, and for each of its moments, whatever the mesh; `held`
                says where they lie in a copy

At a start each device reads its part of a copy, and devices that have the same parameter hand their
shares on.

The copy is made on the devices, in order with the steps. Where one does not fit them, by their own
figures, it is made on the host, array by array, while the training waits.
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
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.checkpoint.writing import DeviceParts
from zaya_jax.cluster import multihost
from zaya_jax.optim import balance, chain
from zaya_jax.optim.chain import Optimizer
from zaya_jax.training import state as states
from zaya_jax.training.state import REPLICATED


class Copies:
    """The ways between a run's state (here an abstract one) and its checkpoints."""

    def __init__(
        self, optimizer: Optimizer, state: Any, say: Callable[[str], None] = lambda message: None
    ):
        self.optimizer, self.say = optimizer, say
        self._params = trees.flat(state["params"], "/")
        self._mesh = next(iter(self._params.values())).sharding.mesh
        arrays = arrays_of(optimizer, state)
        # a copy, as ShapeDtypeStructs with their shardings
        self.like = arrays | {"params": jax.tree.map(_share, arrays["params"])}
        self._cut = [
            name
            for name, x in trees.flat(self.like["params"], "/").items()
            if x.sharding != self._params[name].sharding
        ]
        self.held = _held(optimizer, list(self._mesh.devices.flat), self.like)
        shardings = jax.tree.map(lambda x: x.sharding, self.like)
        # Each device copies its part, or slices its share out of it.
        self.program: Any = jax.jit(
            lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=shardings
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
        needed = sum(states.bytes_per_device(x) for x in jax.tree.leaves(self.like))
        free = [
            unused_bytes(device)
            for device in jax.tree.leaves(self.like)[0].sharding.addressable_devices
        ]
        known = [x for x in free if x is not None]
        if len(known) < len(free):
            return True
        least = multihost.reduce_figures({"free": float(min(known))}, {"free": np.min})["free"]
        how = (
            "made there"
            if needed <= least
            else "made on the host, array by array, while the training waits"
        )
        self.say(
            f"the copy that a checkpoint is saved from takes {needed / 2**30:.2f} GiB of each"
            f" device, {least / 2**30:.2f} GiB are free during the steps: it is {how}"
        )
        return needed <= least

    def on_devices(self, state: Any) -> Any:
        """A copy on the devices."""
        return self.program(arrays_of(self.optimizer, state))

    def on_host(self, state: Any) -> DeviceParts:
        """A copy on the host. A device needs memory only for its share of one array that several
        have."""
        found: dict[str, dict[jax.Device, np.ndarray]] = {}
        for (name, x), like in zip(
            trees.flat(arrays_of(self.optimizer, state)).items(),
            jax.tree.leaves(self.like),
            strict=True,
        ):
            shares = like.sharding.addressable_devices_indices_map(x.shape)
            found[name] = {}
            for shard in x.addressable_shards:
                has, box = (
                    layout.box_of(index, x.shape) for index in (shard.index, shares[shard.device])
                )
                own = shard.data if box == has else shard.data[layout.within(box, has)]
                # On a CPU it would be the state's own memory, which the next step takes.
                host = np.array(
                    writing.to_host(own), copy=chip.chip_of(shard.device).is_host or None
                )
                found[name][shard.device] = host
        return found

    def place(self, copy: Any) -> dict[str, Any]:
        """A copy as a state, which takes the copy's memory; all processes together."""
        params = trees.flat(copy["params"], "/")
        params |= self._together({name: params[name] for name in self._cut})
        if self.optimizer.layout.copied:
            params |= self._rounded(copy["optimizer"]["weights"])
        everywhere = NamedSharding(self._mesh, REPLICATED)
        figures = {
            name: jax.make_array_from_callback(x.shape, everywhere, x.__getitem__)
            for name, x in self.optimizer.no_figures().items()
        }
        return {
            "params": trees.nested(params, "/"),
            "optimizer": self.optimizer.with_arrays(copy["optimizer"], figures),
            "balance": balance.State(**copy["balance"]),
        }

    def _together(self, shares: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Whole parameters: devices with a share gather the rest."""
        if not shares:
            return {}
        shardings = {name: self._params[name].sharding for name in shares}
        return jax.jit(lambda shares: shares, out_shardings=shardings)(shares)

    def _rounded(self, kept: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The devices' copies, by path, of weights that their owners keep in float32, by bucket."""
        buckets = self.optimizer.layout
        shardings = {path: self._params[path].sharding for path in buckets.copied}
        mapped = jax.shard_map(
            buckets.copies,
            mesh=self._mesh,
            check_vma=False,
            in_specs=({name: buckets.spec(name) for name in kept},),
            out_specs=REPLICATED,
        )
        return jax.jit(mapped, out_shardings=shardings)(kept)

    def with_weights_of(self, state: Any, read: Callable[[Any, Holding], Any]) -> Any:
        """A fresh state with the weights and balancing biases of a checkpoint; read(like, held)
        reads these."""
        held = self.held.weights()
        like = {name: x for name, x in trees.flat(self.like).items() if name in held.leaves}
        arrays = trees.flat(arrays_of(self.optimizer, state)) | read(like, held)
        return self.place(jax.tree.unflatten(jax.tree.structure(self.like), arrays.values()))


def _share(x: Any) -> Any:
    """An array cut into shares for the devices that have it."""
    sharding = layout.spread(x.shape, x.dtype, x.sharding)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def arrays_of(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a state that a checkpoint holds, as it lies: of weights that devices have copies
    of, the owners'."""
    params = trees.flat(state["params"], "/")
    own = {path: x for path, x in params.items() if path not in optimizer.layout.copied}
    return {
        "params": trees.nested(own, "/"),
        "optimizer": optimizer.arrays(state["optimizer"]),
        "balance": state["balance"]._asdict(),
    }


def _held(optimizer: Optimizer, devices: list[jax.Device], like: Any) -> Holding:
    """Where the checkpoint's arrays lie in those of a copy.

    A bucket holds boxes of one kind of state of several weights (in "weights" the parameters
    themselves); every other leaf is an array of the checkpoint.
    """
    leaves = trees.flat(like)
    buckets = {
        f"optimizer.{kind}.{bucket}": (kind, bucket)
        for kind in chain.KINDS
        for bucket in like["optimizer"][kind]
    }
    shapes = {weight.path: weight.shape for weight in optimizer.layout.weights}
    arrays: dict[str, Any] = {}
    parts: list[HeldBox] = []
    for leaf, x in leaves.items():
        if leaf not in buckets:
            arrays[leaf] = x
            parts += boxes.parts_of(leaf, x)
            continue
        kind, bucket = buckets[leaf]
        group = "params" if kind == "weights" else f"optimizer.{kind}"
        for held in optimizer.layout.held(bucket):
            name = f"{group}.{held.weight.replace('/', '.')}"
            arrays[name] = jax.ShapeDtypeStruct(shapes[held.weight], x.dtype)
            parts.append(HeldBox(name, held.box, leaf, devices[held.device], held.place))
    return Holding(arrays, leaves, parts)


def unused_bytes(device: jax.Device) -> int | None:
    """Memory of a device that nothing has used so far, no step either; None where the device does
    not report it."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "peak_bytes_in_use" not in stats:
        return None
    return stats["bytes_limit"] - stats["peak_bytes_in_use"]
