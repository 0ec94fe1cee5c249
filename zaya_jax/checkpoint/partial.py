"""Part of a checkpoint for another model or program: parameters alone, some arrays, another type.

params = partial.read(folder, "params.*", dtype="bfloat16")["params"]    NumPy arrays, as a tree
partial.require_fit(source, held)                                        before a run begins with its weights
"""

import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.boxes import Holding
from zaya_jax.checkpoint.foreign import open_source
from zaya_jax.checkpoint.source import Source, misfit
from zaya_jax.cluster import multihost
from zaya_jax.config import UserError


def read(
    place: str | Path | Source,
    pattern: str = "params.*",
    step: int | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """The arrays of a checkpoint whose names fit a pattern (params.layers.router.*), on the host.

    `place` is a workdir, the folder of one checkpoint or of exported parameters, a URL, or an open
    source; floating point numbers become `dtype`.
    """
    source = place if isinstance(place, Source) else open_source(place, step)
    chosen = [
        array for name, array in source.arrays().items() if fnmatch.fnmatchcase(name, pattern)
    ]
    if not chosen:
        names = ", ".join(sorted({name.split(".")[0] + ".*" for name in source.arrays()}))
        raise UserError(f"no array of {source.name} is called {pattern!r}; it has {names}")
    source.check(names=[array.folder for array in chosen])
    found = {}
    for array in chosen:
        out = np.empty(
            array.shape, np.dtype(dtype if dtype and layout.is_real(array.dtype) else array.dtype)
        )
        source.fill(array, tuple(slice(0, n) for n in array.shape), out)
        found[array.name] = out
    return trees.nested(found)


def require_fit(source: Source, held: Holding) -> None:
    """UserError where a run that holds these weights cannot begin with a checkpoint's; StorageError
    for damage."""
    theirs = {name: x for name, x in source.arrays().items() if layout.is_weight(name)}
    if odd := misfit(theirs, held.arrays, everything=True):
        raise UserError(
            f"{source.name} does not fit this model: {odd}; give a checkpoint of the same arrays"
        )
    multihost.broadcast_from_zero(
        "init", lambda: source.check(names=[x.folder for x in theirs.values()])
    )
