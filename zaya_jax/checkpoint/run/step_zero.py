"""Writes step 0 of a new run from weights that lie anywhere, a chunk at a time: memory holds one
chunk of the result and one of the source."""

from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import folders, layout, writing
from zaya_jax.checkpoint.layout import StoredArray
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.source import ArraySource
from zaya_jax.checkpoint.vault import CountBytes


def write(
    workdir: Path,
    source: ArraySource,
    state: Any,
    meta: dict[str, Any],
    progress: CountBytes | None = None,
) -> None:
    """Writes the arrays of an abstract state, zeros for those that the source does not have, as the
    only step of a new workdir."""
    arrays = []
    for name, x in trees.flat(state).items():
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
        chunk = layout.chunk_shape(name, shape, dtype.itemsize)
        arrays.append(StoredArray(name, shape, dtype.name, chunk))
    root = workdir.absolute() / "checkpoints"
    folder = root / f"{folders.SAVING}0"
    run = folders.name_run(root)
    sums = writing.write_files(folder, layout.metadata_files(tuple(arrays), meta))
    sums |= _write_chunks(folder, source, arrays, progress)
    folders.commit(folder, root / "0", Seal(sums, 0, run))


def _write_chunks(
    folder: Path, source: ArraySource, arrays: list[StoredArray], progress: CountBytes | None
) -> Sums:
    """Writes one chunk after the other; their sizes and checksums."""
    sums: Sums = {}
    total = sum(array.num_bytes for array in arrays)
    done = 0
    for array in arrays:
        for index, box in array.chunks_overlapping(layout.full_box(array.shape)):
            chunk = np.zeros(array.chunk, array.dtype)
            if array.name in source.arrays:
                # The Ellipsis makes NumPy return a view of a single number, too.
                inside: Any = (*layout.within(box, box), ...)
                source.fill(source.arrays[array.name], box, chunk[inside])
            sums[array.file(index)] = writing.write_chunk(folder / array.file(index), chunk)
            done += chunk.nbytes
            del chunk  # before the next is made
            if progress:
                progress(min(done, total), total)
    return sums
