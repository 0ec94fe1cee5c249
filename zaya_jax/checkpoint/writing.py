"""Writes a checkpoint's files with threads, and sums them on the way.

Every byte of a save goes through `write_file`; copies go through `storage`. A save goes:

    write_share               each process: its parts of the arrays, as chunks (`boxes` says which),
                              and process 0 the small files
    run_in_all_then_zero      collects all processes' sums, or an error, in process 0, which then
    folders.commit            writes the seal, the list of all files, and renames the folder
"""

import concurrent.futures
import contextlib
import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.boxes import LocatedBox, Writers
from zaya_jax.checkpoint.layout import Box, StoredArray
from zaya_jax.checkpoint.seal import TAIL, Sums, crc32c
from zaya_jax.cluster import multihost
from zaya_jax.config import first_line

THREADS = 4

# The parts of a run's arrays on this process's devices: by the array's name, then by device.
DeviceParts = Mapping[str, Mapping[jax.Device, jax.Array | np.ndarray]]


def write_file(path: Path, buffers: Sequence[Any]) -> None:
    """A new file of some buffers one after the other, on the disk when this returns."""
    with path.open("wb", buffering=0) as file:
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


class StageTimer:
    """Seconds of each stage of one save; of a stage that threads share, divided by their number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, threads: int = 1) -> Iterator[None]:
        """Counts the time inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = (time.perf_counter() - begun) / threads
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """The stages so far."""
        return {name: round(value, 6) for name, value in self._seconds.items()}


# By file, of chunks that several devices hold parts of: the chunk so far, and how many of its
# numbers are missing.
Begun = dict[str, tuple[np.ndarray, int]]


def _assemble(
    begun: Begun, array: StoredArray, file: str, chunk_box: Box, part_box: Box, numbers: np.ndarray
) -> np.ndarray | None:
    """The chunk of a file, once all its parts were given; None before."""
    if numbers.shape == array.chunk:
        return numbers
    if file in begun:
        chunk, missing = begun.pop(file)
    else:
        chunk = np.zeros(array.chunk, array.dtype)
        missing = layout.volume(chunk_box)
    chunk[layout.within(part_box, chunk_box)] = numbers
    if missing == numbers.size:
        return chunk
    begun[file] = chunk, missing - numbers.size
    return None


def write_parts(
    folder: Path,
    arrays: Mapping[str, StoredArray],
    parts: Sequence[LocatedBox],
    device_parts: DeviceParts,
    timer: StageTimer,
    prefix: str = "",
) -> Sums:
    """Writes one process's parts of some arrays, fetching them from devices one by one.

    `folder` is the checkpoint's, or the one in it with whose name, `prefix`, its files' names begin.

    Peak host memory, besides the snapshot: one device's part of one array, a few chunks for each
    thread, and the chunks being assembled from several devices' parts (at most PART_BYTES each,
    unless a device's part is smaller).
    """
    sums: Sums = {}
    begun: Begun = {}
    waiting: deque[tuple[str, concurrent.futures.Future]] = deque()

    def submit_chunks(group: Iterable[LocatedBox], device_part: np.ndarray) -> None:
        for part in group:
            array = arrays[part.name]
            (folder / array.folder.removeprefix(prefix)).mkdir(parents=True, exist_ok=True)
            numbers = part.view(device_part)
            for index, chunk_box in array.chunks_overlapping(part.box):
                file = array.file(index)
                inside = layout.overlap(chunk_box, part.box)
                piece = numbers[layout.within(inside, part.box)]
                chunk = _assemble(begun, array, file, chunk_box, inside, piece)
                if chunk is not None:
                    path = folder / file.removeprefix(prefix)
                    waiting.append((file, pool.submit(write_chunk, path, chunk, timer)))
            # Otherwise a fast device would fill the host's memory with chunks that a slow disk has
            # yet to take.
            while len(waiting) > 4 * THREADS:
                collect_first()

    def collect_first() -> None:
        file, entry = waiting.popleft()
        sums[file] = entry.result()

    def fetched(leaf: str, device: jax.Device) -> np.ndarray:
        with timer.stage("copy"):
            return to_host(device_parts[leaf][device])

    with concurrent.futures.ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        by_source = itertools.groupby(parts, key=lambda part: (part.leaf, part.device))
        for (leaf, device), group in by_source:
            submit_chunks(group, fetched(leaf, device))
        while waiting:
            collect_first()
    assert not begun, f"of {', '.join(begun)} other processes hold a part"
    return sums


def write_share(
    folder: Path,
    writers: Writers,
    device_parts: DeviceParts,
    meta: dict[str, Any],
    timer: StageTimer | None = None,
    prefix: str = "",
) -> Sums:
    """Writes this process's share of a checkpoint: its parts of the arrays, and in process 0 the
    small files. The folder is that of `write_parts`, in which no file without the prefix lies."""
    parts = writers.parts.get(jax.process_index(), [])
    timer = timer or StageTimer()
    sums = write_parts(folder, writers.arrays, parts, device_parts, timer, prefix)
    if multihost.is_writer():
        small = layout.metadata_files(tuple(writers.arrays.values()), meta)
        inside = {name: content for name, content in small.items() if name.startswith(prefix)}
        sums |= write_files(folder, inside, prefix)
    return sums


def parts_by_device(tree: Any) -> DeviceParts:
    """The parts of a tree of arrays that lie on this process's devices."""
    return {
        name: {shard.device: shard.data for shard in x.addressable_shards}
        for name, x in trees.flat(tree).items()
    }


def to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """Copies a device's array to the host, without leaving the copy cached on it."""
    if isinstance(x, np.ndarray):
        return x
    # Through a fresh jax.Array: `asarray` caches the host's copy on the array that it is given, and
    # that copy must not outlive its use.
    return np.asarray(jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x]))


def write_chunk(path: Path, chunk: np.ndarray, timer: StageTimer | None = None) -> list[int]:
    """Writes one chunk as zarr's codecs `bytes` and `crc32c` do; the file's size and checksum."""
    timer = timer or StageTimer()
    with timer.stage("serialise", THREADS):
        raw = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
        crc = crc32c(raw)
    with timer.stage("write", THREADS):
        write_file(path, (raw, crc.to_bytes(TAIL, "little")))
    return [raw.nbytes + TAIL, crc, TAIL]


def write_files(folder: Path, files: Mapping[str, bytes], prefix: str = "") -> Sums:
    """Writes small files; the folder as for `write_parts`."""
    for name, content in files.items():
        path = folder / name.removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, [content])
    return {name: [len(content), crc32c(content), 0] for name, content in files.items()}


def run_in_all_then_zero(
    name: str, work: Callable[[], Any], end: Callable[[list[Any]], None], folder: Path | None = None
) -> str | None:
    """Runs `work` in all processes, then `end` in process 0 if all succeeded; returns any error in
    every process.

    By `name` the processes find each other (`multihost`): each thread has its own. `end` gets the
    results of `work` in all processes (JSON). A failure deletes `folder`, in which they worked,
    before any process returns: the next attempt writes there again.
    """

    def attempt(function: Callable[..., Any], *args: Any) -> tuple[str | None, Any]:
        try:
            return None, function(*args)
        except Exception as failure:  # of any class: the others wait for this process
            return reason(failure), None

    results = multihost.gather_to_zero(name, attempt(work)) or []

    def finish() -> str | None:
        errors = [
            f"{error} (process {process})" if len(results) > 1 else error
            for process, (error, _) in enumerate(results)
            if error
        ]
        error = errors[0] if errors else attempt(end, [value for _, value in results])[0]
        if error and folder:
            shutil.rmtree(folder, ignore_errors=True)
        return error

    return multihost.broadcast_from_zero(f"{name}: end", finish)


def reason(error: BaseException) -> str:
    """An error in a few words, with the file it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return first_line(error)
