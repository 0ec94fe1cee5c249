"""A checkpoint's arrays onto devices: each process reads its devices' parts, each chunk once, and checks it.

What a device has of an array is filled on the host and handed over; from WHOLE_BYTES on it is filled on the device,
chunk by chunk, so that the host never holds a second copy. What no part fills, ZeRO-1's padding, is zeros.
"""

import concurrent.futures
import functools
import itertools
import math
import os
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.checkpoint.layout import Array, Box
from zaya_jax.checkpoint.seal import TAIL, crc32c
from zaya_jax.config import StorageError
from zaya_jax.config.fields import parse_json

THREADS = 4
AHEAD_BYTES = 64 << 20  # of chunks that are read before they are asked for
WHOLE_BYTES = 8 << 20  # what one device has of one array, up to which it is filled on the host


def read(folder: Path, held: Holding, everything: bool = True) -> dict[str, jax.Array]:
    """The run's arrays by name, from a checkpoint's folder; StorageError where it is damaged or of another model.

    `everything`: the checkpoint must have no array beside those that are held.
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
    own, devices = (
        x.sharding.shard_shape(tuple(x.shape)),
        sorted(x.sharding.addressable_devices, key=lambda device: device.id),
    )
    # Devices that have the same have it from one reading.
    targets: dict[tuple, list[jax.Device]] = defaultdict(list)
    by_device: dict[jax.Device, list[HeldBox]] = {device: [] for device in devices}
    for part in parts:
        by_device[part.device].append(part)
    for device, its in by_device.items():
        targets[tuple((part.name, part.box, part.place) for part in its)].append(device)
    small = math.prod(own) * np.dtype(x.dtype).itemsize <= WHOLE_BYTES
    make = _OnHost if small else _OnDevices
    filled = [(make(own, np.dtype(x.dtype), to), by_device[to[0]]) for to in targets.values()]
    for target, part, chunk, inside in _chunks(folder, filled, arrays, pool):
        target.put(part, layout.within(inside[1], part.box), chunk[inside[0]])
    singles = {device: array for target, _ in filled for device, array in target.done().items()}
    return jax.make_array_from_single_device_arrays(
        tuple(x.shape), x.sharding, [singles[device] for device in devices]
    )


def _chunks(folder: Path, filled: list, arrays: dict[str, Array], pool: Any) -> Iterator[tuple]:
    """(target, part, chunk, (where in the chunk, where in the array)), each chunk read once, a few ahead."""
    wanted: dict[tuple[str, tuple[int, ...]], list] = defaultdict(list)
    for target, parts in filled:
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


class _OnHost:
    """What some devices have of an array alike, filled on the host."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: list[jax.Device]):
        self._x, self._devices = np.zeros(shape, dtype), devices

    def put(self, part: HeldBox, box: Box, x: np.ndarray) -> None:
        """Sets a box of a part."""
        part.of(self._x)[box] = x

    def done(self) -> dict[jax.Device, jax.Array]:
        """The filled arrays, which no other memory stands behind: a step may take theirs."""
        return {device: jax.device_put(self._x, device, may_alias=False) for device in self._devices}


class _OnDevices:
    """The same, filled on the devices, in place."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: list[jax.Device]):
        self._dtype = dtype
        self._x = {device: jnp.zeros(shape, dtype, device=device) for device in devices}

    def put(self, part: HeldBox, box: Box, x: np.ndarray) -> None:
        """Sets a box of a part."""
        for piece, at in _pieces(part, box, x.astype(self._dtype, copy=False)):
            for device, old in self._x.items():
                self._x[device] = _set(old, piece, at)

    def done(self) -> dict[jax.Device, jax.Array]:
        """The filled arrays."""
        return self._x


def _pieces(part: HeldBox, box: Box, x: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
    """The numbers of a box of a part as pieces that are boxes of what the device has too, and where these begin."""
    shape, places = part.shape, layout.sizes(part.place)
    if part.inner:
        box = tuple(slice(s.start + i.start, s.stop + i.start) for s, i in zip(box, part.inner, strict=True))
    if [n for n in shape if n > 1] == [n for n in places if n > 1]:
        told = iter([s for s, n in zip(box, shape, strict=True) if n > 1])
        own: Box = tuple(next(told) if n > 1 else slice(0, 1) for n in places)
        yield x.reshape(layout.sizes(own)), [p.start + s.start for p, s in zip(part.place, own, strict=True)]
        return
    # Otherwise the place is a run of numbers, and so is what is whole in the last dims with a stretch of one before.
    (run,) = part.place
    lead = len(shape)
    while lead and box[lead - 1] == slice(0, shape[lead - 1]):
        lead -= 1
    lead = max(lead - 1, 0)
    for at in np.ndindex(*layout.sizes(box)[:lead]):
        first = [s.start + (at[i] if i < lead else 0) for i, s in enumerate(box)]
        yield x[at].reshape(-1), [run.start + int(np.ravel_multi_index(tuple(first), shape))]


@functools.partial(jax.jit, donate_argnums=0)
def _set(x: jax.Array, piece: jax.Array, at: list[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, piece, at)
