"""The terms of the optimizer's layouts: devices, weights, and the boxes of state that a device
holds."""

import abc
import dataclasses
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from zaya_jax.config import UserError

UNIT = 8  # numbers in a row: 16 bytes even in bfloat16, a good alignment for transfers


class Grid:
    """A mesh's devices, `node` of them per node. Axes of size 1 are dropped."""

    def __init__(self, axes: Mapping[str, int], node: int = 1):
        self.axes = {axis: size for axis, size in axes.items() if size > 1}
        self.names = tuple(self.axes)
        self.num_devices = math.prod(self.axes.values())
        self.nodes = np.arange(self.num_devices).reshape(-1, node)  # the devices of each

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of devices along these axes."""
        return math.prod(self.axes[axis] for axis in axes)

    def device_groups(self, outer: tuple[str, ...], inner: tuple[str, ...]) -> np.ndarray:
        """Devices [outer, inner] by their coordinates along these axes, which together are all axes."""
        numbers = np.arange(self.num_devices).reshape(tuple(self.axes.values()))
        order = [self.names.index(axis) for axis in (*outer, *inner)]
        return numbers.transpose(order).reshape(self.size(outer), self.size(inner))

    def coordinates(self, axes: tuple[str, ...], number: int) -> dict[str, int]:
        """The coordinate along each axis of the number-th device along them all."""
        places = {}
        for axis in reversed(axes):
            number, places[axis] = divmod(number, self.axes[axis])
        return places

    def flat_index(self, axes: tuple[str, ...], places: Mapping[str, int]) -> int:
        """The inverse of `coordinates`."""
        result = 0
        for axis in axes:
            result = result * self.axes[axis] + places[axis]
        return result


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """The numbers from start to stop of an array in row-major order, as boxes in that order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (first, before), (last, after) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from ((slice(first, first + 1), *box) for box in boxes(shape[1:], before, after))
        return
    if before:
        yield from ((slice(first, first + 1), *box) for box in boxes(shape[1:], before, inner))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:]))
    yield from ((slice(last, last + 1), *box) for box in boxes(shape[1:], 0, after))


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter as the optimizer sees it."""

    path: str
    shape: tuple[int, ...]  # over all devices
    method: str  # muon or adamw
    group: str  # the group whose norm it counts towards
    # the mesh axes of each dim, up to the last one that has any
    spec: tuple[tuple[str, ...], ...] = ()
    copy: str = ""  # a format in which devices may hold it, if its owner has it in float32
    # Muon's: the last dims are a matrix [in, out], or [in, 2, out] with the columns of two maps
    matrix_dims: int = 2

    @property
    def stack(self) -> tuple[int, ...]:
        """The dims before those of the matrix."""
        return self.shape[: len(self.shape) - self.matrix_dims]

    @property
    def matrix(self) -> tuple[int, int]:
        """The matrix that Muon makes orthogonal: rows and all columns."""
        rows, *columns = self.shape[len(self.stack) :]
        return rows, math.prod(columns)

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of every dim."""
        return (*self.spec, *((),) * (len(self.shape) - len(self.spec)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is sharded over."""
        return tuple(axis for dim in self.spec for axis in dim)

    def local(self, grid: Grid) -> tuple[int, ...]:
        """The shape of a device's part; UserError where the mesh does not divide it."""
        for size, axes in zip(self.shape, self.dims, strict=True):
            if size % grid.size(axes):
                raise UserError(
                    f"weight {self.path} {list(self.shape)} is sharded over {grid.size(axes)}"
                    f" devices ({', '.join(axes)}) along a dim of {size}; give the mesh sizes that"
                    " divide it"
                )
        return tuple(
            size // grid.size(axes) for size, axes in zip(self.shape, self.dims, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class StateBox:
    """One box of a weight's state that one device holds; `layout.state_boxes(bucket)` lists them all."""

    weight: str  # path of the weight
    device: int  # index in mesh.devices.flat
    place: tuple[slice, ...]  # in that device's own part of the bucket's array
    box: tuple[slice, ...]  # in the weight's shape; the same numbers in the same order, row-major


class Bucket(abc.ABC):
    """Weights whose state lies in arrays of their own: one of Muon's, two of AdamW's, by name.

    `reduce`, `after_sum`, `gather` and `sums` run inside shard_map.
    """

    weights: list[Weight]
    method: str  # muon or adamw
    names: tuple[str, ...]  # of the state's arrays
    replica_axes: tuple[str, ...] = ()  # axes along which the weights are replicated
    # the axes over which a result of `reduce` must still be summed, with other small arrays
    pending_sum_axes: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the state over all devices, in the order of the mesh."""

    @abc.abstractmethod
    def spec(self, name: str) -> PartitionSpec:
        """The mesh axes that split it."""

    @abc.abstractmethod
    def num_shards(self, name: str) -> int:
        """The number of devices with different parts of it."""

    @abc.abstractmethod
    def state_boxes(self, name: str) -> Iterable[StateBox]:
        """The place of each box of its weights."""

    @abc.abstractmethod
    def traffic(self, name: str, direction_bytes: int) -> dict[str, int]:
        """Bytes that a device puts into or gets out of each kind of collective, and the padding
        among them."""

    @abc.abstractmethod
    def reduce(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Partial gradients by path to a device's share of the sum, by name; those of
        `pending_sum_axes` are not summed yet."""

    def after_sum(self, name: str, x: jax.Array) -> jax.Array:
        """Picks this device's part of an array that was pending, now summed; by default all."""
        return x

    def contribution(
        self, buckets: Mapping[str, jax.Array]
    ) -> dict[str, tuple[tuple[str, ...], jax.Array]]:
        """In the place of `gather`: the axes over which directions are summed with other small
        arrays, and this device's part of the sum, by name; by default none."""
        return {}

    @abc.abstractmethod
    def gather(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The directions of all devices by name, as parts of the weights by path."""

    @abc.abstractmethod
    def sums(self, buckets: Mapping[str, jax.Array]) -> Iterable[tuple[str, jax.Array]]:
        """The sum of squares of this device's numbers, by groups of weights; numbers that several
        hold count on one of them."""


def group_sums(
    counts: Sequence[tuple[Weight, int]], index: jax.Array, values: jax.Array
) -> Iterator[tuple[str, jax.Array]]:
    """Sums of values by group; value i is the index[i]-th of all, and `counts` says how many each
    weight has."""
    start = 0
    for w, count in counts:
        inside = (index >= start) & (index < start + count)
        yield w.group, jnp.sum(jnp.where(inside, values, 0.0))
        start += count
