"""Maps each device's memory to boxes of a checkpoint's arrays, so that saving and restoring move
nothing between them.

A run keeps its state in arrays of its own: ZeRO-1's buckets of whole matrices from many weights,
vectors in a row, slots that are not in use. A checkpoint has plain arrays. A list of parts connects
the two, each a box of a checkpoint's array that lies on one device:

    locations = Locations(arrays, leaves, parts)    for a run; `of_tree` if its arrays are the checkpoint's own
    writers = locations.writers()                   the writer of each part, and the chunks of the arrays
"""

import dataclasses
import math
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.layout import Box, StoredArray


@dataclasses.dataclass(frozen=True, slots=True)
class LocatedBox:
    """A box of a checkpoint's array, and its place in one device's part of one of the run's
    arrays."""

    name: str  # the checkpoint's array
    box: Box
    leaf: str  # the run's
    device: jax.Device
    place: Box  # in the device's part of it: the same numbers in row-major order

    def view(self, device_part: np.ndarray) -> np.ndarray:
        """The box's numbers in the device's part of the leaf, in the shape of the box."""
        # A scalar's place is empty; the ellipsis makes its number a view too.
        place: tuple[Any, ...] = (*self.place, ...)
        return device_part[place].reshape(layout.shape_of(self.box), copy=False)


@dataclasses.dataclass(frozen=True)
class Writers:
    """All arrays, and the parts and bytes of each process."""

    arrays: dict[str, StoredArray]
    parts: dict[int, list[LocatedBox]]
    bytes: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Locations:
    """Where a whole state lies. A box that several devices have is in `parts` once for each of
    them."""

    arrays: dict[str, Any]  # the checkpoint's, as ShapeDtypeStructs
    leaves: dict[str, Any]  # the run's, as ShapeDtypeStructs with their shardings
    parts: list[LocatedBox]

    def weights(self) -> "Locations":
        """The locations of the parameters and balancing biases only."""
        arrays = {name: x for name, x in self.arrays.items() if layout.is_weight(name)}
        parts = [part for part in self.parts if part.name in arrays]
        leaves = {part.leaf: self.leaves[part.leaf] for part in parts}
        return Locations(arrays, leaves, parts)

    def writers(self) -> Writers:
        """The writer of each part; the same in every process."""
        copies: dict[tuple[str, Box], list[LocatedBox]] = defaultdict(list)
        for part in self.parts:
            copies[part.name, part.box].append(part)
        itemsize = {name: np.dtype(x.dtype).itemsize for name, x in self.arrays.items()}
        load: dict[int, int] = defaultdict(int)

        def size(of_box: list[LocatedBox]) -> int:
            return layout.volume(of_box[0].box) * itemsize[of_box[0].name]

        def by_urgency(of_box: list[LocatedBox]) -> tuple[bool, int]:
            several = len({part.device.process_index for part in of_box}) > 1
            return several, -size(of_box)

        def by_load(part: LocatedBox) -> tuple[int, int, int]:
            process = part.device.process_index
            return load[process], process, part.device.id

        # First the boxes that only one process can write, then the largest: the rest evens out.
        chosen: dict[str, list[LocatedBox]] = defaultdict(list)
        for of_box in sorted(copies.values(), key=by_urgency):
            part = min(of_box, key=by_load)
            chosen[part.name].append(part)
            load[part.device.process_index] += size(of_box)

        arrays = {}
        parts: dict[int, list[LocatedBox]] = defaultdict(list)
        for name, x in self.arrays.items():
            chunk = _chunk(name, tuple(x.shape), itemsize[name], chosen[name])
            arrays[name] = StoredArray(name, tuple(x.shape), np.dtype(x.dtype).name, chunk)
            for part in chosen[name]:
                parts[part.device.process_index].append(part)
        order = {leaf: i for i, leaf in enumerate(self.leaves)}
        for of_process in parts.values():
            of_process.sort(key=lambda part: (order[part.leaf], part.device.id))
        return Writers(arrays, dict(parts), dict(load))


def of_tree(abstract: Any) -> Locations:
    """The locations of a tree whose arrays are the checkpoint's own, by their shardings."""
    leaves, parts = {}, []
    for name, x in trees.flat(abstract).items():
        # without the numbers, which may be freed before the writers are chosen
        leaves[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        parts += parts_of(name, x)
    return Locations(leaves, leaves, parts)


def parts_of(name: str, x: Any) -> list[LocatedBox]:
    """The parts of one such array."""
    parts = []
    for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items():
        box = layout.box_of(index, tuple(x.shape))
        place = layout.full_box(layout.shape_of(box))
        parts.append(LocatedBox(name, box, name, device, place))
    return parts


def _chunk(
    name: str, shape: tuple[int, ...], itemsize: int, parts: list[LocatedBox]
) -> tuple[int, ...]:
    """Chunks that one device's part fills alone, or if these were small, one process's."""
    part = shape
    for owner in (lambda p: p.device.id, lambda p: p.device.process_index):
        borders = _borders(shape, parts, owner)
        part = tuple(math.gcd(n, *cuts) for n, cuts in zip(shape, borders, strict=True))
        if math.prod(part) * itemsize >= layout.PART_BYTES:
            return layout.chunk_shape(name, shape, itemsize, part)
    # Where borders do not divide the size (257 of 262,272 rows per device), the last chunk is
    # filled up instead.
    filled = tuple(math.gcd(*cuts) or n for n, cuts in zip(shape, borders, strict=True))
    return layout.chunk_shape(name, shape, itemsize, max(part, filled, key=math.prod))


def _borders(shape: tuple[int, ...], parts: list[LocatedBox], owner: Any) -> list[list[int]]:
    """Along each dim, the borders between different owners."""
    # The parts' starts cut each dim into cells; every cell has one owner.
    starts = []
    for dim in range(len(shape)):
        of_parts = [part.box[dim].start for part in parts]
        starts.append(np.unique(of_parts))
    owners = np.full([*map(len, starts)], -1, np.int64)
    for part in parts:
        cells = []
        for dim_starts, side in zip(starts, part.box, strict=True):
            first, end = np.searchsorted(dim_starts, [side.start, side.stop])
            cells.append(slice(first, end))
        owners[tuple(cells)] = owner(part)
    assert (owners >= 0).all(), "boxes must fill their array"
    borders = []
    for dim, dim_starts in enumerate(starts):
        other_dims = tuple(d for d in range(len(shape)) if d != dim)
        differ = np.diff(owners, axis=dim).any(other_dims)
        borders.append(dim_starts[1:][differ].tolist())
    return borders
