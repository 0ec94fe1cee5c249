"""Part of a checkpoint for another model or program: parameters alone, some arrays, another type, a smaller model's.

    params = partial.read(folder, "params.*", dtype="bfloat16")["params"]        NumPy arrays, as a tree
    copy = partial.InitialWeights(source, held, grow=True).of(fresh, say=print)     of a run's first state

A grown model takes what fits: layers and experts that the smaller one has, in their places; the skip class stays last.
Arrays that it does not take keep their fresh values and are listed.
"""

import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.checkpoint.foreign import open_source
from zaya_jax.checkpoint.source import Source
from zaya_jax.cluster import multihost
from zaya_jax.config import UserError

SKIP_LAST = ("params.layers.router.out.kernel", "balance.bias")  # their last dim: experts and the skip class
Overlap = tuple[slice, slice]  # from, to


def read(
    place: str | Path | Source, pattern: str = "params.*", step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """The arrays of a checkpoint whose names fit a pattern (params.layers.router.*), on the host.

    `place` is a workdir, the folder of one checkpoint or of exported parameters, a URL, or an open source; floating
    point numbers become `dtype`.
    """
    source = place if isinstance(place, Source) else open_source(place, step)
    chosen = [array for name, array in source.arrays().items() if fnmatch.fnmatchcase(name, pattern)]
    if not chosen:
        names = ", ".join(sorted({name.split(".")[0] + ".*" for name in source.arrays()}))
        raise UserError(f"no array of {source.name} is called {pattern!r}; it has {names}")
    source.check(names=[array.folder for array in chosen])
    found = {}
    for array in chosen:
        out = np.empty(array.shape, np.dtype(dtype if dtype and layout.is_real(array.dtype) else array.dtype))
        source.fill(array, tuple(slice(0, n) for n in array.shape), out)
        found[array.name] = out
    return trees.nested(found)


class InitialWeights:
    """A checkpoint whose parameters and balancing biases a run begins with, found and checked before any is read.

    `held` are the run's arrays and their places. UserError where they do not fit, unless `grow` is set; StorageError
    where the source is damaged.
    """

    def __init__(self, source: Source, held: Holding, grow: bool):
        theirs = source.arrays()
        ours = {n: x for n, x in held.arrays.items() if n.startswith("params.") or n == "balance.bias"}
        plans = {name: _overlaps(name, theirs[name].shape, x.shape) for name, x in ours.items() if name in theirs}
        whole = [name for name, x in ours.items() if name in theirs and theirs[name].shape == tuple(x.shape)]
        if not grow and len(whole) < len(ours):
            name = next(name for name in ours if name not in whole)
            has = f"has {theirs[name].shape}" if name in theirs else f"has none{source.nearest(name)}"
            raise UserError(
                f"config.run.init_from: {source.name} does not fit this model: of {name} it {has}, the model needs "
                f"{tuple(ours[name].shape)} ({len(ours) - len(whole)} such arrays); give a checkpoint of the same "
                "shapes, or let a larger model take what fits with --config.run.init_grow=True"
            )
        for name in plans:
            if not layout.is_real(theirs[name].dtype):
                raise UserError(
                    f"config.run.init_from: {source.name} has {name} as {theirs[name].dtype}, and weights are "
                    "floating-point numbers: multiply quantised ones by their scales before they are saved"
                )
        taken = {name: plan for name, plan in plans.items() if plan is not None}
        multihost.from_first("init", lambda: source.check(names=[theirs[name].folder for name in taken]))
        self._source, self._theirs, self._taken, self._held = source, theirs, taken, held
        self._parts = [name for name in taken if name not in whole]
        self._left = [name for name in ours if name not in taken]

    def of(self, fresh: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
        """A copy of a fresh state (`training.snapshot`), with the arrays taken from the checkpoint."""
        taken, theirs = self._taken, self._theirs
        parts = [x for part in self._held.parts if part.name in taken for x in _moved(part, taken[part.name])]
        where = {part.leaf for part in parts}
        leaves = {name: self._held.leaves[name] for name in trees.flat(fresh) if name in where}
        held = Holding({name: theirs[name] for name in taken}, leaves, parts)
        state = trees.flat(fresh)
        state |= trees.flat(self._source.restore(trees.nested(leaves), held, fresh=state))
        count = len(taken)
        say(
            f"begins from {self._source.name}{self._source.warning}: {count} of {count + len(self._left)} arrays "
            f"taken, {len(self._parts)} of them in part"
        )
        unused = [n for n in self._theirs if (n.startswith("params.") or n == "balance.bias") and n not in self._taken]
        for what, names in (("taken in part", self._parts), ("left fresh", self._left), ("not used", unused)):
            if names:
                say(f"  {what}: {', '.join(names)}")
        return jax.tree.unflatten(jax.tree.structure(fresh), list(state.values()))


def _overlaps(name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> list[list[Overlap]] | None:
    """The stretches of each dim and their places; None if the array does not fit."""
    if len(theirs) != len(ours):
        return None
    dims: list[list[Overlap]] = []
    for dim, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        layers = dim == 0 and ("layers" in name.split(".") or name.startswith("balance."))
        experts = dim == 1 and ".experts." in name
        if name in SKIP_LAST and dim == len(ours) - 1 and b >= a:
            dims.append([(slice(0, a - 1), slice(0, a - 1)), (slice(a - 1, a), slice(b - 1, b))])
        elif a == b or (b > a and (layers or experts)):
            dims.append([(slice(0, a), slice(0, a))])
        else:
            return None
    return dims


def _moved(part: HeldBox, dims: list[list[Overlap]]) -> Iterator[HeldBox]:
    """The boxes of a stored array that go into a part of a larger one."""
    for stretches in itertools.product(*dims):
        inside = layout.overlap(tuple(target for _, target in stretches), part.box)
        if layout.volume(inside):
            theirs = tuple(
                slice(s.start - target.start + their.start, s.stop - target.start + their.start)
                for s, (their, target) in zip(inside, stretches, strict=True)
            )
            begin = [s.start for s in part.inner] or [0] * len(inside)
            where = layout.within(inside, part.box)
            inner = tuple(slice(s.start + at, s.stop + at) for s, at in zip(where, begin, strict=True))
            yield dataclasses.replace(part, box=theirs, outer=part.outer or part.box, inner=inner)
