"""The buckets of all weights over the devices of a mesh, and what they send together; the
package's head explains them."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zaya_jax.optim.zero import owners
from zaya_jax.optim.zero.by_layer import ByLayer
from zaya_jax.optim.zero.grid import Bucket, Grid, StateBox, Weight, sum_of_squares, whole_box
from zaya_jax.optim.zero.matrices import Form, Matrices
from zaya_jax.optim.zero.vectors import Vectors

GroupSums = Iterable[tuple[str, jax.Array]]  # a number by the metric group it counts towards


class Unsharded(Bucket):
    """A weight on one device: a separate bucket under its path, never copied."""

    def __init__(self, weight: Weight):
        self.weight, self.weights = weight, [weight]
        self.method, self.names = weight.method, (weight.path,)

    def shape(self, name: str) -> tuple[int, ...]:
        w = self.weight
        return (*w.stack, *w.matrix) if w.method == "muon" else w.shape

    def axes(self, name: str) -> tuple[str, ...]:
        return ()

    def traffic(self, name: str, direction_bytes: int) -> dict[str, int]:
        return {}

    def state_boxes(self, name: str) -> list[StateBox]:
        return [StateBox(name, 0, whole_box(self.shape(name)), whole_box(self.weight.shape))]

    def reduce(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        path = self.weight.path
        return {path: leaves[path].reshape(self.shape(path))}

    def gather(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        path = self.weight.path
        return {path: buckets[path].reshape(self.weight.shape)}

    def sums(self, buckets: Mapping[str, jax.Array]) -> GroupSums:
        return [(self.weight.group, sum_of_squares(buckets[self.weight.path]))]


class Layout:
    """Buckets over the devices of a mesh; see the package's head. `axes` gives the mesh's axis
    sizes, in its order."""

    def __init__(
        self,
        weights: list[Weight],
        treedef: Any,
        axes: Mapping[str, int],
        node: int = 1,
        two_levels_under: int = 0,
    ):
        self.weights, self.treedef, self.grid = weights, treedef, Grid(axes, node)
        self.metric_groups = list(dict.fromkeys(w.group for w in weights))
        self.matrices: dict[str, Matrices] = {}
        self.vectors: list[Vectors] = []
        self.by_layer: dict[str, ByLayer] = {}
        self.buckets: list[Bucket] = [Unsharded(w) for w in weights]
        self.sharded = bool(self.grid.names)
        if self.sharded:
            self._build_buckets()
            ByLayer.choose_levels(list(self.by_layer.values()), two_levels_under)
            self.buckets = [*self.matrices.values(), *self.vectors]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.methods = {name: bucket.method for name, bucket in self.bucket_of.items()}
        # The bucket of each weight that devices hold as a copy: the weights of its state are the
        # owner's, in float32.
        by_layer = self.by_layer.items()
        self.copied = {path: way.bucket.name for path, way in by_layer if way.weight.copy}
        # The number format of copies that products make of a weight, whether devices hold such
        # copies or not.
        self.copy_dtypes = {w.path: w.copy for w in weights if w.copy}

    def _build_buckets(self) -> None:
        """Muon's weights by the form of their matrices, each with an owner; AdamW's by their
        axes."""
        by_form: dict[Form, list[Weight]] = {}
        by_axes: dict[tuple[str, ...], list[Weight]] = {}
        travelling = 0  # numbers of a device; AdamW's weights that all axes split do not travel
        for w in self.weights:
            size = math.prod(w.local(self.grid))  # refuses a shape that the mesh does not divide
            if w.method == "muon":
                by_form.setdefault(Form.of(w, self.grid), []).append(w)
            else:
                by_axes.setdefault(w.axes, []).append(w)
            if w.method == "muon" or len(w.axes) < len(self.grid.names):
                travelling += size
        buckets = [Matrices(form, same, travelling, self.grid) for form, same in by_form.items()]
        # All buckets share the owners' time, so owners come after all buckets; then each knows its
        # exchange, and whether it can travel layer by layer.
        counts = owners.assign([b.work_item for b in buckets], self.grid.num_devices)
        for bucket, of_bucket in zip(buckets, counts, strict=True):
            bucket.set_owners(of_bucket)
            bucket.by_layer = ByLayer.if_possible(bucket)
            self.matrices[bucket.name] = bucket
            if bucket.by_layer:
                self.by_layer[bucket.by_layer.weight.path] = bucket.by_layer
        total = sum(math.prod(w.shape) for w in self.weights)
        self.vectors = [Vectors(axes, same, total, self.grid) for axes, same in by_axes.items()]

    # ############################################################################################
    # Sizes, for plans and tests
    # ############################################################################################

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each bucket over all devices."""
        return {name: bucket.shape(name) for name, bucket in self.bucket_of.items()}

    def spec(self, name: str) -> PartitionSpec:
        """A bucket's PartitionSpec: its first dim over every axis, or over those of its weights."""
        axes = self.bucket_of[name].axes(name)
        return PartitionSpec(axes) if axes else PartitionSpec()

    def num_shards(self, name: str) -> int:
        """The number of devices with different parts of a bucket."""
        return self.grid.size(self.bucket_of[name].axes(name))

    # ############################################################################################
    # Trees like the parameters
    # ############################################################################################

    def leaves_by_path(self, tree: Any) -> dict[str, Any]:
        """The leaves of a tree like the parameters'."""
        return dict(zip((w.path for w in self.weights), jax.tree.leaves(tree), strict=True))

    def replace_leaves(self, tree: Any, new: Mapping[str, Any]) -> Any:
        """A tree like the parameters', with new leaves in the place of some, by path."""
        return self._tree({**self.leaves_by_path(tree), **new})

    def _tree(self, leaves: Mapping[str, Any]) -> Any:  # the inverse of `leaves_by_path`
        return jax.tree.unflatten(self.treedef, [leaves[w.path] for w in self.weights])

    def split_master_weights(self, params: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Splits full weights, as arrays over all devices, into what every device holds (bfloat16
        copies where used) and the owners' float32 master weights by bucket."""
        by_path, copies, masters = self.leaves_by_path(params), {}, {}
        for path, name in self.copied.items():
            bucket = self.matrices[name]
            copies[path] = by_path[path].astype(bucket.weights[0].copy)
            masters[name] = bucket.scatter_to_slots(by_path[path])
        return self.replace_leaves(params, copies), masters

    # ############################################################################################
    # Inside shard_map, where there are several devices
    # ############################################################################################

    def owned(self) -> dict[str, jax.Array | int]:
        """The number of this device's matrices in a bucket, unless it has all of them: they fill
        its first slots."""
        return {name: bucket.owned() for name, bucket in self.matrices.items()}

    def reduce_gradients(self, grads: Any) -> dict[str, jax.Array]:
        """Sums the devices' partial gradients and gives each device its share of the sum, in
        float32.

        For weights in `by_layer` they may be the shares of each layer. On one device the shares are
        the gradients.
        """
        leaves = self.leaves_by_path(grads)
        shares: dict[str, jax.Array] = {}
        pending: dict[str, tuple[str, ...]] = {}
        with self._exchange():
            for bucket in self.buckets:
                shares |= bucket.reduce(leaves)
                pending |= bucket.pending_sum_axes
            to_sum = {name: (axes, shares[name]) for name, axes in pending.items()}
            for name, x in _sums(to_sum).items():
                shares[name] = self.bucket_of[name].after_sum(name, x)
        return {name: shares[name] for name in self.methods}

    def gather_directions(self, buckets: Mapping[str, jax.Array]) -> Any:
        """All devices' shares, as a tree like the parameters' (of a sharded weight, the device's
        part).

        For copied weights the owner's share is returned as it is: the owner updates its master
        weights and then broadcasts `copies`.
        """
        leaves = {path: buckets[name] for path, name in self.copied.items()}
        to_sum: dict[str, tuple[tuple[str, ...], jax.Array]] = {}
        with self._exchange():
            for bucket in self.buckets:
                if bucket.names[0] in self.copied.values():
                    continue
                contribution = bucket.contribution(buckets)
                to_sum |= contribution
                if not contribution:
                    leaves |= bucket.gather(buckets)
            for name, x in _sums(to_sum).items():
                leaves |= self.matrices[name].of_sum(x, buckets[name].dtype)
        return self._tree(leaves)

    def copies(self, masters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Every device's copies of the owners' weights, by path."""
        copies: dict[str, jax.Array] = {}
        with self._exchange():
            for name, x in masters.items():
                bucket = self.matrices[name]
                copies |= bucket.gather({name: x.astype(bucket.weights[0].copy)})
        return copies

    def _exchange(self) -> contextlib.AbstractContextManager:
        return jax.named_scope("exchange") if self.sharded else contextlib.nullcontext()

    def sum_squares(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The sum of squares of each group of weights over all devices: one all-reduce of one
        number per group."""
        of_buckets = (bucket.sums(buckets) for bucket in self.buckets)
        (sums,) = self._over_devices(itertools.chain.from_iterable(of_buckets))
        return sums

    def disjoint_shares(self, tree: Any) -> Any:
        """Divides each replicated weight evenly over its replicas (by rows; zeros where rows run
        out), so that a sum over devices counts every number once. A single device has all; an
        owner's master weights are its own."""
        if not self.sharded:
            return tree
        leaves = map(self._disjoint_share, self.weights, jax.tree.leaves(tree))
        return jax.tree.unflatten(self.treedef, leaves)

    def _disjoint_share(self, w: Weight, x: jax.Array) -> jax.Array:
        if w.path in self.copied:
            return x
        replica_axes = self.grid.other_axes(w.axes)
        # rows, not numbers: there may be more numbers than an int32 counts
        x = x.reshape(-1, x.shape[-1])
        count = -(-len(x) // self.grid.size(replica_axes))
        wanted = count * (lax.axis_index(replica_axes) if replica_axes else 0)
        start = jnp.minimum(wanted, len(x) - count)  # the last parts would reach past the end
        part = lax.dynamic_slice_in_dim(x, start, count)
        return jnp.where((start + jnp.arange(count) < wanted)[:, None], 0, part)

    def tree_sum_squares(self, *trees: Any) -> list[dict[str, jax.Array]]:
        """The sum of squares of each group of the results of `disjoint_shares`, for several trees:
        one all-reduce."""

        def sums(tree: Any) -> GroupSums:
            for w, x in zip(self.weights, jax.tree.leaves(tree), strict=True):
                yield w.group, sum_of_squares(x)

        return self._over_devices(*map(sums, trees))

    def _over_devices(self, *series: GroupSums) -> list[dict[str, jax.Array]]:
        """The groups' totals over all devices, of several series of numbers by group."""
        totals: list[dict[str, jax.Array]] = [{} for _ in series]
        for total, numbers in zip(totals, series, strict=True):
            for group, value in numbers:
                total[group] = total[group] + value if group in total else value
        if not self.sharded:
            return totals
        groups = self.metric_groups
        rows = [[total[group] for group in groups] for total in totals]
        sums = lax.psum(jnp.stack([*map(jnp.stack, rows)]), self.grid.names)
        return [dict(zip(groups, row, strict=True)) for row in sums]


def _sums(arrays: dict[str, tuple[tuple[str, ...], jax.Array]]) -> dict[str, jax.Array]:
    """Small arrays summed over their axes: one all-reduce for all arrays with the same axes."""
    by_axes: dict[tuple[str, ...], dict[str, jax.Array]] = {}
    for name, (axes, x) in arrays.items():
        by_axes.setdefault(axes, {})[name] = x
    result = by_axes.pop((), {})
    for axes, same in by_axes.items():
        flat = [x.reshape(-1) for x in same.values()]
        ends = np.cumsum([len(x) for x in flat])[:-1].tolist()
        total = lax.psum(jnp.concatenate(flat), axes)
        for (name, x), part in zip(same.items(), jnp.split(total, ends), strict=True):
            result[name] = part.reshape(x.shape)
    return result
