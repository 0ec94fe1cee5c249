"""Checkpoints written anew, a chunk at a time: in other chunks, in another place, or the parameters alone.

    reshard(source, target, step, chunk_mb)         a workdir, or a place such as s3://bucket/run, to another
    export_params(workdir, out, step, dtype)        an Orbax checkpoint for whoever has no use for the rest

Memory holds one chunk of the result and, while it is filled, what it takes of one chunk of the source: local chunks are
mapped, not read. Sources are checked whole before anything is written.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint import audit, layout, lock, owner, places, store, writing
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED
from zaya_jax.checkpoint.places import new_folder, whole_or_nothing
from zaya_jax.checkpoint.remote import Vault, asked_for, vault_at
from zaya_jax.checkpoint.seal import TAIL, Seal, Sums, crc32c, entry_of
from zaya_jax.config import StorageError, UserError, files, shown
from zaya_jax.config.fields import parse_json

Progress = Callable[[int, int], None]
Put = Callable[[str, bytes | memoryview], None]
SLAB = 4 << 20
MOST_MB = 1e6
NAMELESS = "without a name"  # of checkpoints from before runs had one
# What a workdir has beside its checkpoints that a run needs to go on.
BESIDE = ("config.json", "environment.json", "lineage.json", IMPORTED, "tokenizer")


class Source:
    """A whole checkpoint's files, in a folder or in a vault."""

    def __init__(self, place: str | Path, step: int | None):
        self.workdir: Path | None = None
        vault = vault_at(place)
        if vault is not None:
            steps = vault.steps()
            if not steps or step not in (None, *steps):
                raise UserError(
                    f"--from={place} has no checkpoint{f' of step {shown(step)}' if step is not None else ''}"
                )
            self.step = max(steps) if step is None else step
            self._vault: Vault | None = vault
        else:
            self.workdir, self._vault = Path(place).absolute(), None
            if (
                self.workdir / layout.MARKER
            ).is_file():  # one checkpoint's own folder, or exported parameters
                self._folder, self.workdir, self.step = self.workdir, None, 0  # it says itself which
            else:
                self.step = store.latest_step(place, step)
                self._folder = store.step_folder(place, self.step)
        self._place = place
        self._kept: tuple[str, np.ndarray] | None = None
        with self.unless_deleted():
            found = self._vault.manifest(self.step) if self._vault else self._found()
            self.files, self.run = found.files, found.run
            with contextlib.suppress(ValueError, AttributeError):  # an older version's is in the small file
                self.run = self.run or self.json(layout.META).get("run")
        self.name = f"step {self.step} of {place}"

    def _found(self) -> Seal:
        """The list of a folder, which has to be the step's that it is called."""
        try:
            found = writing.read_seal(self._folder)
            self.step = int(self.json(layout.META)["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self._folder} is damaged: {writing.reason(error)}") from None
        is_run_s = self._folder.parent.name == "checkpoints"  # else it may have any name
        for damage in audit.identity(self._folder, found) if is_run_s else ():
            raise StorageError(f"{self._folder} is damaged: {damage}")
        return found

    def unless_deleted(self) -> contextlib.AbstractContextManager[None]:
        """For all that reads it: UserError where its run has deleted it meanwhile."""
        if self._vault:
            return writing.unless_deleted(self._place, self.step, self._vault.steps)
        if self.workdir:
            return store.unless_deleted(self._place, self.step)
        return contextlib.nullcontext()

    def check(self, progress: Progress | None = None, names: Sequence[str] = ("",)) -> None:
        """StorageError if files that begin with one of these names, or by which they are found, are damaged."""
        wanted = (*names, layout.META, "_CHECKPOINT", f"{layout.STATE}/_METADATA")
        self.check_files(
            {name: sums for name, sums in self.files.items() if name.startswith(wanted)}, progress
        )

    def check_files(self, files: Sums, progress: Progress | None = None) -> None:
        """StorageError if one of these is damaged."""
        if self._vault:
            damages = self._vault.verify(self.step, progress, files) or []
        else:
            damages = audit.check_here(self._folder, files, progress)
        if damages:
            more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
            raise StorageError(f"{self.name} is damaged: {damages[0]}{more}; nothing was written")

    def json(self, name: str) -> dict[str, Any]:
        """A small file."""
        return parse_json(
            self._vault.get(self.step, name) if self._vault else files.read(self._folder / name)
        )

    def arrays(self) -> list[layout.Array]:
        """All arrays; StorageError if what describes them is damaged."""
        described = sorted(name for name in self.files if name.endswith("/zarr.json"))
        self.check(names=described)
        found = []
        for file in described:
            name, about = file.split("/")[1], self.json(file)
            chunk = tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
            found.append(layout.Array(name, tuple(about["shape"]), about["data_type"], chunk))
        return found

    def read(self, array: layout.Array, box: tuple[slice, ...], out: np.ndarray) -> None:
        """Fills `out` with a part of an array, in `out`'s own type."""
        first = [s.start // c for s, c in zip(box, array.chunk, strict=True)]
        counts = [-(-s.stop // c) - f for s, c, f in zip(box, array.chunk, first, strict=True)]
        for at in np.ndindex(*counts):
            index = tuple(f + i for f, i in zip(first, at, strict=True))
            here, there = [], []
            for s, c, i in zip(box, array.chunk, index, strict=True):
                begin, end = max(s.start, i * c), min(s.stop, (i + 1) * c)
                here.append(slice(begin - s.start, end - s.start))
                there.append(slice(begin - i * c, end - i * c))
            for a, b in _slabs(here, there, np.dtype(array.dtype).itemsize):
                out[a] = self._chunk(array, index)[b]  # mapped anew, so that what was copied can go

    def _chunk(self, array: layout.Array, index: tuple[int, ...]) -> np.ndarray:
        name, dtype = array.file(index), np.dtype(array.dtype)
        if self._vault is None:
            return np.memmap(self._folder / name, dtype, "r", shape=array.chunk)
        if self._kept is None or self._kept[0] != name:
            self._kept = None
            raw = np.frombuffer(self._vault.get(self.step, name), np.uint8)[:-4]
            self._kept = name, raw.view(dtype).reshape(array.chunk)
        return self._kept[1]


def _slabs(
    here: list[slice], there: list[slice], itemsize: int
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Two boxes of one shape cut alike into slabs of about SLAB bytes, along their first dim that has a length."""
    sizes = [s.stop - s.start for s in here]
    dim = next((d for d, n in enumerate(sizes) if n > 1), None)
    if dim is None:
        yield tuple(here), tuple(there)
        return
    rows = max(1, SLAB // (math.prod(sizes) // sizes[dim] * itemsize))
    for begin in range(0, sizes[dim], rows):
        end = min(begin + rows, sizes[dim])
        cut = [list(here), list(there)]
        for box in cut:
            box[dim] = slice(box[dim].start + begin, box[dim].start + end)
        yield tuple(cut[0]), tuple(cut[1])


def reshard(
    source: str | Path,
    target: str | Path,
    step: int | None = None,
    chunk_mb: float = layout.CHUNK_BYTES / 2**20,
    progress: Progress | None = None,
) -> str:
    """Writes a step (by default the newest) in chunks of at most so many MiB to another workdir or place."""
    if not 0 < chunk_mb <= MOST_MB:
        raise UserError(f"--chunk_mb={chunk_mb:g} must be above 0 and at most {MOST_MB:g}")
    found = Source(source, step)
    with found.unless_deleted(), _sink(found, target) as (put, finish):
        found.check()
        arrays = [_resized(array, array.dtype, chunk_mb) for array in found.arrays()]
        finish(_write(found, arrays, found.json(layout.META), put, progress))
    return f"step {found.step} in {target}"


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
    found = Source(workdir, step)
    with found.unless_deleted():
        return _export_params(found, new_folder(out, "--out"), dtype, progress)


def _export_params(found: Source, target: Path, dtype: str | None, progress: Progress | None) -> Path:
    arrays = [
        _resized(array, dtype if dtype and array.name.startswith("params.") else array.dtype)
        for array in found.arrays()
        if array.name.startswith("params.") or array.name == "balance.bias"
    ]
    found.check()
    meta = {name: value for name, value in found.json(layout.META).items() if name not in ("data", "layout")}
    with whole_or_nothing(target) as part:
        sums = _write(found, arrays, meta, lambda name, content: _put_file(part, name, content), progress)
        writing.write_files(part, {layout.MARKER: Seal(sums, found.step, found.run).content()})
    return target


def _resized(array: layout.Array, dtype: str, chunk_mb: float | None = None) -> layout.Array:
    most = int(chunk_mb * 2**20) if chunk_mb else 0
    chunk = layout.chunk_shape(array.name, array.shape, np.dtype(dtype).itemsize, most=most)
    return layout.Array(array.name, array.shape, dtype, chunk)


def _write(
    source: Source, arrays: list[layout.Array], meta: dict[str, Any], put: Put, progress: Progress | None
) -> Sums:
    """All files but the marker, one after the other; their sizes and checksums."""
    sums: Sums = {}
    for name, content in layout.frame(tuple(arrays), meta).items():
        put(name, content)
        sums[name] = entry_of(content)
    sizes = {array.name: math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays}
    done, originals = 0, {array.name: array for array in source.arrays()}
    for array in arrays:
        whole = tuple(slice(0, n) for n in array.shape)
        for index, place in array.chunks(whole):
            buffer = np.empty(math.prod(array.chunk) * np.dtype(array.dtype).itemsize + TAIL, np.uint8)
            source.read(originals[array.name], place, buffer[:-TAIL].view(array.dtype).reshape(array.chunk))
            crc = crc32c(buffer[:-TAIL])
            buffer[-TAIL:] = np.frombuffer(crc.to_bytes(TAIL, "little"), np.uint8)
            name = array.file(index)
            put(name, memoryview(buffer))
            sums[name] = [len(buffer), crc, TAIL]
            done += len(buffer) - TAIL
            del buffer  # before the next is made
            if progress:
                progress(done, sum(sizes.values()))
    return sums


@contextlib.contextmanager
def _sink(source: Source, target: str | Path) -> Iterator[tuple[Put, Callable[[Sums], None]]]:
    """(where files go, what makes them a checkpoint) of a workdir or a place; a failure leaves neither."""
    step = source.step
    if "://" in str(target):
        vault = asked_for(str(target))
        if vault.folder:
            places.require_outside(vault.folder, f"--to={target}")
        if step in vault.steps():
            raise UserError(
                f"--to={target} has a checkpoint of step {step} already; give another place or --step"
            )
        owner.require_one(vault, source.run or NAMELESS, source.name, f"--to={target}")

        def end(sums: Sums) -> None:
            vault.claim(source.run or "")
            vault.put(step, layout.MARKER, Seal(sums, step, source.run).content())

        yield lambda name, content: vault.put(step, name, content), end
        return
    workdir = Path(target).absolute()
    root = workdir / "checkpoints"
    writing.require_writable(workdir, f"--to={target}")
    places.require_outside(workdir, f"--to={target}")
    _require_same_run(workdir, source, f"--to={target}")
    folder = root / f"{writing.SAVING}{step}"
    made = [path for path in (root, *root.parents) if not path.exists()]
    locked = (workdir / lock.NAME).exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock.take(workdir)
    except OSError as error:
        raise UserError(
            f"--to={target} cannot be written ({error.strerror}); give a folder that can"
        ) from None
    before = {path.name for path in workdir.iterdir()} - (set() if locked else {lock.NAME})

    def finish(sums: Sums) -> None:
        if source.workdir and not (workdir / "config.json").exists():
            for name in BESIDE:
                if os.path.lexists(source.workdir / name):
                    _copy(source.workdir / name, workdir / name)
        run = writing.run_of(root) or writing.begin_run(root, source.run or "")
        writing.commit(folder, root / str(step), Seal(sums, step, run))

    try:
        # What was there before it had the lock does not count.
        _require_same_run(workdir, source, f"--to={target}")
        try:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed attempt left
            folder.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"--to={target} cannot be written ({error.strerror}); give a folder that can"
            ) from None
        yield lambda name, content: _put_file(folder, name, content), finish
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if "config.json" not in before and "checkpoints" not in before:
            for name in {*BESIDE, "checkpoints", lock.NAME} - before:
                path = workdir / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        writing.remove_empty(made)
        raise
    finally:
        lock.release(workdir)


def _copy(source: Path, target: Path) -> None:
    """A file, or a folder of them; StorageError, with its name, for a link to nothing and for what is no file."""
    if not source.is_dir():
        try:
            content = files.read(source)
        except OSError as error:
            raise StorageError(f"{source} cannot be read ({error.strerror}); mend it, or remove it") from None
        files.write(target, content)
        return
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        _copy(path, target / path.name)


def _require_same_run(workdir: Path, source: Source, option: str) -> None:
    """UserError for a folder that is neither new nor of the run whose step is to go there."""
    root = workdir / "checkpoints"
    there = {path.name for path in workdir.iterdir()} - {lock.NAME} if workdir.exists() else set()
    if not there:
        return
    if not there & {"config.json", "checkpoints"}:
        raise UserError(f"{option} is not empty and no run's folder; give a new one")
    if source.step in writing.numbered(root):
        raise UserError(
            f"{option} has a checkpoint of step {source.step} already; give another folder or --step"
        )
    runs = {writing.run_of(root)}
    for number in writing.steps_in(root):
        with contextlib.suppress(OSError, ValueError):
            runs.add(writing.read_seal(root / str(number)).run or "")
    if runs - {""} != {source.run or NAMELESS}:
        names = " and ".join(sorted(runs - {""})) or NAMELESS
        raise UserError(
            f"{option} is the folder of run {names}, but {source.name} is of run {source.run or NAMELESS}; "
            "give a new folder"
        )


def _put_file(folder: Path, name: str, content: bytes | memoryview) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    writing.write_file(folder / name, [content])
