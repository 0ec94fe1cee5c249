"""Rewrites checkpoints a chunk at a time: with other chunks, in a new workdir, or the parameters
alone.

    reshard(source, target, step, chunk_mb)         a workdir, or a place such as s3://bucket/run, to a new workdir
    export_params(workdir, out, step, dtype)        an Orbax checkpoint for readers that have no use for the rest
    begin_run(workdir, source, state, meta)         step 0 of a new run, of weights that lie anywhere

Memory holds one chunk of the result and one of the source. Sources are checked whole before
anything is written.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout, writing
from zaya_jax.checkpoint.foreign import open_source
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED, Array
from zaya_jax.checkpoint.run import claims
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.source import Source
from zaya_jax.checkpoint.vault import Progress
from zaya_jax.config import UserError, files

MOST_MB = 1e6
# Files outside of the checkpoints that a run needs to continue.
COPIED = ("config.json", "environment.json", "lineage.json", IMPORTED, "tokenizer")


def reshard(
    place: str | Path,
    target: str | Path,
    step: int | None = None,
    chunk_mb: float = layout.CHUNK_BYTES / 2**20,
    progress: Progress | None = None,
) -> str:
    """Writes a step (by default the newest) in chunks of at most so many MiB to a new workdir."""
    if not 0 < chunk_mb <= MOST_MB:
        raise UserError(f"--chunk_mb={chunk_mb:g} must be above 0 and at most {MOST_MB:g}")
    source = open_source(place, step)
    with claims.whole_or_nothing(claims.new_folder(target)) as part:
        source.check()
        arrays = [_stored(x.name, x.shape, x.dtype, chunk_mb) for x in source.arrays().values()]
        _write_step(part, source.step, source.run, source, arrays, source.meta(), progress)
        paths = [source.workdir / name for name in COPIED] if source.workdir else []
        for path in filter(Path.exists, paths):
            if path.is_dir():
                shutil.copytree(path, part / path.name)
            else:
                files.write(part / path.name, path.read_bytes())
    return f"step {source.step} in {target}{source.warning}"


def begin_run(
    workdir: Path,
    source: Source,
    state: Any,
    meta: dict[str, Any],
    progress: Progress | None = None,
) -> None:
    """Writes step 0 of a new run: the arrays of an abstract state, zeros where the source has none
    of that name."""
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
    progress: Progress | None = None,
) -> Path:
    """Writes the parameters, in float32 or another type, and the balancing biases (always
    float32)."""
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype={dtype} is not one of {', '.join(DTYPES)}")
    source = Source(workdir, step)
    if "base" in source.meta():
        raise UserError(
            f"{workdir} holds low-rank updates alone; to_hf writes them merged with their base, and"
            f" so does zaya_jax.load({str(workdir)!r}).save(DIR)"
        )
    target = claims.new_folder(out)
    arrays = [
        _stored(
            name,
            x.shape,
            dtype if dtype and name.startswith("params.") and layout.is_real(x.dtype) else x.dtype,
        )
        for name, x in source.arrays().items()
        if layout.is_weight(name)
    ]
    source.check()
    meta = {name: x for name, x in source.meta().items() if name != "data"}
    with claims.whole_or_nothing(target) as part:
        sums = _write(part, source, arrays, meta, progress)
        writing.write_files(part, {layout.MARKER: Seal(sums, source.step, source.run).content()})
    return target


def _stored(name: str, shape: tuple[int, ...], dtype: str, chunk_mb: float = 0.0) -> Array:
    most = int(chunk_mb * 2**20)
    return Array(
        name, shape, dtype, layout.chunk_shape(name, shape, np.dtype(dtype).itemsize, most=most)
    )


def _write(
    folder: Path,
    source: Source,
    arrays: list[Array],
    meta: dict[str, Any],
    progress: Progress | None,
) -> Sums:
    """All files but the marker, one after the other; their sizes and checksums."""
    sums = writing.write_files(folder, layout.frame(tuple(arrays), meta))
    total = sum(array.bytes for array in arrays)
    done, originals = 0, source.arrays()
    for array in arrays:
        for index, box in array.touched(tuple(slice(0, n) for n in array.shape)):
            chunk = np.zeros(array.chunk, array.dtype)
            # the dots: a view of a single number, too
            inside: Any = (*layout.within(box, box), ...)
            if array.name in originals:
                source.fill(originals[array.name], box, chunk[inside])
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
    source: Source,
    arrays: list[Array],
    meta: dict,
    progress: Progress | None,
) -> None:
    """Writes the only step of a new workdir; the run is called anew where it has no name."""
    root = workdir.absolute() / "checkpoints"
    folder, run = root / f"{writing.SAVING}{step}", writing.begin_run(root, run)
    sums = _write(folder, source, arrays, meta, progress)
    writing.commit(folder, root / str(step), Seal(sums, step, run))
