"""Copies a run's state for its checkpoints, and makes a state of a copy that was read.

    copies = snapshot.of_run(setup.optimizer, states.abstract(config, setup), setup.spread.heads)
    store.save(step, copies.take(state), meta, copies.held)
    state, _ = store.restore(step, copies.like, copies.held, copies.place)

A copy has the run's own arrays, each device's own part, so that nothing travels for a save:
ZeRO-1's buckets as they are, and a share each of arrays on several devices (`layout.spread`). A
checkpoint's arrays are logical: one for each weight, and for each of its moments, whatever the
mesh. `held` says where they lie in the run's own. At a start each device reads its share, and
devices that have the same hand it on.

The copy is made on the devices, in order with the steps. Where one does not fit them, by their own
figures, it is made on the host, array by array, while the training waits.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import chip
from zaya_jax import trees
from zaya_jax.checkpoint import boxes, layout, writing
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.checkpoint.writing import OnHost
from zaya_jax.cluster import multihost
from zaya_jax.optim import balance, chain
from zaya_jax.optim.chain import Optimizer
from zaya_jax.training import state as states
from zaya_jax.training.state import REPLICATED


@dataclasses.dataclass(frozen=True)
class Copies:
    """The ways between a run's state and its checkpoints."""

    optimizer: Optimizer
    like: Any  # a copy, as a tree of ShapeDtypeStructs
    held: Holding  # where the checkpoint's arrays lie in it
    place: Callable[[Any], Any]  # a copy as a state, which takes the copy's memory
    program: Any  # jitted: arrays to a copy
    say: Callable[[str], None]

    def take(self, state: Any) -> Any:
        """A copy, made where there is room for it; all processes together, after a step."""
        return self.on_devices(state) if self._fits_devices else self.on_host(state)

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

    def on_host(self, state: Any) -> OnHost:
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
                    writing.on_host(own), copy=chip.chip_of(shard.device).is_host or None
                )
                found[name][shard.device] = host
        return OnHost(found)

    def with_weights_of(self, state: Any, read: Callable[[Any, Holding], Any]) -> Any:
        """A fresh state with the weights and balancing biases of a checkpoint; read(like, held)
        reads these."""
        held = self.held.weights()
        found = read(
            {name: x for name, x in trees.flat(self.like).items() if name in held.leaves}, held
        )
        fresh = trees.flat(arrays_of(self.optimizer, state))
        return self.place(
            jax.tree.unflatten(jax.tree.structure(self.like), (fresh | found).values())
        )


def unused_bytes(device: jax.Device) -> int | None:
    """Memory of a device that nothing has used so far, no step either; None where the device does
    not report it."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "peak_bytes_in_use" not in stats:
        return None
    return stats["bytes_limit"] - stats["peak_bytes_in_use"]


def of_run(
    optimizer: Optimizer, state: Any, heads: int, say: Callable[[str], None] = lambda message: None
) -> Copies:
    """How a state like this (`training.state.abstract`) goes into checkpoints and comes out of
    them.

    `heads` is the spread's: the parts in which gate and up columns lie in pairs.
    """
    whole = arrays_of(optimizer, state)
    mesh = jax.tree.leaves(whole)[0].sharding.mesh
    like = whole | {"params": jax.tree.map(_share, whole["params"])}
    held, place = (
        _held(optimizer, mesh, like, heads),
        _place(optimizer, mesh, state["params"], like["params"]),
    )
    return Copies(optimizer, like, held, place, _program(like), say)


def _share(x: Any) -> Any:
    """An array cut into shares for the devices that have it."""
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=layout.spread(x.shape, x.dtype, x.sharding)
    )


# ################################################################################################
# The arrays of a checkpoint
# ##################################################################################################


def arrays_of(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a state that a checkpoint holds, as it lies: of weights that devices have copies
    of, the owners'."""
    params = trees.flat(state["params"], "/")
    return {
        "params": trees.nested(
            {path: x for path, x in params.items() if path not in optimizer.layout.copied}, "/"
        ),
        "optimizer": optimizer.arrays(state["optimizer"]),
        "balance": state["balance"]._asdict(),
    }


def _held(optimizer: Optimizer, mesh: Mesh, like: Any, heads: int) -> Holding:
    """Where the checkpoint's arrays lie in those of `arrays_of`; the experts' width lies on `heads`
    devices."""
    leaves, devices = trees.flat(like), list(mesh.devices.flat)
    shapes = {weight.path: weight.shape for weight in optimizer.layout.weights}
    logical, parts = {}, []
    buckets = {
        f"optimizer.{kind}.{bucket}": (kind, bucket)
        for kind, found in like["optimizer"].items()
        if kind in chain.KINDS
        for bucket in found
    }
    for leaf, x in leaves.items():
        if leaf not in buckets:
            logical[leaf] = x
            parts += boxes.parts_of(leaf, x)
            continue
        kind, bucket = buckets[leaf]
        for h in optimizer.layout.held(bucket):
            name = ("params." if kind == "weights" else f"optimizer.{kind}.") + h.weight.replace(
                "/", "."
            )
            logical[name] = jax.ShapeDtypeStruct(shapes[h.weight], x.dtype)
            parts.append(HeldBox(name, h.box, leaf, devices[h.device], h.place))
    return Holding(
        logical,
        leaves,
        [p for part in parts for p in _paired(part, logical[part.name].shape, heads)],
    )


def _paired(part: HeldBox, shape: tuple[int, ...], heads: int) -> list[HeldBox]:
    """Cuts a part of the gate and up columns in two where a run holds them in pairs
    (`sharding.arrange`)."""
    if heads == 1 or part.name.split(".")[-1] != "gate_up":
        return [part]
    found, width, columns = [], shape[-1] // (2 * heads), part.box[-1]
    for block in range(columns.start // width, -(-columns.stop // width)):
        begin, end = max(columns.start, block * width), min(columns.stop, (block + 1) * width)
        moved = (block % 2 * heads + block // 2) * width - block * width
        box = (*part.box[:-1], slice(begin + moved, end + moved))
        inner = layout.within((*part.box[:-1], slice(begin, end)), part.box)
        found.append(dataclasses.replace(part, box=box, outer=part.box, inner=inner))
    return found


# ################################################################################################
# Copying
# ##################################################################################################


def _program(like: Any) -> Any:
    """The function from arrays to a copy. Each device copies its part, or slices its share out of
    it."""
    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=places)


def _place(optimizer: Optimizer, mesh: Mesh, whole: Any, like: Any) -> Callable[[Any], Any]:
    """The function from a copy to a state: devices with a share of a parameter gather the rest; all
    else is there."""
    full, shares = trees.flat(whole, "/"), trees.flat(like, "/")
    cut = [
        name
        for name, x in shares.items()
        if states.bytes_per_device(x) < states.bytes_per_device(full[name])
    ]
    together = jax.jit(
        lambda found: found, out_shardings={name: full[name].sharding for name in cut}
    )

    def copies(kept):
        mapped = jax.shard_map(
            optimizer.layout.copies,
            mesh=mesh,
            check_vma=False,
            in_specs=({name: optimizer.layout.spec(name) for name in kept},),
            out_specs=REPLICATED,
        )
        return jax.jit(
            mapped, out_shardings={path: full[path].sharding for path in optimizer.layout.copied}
        )(kept)

    def place(copy: Any) -> Any:
        params = trees.flat(copy["params"], "/")
        params |= together({name: params[name] for name in cut}) if cut else {}
        # The copy's mesh is of prime factors: for arrays on it the training step would be compiled
        # a second time.
        params = {name: _with_sharding(full[name].sharding, x) for name, x in params.items()}
        kept = copy["optimizer"]["weights"]
        params |= copies(kept) if kept else {}
        figures = {name: _replicated(mesh, x) for name, x in optimizer.no_figures().items()}
        return {
            "params": trees.nested(params, "/"),
            "optimizer": optimizer.with_arrays(copy["optimizer"], figures),
            "balance": balance.State(**copy["balance"]),
        }

    return place


def _with_sharding(sharding: NamedSharding, x: jax.Array) -> jax.Array:
    """The same parts on the same devices, under another sharding that means the same."""
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def _replicated(mesh: Mesh, x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, REPLICATED), lambda index: x[index]
    )
