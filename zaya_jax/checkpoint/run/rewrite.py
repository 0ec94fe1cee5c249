"""Rewrites checkpoints a chunk at a time: with other chunks, in a new workdir, or the parameters
alone.

    reshard(source, target, step, chunk_mb)         a workdir, or a place such as s3://bucket/run, to a new workdir
    export_params(workdir, out, step, dtype)        an Orbax checkpoint for readers that have no use for the rest
    write_step_zero(workdir, source, state, meta)   of a new run, of weights that lie anywhere

Memory holds one chunk of the result and one of the source. Sources are checked whole before
anything is written.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import folders, layout, writing
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED, StoredArray
from zaya_jax.checkpoint.orbax_source import open_source
from zaya_jax.checkpoint.run import claims
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.source import ArraySource, SealedSource
from zaya_jax.checkpoint.vault import CountBytes
from zaya_jax.config import UserError, files

# Files outside of the checkpoints that a run needs to continue.
COPIED = ("config.json", "environment.json", "lineage.json", IMPORTED, "tokenizer")


def reshard(
    location: str | Path,
    target: str | Path,
    step: int | None = None,
    chunk_mb: float = layout.CHUNK_BYTES / 2**20,
    progress: CountBytes | None = None,
) -> str:
    """Writes a step (by default the newest) in chunks of at most so many MiB to a new workdir."""
    if not 0 < chunk_mb < math.inf:
        raise UserError(f"--chunk_mb={chunk_mb:g} must be above 0, and a number")
    source = open_source(location, step)
    with claims.whole_or_nothing(claims.require_new_folder(target)) as part:
        source.check()
        arrays = [_stored(x.name, x.shape, x.dtype, chunk_mb) for x in source.arrays.values()]
        _write_step(part, source.step, source.run, source, arrays, source.meta(), progress)
        paths = [source.workdir / name for name in COPIED] if source.workdir else []
        for path in filter(Path.exists, paths):
            if path.is_dir():
                shutil.copytree(path, part / path.name)
            else:
                files.write(part / path.name, path.read_bytes())
    return f"step {source.step} in {target}{source.warning}"


def write_step_zero(
    workdir: Path,
    source: ArraySource,
    state: Any,
    meta: dict[str, Any],
    progress: CountBytes | None = None,
) -> None:
    """Writes step 0 of a new run: the arrays of an abstract state, zeros for those that the source
    does not have."""
    arrays = [
        _stored(name, tuple(x.shape), np.dtype(x.dtype).name)
        for name, x in trees.flat(state).items()
    ]
    _write_step(workdir, 0, "", source, arrays, meta, progress)


def export_params(
    workdir: str | Path,
    out: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    progress: CountBytes | None = None,
) -> Path:
    """Writes the parameters, in float32 or another type, and the balancing biases (always
    float32)."""
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype={dtype} is not one of {', '.join(DTYPES)}")
    source = SealedSource(workdir, step)
    if "base" in source.meta():
        raise UserError(
            f"{workdir} holds low-rank updates alone; to_hf writes them merged with their base, and"
            f" so does zaya_jax.load({str(workdir)!r}).save(DIR)"
        )
    target = claims.require_new_folder(out)
    arrays = []
    for name, x in source.arrays.items():
        if layout.is_weight(name):
            is_parameter = name.startswith("params.") and layout.is_real(x.dtype)
            arrays.append(_stored(name, x.shape, (is_parameter and dtype) or x.dtype))
    source.check()
    meta = {name: x for name, x in source.meta().items() if name != "data"}
    with claims.whole_or_nothing(target) as part:
        sums = _write(part, source, arrays, meta, progress)
        writing.write_files(part, {layout.MARKER: Seal(sums, source.step, source.run).to_bytes()})
    return target


def _stored(name: str, shape: tuple[int, ...], dtype: str, chunk_mb: float = 0.0) -> StoredArray:
    most = int(chunk_mb * 2**20)
    chunk = layout.chunk_shape(name, shape, np.dtype(dtype).itemsize, most=most)
    return StoredArray(name, shape, dtype, chunk)


def _write(
    folder: Path,
    source: ArraySource,
    arrays: list[StoredArray],
    meta: dict[str, Any],
    progress: CountBytes | None,
) -> Sums:
    """All files but the marker, one after the other; their sizes and checksums."""
    sums = writing.write_files(folder, layout.metadata_files(tuple(arrays), meta))
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


def _write_step(
    workdir: Path,
    step: int,
    run: str,
    source: ArraySource,
    arrays: list[StoredArray],
    meta: dict,
    progress: CountBytes | None,
) -> None:
    """Writes the only step of a new workdir; a run without an id gets a new one."""
    root = workdir.absolute() / "checkpoints"
    folder = root / f"{folders.SAVING}{step}"
    run = folders.name_run(root, run)
    sums = _write(folder, source, arrays, meta, progress)
    folders.commit(folder, root / str(step), Seal(sums, step, run))
