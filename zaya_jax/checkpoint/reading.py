"""Puts a checkpoint's arrays onto devices: each process reads its devices' parts, verifying each
chunk, once.

Each device's part of an array is filled on the host and handed over, one array after the other: on
top of the state the host holds one array and the chunks under way. Places that no part fills,
ZeRO-1's padding, are zeros.
"""

import concurrent.futures
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.checkpoint.layout import Array
from zaya_jax.checkpoint.seal import TAIL, crc32c

THREADS = 4
AHEAD_BYTES = 64 << 20  # of chunks that are read before they are asked for

ReadChunk = Callable[[Array, tuple[int, ...]], np.ndarray]


def on_devices(read: ReadChunk, arrays: Mapping[str, Array], held: Holding) -> dict[str, jax.Array]:
    """The run's arrays by name."""
    by_leaf: dict[str, list[HeldBox]] = defaultdict(list)
    for part in held.parts:
        if part.device.process_index == jax.process_index():
            by_leaf[part.leaf].append(part)
    with concurrent.futures.ThreadPoolExecutor(THREADS, "load") as pool:
        ahead = lambda *chunk: pool.submit(read, *chunk)  # noqa: E731
        return {name: _leaf(ahead, x, by_leaf[name], arrays) for name, x in held.leaves.items()}


def _leaf(ahead: Any, x: Any, parts: list[HeldBox], arrays: Mapping[str, Array]) -> jax.Array:
    """One array of the run."""
    by_device: dict[jax.Device, list[HeldBox]] = {
        device: [] for device in x.sharding.addressable_devices
    }
    for part in parts:
        by_device[part.device].append(part)
    # Devices that have the same have it from one reading.
    alike: dict[tuple, list[jax.Device]] = defaultdict(list)
    for device, index in x.sharding.addressable_devices_indices_map(tuple(x.shape)).items():
        alike[layout.box_of(index, tuple(x.shape))].append(device)
    own = x.sharding.shard_shape(tuple(x.shape))
    filled = [(np.zeros(own, x.dtype), by_device[to[0]], to) for to in alike.values()]
    for target, part, chunk, inside in _chunks(ahead, filled, arrays):
        part.of(target)[layout.within(inside[1], part.box)] = chunk[inside[0]]
    # No other memory stands behind these: a step may take theirs.
    singles = [jax.device_put(a, device, may_alias=False) for a, _, to in filled for device in to]
    return jax.make_array_from_single_device_arrays(tuple(x.shape), x.sharding, singles)


def _chunks(ahead: Any, filled: list, arrays: Mapping[str, Array]) -> Iterator[tuple]:
    """(target, part, chunk, (where in the chunk, where in the array)), each chunk read once, a few
    ahead."""
    wanted: dict[tuple[str, tuple[int, ...]], list] = defaultdict(list)
    for target, parts, _ in filled:
        for part in parts:
            for index, holds in arrays[part.name].touched(part.box):
                inside = layout.overlap(holds, part.box)
                wanted[part.name, index].append(
                    (target, part, (layout.within(inside, holds), inside))
                )
    coming = (ahead(arrays[name], index) for name, index in wanted)
    largest = max((arrays[name].chunk_bytes for name, _ in wanted), default=1)
    count = min(max(AHEAD_BYTES // largest, 1), 2 * THREADS)
    waiting = deque(itertools.islice(coming, count))
    for uses in wanted.values():
        chunk = waiting.popleft().result()
        waiting.extend(itertools.islice(coming, 1))
        for target, part, inside in uses:
            yield target, part, chunk, inside


def chunk_of(content: bytes, array: Array, index: tuple[int, ...], crc: int) -> np.ndarray:
    """The numbers of a chunk's file, if they and its tail have this checksum; ValueError
    otherwise."""
    raw = np.frombuffer(content, np.uint8)
    numbers, tail = raw[: array.chunk_bytes], raw[array.chunk_bytes :].tobytes()
    if tail != crc.to_bytes(TAIL, "little") or crc32c(numbers) != crc:
        raise ValueError(f"{array.file(index)} (array {array.name}) is damaged")
    return numbers.view(array.dtype).reshape(array.chunk)
