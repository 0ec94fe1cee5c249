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

from zaya_jax.config import UserError

UNIT = 8  # numbers in a row: 16 bytes even in bfloat16, a good alignment for transfers


class Grid:
    """A mesh's devices, `node` of them per node. Axes of size 1 are dropped."""

    def __init__(self, axes: Mapping[str, int], node: int = 1):
        self.axes = {axis: size for axis, size in axes.items() if size > 1}
        self.names, self.shape = tuple(self.axes), tuple(self.axes.values())
        self.num_devices = math.prod(self.axes.values())
        self.nodes = np.arange(self.num_devices).reshape(-1, node)  # the devices of each

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of devices along these axes."""
        return math.prod(self.axes[axis] for axis in axes)

    def other_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The mesh's axes without these."""
        return tuple(axis for axis in self.names if axis not in axes)

    def device_groups(self, outer: tuple[str, ...], inner: tuple[str, ...]) -> np.ndarray:
        """Devices [outer, inner] by their coordinates along these axes, which together are all axes."""
        numbers = np.arange(self.num_devices).reshape(self.shape)
        order = [self.names.index(axis) for axis in (*outer, *inner)]
        return numbers.transpose(order).reshape(self.size(outer), self.size(inner))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """The numbers from start to stop of an array in row-major order, as boxes in that order."""
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        first, before = divmod(start, inner)
        last = stop // inner
        if before == 0 and first < last:  # whole entries of the first dim
            yield (slice(first, last), *whole_box(shape[1:]))
            start = last * inner
            continue
        end = min(stop, (first + 1) * inner)
        for box in boxes(shape[1:], before, before + end - start):
            yield (slice(first, first + 1), *box)
        start = end


def whole_box(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """All numbers of an array, as a box."""
    return tuple(slice(0, size) for size in shape)


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
        return sum(self.spec, ())

    def local(self, grid: Grid) -> tuple[int, ...]:
        """The shape of a device's part; UserError where the mesh does not divide it."""
        local = []
        for size, axes in zip(self.shape, self.dims, strict=True):
            if size % grid.size(axes):
                raise UserError(
                    f"weight {self.path} {list(self.shape)} is sharded over {grid.size(axes)}"
                    f" devices ({', '.join(axes)}) along a dim of {size}; give the mesh sizes that"
                    " divide it"
                )
            local.append(size // grid.size(axes))
        return tuple(local)

    def part(self, grid: Grid, device: int) -> tuple[slice, ...]:
        """The box that a device holds."""
        coordinates = dict(zip(grid.names, np.unravel_index(device, grid.shape), strict=True))
        box = []
        for size, axes in zip(self.local(grid), self.dims, strict=True):
            number = 0  # of the part, along this dim
            for axis in axes:
                number = number * grid.axes[axis] + int(coordinates[axis])
            box.append(slice(number * size, (number + 1) * size))
        return tuple(box)


@dataclasses.dataclass(frozen=True)
class StateBox:
    """One box of a weight's state that one device holds; `Bucket.state_boxes` lists them all."""

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
    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that split its first dim."""

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


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Of an array's numbers, in float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Zeros behind a dim, up to this size."""
    if x.shape[dim] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, size - x.shape[dim])
    return jnp.pad(x, widths)
