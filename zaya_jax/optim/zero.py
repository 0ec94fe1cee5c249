"""ZeRO-1: the optimizer's state and work spread over all devices that hold the same weights.

Weights are cut into rows, and rows of one kind form a bucket [n, *row]:

    Muon    a row is one matrix [a, b]; all stacks of that shape lie in one bucket, L rows of an [L, a, b],
            L·E of an [L, E, a, b]
    AdamW   a row is LANES numbers; every weight, flattened and filled up to whole rows, lies in one bucket

n is padded with zeros to a multiple of the number of shards, which are the devices over whose axes the weight
is replicated. A step then is, for each bucket,

    one reduce-scatter of the gradients (`reduce`): 4 · n · row bytes in, 1 / shards of it out
    the optimizer on n / shards rows, with no collective; a zero row stays zero in both methods
    one all-gather of the directions (`gather`): n · row bytes out times 4, or 2 for Muon in bfloat16

and one all-reduce of a vector with one number a group of weights, for the norms. Everything here runs inside
`jax.shard_map`, on a device's part of each array; gradients come in as each device's own partial sums.

A weight may itself be sharded. Over a stack dim (experts) each device has whole matrices, only fewer: nothing
changes. Over a matrix dim (tensor, fsdp) an all-to-all after the reduce-scatter trades rows for columns, so
that each device still gets whole matrices, and another one before the all-gather takes them back.

Where n is well below the number of shards, padding would be most of what travels (ZAYA1 on 1,024 devices: 74
GB a step in place of 35). Such a bucket is scattered and gathered along its matrices' first dim, un-padded, and
two all-to-alls, each of no more than a 1 / shards part of n · row, make whole matrices of the slices and back.

State for checkpoints is un-padded, one array a weight in the weight's own shape (`to_logical`,
`from_logical`), hence independent of the mesh. `WholeLayout` is the same interface for weights that nobody
shares: buckets are the weights.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zaya_jax.config import UserError

LANES = 128  # numbers in a row of an AdamW bucket; each weight wastes less than one row
SLICED_FROM = 2**26  # bytes of padding in a bucket's reduce-scatter from which on it is sliced instead


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter as the optimizer sees it."""

    path: str
    shape: tuple[int, ...]  # over all devices
    method: str  # muon or adamw
    group: str  # whose norm it counts towards
    spec: tuple[tuple[str, ...], ...] = ()  # the mesh axes of each dim

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is sharded over."""
        return tuple(axis for dim in self.spec for axis in dim)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Rows of one kind, from one or several weights; `pieces` are (weight, its number of rows) in order."""

    name: str
    method: str
    row: tuple[int, ...]
    pieces: tuple[tuple[Weight, int], ...]
    padded: int  # rows, a multiple of the number of shards
    shared: tuple[str, ...]  # axes on which its weights are replicated: the reduce-scatter's and all-gather's
    own: tuple[str, ...]  # axes along which its weights hold different rows
    swaps: tuple[
        tuple[int, tuple[str, ...]], ...
    ]  # (dim in the bucket, axes) of matrix dims that are sharded
    sliced: bool = False  # whether matrices are scattered by slices and made whole by an all-to-all

    @property
    def rows(self) -> int:
        """Rows without padding."""
        return sum(rows for _, rows in self.pieces)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes over which the rows are sharded, in order."""
        return (*self.shared, *(axis for _, axes in self.swaps for axis in axes))


class WholeLayout:
    """No sharing and no copy: each weight is a bucket of its own, under its path."""

    def __init__(self, weights: list[Weight], treedef: Any):
        self.weights, self.treedef = weights, treedef
        self.methods = {w.path: w.method for w in weights}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each bucket."""
        return {w.path: w.shape for w in self.weights}

    def spec(self, name: str) -> PartitionSpec:
        """How a bucket's state lies on the mesh."""
        del name
        return PartitionSpec()

    def parts(self, name: str) -> int:
        """On how many devices different parts of a bucket lie: one has all."""
        del name
        return 1

    def reduce(self, grads: Any) -> dict[str, jax.Array]:
        """Gradients as buckets."""
        return dict(zip(self.methods, jax.tree.leaves(grads), strict=True))

    def gather(self, buckets: Mapping[str, jax.Array]) -> Any:
        """Buckets as a tree like the parameters'."""
        return jax.tree.unflatten(self.treedef, [buckets[w.path] for w in self.weights])

    def sum_squares(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The sum of squares of each group of weights."""
        return group_sum_squares(self.weights, [buckets[w.path] for w in self.weights])

    def tree_sum_squares(self, tree: Any) -> dict[str, jax.Array]:
        """The same of a tree like the parameters'."""
        return group_sum_squares(self.weights, jax.tree.leaves(tree))

    def to_logical(self, buckets: Mapping[str, Any]) -> dict[str, Any]:
        """One array a weight, by path."""
        return dict(buckets)

    def from_logical(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `to_logical`."""
        return dict(arrays)


class ShardedLayout:
    """Buckets over the devices of a mesh; see the module's head. `axes` gives the mesh's axis sizes."""

    def __init__(self, weights: list[Weight], treedef: Any, axes: Mapping[str, int]):
        self.weights, self.treedef = weights, treedef
        self.axes = {axis: size for axis, size in axes.items() if size > 1}
        self.buckets = {bucket.name: bucket for bucket in self._fill()}
        self.methods = {name: bucket.method for name, bucket in self.buckets.items()}
        self.groups = list(dict.fromkeys(w.group for w in weights))

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.axes[axis] for axis in axes)

    def parts(self, name: str) -> int:
        """On how many devices different parts of a bucket lie."""
        return self._size((*self.buckets[name].own, *self.buckets[name].shard_axes))

    def _local(self, weight: Weight) -> tuple[int, ...]:
        spec = (*weight.spec, *((),) * (len(weight.shape) - len(weight.spec)))
        for size, axes in zip(weight.shape, spec, strict=True):
            if size % self._size(axes):
                raise UserError(
                    f"weight {weight.path} {list(weight.shape)} is sharded over {self._size(axes)} devices "
                    f"({', '.join(axes)}) along a dim of {size}; give the mesh sizes that divide it"
                )
        return tuple(size // self._size(axes) for size, axes in zip(weight.shape, spec, strict=True))

    def _fill(self) -> list[Bucket]:
        kinds: dict[Bucket, list[tuple[Weight, int]]] = {}
        for w in self.weights:
            local, stack = self._local(w), len(w.shape) - 2
            if w.method == "muon":
                row, rows = w.shape[stack:], math.prod(local[:stack])
                own = tuple(axis for dim in w.spec[:stack] for axis in dim)
                swaps = tuple(
                    (dim + 1 - stack, axes) for dim, axes in enumerate(w.spec) if dim >= stack and axes
                )
            else:
                row, rows, own, swaps = (LANES,), -(-math.prod(local) // LANES), w.axes, ()
            shared = tuple(axis for axis in self.axes if axis not in w.axes)
            name = f"{w.method} {'x'.join(map(str, row))}"
            name += f" of {'+'.join(own)}" if own else ""
            name += "".join(f" dim {dim} over {'+'.join(axes)}" for dim, axes in swaps)
            kinds.setdefault(Bucket(name, w.method, row, (), 0, shared, own, swaps), []).append((w, rows))
        result = []
        for kind, pieces in kinds.items():
            shards = self._size(kind.shard_axes)
            padded = -(-sum(rows for _, rows in pieces) // shards) * shards
            bucket = dataclasses.replace(kind, pieces=tuple(pieces), padded=padded)
            result.append(dataclasses.replace(bucket, sliced=self._is_worth_slicing(bucket)))
        return result

    def _is_worth_slicing(self, bucket: Bucket) -> bool:
        held = [math.prod(self.axes[axis] for axis in axes) for dim, axes in bucket.swaps if dim == 1]
        slices = self._size(bucket.shared) * math.prod(held)
        wasted = 4 * (bucket.padded - bucket.rows) * self._row_size(bucket)
        return (
            bucket.method == "muon"
            and bucket.shared != ()
            and wasted >= SLICED_FROM
            and bucket.row[0] % slices == 0
        )

    def _row_size(self, bucket: Bucket) -> int:
        """The numbers of a row that a device holds before the matrices are made whole."""
        return math.prod(bucket.row) // math.prod(self._size(axes) for _, axes in bucket.swaps)

    # Sizes, for plans and tests.

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each bucket over all devices."""
        return {b.name: (self._size(b.own) * b.padded, *b.row) for b in self.buckets.values()}

    def spec(self, name: str) -> PartitionSpec:
        """How a bucket's state lies on the mesh: its first dim over every axis."""
        axes = (*self.buckets[name].own, *self.buckets[name].shard_axes)
        return PartitionSpec(axes if axes else None)

    def traffic(self, name: str, direction_bytes: int = 4) -> dict[str, int]:
        """Bytes a device puts into a bucket's reduce-scatter and gets out of its all-gather."""
        bucket = self.buckets[name]
        numbers = (bucket.rows if bucket.sliced else bucket.padded) * self._row_size(bucket)
        return {"reduce-scatter": 4 * numbers, "all-gather": direction_bytes * numbers}

    def padding_share(self) -> float:
        """The share of what goes through reduce-scatters and all-gathers that is padding."""
        travels = {name: self.traffic(name)["reduce-scatter"] for name in self.buckets}
        return 1 - sum(4 * b.rows * self._row_size(b) for b in self.buckets.values()) / sum(travels.values())

    # Inside shard_map.

    def reduce(self, grads: Any) -> dict[str, jax.Array]:
        """Every device's partial gradients summed, and each device's rows of the sum, in float32."""
        leaves = dict(zip((w.path for w in self.weights), jax.tree.leaves(grads), strict=True))
        return {name: self._reduce(bucket, leaves) for name, bucket in self.buckets.items()}

    def _reduce(self, bucket: Bucket, leaves: dict[str, jax.Array]) -> jax.Array:
        parts = [_to_rows(bucket, leaves[w.path].astype(jnp.float32)) for w, _ in bucket.pieces]
        x = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        padding = [(0, bucket.padded - bucket.rows)] + [(0, 0)] * (x.ndim - 1)
        if bucket.sliced:
            x = lax.psum_scatter(x, bucket.shared, scatter_dimension=1, tiled=True)
            x = lax.all_to_all(jnp.pad(x, padding), bucket.shared, split_axis=0, concat_axis=1, tiled=True)
        else:
            x = jnp.pad(x, padding)
            x = lax.psum_scatter(x, bucket.shared, scatter_dimension=0, tiled=True) if bucket.shared else x
        for dim, axes in bucket.swaps:
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)
        return x

    def gather(self, buckets: Mapping[str, jax.Array]) -> Any:
        """All devices' rows, as a tree like the parameters' (of a sharded weight, the device's part)."""
        leaves = {}
        for name, bucket in self.buckets.items():
            x, dtype = buckets[name], buckets[name].dtype
            # As bare bits: XLA:CPU would make 4 bytes of bfloat16's 2 for the transfer, and any compiler may.
            x = lax.bitcast_convert_type(x, jnp.uint16) if dtype.itemsize == 2 else x
            for dim, axes in reversed(bucket.swaps):
                x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=0, tiled=True)
            if bucket.sliced:
                x = lax.all_to_all(x, bucket.shared, split_axis=1, concat_axis=0, tiled=True)[: bucket.rows]
            if bucket.shared:
                x = lax.all_gather(x, bucket.shared, axis=1 if bucket.sliced else 0, tiled=True)
            x = lax.bitcast_convert_type(x, dtype) if dtype.itemsize == 2 else x
            start = 0
            for w, rows in bucket.pieces:
                leaves[w.path] = _from_rows(x[start : start + rows], self._local(w))
                start += rows
        return jax.tree.unflatten(self.treedef, [leaves[w.path] for w in self.weights])

    def sum_squares(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The sum of squares of each group over all devices: one all-reduce of one number a group."""
        totals = {group: jnp.zeros((), jnp.float32) for group in self.groups}
        for name, bucket in self.buckets.items():
            x = jnp.square(buckets[name].astype(jnp.float32))
            by_row = jnp.sum(x, tuple(range(1, x.ndim)))
            rank = lax.axis_index(bucket.shard_axes) if bucket.shard_axes else 0
            row = rank * by_row.shape[0] + jnp.arange(by_row.shape[0])
            start = 0
            for w, rows in bucket.pieces:
                inside = (row >= start) & (row < start + rows)
                totals[w.group] += jnp.sum(jnp.where(inside, by_row, 0.0))
                start += rows
        vector = jnp.stack([totals[group] for group in self.groups])
        vector = lax.psum(vector, tuple(self.axes)) if self.axes else vector
        return {group: vector[i] for i, group in enumerate(self.groups)}

    def tree_sum_squares(self, tree: Any) -> dict[str, jax.Array]:
        """The same of a tree like the parameters'; one all-reduce for each set of axes that shard weights."""
        leaves = jax.tree.leaves(tree)
        totals: dict[str, jax.Array] = {}
        for axes in dict.fromkeys(w.axes for w in self.weights):
            chosen = [(w, x) for w, x in zip(self.weights, leaves, strict=True) if w.axes == axes]
            part = group_sum_squares([w for w, _ in chosen], [x for _, x in chosen])
            part = lax.psum(part, axes) if axes else part
            for group, value in part.items():
                totals[group] = totals[group] + value if group in totals else value
        return totals

    # Outside shard_map, on global arrays (NumPy's or JAX's).

    def to_logical(self, buckets: Mapping[str, Any]) -> dict[str, Any]:
        """One array a weight in the weight's own shape, by path, for those buckets that are given."""
        arrays = {}
        for name, x in buckets.items():
            bucket, start = self.buckets[name], 0
            x = x.reshape(-1, bucket.padded, *bucket.row)
            for w, rows in bucket.pieces:
                sizes, inner = self._grid(w, bucket)
                part = x[:, start : start + rows].reshape(x.shape[0], -1)[:, : math.prod(inner)]
                # [axes of dim 0, axes of dim 1, .., dim 0, dim 1, ..] to [dim 0 whole, dim 1 whole, ..]
                part = part.reshape(*sizes, *inner)
                order = [i for dim in range(len(sizes)) for i in (dim, len(sizes) + dim)]
                arrays[w.path] = part.transpose(order).reshape(w.shape)
                start += rows
        return arrays

    def from_logical(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `to_logical`: the buckets of this mesh, whichever mesh the arrays come from."""
        xp: Any = np if all(isinstance(x, np.ndarray) for x in arrays.values()) else jnp
        result = {}
        for name, bucket in self.buckets.items():
            if bucket.pieces[0][0].path not in arrays:
                continue
            parts = []
            for w, rows in bucket.pieces:
                sizes, inner = self._grid(w, bucket)
                x = arrays[w.path].reshape([n for pair in zip(sizes, inner, strict=True) for n in pair])
                x = x.transpose([*range(0, x.ndim, 2), *range(1, x.ndim, 2)]).reshape(math.prod(sizes), -1)
                x = xp.pad(x, [(0, 0), (0, rows * math.prod(bucket.row) - x.shape[1])])
                parts.append(x.reshape(x.shape[0], rows, *bucket.row))
            x = xp.concatenate(parts, 1)
            x = xp.pad(x, [(0, 0), (0, bucket.padded - bucket.rows)] + [(0, 0)] * len(bucket.row))
            result[name] = x.reshape(-1, *bucket.row)
        return result

    def _grid(self, weight: Weight, bucket: Bucket) -> tuple[list[int], list[int]]:
        """For each dim of a weight: into how many parts its bucket cuts it, and the size of a part."""
        spec = (*weight.spec, *((),) * (len(weight.shape) - len(weight.spec)))
        sizes = [self._size(tuple(axis for axis in axes if axis in bucket.own)) for axes in spec]
        return sizes, [size // parts for size, parts in zip(weight.shape, sizes, strict=True)]


def group_sum_squares(weights: list[Weight], arrays: list[jax.Array]) -> dict[str, jax.Array]:
    """The sum of squares of each group of weights, of the arrays as they are on this device."""
    totals: dict[str, jax.Array] = {}
    for w, x in zip(weights, arrays, strict=True):
        value = jnp.sum(jnp.square(x.astype(jnp.float32)))
        totals[w.group] = totals[w.group] + value if w.group in totals else value
    return totals


def _to_rows(bucket: Bucket, x: jax.Array) -> jax.Array:
    if bucket.method == "muon":
        return x.reshape(-1, *x.shape[-2:])
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % LANES)).reshape(-1, LANES)


def _from_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)
