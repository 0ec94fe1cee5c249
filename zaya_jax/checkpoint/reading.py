"""Puts a checkpoint's arrays onto devices: each process reads its devices' parts, verifying each
chunk, once.

Each device's part of an array is filled on the host and handed over, one array after the other: on
top of the state the host holds one array and the chunks under way. Places that no part fills,
ZeRO-1's padding, are zeros.
"""

import concurrent.futures
import dataclasses
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.boxes import LocatedBox, Locations
from zaya_jax.checkpoint.layout import Box, StoredArray

THREADS = 4
PREFETCH_BYTES = 64 << 20  # of chunks that are read before they are asked for

Index = tuple[int, ...]  # of a chunk in its array
ReadChunk = Callable[[StoredArray, Index], np.ndarray]
SubmitRead = Callable[[StoredArray, Index], concurrent.futures.Future[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """The host's copy of a device's part of one of the run's arrays."""

    numbers: np.ndarray
    parts: list[LocatedBox]
    devices: list[jax.Device]  # that have the same part, from one reading


def on_devices(
    read_chunk: ReadChunk, arrays: Mapping[str, StoredArray], locations: Locations
) -> dict[str, jax.Array]:
    """The run's arrays by name."""
    parts: dict[str, list[LocatedBox]] = defaultdict(list)
    for part in locations.parts:
        if part.device.process_index == jax.process_index():
            parts[part.leaf].append(part)
    with concurrent.futures.ThreadPoolExecutor(THREADS, "load") as pool:

        def submit(array: StoredArray, index: Index) -> concurrent.futures.Future[np.ndarray]:
            return pool.submit(read_chunk, array, index)

        return {name: _leaf(submit, x, parts[name], arrays) for name, x in locations.leaves.items()}


def _leaf(
    submit: SubmitRead, x: Any, parts: list[LocatedBox], arrays: Mapping[str, StoredArray]
) -> jax.Array:
    """One array of the run, as its ShapeDtypeStruct `x` says."""
    shape = tuple(x.shape)
    parts_by_device: dict[jax.Device, list[LocatedBox]] = defaultdict(list)
    for part in parts:
        parts_by_device[part.device].append(part)
    devices_by_box: dict[Box, list[jax.Device]] = defaultdict(list)
    for device, index in x.sharding.addressable_devices_indices_map(shape).items():
        devices_by_box[layout.box_of(index, shape)].append(device)
    buffers = [
        _Buffer(np.zeros(layout.shape_of(box), x.dtype), parts_by_device[devices[0]], devices)
        for box, devices in devices_by_box.items()
    ]
    _fill(submit, buffers, arrays)
    singles = [
        # No other memory stands behind these: a step may take theirs.
        jax.device_put(buffer.numbers, device, may_alias=False)
        for buffer in buffers
        for device in buffer.devices
    ]
    return jax.make_array_from_single_device_arrays(shape, x.sharding, singles)


def _fill(submit: SubmitRead, buffers: list[_Buffer], arrays: Mapping[str, StoredArray]) -> None:
    """Fills buffers with the numbers of their parts; reads each chunk once, a few ahead."""
    # by chunk: views of the buffers, and the box of the chunk that goes into each
    targets: dict[tuple[str, Index], list[tuple[np.ndarray, Box]]] = defaultdict(list)
    for buffer in buffers:
        for part in buffer.parts:
            view = part.view(buffer.numbers)
            for index, chunk_box in arrays[part.name].chunks_overlapping(part.box):
                box = layout.overlap(chunk_box, part.box)
                # The ellipsis makes a single number a view, too.
                place: tuple[Any, ...] = (*layout.within(box, part.box), ...)
                targets[part.name, index].append((view[place], layout.within(box, chunk_box)))
    reads = (submit(arrays[name], index) for name, index in targets)
    largest = max((arrays[name].chunk_bytes for name, _ in targets), default=1)
    num_ahead = min(max(PREFETCH_BYTES // largest, 1), 2 * THREADS)
    waiting = deque(itertools.islice(reads, num_ahead))
    for of_chunk in targets.values():
        chunk = waiting.popleft().result()
        waiting.extend(itertools.islice(reads, 1))
        for target, box in of_chunk:
            target[...] = chunk[box]
