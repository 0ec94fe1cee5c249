"""Part of a checkpoint for another model or program: parameters alone, some arrays, another type.

params = partial.read(folder, "params.*", dtype="bfloat16")["params"]    NumPy arrays, as a tree
partial.require_fit(source, wanted)                                      before a run begins with its weights
"""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.orbax_source import open_source
from zaya_jax.checkpoint.source import ArraySource, misfit
from zaya_jax.config import UserError


def read(
    location: str | Path | ArraySource,
    pattern: str = "params.*",
    step: int | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """The arrays of a checkpoint whose names fit a pattern (params.layers.router.*), on the host.

    The location is a workdir, the folder of one checkpoint, a URL, or an open source; floating
    point numbers become `dtype`.
    """
    if isinstance(location, ArraySource):
        source = location
    else:
        source = open_source(location, step)
    chosen = [array for name, array in source.arrays.items() if fnmatch.fnmatchcase(name, pattern)]
    if not chosen:
        names = ", ".join(sorted({name.split(".")[0] + ".*" for name in source.arrays}))
        raise UserError(f"no array of {source.name} is called {pattern!r}; it has {names}")
    arrays = {}
    for array in chosen:
        converted = dtype if dtype and layout.is_real(array.dtype) else array.dtype
        out = np.empty(array.shape, np.dtype(converted))
        source.fill(array, layout.full_box(array.shape), out)
        arrays[array.name] = out
    return trees.nested(arrays)


def require_fit(source: ArraySource, wanted: Mapping[str, Any]) -> None:
    """UserError if a run of these weights (by their names) cannot begin with a checkpoint's."""
    stored = {name: x for name, x in source.arrays.items() if layout.is_weight(name)}
    if odd := misfit(stored, wanted, exact=True):
        raise UserError(
            f"{source.name} does not fit this model: {odd}; give a checkpoint of the same arrays"
        )
