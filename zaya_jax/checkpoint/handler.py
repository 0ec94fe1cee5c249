"""Has Orbax's own functions and `Checkpointer` save and load a state by this package's engine.

    with zj.checkpoint.Handler.context():
        ocp.save(folder, state)
        state = ocp.load(folder, like)
    ocp.training.Checkpointer(root, context=zj.checkpoint.Handler.context())

The files of `state` are those of `layout`, with `checksums.json` beside them; Orbax makes, renames
and deletes the folder around them. Orbax commits a step as soon as process 0 has done its part. So
process 0 reports completion only after every process has confirmed that its chunks are on disk; a
failure in any process fails the save in all.
"""

import asyncio
import functools
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from zaya_jax import trees
from zaya_jax.checkpoint import boxes, folders, layout, writing
from zaya_jax.checkpoint.boxes import Locations
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.checkpoint.writing import DeviceParts
from zaya_jax.config import StorageError, UserError

_IN_STATE = f"{layout.STATE}/"


class Handler:
    """Orbax's `CheckpointableHandler` for a tree of arrays and numbers."""

    @classmethod
    def context(cls) -> Any:
        """A new context of Orbax in which `state` is this class's; other checkpointables keep their
        handlers."""
        # Imported here: it takes seconds.
        from orbax.checkpoint import v1 as ocp

        registry = ocp.handlers.local_registry(include_global_registry=False)
        registry.add(cls, checkpointable_name=layout.STATE)
        known = ocp.handlers.global_registry()
        for handler, name in known.get_all_entries():
            if name != layout.STATE:
                aliases = known.get_secondary_typestrs(handler)
                registry.add(handler, checkpointable_name=name, secondary_typestrs=aliases)
        context = ocp.Context()
        context.checkpointables.registry = registry
        return context

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Begins to copy the state on its devices, after which the caller may donate it; the rest
        is awaited."""
        snapshot: _Snapshot | Exception
        try:
            snapshot = _snapshot(checkpointable)
        except Exception as failure:
            # raised at the roll call: otherwise the other processes would wait for this one
            snapshot = failure
        return self._write(directory, snapshot)

    async def _write(self, directory: Any, snapshot: "_Snapshot | Exception") -> None:
        folder = _local(directory.path)
        step = folder.parent.name.split(".orbax-checkpoint-tmp")[0]
        try:
            await directory.await_creation()
        except Exception as failure:
            snapshot = failure
        error = await asyncio.to_thread(_write_together, folder, step, snapshot)
        if error:
            raise StorageError(f"{folder.parent.parent / step} is not saved: {error}")

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """The tree as the abstract one says; leaves without a sharding, and all without a tree, as
        NumPy's arrays."""
        return asyncio.to_thread(_load, _source(directory), abstract_checkpointable)

    async def metadata(self, directory: Any) -> Any:
        """The shapes and types."""
        arrays = _source(directory).arrays.values()
        return trees.nested(
            {x.name: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)) for x in arrays}
        )

    def is_handleable(self, checkpointable: Any) -> bool:
        """What it cannot take is refused with a reason."""
        return True

    is_abstract_handleable = is_handleable


_Snapshot = tuple[Locations, DeviceParts]


@functools.cache
def _copy_with(sharding: Sharding) -> Any:
    return jax.jit(jnp.copy, out_shardings=sharding)


def _snapshot(tree: Any) -> _Snapshot:
    """A copy that lies on the devices, a share on each device that has an array; its copying is
    only begun."""
    leaves = trees.flat(tree)
    first = jax.devices()[0]
    if len(leaves) < len(jax.tree.leaves(tree)) or any(not name or "/" in name for name in leaves):
        raise UserError(
            "an array's path is its file's name, so each needs a key, without '.' and '/'; given:"
            f" {sorted(leaves)}"
        )
    like, copies = {}, {}
    for name, x in leaves.items():
        if isinstance(x, jax.Array):
            if jax.process_count() > 1 and x.is_fully_addressable:
                raise UserError(f"{name} is an array of one process alone; put it on the mesh")
            sharding = x.sharding
            if isinstance(sharding, NamedSharding):
                sharding = layout.cut_replicas(x.shape, x.dtype, sharding)
            x = _copy_with(sharding)(x)
            copies[name] = {shard.device: shard.data for shard in x.addressable_shards}
        else:  # the same in each process; process 0 writes it
            x = np.array(x)
            sharding = SingleDeviceSharding(first)
            x = x.astype(x.dtype.newbyteorder("="))  # files do not tell the order of bytes
            if x.dtype.kind in "OSU":
                raise UserError(f"{name} is neither an array nor a number")
            copies[name] = {first: x}
        like[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return boxes.of_tree(like), copies


def _write_together(folder: Path, step: str, snapshot: _Snapshot | Exception) -> str | None:
    """Writes this process's chunks, and in process 0 the seal when all have; an error of any
    process, in each.

    `folder` is the state's, which has a passing name while Orbax saves. The snapshot is an error if
    it or the folder could not be made.
    """

    def write() -> Sums:
        if isinstance(snapshot, Exception):
            raise snapshot
        locations, device_parts = snapshot
        writers = locations.writers()
        return writing.write_share(folder, writers, device_parts, {}, prefix=_IN_STATE)

    def write_seal(sums_by_process: list[Sums]) -> None:
        sums = {name: entry for part in sums_by_process for name, entry in part.items()}
        for below in {(folder / name.removeprefix(_IN_STATE)).parent for name in sums}:
            folders.sync_folder(below)
        seal = Seal(sums, folders.step_of(step) or 0)
        writing.write_files(folder.parent, {layout.SEAL_FILE: seal.to_bytes()})
        folders.sync_folder(folder.parent)

    name = f"save {folder.parent.parent / step}"
    return writing.run_in_all_then_zero(name, write, write_seal)


def _local(folder: Any) -> Path:
    """A state's folder; UserError if it is not on this machine, or has another name."""
    if "://" in str(folder) or folder.name.split(".")[0] != layout.STATE:
        raise UserError(
            f"this handler only handles the checkpointable {layout.STATE!r} in a local folder, not"
            f" {folder}"
        )
    return Path(folder)


def _source(directory: Any) -> SealedSource:
    """The checkpoint around a state's folder; StorageError if it has no seal, or
    another step's."""
    folder = _local(directory).parent
    if not (folder / layout.SEAL_FILE).is_file():
        raise StorageError(
            f"{folder} has no {layout.SEAL_FILE}: load checkpoints that Orbax saved on its own outside"
            " Handler.context()"
        )
    source = SealedSource(folder)
    number = folders.step_of(folder.name)
    if number is not None and source.step not in (0, number):
        raise StorageError(
            f"{folder} is of step {source.step}: whole steps were exchanged or renamed"
        )
    return source


def _load(source: SealedSource, like: Any) -> Any:
    if like is None:
        return trees.nested({name: source.read(name) for name in source.arrays})
    wanted = trees.flat(like)
    placed = {name: x for name, x in wanted.items() if getattr(x, "sharding", None) is not None}
    on_host = wanted.keys() - placed.keys()
    leaves = source.restore(placed)
    for name in on_host:
        x = source.read(name)
        shape = getattr(wanted[name], "shape", None)
        if shape not in (None, x.shape):
            raise StorageError(
                f"{source.name}: its array {name} is {list(x.shape)}, {list(shape)} is asked for"
            )
        leaves[name] = np.asarray(x, getattr(wanted[name], "dtype", None))
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted])
