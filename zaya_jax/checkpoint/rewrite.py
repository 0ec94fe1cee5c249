"""Rewrites checkpoints a chunk at a time: with other chunks, in another place, or the parameters alone.

    reshard(source, target, step, chunk_mb)         a workdir, or a place such as s3://bucket/run, to another
    export_params(workdir, out, step, dtype)        an Orbax checkpoint for readers that have no use for the rest
    begin_run(workdir, source, state, meta)         step 0 of a new run, of weights that lie anywhere

Memory holds one chunk of the result and one of the source. Sources are checked whole before anything is written.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import claims, layout, writing
from zaya_jax.checkpoint.foreign import open_source
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED, Array
from zaya_jax.checkpoint.seal import TAIL, Seal, Sums, crc32c, entry_of
from zaya_jax.checkpoint.source import Source
from zaya_jax.checkpoint.vault import Progress, Vault
from zaya_jax.config import UserError, files

Put = Callable[[str, bytes | memoryview], None]  # writes one file
Write = Callable[[Put], Sums]
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
    """Writes a step (by default the newest) in chunks of at most so many MiB to another workdir or place."""
    if not 0 < chunk_mb <= MOST_MB:
        raise UserError(f"--chunk_mb={chunk_mb:g} must be above 0 and at most {MOST_MB:g}")
    source = open_source(place, step)

    def write(put: Put) -> Sums:
        source.check()
        arrays = [_stored(x.name, x.shape, x.dtype, chunk_mb) for x in source.arrays().values()]
        return _write(source, arrays, source.meta(), put, progress)

    with source.unless_deleted():
        (_to_vault if "://" in str(target) else _to_workdir)(source, str(target), write)
    return f"step {source.step} in {target}{source.warning}"


def begin_run(
    workdir: Path, source: Source, state: Any, meta: dict[str, Any], progress: Progress | None = None
) -> None:
    """Writes step 0 of a new run: the arrays of an abstract state, zeros where the source has none of that name."""
    arrays = [_stored(name, tuple(x.shape), np.dtype(x.dtype).name) for name, x in trees.flat(state).items()]
    _first_step(workdir, 0, "", lambda put: _write(source, arrays, meta, put, progress))


def export_params(
    workdir: str | Path,
    out: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes the parameters, in float32 or another type, and the balancing biases (always float32)."""
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype={dtype} is not one of {', '.join(DTYPES)}")
    source = Source(workdir, step)
    with source.unless_deleted():
        if "base" in source.meta():
            raise UserError(
                f"{workdir} holds low-rank updates alone; to_hf writes them merged with their base, and so does "
                f"zaya_jax.load({str(workdir)!r}).save(DIR)"
            )
        target = claims.new_folder(out, "--out")
        arrays = [
            _stored(
                name, x.shape, dtype if dtype and name.startswith("params.") and layout.is_real(x.dtype) else x.dtype
            )
            for name, x in source.arrays().items()
            if name.startswith("params.") or name == "balance.bias"
        ]
        source.check()
        meta = {name: x for name, x in source.meta().items() if name != "data"}
        with claims.whole_or_nothing(target) as part:
            sums = _write(source, arrays, meta, functools.partial(_put_file, part), progress)
            writing.write_files(part, {layout.MARKER: Seal(sums, source.step, source.run).content()})
    return target


def _stored(name: str, shape: tuple[int, ...], dtype: str, chunk_mb: float = 0.0) -> Array:
    most = int(chunk_mb * 2**20)
    return Array(name, shape, dtype, layout.chunk_shape(name, shape, np.dtype(dtype).itemsize, most=most))


def _write(source: Source, arrays: list[Array], meta: dict[str, Any], put: Put, progress: Progress | None) -> Sums:
    """All files but the marker, one after the other; their sizes and checksums."""
    sums: Sums = {}
    for name, content in layout.frame(tuple(arrays), meta).items():
        put(name, content)
        sums[name] = entry_of(content)
    total = sum(array.bytes for array in arrays)
    done, originals = 0, source.arrays()
    for array in arrays:
        for index, box in array.touched(tuple(slice(0, n) for n in array.shape)):
            buffer = np.zeros(array.chunk_bytes + TAIL, np.uint8)
            chunk = buffer[:-TAIL].view(array.dtype).reshape(array.chunk)
            inside: Any = (*layout.within(box, box), ...)  # the dots: a view of a single number, too
            if array.name in originals:
                source.fill(originals[array.name], box, chunk[inside])
            crc = crc32c(buffer[:-TAIL])
            buffer[-TAIL:] = np.frombuffer(crc.to_bytes(TAIL, "little"), np.uint8)
            name = array.file(index)
            put(name, memoryview(buffer))
            sums[name] = [len(buffer), crc, TAIL]
            done += len(buffer) - TAIL
            del buffer, chunk  # before the next is made
            if progress:
                progress(min(done, total), total)
    return sums


def _to_vault(source: Source, target: str, write: Write) -> None:
    """Writes a step into a place of copies."""
    vault, step = Vault(target), source.step
    if vault.folder:
        claims.require_writable(vault.folder, f"--to={target}")
        claims.require_outside(vault.folder, f"--to={target}")
    if step in vault.steps():
        raise UserError(f"--to={target} has a checkpoint of step {step} already; give another place or --step")
    vault.require_own(source.run, source.name, f"--to={target}")

    def put(name: str, content: bytes | memoryview) -> None:
        if not vault.owner():  # when the source was checked, and before there is a step without an owner
            vault.claim(source.run)
        if name != layout.COMMITTED:  # comes with the list
            vault.put(step, name, content)

    vault.complete(step, Seal(write(put), step, source.run))


def _to_workdir(source: Source, target: str, write: Write) -> None:
    """Writes a step into a new workdir; nothing is left where that fails."""
    with claims.whole_or_nothing(claims.new_folder(target, "--to")) as part:
        _first_step(part, source.step, source.run, write)
        paths = [source.workdir / name for name in COPIED] if source.workdir else []
        for path in filter(Path.exists, paths):
            if path.is_dir():
                shutil.copytree(path, part / path.name)
            else:
                files.write(part / path.name, files.read(path))


def _first_step(workdir: Path, step: int, run: str, write: Write) -> None:
    """Writes the only step of a new workdir; the run is called anew where it has no name."""
    root = workdir.absolute() / "checkpoints"
    folder, run = root / f"{writing.SAVING}{step}", writing.begin_run(root, run)
    writing.commit(folder, root / str(step), Seal(write(functools.partial(_put_file, folder)), step, run))


def _put_file(folder: Path, name: str, content: bytes | memoryview) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    writing.write_file(folder / name, [content])
