"""Reads a checkpoint's arrays onto devices: each process reads its devices' parts, verifying each chunk, once.

Each device's part of an array is filled on the host and handed over, one array after the other: beside the
state the host holds one array and the chunks under way. Places that no part fills, ZeRO-1's padding, are zeros.
"""

import concurrent.futures
import itertools
import os
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.checkpoint.layout import Array
from zaya_jax.checkpoint.seal import TAIL, crc32c
from zaya_jax.config import StorageError
from zaya_jax.config.fields import parse_json

THREADS = 4
AHEAD_BYTES = 64 << 20  # of chunks that are read before they are asked for


def read(folder: Path, held: Holding, everything: bool = True) -> dict[str, jax.Array]:
    """The run's arrays by name, from a checkpoint's folder; StorageError where it is damaged or of another model.

    `everything`: the checkpoint must have no other arrays.
    """
    try:
        arrays = {name: array_at(folder, name) for name in held.arrays}
        _check(folder, held, arrays, everything)
        by_leaf: dict[str, list[HeldBox]] = defaultdict(list)
        for part in held.parts:
            if part.device.process_index == jax.process_index():
                by_leaf[part.leaf].append(part)
        with concurrent.futures.ThreadPoolExecutor(THREADS, "load") as pool:
            return {name: _leaf(folder, x, by_leaf[name], arrays, pool) for name, x in held.leaves.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error


def array_at(folder: Path, name: str) -> Array:
    """How a checkpoint has stored one array."""
    try:
        return Array.of_json(name, parse_json((folder / layout.STATE / name / "zarr.json").read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"it has no array {name}") from None


def _check(folder: Path, held: Holding, arrays: dict[str, Array], everything: bool) -> None:
    for name, x in held.arrays.items():
        if arrays[name].shape != tuple(x.shape):
            raise ValueError(f"its array {name} is {list(arrays[name].shape)}, the run's is {list(x.shape)}")
    more = sorted(p.name for p in (folder / layout.STATE).iterdir() if p.is_dir() and p.name not in arrays)
    if more and everything:
        raise ValueError(f"it has {len(more)} arrays that the run has not, such as {more[0]}")


def _leaf(folder: Path, x: Any, parts: list[HeldBox], arrays: dict[str, Array], pool: Any) -> jax.Array:
    """One array of the run."""
    own, devices = x.sharding.shard_shape(tuple(x.shape)), list(x.sharding.addressable_devices)
    by_device: dict[jax.Device, list[HeldBox]] = {device: [] for device in devices}
    for part in parts:
        by_device[part.device].append(part)
    # Devices that have the same have it from one reading.
    alike: dict[tuple, list[jax.Device]] = defaultdict(list)
    for device, its in by_device.items():
        alike[tuple((part.name, part.box, part.place) for part in its)].append(device)
    filled = [(np.zeros(own, x.dtype), by_device[to[0]], to) for to in alike.values()]
    for target, part, chunk, inside in _chunks(folder, filled, arrays, pool):
        part.of(target)[layout.within(inside[1], part.box)] = chunk[inside[0]]
    # No other memory stands behind these: a step may take theirs.
    singles = [jax.device_put(a, device, may_alias=False) for a, _, to in filled for device in to]
    return jax.make_array_from_single_device_arrays(tuple(x.shape), x.sharding, singles)


def _chunks(folder: Path, filled: list, arrays: dict[str, Array], pool: Any) -> Iterator[tuple]:
    """(target, part, chunk, (where in the chunk, where in the array)), each chunk read once, a few ahead."""
    wanted: dict[tuple[str, tuple[int, ...]], list] = defaultdict(list)
    for target, parts, _ in filled:
        for part in parts:
            for index, holds in arrays[part.name].touched(part.box):
                inside = layout.overlap(holds, part.box)
                wanted[part.name, index].append((target, part, (layout.within(inside, holds), inside)))
    coming = ((read_chunk, folder, arrays[name], index) for name, index in wanted)
    largest = max((arrays[name].chunk_bytes for name, _ in wanted), default=1)
    count = min(max(AHEAD_BYTES // largest, 1), 2 * THREADS)
    ahead = deque(pool.submit(*call) for call in itertools.islice(coming, count))
    for uses in wanted.values():
        chunk = ahead.popleft().result()
        ahead.extend(pool.submit(*call) for call in itertools.islice(coming, 1))
        for target, part, inside in uses:
            yield target, part, chunk, inside


def read_chunk(folder: Path, array: Array, index: tuple[int, ...]) -> np.ndarray:
    """One chunk, if it has its checksum; ValueError otherwise."""
    size = array.chunk_bytes
    raw = np.empty(size + TAIL, np.uint8)
    with (folder / array.file(index)).open("rb", buffering=0) as file:
        read, view = 0, memoryview(raw)
        while count := file.readinto(view[read:]):
            read += count
        whole = read == len(raw) == os.fstat(file.fileno()).st_size
    if not whole or crc32c(raw[:size]) != int.from_bytes(raw[size:].tobytes(), "little"):
        raise ValueError(f"{array.file(index)} (array {array.name}) is damaged")
    return raw[:size].view(array.dtype).reshape(array.chunk)
