"""Writes a checkpoint's files with threads, sums them on the way, and makes the folder whole by one
rename.

Every byte of a checkpoint goes through `write_file`. A folder being written is called
`.saving-STEP`, one being deleted `.deleting-STEP`, a damaged one `.damaged-STEP`, one of an
abandoned past `.stale-N-STEP`; only `STEP` is a checkpoint.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout, seal
from zaya_jax.checkpoint.boxes import HeldBox, Writers
from zaya_jax.checkpoint.layout import MARKER
from zaya_jax.checkpoint.seal import RUN, TAIL, Seal, Sums, crc32c
from zaya_jax.cluster import multihost
from zaya_jax.config import files, first_line

THREADS = 4
SAVING, DELETING, DAMAGED, STALE = ".saving-", ".deleting-", ".damaged-", ".stale-"

# of each array each device's part
Copies = Mapping[str, Mapping[jax.Device, jax.Array | np.ndarray]]


@dataclasses.dataclass(frozen=True)
class OnHost:
    """A snapshot that lies on the host, where the devices have no room for it."""

    copies: Copies


def write_file(path: Path, buffers: Sequence[Any]) -> None:
    """A new file of some buffers one after the other, on the disk when this returns."""
    with path.open("wb", buffering=0) as file:
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


class Times:
    """Seconds that the threads of one save spent on each stage, as wall time if they had worked
    together."""

    def __init__(self) -> None:
        self._lock, self._seconds = threading.Lock(), dict[str, float]()

    @contextlib.contextmanager
    def stage(self, name: str, threads: int = 1) -> Any:
        """Counts the time inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[name] = (
                    self._seconds.get(name, 0.0) + (time.perf_counter() - begun) / threads
                )

    def seconds(self) -> dict[str, float]:
        """The stages so far."""
        return {name: round(value, 6) for name, value in self._seconds.items()}


def write_parts(
    folder: Path, plan: Writers, parts: Sequence[HeldBox], copies: Copies, times: Times
) -> Sums:
    """Writes one process's parts below a folder, fetching arrays from devices one by one.

    Beyond the copies it needs the memory of one device's part of one array, of THREADS chunks, and
    of those that are put together of several devices' parts: these are at most PART_BYTES each,
    unless no device has as much.
    """
    sums: Sums = {}
    # incomplete chunks, and how many numbers each lacks
    begun: dict[str, tuple[np.ndarray, int]] = {}
    own: Any = None
    last = None
    with concurrent.futures.ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        waiting: list[tuple[str, concurrent.futures.Future]] = []
        for part in parts:
            array = plan.arrays[part.name]
            if (part.leaf, part.device) != last:
                own = None  # before the next is fetched
                with times.stage("copy"):
                    own = on_host(copies[part.leaf][part.device])
                last = part.leaf, part.device
            x = part.of(own)
            (folder / array.folder).mkdir(parents=True, exist_ok=True)
            for index, holds in array.touched(part.box):
                name, inside = array.file(index), layout.overlap(holds, part.box)
                chunk = x[layout.within(inside, part.box)]
                if chunk.shape != array.chunk:
                    buffer, rest = begun.pop(name, (None, layout.volume(holds)))
                    buffer = np.zeros(array.chunk, array.dtype) if buffer is None else buffer
                    buffer[layout.within(inside, holds)] = chunk
                    if rest > chunk.size:
                        begun[name] = buffer, rest - chunk.size
                        continue
                    chunk = buffer
                waiting.append((name, pool.submit(write_chunk, folder / name, chunk, times)))
            # Otherwise a fast device would fill the host's memory with chunks that a slow disk has
            # yet to take.
            while len(waiting) > 4 * THREADS:
                name, done = waiting.pop(0)
                sums[name] = done.result()
    assert not begun, f"of {', '.join(begun)} other processes hold a part"
    return sums | {name: done.result() for name, done in waiting}


def copies_of(snapshot: Any) -> Copies:
    """The parts of a snapshot on this process's devices: of a tree of arrays, or of a copy on the
    host."""
    if isinstance(snapshot, OnHost):
        return snapshot.copies
    leaves = trees.flat(snapshot)
    return {
        name: {shard.device: shard.data for shard in x.addressable_shards}
        for name, x in leaves.items()
    }


def on_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """A device's array there; it does not keep that copy."""
    if isinstance(x, np.ndarray):
        return x
    # By another view of it: an array keeps its copy on the host, which must go when it is used.
    return np.asarray(jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x]))


def write_chunk(path: Path, chunk: np.ndarray, times: Times | None = None) -> list[int]:
    """Writes one chunk as zarr's codecs `bytes` and `crc32c` do; the file's size and checksum."""
    times = times or Times()
    with times.stage("serialise", THREADS):
        raw = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
        crc = crc32c(raw)
    with times.stage("write", THREADS):
        write_file(path, (raw, crc.to_bytes(TAIL, "little")))
    return [raw.nbytes + TAIL, crc, TAIL]


def write_files(folder: Path, files: Mapping[str, bytes]) -> Sums:
    """Writes small files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, [content])
    return {name: seal.entry_of(content) for name, content in files.items()}


def together(name: str, work: Callable[[], Any], end: Callable[[list[Any]], None]) -> str | None:
    """Runs `work` in all processes, then `end` in process 0 if all succeeded; returns any error in
    every process.

    `end` gets the results of `work` in all processes (JSON).
    """

    def tried(function: Callable[..., Any], *given: Any) -> tuple[str | None, Any]:
        try:
            return None, function(*given)
        except Exception as failure:  # of any class: the others wait for this process
            return reason(failure), None

    results = multihost.gather_to_zero(name, tried(work)) or []

    def last() -> str | None:
        several = len(results) > 1
        errors = (f"{e} (process {i})" if several else e for i, (e, _) in enumerate(results) if e)
        return next(errors, None) or tried(end, [given for _, given in results])[0]

    return multihost.broadcast_from_zero(f"{name}: end", last)


def commit(folder: Path, target: Path, whole: Seal) -> None:
    """Gives a written folder its final name; when this returns, it outlives a power cut."""
    write_files(folder, {MARKER: whole.content()})
    for path in {folder, *(folder / Path(name).parent for name in whole.files), folder / "state"}:
        sync_folder(path)
    folder.rename(target)
    sync_folder(target.parent)


def remove(root: Path, step: int) -> None:
    """Deletes a checkpoint; killed meanwhile, it leaves nothing that looks like one."""
    gone = root / f"{DELETING}{step}"
    shutil.rmtree(gone, ignore_errors=True)
    (root / str(step)).rename(gone)
    shutil.rmtree(gone)


def set_aside(root: Path, step: int) -> Path:
    """Renames a damaged checkpoint, which is kept for inspection."""
    number, target = 0, root / f"{DAMAGED}{step}"
    while target.exists():
        number += 1
        target = root / f"{DAMAGED}{step}.{number}"
    (root / str(step)).rename(target)
    return target


def clear(root: Path) -> None:
    """Deletes folders that killed runs left half-written or half-deleted."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith((SAVING, DELETING)):
                shutil.rmtree(path, ignore_errors=True)


def steps_in(root: Path) -> list[int]:
    """The complete checkpoints of a folder, oldest first."""
    return [step for step in numbered(root) if (root / str(step) / MARKER).is_file()]


def numbered(root: Path) -> list[int]:
    """All folders named like a step, oldest first."""
    return sorted(steps_of(p.name for p in root.iterdir())) if root.is_dir() else []


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps among some names: 40, but neither 040 nor ٤٠, which would be another folder."""
    return [
        int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name
    ]


def run_of(root: Path) -> str:
    """The name of the run whose checkpoints lie here, made when it begins; "" before."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (root / RUN).read_bytes().decode("utf-8").strip()
    return ""


def begin_run(root: Path, run: str = "") -> str:
    """Gives a folder of checkpoints a run's name, by default a new one."""
    root.mkdir(parents=True, exist_ok=True)
    run = run or uuid.uuid4().hex
    files.write(root / RUN, run.encode())
    return run


def reason(error: BaseException) -> str:
    """An error in a few words, with the file it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return first_line(error)


def sync_folder(folder: Path) -> None:
    """Has the names of its files outlive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
