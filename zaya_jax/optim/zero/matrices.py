"""Muon's buckets over the devices of a mesh: all stacks of one local matrix shape, owned matrix by
matrix.

The gradients of a bucket travel as one run of rows, cut evenly (the last one may end in padding):
reduce-scattered over the devices that hold the same weights, then exchanged until every device has
the whole matrices that it owns. The directions take the same way back, with an all-gather. The
owner keeps momentum as [slots, a, b]; slots is the most that any device owns, and a device's first
ones are in use.

A weight that is itself sharded over a stack dim (experts) has a separate run for each part. Over a
matrix dim (tensor, fsdp), a device has part t of T of every matrix: an all-to-all gives it all T
parts of a T-th of the rows, and rows then are T · UNIT numbers wide.

A bucket with much padding, or a small one, does not travel like that. It is summed as a whole
(`summed_whole`) and each owner takes its matrices; on the way back every owner contributes its
matrices, zeros elsewhere, and a second all-reduce adds them up.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zaya_jax.optim.muon import newton_schulz_flops
from zaya_jax.optim.zero import owners
from zaya_jax.optim.zero.grid import UNIT, Bucket, Grid, StateBox, Weight, pad, whole_box

# A bucket with more padding than this share of its own numbers, and of all buckets', is summed as a
# whole.
WASTE, WASTE_OF_ALL = 0.02, 1e-3
SMALL = 2**16  # numbers up to which a sum costs less than the rounds of an exchange


@dataclasses.dataclass(frozen=True)
class Form:
    """The properties that the weights of a bucket share."""

    dims: tuple[int, ...]  # the matrix over all devices, [a, b], or [a, 2, b]
    replica_axes: tuple[str, ...]  # axes along which they are replicated
    sharded_axes: tuple[str, ...]  # axes along which devices hold different matrices
    # (dim of [n, *dims], axes) of matrix dims that are sharded
    matrix_dim_axes: tuple[tuple[int, tuple[str, ...]], ...]

    @staticmethod
    def of(weight: Weight, grid: Grid) -> "Form":
        """The form of a weight."""
        stack = len(weight.stack)
        of_matrix = enumerate(weight.dims[stack:], start=1)
        matrix_dim_axes = tuple((dim, axes) for dim, axes in of_matrix if axes)
        return Form(
            weight.shape[stack:],
            replica_axes=grid.other_axes(weight.axes),
            sharded_axes=sum(weight.dims[:stack], ()),
            matrix_dim_axes=matrix_dim_axes,
        )

    @property
    def name(self) -> str:
        """The bucket's name."""
        name = f"muon {'x'.join(map(str, self.dims))}"
        if self.sharded_axes:
            name += f" of {'+'.join(self.sharded_axes)}"
        for dim, axes in self.matrix_dim_axes:
            name += f" dim {dim} over {'+'.join(axes)}"
        return name

    @property
    def matrix_axes(self) -> tuple[str, ...]:
        """The axes that split matrix dims."""
        return sum((axes for _, axes in self.matrix_dim_axes), ())


class Matrices(Bucket):
    """The weights of one form, one bucket.

    Its sizes are known at once; `slots`, `starts`, `counts` and `plan` when `set_owners` says how
    many matrices each device owns, since all buckets share the owners' time; `by_layer` then.
    """

    method = "muon"

    def __init__(self, form: Form, weights: list[Weight], travelling: int, grid: Grid):
        self.form, self.weights, self.grid = form, weights, grid
        self.name, self.names, self.replica_axes = form.name, (form.name,), form.replica_axes
        self.matrix = weights[0].matrix
        self.by_layer: Any = None  # if gradients leave layer by layer: a `ByLayer`
        self.count = 0  # matrices in a group
        self.spans: dict[str, slice] = {}  # those of each weight among them
        for w in weights:
            start = self.count
            self.count += math.prod(w.local(grid)[: len(w.stack)])
            self.spans[w.path] = slice(start, self.count)
        self.device_groups = grid.device_groups(
            form.sharded_axes, (*form.replica_axes, *form.matrix_axes)
        )
        self.num_replicas = grid.size(form.replica_axes)
        # Devices that share each matrix, and the part of one that a device has.
        self.matrix_shards = grid.size(form.matrix_axes)
        self.local_matrix = weights[0].local(grid)[len(weights[0].stack) :]
        self.rows_per_matrix = -(-math.prod(self.local_matrix) // UNIT)
        devices = self.device_groups.shape[1]
        # The run of rows of all matrices, and each device's chunk of it.
        self.rows = self.count * self.rows_per_matrix
        self.chunk = -(-self.rows // devices)
        self.padded_rows = self.chunk * devices
        self.local_size = self.count * math.prod(self.local_matrix)
        waste = self.padded_rows * UNIT - self.local_size
        much_waste = waste > max(WASTE * self.local_size, WASTE_OF_ALL * travelling)
        small = self.count * math.prod(self.matrix) <= SMALL
        self.summed_whole = devices > 1 and (small or much_waste)
        if self.summed_whole:
            self.pending_sum_axes = {self.name: form.replica_axes}

    @property
    def work_item(self) -> owners.WorkItem:
        """The bucket, in the form that the assignment of owners takes."""
        return owners.WorkItem(self.count, newton_schulz_flops(self.matrix, 1), self.device_groups)

    def set_owners(self, counts: np.ndarray) -> None:
        """Records how many matrices each device of each group owns."""
        starts = np.cumsum(counts, 1) - counts
        self.slots = int(counts.max())
        self.starts, self.counts = np.zeros((2, self.device_groups.size), np.int32)
        self.starts[self.device_groups], self.counts[self.device_groups] = starts, counts
        self.plan = None
        if not self.summed_whole:
            self.plan = owners.plan(counts, self.device_groups, self.rows_per_matrix, self.chunk)

    def shape(self, name: str) -> tuple[int, ...]:
        return (self.device_groups.size * self.slots, *self.matrix)

    def axes(self, name: str) -> tuple[str, ...]:
        return self.grid.names

    def traffic(self, name: str, direction_bytes: int) -> dict[str, int]:
        """An exchange is a mean over devices, of both ways."""
        if self.summed_whole:
            gathered = 4 * self.count * math.prod(self.matrix)
            traffic = {"all-reduce": 4 * self.local_size + gathered, "padding": 0}
            if self.matrix_shards > 1:
                traffic["all-gather"] = gathered
            return traffic
        assert self.plan is not None
        there_and_back = 4 + direction_bytes
        kinds = ("reduce-scatter", "all-gather", "all-to-all", "exchange", "padding")
        traffic = dict.fromkeys(kinds, 0)
        padded = self.padded_rows * UNIT
        padding = there_and_back * (padded - self.local_size)
        if self.num_replicas > 1:
            traffic["reduce-scatter"] = 4 * padded
            traffic["all-gather"] = direction_bytes * padded
            traffic["padding"] += padding
        if self.matrix_shards > 1:
            traffic["all-to-all"] = there_and_back * padded // self.num_replicas
            traffic["padding"] += padding // self.num_replicas
        if not self.plan.is_noop:
            row, devices = self.matrix_shards * UNIT * there_and_back, self.device_groups.size
            sent, valid = self.plan.sent_rows()
            traffic["exchange"] = sent * row // devices
            traffic["padding"] += traffic["exchange"] - valid * row // devices
        return traffic

    # ############################################################################################
    # Inside shard_map
    # ############################################################################################

    def stacked_local(self, leaves: Mapping[str, jax.Array]) -> jax.Array:
        """A device's parts of all matrices, [n, *part]."""
        parts = []
        for w in self.weights:
            x = leaves[w.path].astype(jnp.float32)
            parts.append(x.reshape(-1, *self.local_matrix))
        return jnp.concatenate(parts)

    def reduce(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Partial gradients to the matrices [slots, a, b] that a device owns, or if `summed_whole` to
        its parts of all."""
        if self.summed_whole:
            return {self.name: self.stacked_local(leaves)}
        first = leaves[self.weights[0].path]
        # Shares of each layer's gradient have this shape; no weight of the layers does.
        if self.by_layer and first.shape == self.by_layer.shape:
            return {self.name: self.by_layer.to_owners(first)}
        return {self.name: self._to_owners(leaves)}

    def _to_owners(self, leaves):
        form, plan = self.form, self.plan
        assert plan is not None
        x = self.stacked_local(leaves).reshape(self.count, -1)
        x = pad(x, 1, self.rows_per_matrix * UNIT).reshape(-1, UNIT)
        x = pad(x, 0, self.padded_rows)
        if self.num_replicas > 1:
            x = lax.psum_scatter(x, form.replica_axes, scatter_dimension=0, tiled=True)
        x = x.reshape(self.matrix_shards, -1, UNIT)
        if self.matrix_shards > 1:
            x = owners.all_to_all(x, form.matrix_axes)
        x = owners.to_owners(x, plan, self.grid.names)
        x = x.reshape(self.matrix_shards, self.slots, -1)[:, :, : math.prod(self.local_matrix)]
        return self._merge_parts(x.reshape(self.matrix_shards, self.slots, *self.local_matrix))

    def gather(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        x = buckets[self.name]
        form, plan, dtype = self.form, self.plan, x.dtype
        assert plan is not None
        # As bare bits: XLA:CPU would make 4 bytes of bfloat16's 2 for the transfer, and any
        # compiler may.
        if dtype.itemsize == 2:
            x = lax.bitcast_convert_type(x, jnp.uint16)
        x = self._split_parts(x).reshape(self.matrix_shards, self.slots, -1)
        x = pad(x, 2, self.rows_per_matrix * UNIT).reshape(self.matrix_shards, -1, UNIT)
        x = owners.from_owners(x, plan, self.grid.names)
        if self.matrix_shards > 1:
            x = owners.all_to_all(x, form.matrix_axes)
        x = x.reshape(-1, UNIT)
        if self.num_replicas > 1:
            x = lax.all_gather(x, form.replica_axes, tiled=True)
        x = x[: self.rows].reshape(self.count, -1)[:, : math.prod(self.local_matrix)]
        if dtype.itemsize == 2:
            x = lax.bitcast_convert_type(x, dtype)
        return self.leaves(x.reshape(self.count, *self.local_matrix))

    def after_sum(self, name: str, x: jax.Array) -> jax.Array:
        """The matrices that this device owns, from the summed parts [n, *part]."""
        parts = x[None]
        if self.matrix_shards > 1:
            parts = lax.all_gather(x, self.form.matrix_axes)
        matrices = pad(self._merge_parts(parts), 0, self.count + self.slots)
        start, count = self.owned_range()
        owned = lax.dynamic_slice_in_dim(matrices, start, self.slots)
        return jnp.where((np.arange(self.slots) < count)[:, None, None], owned, 0)

    def contribution(
        self, buckets: Mapping[str, jax.Array]
    ) -> dict[str, tuple[tuple[str, ...], jax.Array]]:
        """If `summed_whole`: this device's directions at their places among all, float32, zeros for
        the others'.

        Unused slots hold zeros (`muon.orthogonalize_in_use`), so it does not matter that they lie
        over the next owner's matrices.
        """
        if not self.summed_whole:
            return {}
        x = buckets[self.name]
        target = jnp.zeros((self.count + self.slots, *self.matrix), jnp.float32)
        start = owners.of_device(self.starts, self.grid.names)
        target = lax.dynamic_update_slice_in_dim(target, x.astype(jnp.float32), start, 0)
        axes = (*self.form.replica_axes, *self.form.matrix_axes)
        return {self.name: (axes, target[: self.count])}

    def of_sum(self, x: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        """The directions of all devices, from the sum of their contributions [n, a, b]: of each
        matrix this device's part."""
        x = x.reshape(-1, *self.form.dims)
        for dim, axes in self.form.matrix_dim_axes:
            size = x.shape[dim] // self.grid.size(axes)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
        return self.leaves(x.astype(dtype))

    def leaves(self, x: jax.Array) -> dict[str, jax.Array]:
        """Parts of all matrices as parts of the weights."""
        return {w.path: x[self.spans[w.path]].reshape(w.local(self.grid)) for w in self.weights}

    def owned(self) -> jax.Array | int:
        """The number of matrices that this device owns."""
        if (self.counts == self.slots).all():
            return self.slots
        return owners.of_device(self.counts, self.grid.names)

    def owned_range(self) -> tuple[jax.Array, jax.Array]:
        """The first of the matrices that this device owns, and how many there are."""
        axes = self.grid.names
        return owners.of_device(self.starts, axes), owners.of_device(self.counts, axes)

    def sums(self, buckets: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
        by_slot = jnp.sum(jnp.square(buckets[self.name].astype(jnp.float32)), (1, 2))
        start, count = self.owned_range()
        slot = np.arange(self.slots)
        matrix = jnp.where(slot < count, start + slot, -1)
        for w in self.weights:
            span = self.spans[w.path]
            of_weight = (matrix >= span.start) & (matrix < span.stop)
            yield w.group, jnp.sum(jnp.where(of_weight, by_slot, 0.0))

    def _merge_parts(self, x: jax.Array) -> jax.Array:
        """[T, n, *part] to [n, a, b]."""
        sizes = [self.grid.size(axes) for _, axes in self.form.matrix_dim_axes]
        x = x.reshape(*sizes, *x.shape[1:])
        # the last one first, so that the others stay in front
        for i in reversed(range(len(sizes))):
            dim = i + self.form.matrix_dim_axes[i][0]
            x = jnp.moveaxis(x, i, dim)  # to before the dim that it is a part of
            x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
        return x.reshape(-1, *self.matrix)

    def _split_parts(self, x: jax.Array) -> jax.Array:
        """The inverse of `_merge_parts`."""
        x = x.reshape(-1, *self.form.dims)
        for i, (dim, axes) in enumerate(self.form.matrix_dim_axes):
            split = i + dim
            x = x.reshape(*x.shape[:split], self.grid.size(axes), -1, *x.shape[split + 1 :])
            x = jnp.moveaxis(x, split, i)
        return x.reshape(self.matrix_shards, *x.shape[len(self.form.matrix_dim_axes) :])

    # ############################################################################################
    # Outside, on global arrays
    # ############################################################################################

    def slot_of_each_matrix(self, weight: Weight) -> np.ndarray:
        """Index of each matrix of the stack in the global state array: device · slots + slot."""
        result = np.zeros(weight.stack, np.int64)
        for group in self.device_groups:
            # For all matrices of the group: the device's number in it, and the slot.
            owner = np.repeat(np.arange(len(group)), self.counts[group])
            slot = np.arange(self.count) - self.starts[group][owner]
            index = group[owner] * self.slots + slot
            box = weight.part(self.grid, int(group[0]))[: result.ndim]
            result[box] = index[self.spans[weight.path]].reshape(result[box].shape)
        return result

    def scatter_to_slots(self, x: jax.Array) -> jax.Array:
        """The state's array of the only weight's values, with zeros in slots that are not in
        use."""
        (weight,) = self.weights
        slots = self.slot_of_each_matrix(weight).reshape(-1)
        source = np.full(self.device_groups.size * self.slots, len(slots))
        source[slots] = np.arange(len(slots))
        return jnp.take(x.reshape(-1, *self.matrix), source, 0, mode="fill", fill_value=0)

    def state_boxes(self, name: str) -> Iterator[StateBox]:
        matrix, dims = whole_box(self.matrix), whole_box(self.form.dims)
        for w in self.weights:
            for index, number in np.ndenumerate(self.slot_of_each_matrix(w)):
                device, slot = divmod(int(number), self.slots)
                place = (slice(slot, slot + 1), *matrix)
                box = (*(slice(i, i + 1) for i in index), *dims)
                yield StateBox(w.path, device, place, box)
