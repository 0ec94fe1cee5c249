"""Muon's buckets over the devices of a mesh: all stacks of one local matrix shape, owned matrix by
matrix.

The gradients of a bucket travel as one run of rows (`owners.Travel`): reduce-scattered over the
devices that hold the same weights, then exchanged until every device has the whole matrices that it
owns. The directions take the same way back, with an all-gather. The owner keeps momentum as [slots,
a, b]; slots is the most that any device owns, and a device's first ones are in use.

A weight that is itself sharded over a stack dim (experts) has a separate run for each part. Over a
matrix dim (tensor, fsdp), a device has part t of T of every matrix: an all-to-all gives it all T
parts of a T-th of the rows, and rows then are T · UNIT numbers wide.

A bucket with much padding, or a small one, does not travel like that: it is summed as a whole
(`together`), each owner takes its matrices, and zeros for all others make the way back a sum, too.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zaya_jax.optim.muon import newton_schulz_flops
from zaya_jax.optim.zero import owners
from zaya_jax.optim.zero.grid import UNIT, Bucket, Grid, Held, Weight, group_sums

# A bucket with more padding than this share of its own numbers, and of all buckets', is summed as a
# whole.
WASTE, WASTE_OF_ALL = 0.02, 1e-3
SMALL = 2**16  # numbers up to which a sum costs less than the rounds of an exchange


@dataclasses.dataclass(frozen=True)
class Form:
    """The properties that the weights of a bucket share."""

    dims: tuple[
        int, ...
    ]  # the matrix over all devices, [a, b], or [a, 2, b] (`Weight.matrix_dims`)
    shared: tuple[str, ...]  # axes along which they are replicated
    own: tuple[str, ...]  # axes along which devices hold different matrices
    # (dim of [n, *dims], axes) of matrix dims that are sharded
    swaps: tuple[tuple[int, tuple[str, ...]], ...]

    @staticmethod
    def of(weight: Weight, grid: Grid) -> "Form":
        """The form of a weight."""
        stack = len(weight.stack)
        swaps = tuple(
            (dim + 1 - stack, axes) for dim, axes in enumerate(weight.dims) if dim >= stack and axes
        )
        own = tuple(axis for dim in weight.dims[:stack] for axis in dim)
        shared = tuple(axis for axis in grid.names if axis not in weight.axes)
        return Form(weight.shape[stack:], shared, own, swaps)

    @property
    def name(self) -> str:
        """The bucket's name."""
        name = f"muon {'x'.join(map(str, self.dims))}" + (
            f" of {'+'.join(self.own)}" if self.own else ""
        )
        return name + "".join(f" dim {dim} over {'+'.join(axes)}" for dim, axes in self.swaps)

    @property
    def swapped(self) -> tuple[str, ...]:
        """The axes that split matrix dims."""
        return tuple(axis for _, axes in self.swaps for axis in axes)


class Matrices(Bucket):
    """The weights of one form, one bucket."""

    method = "muon"

    def __init__(self, form: Form, weights: list[Weight], travelling: int, grid: Grid):
        self.form, self.weights, self.grid, self.travelling = form, weights, grid, travelling
        self.name, self.names, self.row, self.shared = (
            form.name,
            (form.name,),
            weights[0].matrix,
            form.shared,
        )
        self.way: Any = None  # for gradients that leave layer by layer: `by_layer`
        stacks = [w.local(grid)[: len(w.stack)] for w in weights]
        self.pieces = tuple((w, math.prod(stack)) for w, stack in zip(weights, stacks, strict=True))
        self.count = sum(count for _, count in self.pieces)  # matrices in a group
        self.groups = grid.groups(form.own, (*form.shared, *form.swapped))
        self.parts = grid.size(form.swapped)
        self.shards = grid.size(form.shared)
        self.part = tuple(
            n // grid.size(dict(form.swaps).get(i + 1, ())) for i, n in enumerate(form.dims)
        )
        self.rows = -(-math.prod(self.part) // UNIT)  # in a device's part of a matrix
        self.travel = owners.Travel(self.count * self.rows, self.groups.shape[1])
        self.numbers = self.count * math.prod(self.part)  # in a device's parts
        waste = self.travel.padded * UNIT - self.numbers
        small = self.count * math.prod(self.row) <= SMALL
        much = waste > max(WASTE * self.numbers, WASTE_OF_ALL * travelling)
        self.together = self.groups.shape[1] > 1 and (small or much)
        self.summed = {self.name: form.shared} if self.together else {}

    @property
    def kind(self) -> owners.Kind:
        """The bucket, in the form that the assignment of owners takes."""
        return owners.Kind(self.count, newton_schulz_flops(self.row, 1), self.groups)

    def settle(self, counts: np.ndarray) -> None:
        """Records how many matrices each device of each group owns."""
        starts = np.cumsum(counts, 1) - counts
        self.slots = int(counts.max())
        self.starts, self.counts = (np.zeros(self.groups.size, np.int32) for _ in range(2))
        self.starts[self.groups], self.counts[self.groups] = starts, counts
        self.plan = None
        if not self.together:
            # Otherwise a hundredth of the traffic may be padding of the exchange, or a
            # five-hundredth of all buckets'.
            rows = self.travel.padded // self.parts if self.shards > 1 else self.travel.chunk
            spare = self.groups.size * max(
                rows // 100, self.travelling // (500 * UNIT * self.parts)
            )
            self.plan = owners.plan(counts, self.groups, self.rows, self.travel.chunk, spare)

    def shape(self, name: str) -> tuple[int, ...]:
        return (self.groups.size * self.slots, *self.row)

    def spec(self, name: str) -> PartitionSpec:
        return PartitionSpec(self.grid.names)

    def devices(self, name: str) -> int:
        return self.grid.num_devices

    def traffic(self, name: str, direction_bytes: int) -> dict[str, int]:
        """An exchange is a mean over devices, of both ways."""
        each = 4 + direction_bytes
        if self.together:
            gathered = 4 * self.count * math.prod(self.row)
            found = {"all-reduce": 4 * self.numbers + gathered, "padding": 0}
            return found | ({"all-gather": gathered} if self.parts > 1 else {})
        assert self.plan is not None
        found = dict.fromkeys(
            ("reduce-scatter", "all-gather", "all-to-all", "exchange", "padding"), 0
        )
        padded = self.travel.padded * UNIT
        if self.shards > 1:
            found["reduce-scatter"], found["all-gather"] = 4 * padded, direction_bytes * padded
            found["padding"] += each * (padded - self.numbers)
        if self.parts > 1:
            found["all-to-all"] = each * padded // self.shards
            found["padding"] += each * (padded - self.numbers) // self.shards
        if not self.plan.nothing:
            sent, needed = (
                n * self.parts * UNIT * each // self.groups.size for n in self.plan.sent_rows()
            )
            found["exchange"], found["padding"] = sent, found["padding"] + sent - needed
        return found

    # Inside shard_map.

    def whole(self, leaves: Mapping[str, jax.Array]) -> jax.Array:
        """A device's parts of all matrices, [n, *part]."""
        parts = [leaves[w.path].astype(jnp.float32).reshape(-1, *self.part) for w, _ in self.pieces]
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def reduce(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Partial gradients to the matrices [slots, a, b] that a device owns, or if `together` to
        its parts of all."""
        if self.together:
            return {self.name: self.whole(leaves)}
        first = leaves[self.weights[0].path]
        if self.way and first.shape == self.way.shape:  # shares of each layer's
            return {self.name: self.way.to_owners(first)}
        return {self.name: self._to_owners(leaves)}

    def _to_owners(self, leaves):
        form, plan = self.form, self.plan
        assert plan is not None
        x = self.whole(leaves).reshape(self.count, -1)
        x = pad(x, 1, self.rows * UNIT).reshape(-1, UNIT)
        x = pad(x, 0, self.travel.padded)
        if self.shards > 1:
            x = lax.psum_scatter(x, form.shared, scatter_dimension=0, tiled=True)
        x = x.reshape(self.parts, -1, UNIT)
        x = owners.swap(x, form.swapped) if self.parts > 1 else x
        x = owners.to_owners(x, plan, self.grid.names)
        x = x.reshape(self.parts, self.slots, -1)[:, :, : math.prod(self.part)]
        return self._joined(x.reshape(self.parts, self.slots, *self.part))

    def gather(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return self.leaves(self._from_owners(buckets[self.name]))

    def _from_owners(self, x):
        form, plan, dtype = self.form, self.plan, x.dtype
        assert plan is not None
        # As bare bits: XLA:CPU would make 4 bytes of bfloat16's 2 for the transfer, and any
        # compiler may.
        x = lax.bitcast_convert_type(x, jnp.uint16) if dtype.itemsize == 2 else x
        x = self._cut(x).reshape(self.parts, self.slots, -1)
        x = pad(x, 2, self.rows * UNIT).reshape(self.parts, -1, UNIT)
        x = owners.from_owners(x, plan, self.grid.names)
        x = owners.swap(x, form.swapped) if self.parts > 1 else x
        x = x.reshape(-1, UNIT)
        x = lax.all_gather(x, form.shared, tiled=True) if self.shards > 1 else x
        x = x[: self.travel.rows].reshape(self.count, -1)[:, : math.prod(self.part)]
        x = lax.bitcast_convert_type(x, dtype) if dtype.itemsize == 2 else x
        return x.reshape(self.count, *self.part)

    def take(self, name: str, x: jax.Array) -> jax.Array:
        """The matrices that this device owns, from the summed parts [n, *part]."""
        x = self._joined(lax.all_gather(x, self.form.swapped) if self.parts > 1 else x[None])
        start, count = (owners.of_device(t, self.grid.names) for t in (self.starts, self.counts))
        x = lax.dynamic_slice_in_dim(pad(x, 0, self.count + self.slots), start, self.slots)
        return jnp.where((np.arange(self.slots) < count)[:, None, None], x, 0)

    def put(self, x: jax.Array) -> jax.Array:
        """A device's directions at their places among all, float32, with zeros for the others'."""
        target = jnp.zeros((self.count + self.slots, *self.row), jnp.float32)
        start = owners.of_device(self.starts, self.grid.names)
        return lax.dynamic_update_slice_in_dim(target, x.astype(jnp.float32), start, 0)[
            : self.count
        ]

    def part_of(self, x: jax.Array) -> jax.Array:
        """A device's parts of all matrices, [n, *part], of [n, a, b]."""
        x = x.reshape(-1, *self.form.dims)
        for dim, axes in self.form.swaps:
            size = x.shape[dim] // self.grid.size(axes)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
        return x

    def leaves(self, x: jax.Array) -> dict[str, jax.Array]:
        """Parts of all matrices as parts of the weights."""
        result, start = {}, 0
        for w, count in self.pieces:
            result[w.path] = x[start : start + count].reshape(w.local(self.grid))
            start += count
        return result

    def owned(self) -> jax.Array | int:
        """The number of matrices that this device owns."""
        if (self.counts == self.slots).all():
            return self.slots
        return owners.of_device(self.counts, self.grid.names)

    def sums(self, buckets: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
        by_slot = jnp.sum(jnp.square(buckets[self.name].astype(jnp.float32)), (1, 2))
        start, count = (owners.of_device(t, self.grid.names) for t in (self.starts, self.counts))
        slot = np.arange(self.slots)
        return group_sums(self.pieces, jnp.where(slot < count, start + slot, -1), by_slot)

    def _joined(self, x: jax.Array) -> jax.Array:
        """[T, n, *part] to [n, a, b]."""
        sizes = [self.grid.size(axes) for _, axes in self.form.swaps]
        x = x.reshape(*sizes, *x.shape[1:])
        # the last one first, so that the others stay in front
        for i in reversed(range(len(sizes))):
            dim = i + self.form.swaps[i][0]
            x = jnp.moveaxis(x, i, dim)  # to before the dim that it is a part of
            x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
        return x.reshape(-1, *self.row)

    def _cut(self, x: jax.Array) -> jax.Array:
        """The inverse of `_joined`."""
        x = x.reshape(-1, *self.form.dims)
        for i, (dim, axes) in enumerate(self.form.swaps):
            at = i + dim
            x = x.reshape(*x.shape[:at], self.grid.size(axes), -1, *x.shape[at + 1 :])
            x = jnp.moveaxis(x, at, i)
        return x.reshape(self.parts, *x.shape[len(self.form.swaps) :])

    # Outside, on global arrays.

    def homes(self, weight: Weight) -> np.ndarray:
        """For each matrix of a weight's stack its place in the state over all devices: device ·
        slots + slot."""
        before = 0
        for w, count in self.pieces:
            if w is weight:
                break
            before += count
        stack = weight.stack
        local = weight.local(self.grid)[: len(stack)]
        result = np.zeros(stack, np.int64)
        for number, group in enumerate(self.groups):
            # For all matrices of the group: the device's number in it, and the slot.
            owner = np.repeat(np.arange(len(group)), self.counts[group])
            slot = np.arange(self.count) - self.starts[group][owner]
            home = (group[owner] * self.slots + slot)[before : before + math.prod(local)]
            places = self.grid.places(self.form.own, number)
            at = [self.grid.linear(axes, places) for axes in weight.dims[: len(stack)]]
            where = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, local, strict=True))
            result[where] = home.reshape(local)
        return result

    def at_home(self, x: jax.Array) -> jax.Array:
        """The state's array of the only weight's values, with zeros in slots that are not in
        use."""
        (weight,) = self.weights
        homes = self.homes(weight).reshape(-1)
        source = np.full(self.groups.size * self.slots, len(homes))
        source[homes] = np.arange(len(homes))
        return jnp.take(x.reshape(-1, *self.row), source, 0, mode="fill", fill_value=0)

    def held(self, name: str) -> Iterator[Held]:
        place, whole = (tuple(slice(0, n) for n in of) for of in (self.row, self.form.dims))
        for w in self.weights:
            for index, home in np.ndenumerate(self.homes(w)):
                device, slot = divmod(int(home), self.slots)
                box = tuple(slice(i, i + 1) for i in index)
                yield Held(w.path, device, (slice(slot, slot + 1), *place), (*box, *whole))


def pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Zeros behind a dim, up to this size."""
    if x.shape[dim] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, size - x.shape[dim])
    return jnp.pad(x, widths)
