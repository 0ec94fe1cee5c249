"""Has Orbax's own functions and `Checkpointer` save and load a state by this package's engine.

    with zj.checkpoint.Handler.context():
        ocp.save(folder, state)
        state = ocp.load(folder, like)
    ocp.training.Checkpointer(root, context=zj.checkpoint.Handler.context())

The files of `state` are those of `layout`, with `checksums.json` beside them; Orbax makes, renames
and deletes the folder around them. Orbax commits a step as soon as process 0 has done its part. So
process 0 is done only when every process has said, through the coordinator, that its chunks are on
the disk, and a failure anywhere is one everywhere.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from zaya_jax import trees
from zaya_jax.checkpoint import boxes, layout, writing
from zaya_jax.checkpoint.boxes import Holding
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.source import Source
from zaya_jax.checkpoint.writing import Copies
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, UserError

_BELOW = f"{layout.STATE}/"


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
        snapshot: tuple[Holding, Copies] | Exception
        try:
            snapshot = _snapshot(checkpointable)
        except Exception as failure:
            # raised at the roll call: otherwise the other processes would wait for this one
            snapshot = failure
        return self._write(directory, snapshot)

    async def _write(self, directory: Any, snapshot: tuple[Holding, Copies] | Exception) -> None:
        folder = _local(directory.path)
        step = folder.parent.name.split(".orbax-checkpoint-tmp")[0]
        created: Any = await asyncio.gather(directory.await_creation(), return_exceptions=True)
        error = await asyncio.to_thread(_write_together, folder, step, [*created, snapshot])
        if error:
            raise StorageError(f"{folder.parent.parent / step} is not saved: {error}")

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """The tree as the abstract one says; leaves without a sharding, and all without a tree, as
        NumPy's arrays."""
        return asyncio.to_thread(_load, _source(directory), abstract_checkpointable)

    async def metadata(self, directory: Any) -> Any:
        """The shapes and types."""
        arrays = _source(directory).arrays().values()
        return trees.nested(
            {x.name: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)) for x in arrays}
        )

    def is_handleable(self, checkpointable: Any) -> bool:
        """What it cannot take is refused with a reason."""
        return True

    is_abstract_handleable = is_handleable


@functools.cache
def _copier(sharding: Sharding) -> Any:
    return jax.jit(jnp.copy, out_shardings=sharding)


def _snapshot(tree: Any) -> tuple[Holding, Copies]:
    """A copy that lies on the devices, a share on each device that has an array; its copying is
    only begun."""
    leaves, first = trees.flat(tree), jax.devices()[0]
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
                sharding = layout.spread(x.shape, x.dtype, sharding)
            x = _copier(sharding)(x)
            copies[name] = {shard.device: shard.data for shard in x.addressable_shards}
        else:  # the same in each process; process 0 writes it
            x, sharding = np.array(x), SingleDeviceSharding(first)
            x = x.astype(x.dtype.newbyteorder("="))  # files do not tell the order of bytes
            if x.dtype.kind in "OSU":
                raise UserError(f"{name} is neither an array nor a number")
            copies[name] = {first: x}
        like[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return boxes.of_tree(like), copies


class _Inside(layout.Array):
    """An array whose files are written below the state's folder, which has a passing name while
    Orbax saves."""

    @property
    def folder(self) -> str:
        return self.name


def _write_together(folder: Path, step: str, so_far: list[Any]) -> str | None:
    """Writes this process's chunks, and in process 0 the list when all have; an error of any
    process, in each.

    `so_far`: the folder and the snapshot, or an error in place of each.
    """

    def work() -> Sums:
        for failed in so_far:
            if isinstance(failed, BaseException):
                raise failed
        held, copies = so_far[1]
        plan, me = held.plan(), jax.process_index()
        inside = dataclasses.replace(
            plan, arrays={name: _Inside(**vars(x)) for name, x in plan.arrays.items()}
        )
        sums = writing.write_parts(folder, inside, plan.parts.get(me, []), copies, writing.Times())
        if multihost.is_writer():
            small = layout.frame(tuple(plan.arrays.values()), {})
            sums |= writing.write_files(
                folder,
                {n.removeprefix(_BELOW): x for n, x in small.items() if n.startswith(_BELOW)},
            )
        return sums

    def end(told: list[Sums]) -> None:
        whole = {file: entry for part in told for file, entry in part.items()}
        for below in {folder / Path(file).parent for file in whole}:
            writing.sync_folder(below)
        listed = Seal(
            {_BELOW + file: entry for file, entry in whole.items()},
            int(step) if step.isdecimal() else 0,
        )
        writing.write_files(folder.parent, {layout.MARKER: listed.content()})
        writing.sync_folder(folder.parent)

    return writing.together(f"save {folder.parent.parent / step}", work, end)


def _local(folder: Any) -> Path:
    """A state's folder; UserError where it is none of this machine's, or called otherwise."""
    if "://" in str(folder) or folder.name.split(".")[0] != layout.STATE:
        raise UserError(f"this handler is of {layout.STATE!r} in a mounted folder, not of {folder}")
    return Path(folder)


def _source(directory: Any) -> Source:
    """The checkpoint around a state's folder; StorageError where it has no list of its files, or
    another step's."""
    folder = _local(directory).parent
    if not (folder / layout.MARKER).is_file():
        raise StorageError(
            f"{folder} has no {layout.MARKER}: what Orbax saved without this handler is loaded"
            " without its context"
        )
    source = Source(folder)
    if folder.name.isdecimal() and source.step not in (0, int(folder.name)):
        raise StorageError(
            f"{folder} is of step {source.step}: whole steps were exchanged or renamed"
        )
    return source


def _load(source: Source, like: Any) -> Any:
    if like is None:
        source.check()
        return trees.nested({name: source.read([name]) for name in source.arrays()})
    wanted = trees.flat(like)
    placed = {name: x for name, x in wanted.items() if getattr(x, "sharding", None) is not None}
    source.check(names=[f"{_BELOW}{name}/" for name in wanted.keys() - placed.keys()])
    found = source.restore(placed)
    for name in wanted.keys() - placed.keys():
        x, shape = source.read([name]), getattr(wanted[name], "shape", None)
        if shape not in (None, x.shape):
            raise StorageError(
                f"{source.name}: its array {name} is {list(x.shape)}, {list(shape)} is asked for"
            )
        found[name] = np.asarray(x, getattr(wanted[name], "dtype", None))
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])
