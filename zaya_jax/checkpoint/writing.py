"""The files of a checkpoint on a file system: written by threads, summed on the way, made whole by one rename.

Every byte of a checkpoint goes through `write_file`. A folder being written is called `.saving-STEP`, one being deleted
`.deleting-STEP`, one found damaged `.damaged-STEP`; only `STEP` is a checkpoint.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import numpy as np

from zaya_jax.checkpoint.layout import MARKER, Piece

THREADS = 4
BLOCK = 4 << 20  # summed at a time: the checksum holds the interpreter's lock meanwhile
SAVING, DELETING, DAMAGED = ".saving-", ".deleting-", ".damaged-"

Sums = dict[str, list[int]]  # a file's [bytes, crc32c]


def write_file(path: Path, buffers: Sequence[Any]) -> None:
    """A new file of some buffers one after the other, on the disk when this returns."""
    with path.open("wb", buffering=0) as file:
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def crc32c(buffer: Any, crc: int = 0) -> int:
    """The checksum of a buffer, going on from `crc`."""
    view = memoryview(buffer)
    for begin in range(0, len(view), BLOCK):
        crc = google_crc32c.extend(crc, np.frombuffer(view[begin : begin + BLOCK], np.uint8))
    return crc


class Times:
    """Seconds that the threads of one save spent on each stage, as wall time if they had worked together."""

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
                self._seconds[name] = self._seconds.get(name, 0.0) + (time.perf_counter() - begun) / threads

    def seconds(self) -> dict[str, float]:
        """The stages so far."""
        return {name: round(value, 6) for name, value in self._seconds.items()}


def write_pieces(
    folder: Path, pieces: Sequence[Piece], arrays: Mapping[str, jax.Array], times: Times
) -> Sums:
    """Writes one process's pieces below a folder; what it does not hold on the host already it fetches piece by piece.

    Beyond the arrays it needs the memory of one device's part of one array, and of THREADS chunks.
    """
    sums: Sums = {}
    with concurrent.futures.ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        waiting: list[tuple[str, concurrent.futures.Future]] = []
        for piece in pieces:
            (folder / piece.array.folder).mkdir(parents=True, exist_ok=True)
            with times.stage("copy"):
                part = np.asarray(_held(arrays[piece.array.name], piece.device))
            for index, place in piece.array.chunks(piece.box):
                name = piece.array.file(index)
                waiting.append((name, pool.submit(write_chunk, folder / name, part[place], times)))
            del part
            # Else a fast device would fill the host's memory with what a slow disk has yet to take.
            while len(waiting) > 4 * THREADS:
                name, done = waiting.pop(0)
                sums[name] = done.result()
    return sums | {name: done.result() for name, done in waiting}


def _held(array: jax.Array, device: jax.Device) -> jax.Array:
    held = next(shard.data for shard in array.addressable_shards if shard.device == device)
    # Another view of it: an array keeps its copy on the host, which shall go when it is written.
    return jax.make_array_from_single_device_arrays(held.shape, held.sharding, [held])


def write_chunk(path: Path, chunk: np.ndarray, times: Times | None = None) -> list[int]:
    """Writes one chunk as zarr's codecs `bytes` and `crc32c` do; the file's size and checksum."""
    times = times or Times()
    with times.stage("serialise", THREADS):
        raw = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
        crc = crc32c(raw)
        tail = crc.to_bytes(4, "little")
        whole = crc32c(tail, crc)
    with times.stage("write", THREADS):
        write_file(path, (raw, tail))
    return [raw.nbytes + 4, whole]


def write_files(folder: Path, files: Mapping[str, bytes]) -> Sums:
    """Writes small files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, [content])
    return {name: [len(content), crc32c(content)] for name, content in files.items()}


def read_seal(folder: Path) -> Sums:
    """A whole checkpoint's files, with sizes and checksums; ValueError where that list itself is damaged."""
    return parse_seal((folder / MARKER).read_bytes())


def parse_seal(content: bytes) -> Sums:
    """The same of the marker's content."""
    try:
        found = json.loads(content)
        whole = crc32c(_canonical(found["files"])) == found["crc32c"]
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{MARKER} is changed: it does not have its own checksum")
    for name in found["files"]:  # it may come from anywhere, and files are written by these names
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{MARKER} names a file outside of the checkpoint: {name}")
    return found["files"]


def seal(files: Sums) -> bytes:
    """The content of the file that makes a checkpoint whole; it has a checksum of itself."""
    return json.dumps({"format": 1, "crc32c": crc32c(_canonical(files)), "files": files}).encode()


def _canonical(files: Sums) -> bytes:
    return json.dumps(files, separators=(",", ":"), sort_keys=True).encode()


def commit(folder: Path, target: Path, files: Sums) -> None:
    """Gives a written folder its final name; when this returns, it outlives a power cut."""
    write_files(folder, {MARKER: seal(files)})
    for path in {folder, *(folder / Path(name).parent for name in files), folder / "state"}:
        _sync(path)
    folder.rename(target)
    _sync(target.parent)


def remove(root: Path, step: int) -> None:
    """Deletes a checkpoint; killed meanwhile, it leaves nothing that looks like one."""
    gone = root / f"{DELETING}{step}"
    shutil.rmtree(gone, ignore_errors=True)
    (root / str(step)).rename(gone)
    shutil.rmtree(gone)


def set_aside(root: Path, step: int) -> Path:
    """Takes a damaged checkpoint's name away, and keeps it for whoever wants to look."""
    number, target = 0, root / f"{DAMAGED}{step}"
    while target.exists():
        number += 1
        target = root / f"{DAMAGED}{step}.{number}"
    (root / str(step)).rename(target)
    return target


def check_file(path: Path, size: int, crc: int) -> str | None:
    """What is wrong with a file that should have this size and checksum; None if nothing is."""
    try:
        there = path.stat().st_size
        if there != size:
            return f"{'truncated' if there < size else 'too long'}: {there} bytes instead of {size}"
        found, block = 0, memoryview(bytearray(1 << 20))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                found = crc32c(block[:count], found)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return None if found == crc else f"changed: crc32c {found:08x} instead of {crc:08x}"


def clear(root: Path) -> None:
    """Deletes what killed runs have left half-written or half-deleted."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith((SAVING, DELETING)):
                shutil.rmtree(path, ignore_errors=True)


def steps_in(root: Path) -> list[int]:
    """The complete checkpoints of a folder, oldest first."""
    return [step for step in numbered(root) if (root / str(step) / MARKER).is_file()]


def numbered(root: Path) -> list[int]:
    """The folders with a step for a name."""
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit()) if root.is_dir() else []


def reason(error: BaseException) -> str:
    """An error in a few words, with the file it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
