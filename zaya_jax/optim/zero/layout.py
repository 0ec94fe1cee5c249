"""The buckets of all weights over the devices of a mesh, and what they send together; the
package's head explains them."""

import contextlib
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
from zaya_jax.optim.zero.grid import Bucket, Grid, Held, Weight
from zaya_jax.optim.zero.matrices import Form, Matrices
from zaya_jax.optim.zero.vectors import Vectors


class Whole(Bucket):
    """A weight on one device: a separate bucket under its path, never copied."""

    def __init__(self, weight: Weight):
        self.weight, self.weights, self.method, self.names = (
            weight,
            [weight],
            weight.method,
            (weight.path,),
        )

    def shape(self, name: str) -> tuple[int, ...]:
        w = self.weight
        return (*w.stack, *w.matrix) if w.method == "muon" else w.shape

    def spec(self, name: str) -> PartitionSpec:
        return PartitionSpec()

    def devices(self, name: str) -> int:
        return 1

    def traffic(self, name: str, direction_bytes: int) -> dict[str, int]:
        return {}

    def held(self, name: str) -> list[Held]:
        place, box = (
            tuple(slice(0, n) for n in of) for of in (self.shape(name), self.weight.shape)
        )
        return [Held(name, 0, place, box)]

    def reduce(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        path = self.weight.path
        return {path: leaves[path].reshape(self.shape(path))}

    def gather(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        path = self.weight.path
        return {path: buckets[path].reshape(self.weight.shape)}

    def sums(self, buckets: Mapping[str, jax.Array]) -> Iterable[tuple[str, jax.Array]]:
        return [(self.weight.group, _square(buckets[self.weight.path]))]


class Layout:
    """Buckets over the devices of a mesh; see the module's head. `axes` gives the mesh's axis
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
        self.groups = list(dict.fromkeys(w.group for w in weights))
        self.matrices: dict[str, Matrices] = {}
        self.vectors: list[Vectors] = []
        self.by_layer: dict[str, ByLayer] = {}
        self.sharded = bool(self.grid.names)
        if self.sharded:
            self._share(weights)
            ByLayer.settle(list(self.by_layer.values()), two_levels_under)
        self.buckets: list[Bucket] = [*self.matrices.values(), *self.vectors] or [
            Whole(w) for w in weights
        ]
        self.bucket = {name: bucket for bucket in self.buckets for name in bucket.names}
        # The bucket of each weight that devices hold as a copy: the weights of its state are the
        # owner's, in float32.
        self.copied = {
            path: way.bucket.name
            for path, way in self.by_layer.items()
            if way.bucket.weights[0].copy
        }
        # The number format of each weight's copies, whether devices hold such copies or not.
        self.formats = {w.path: w.copy for w in weights if w.copy}
        self.methods = {name: bucket.method for name, bucket in self.bucket.items()}

    def _share(self, weights: list[Weight]) -> None:
        """Muon's weights by the form of their matrices, each with an owner; AdamW's by their
        axes."""
        forms: dict[Form, list[Weight]] = {}
        own: dict[tuple[str, ...], list[Weight]] = {}
        for w in weights:
            w.local(self.grid)
            if w.method == "muon":
                forms.setdefault(Form.of(w, self.grid), []).append(w)
            else:
                own.setdefault(w.axes, []).append(w)
        spread = len(self.grid.names)  # AdamW's weights that are split over all axes do not travel
        travelling = sum(
            math.prod(w.local(self.grid))
            for w in weights
            if w.method == "muon" or len(w.axes) < spread
        )
        buckets = [Matrices(form, found, travelling, self.grid) for form, found in forms.items()]
        counts, self.work = owners.assign([b.kind for b in buckets], self.grid.num_devices)
        for bucket, each in zip(buckets, counts, strict=True):
            bucket.settle(each)
            bucket.way = ByLayer.of(bucket)
        self.matrices = {bucket.name: bucket for bucket in buckets}
        self.by_layer = {bucket.weights[0].path: bucket.way for bucket in buckets if bucket.way}
        total = sum(math.prod(w.shape) for w in weights)
        self.vectors = [Vectors(axes, found, total, self.grid) for axes, found in own.items()]

    # Sizes, for plans and tests.

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each bucket over all devices."""
        return {name: bucket.shape(name) for name, bucket in self.bucket.items()}

    def spec(self, name: str) -> PartitionSpec:
        """A bucket's PartitionSpec: its first dim over every axis, or over those of its weights."""
        return self.bucket[name].spec(name)

    def parts(self, name: str) -> int:
        """The number of devices with different parts of a bucket."""
        return self.bucket[name].devices(name)

    def held(self, name: str) -> list[Held]:
        """The boxes of a weight's state on each device: every box once, or once for each device
        that has it.

        `spec` determines a device's part of a bucket's array.
        """
        return list(self.bucket[name].held(name))

    def traffic(self, name: str, direction_bytes: int = 4) -> dict[str, int]:
        """Bytes that a device puts into or gets out of each kind of collective, and the padding
        among them."""
        return self.bucket[name].traffic(name, direction_bytes)

    def by_path(self, tree: Any) -> dict[str, Any]:
        """The leaves of a tree like the parameters'."""
        return dict(zip((w.path for w in self.weights), jax.tree.leaves(tree), strict=True))

    def with_leaves(self, tree: Any, found: Mapping[str, Any]) -> Any:
        """A tree like the parameters', with these in the place of some, by path."""
        leaves = {**self.by_path(tree), **found}
        return jax.tree.unflatten(self.treedef, [leaves[w.path] for w in self.weights])

    def divided(self, params: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Whole weights, as arrays over all devices, as the devices' (copies among them) and the
        owners' by bucket."""
        whole = {name: self.by_path(params)[path] for path, name in self.copied.items()}
        copies = {
            path: whole[name].astype(self.matrices[name].weights[0].copy)
            for path, name in self.copied.items()
        }
        return self.with_leaves(params, copies), {
            name: self.matrices[name].at_home(x) for name, x in whole.items()
        }

    # Inside shard_map, where there are several devices.

    def owned(self) -> dict[str, jax.Array | int]:
        """The number of this device's matrices in a bucket, unless it has all of them: they fill
        its first slots."""
        return {name: bucket.owned() for name, bucket in self.matrices.items()}

    def reduce(self, grads: Any) -> dict[str, jax.Array]:
        """Sums the devices' partial gradients and gives each device its share of the sum, in
        float32.

        For weights in `by_layer` they may be the shares of each layer. On one device the shares are
        the gradients.
        """
        leaves = self.by_path(grads)
        found: dict[str, jax.Array] = {}
        with self._exchange():
            for bucket in self.buckets:
                found |= bucket.reduce(leaves)
            over = {name: axes for bucket in self.buckets for name, axes in bucket.summed.items()}
            for name, x in _sums(
                {name: (axes, found[name]) for name, axes in over.items()}
            ).items():
                found[name] = self.bucket[name].take(name, x)
        return {name: found[name] for name in self.methods}

    def gather(self, buckets: Mapping[str, jax.Array]) -> Any:
        """All devices' shares, as a tree like the parameters' (of a sharded weight, the device's
        part).

        Of a weight that devices hold as a copy, the owner's: it changes its own, and then gives
        `copies`.
        """
        leaves: dict[str, jax.Array] = {path: buckets[name] for path, name in self.copied.items()}
        small = {}
        with self._exchange():
            for bucket in self.buckets:
                if bucket.names[0] in self.copied.values():
                    continue
                if isinstance(bucket, Matrices) and bucket.together:
                    axes = (*bucket.form.shared, *bucket.form.swapped)
                    small[bucket.name] = axes, bucket.put(buckets[bucket.name])
                else:
                    leaves |= bucket.gather(buckets)
            for name, x in _sums(small).items():
                bucket = self.matrices[name]
                leaves |= bucket.leaves(bucket.part_of(x).astype(buckets[name].dtype))
        return jax.tree.unflatten(self.treedef, [leaves[w.path] for w in self.weights])

    def copies(self, kept: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Every device's copies of the owners' weights, by path."""
        found: dict[str, jax.Array] = {}
        with self._exchange():
            for name, x in kept.items():
                bucket = self.matrices[name]
                found |= bucket.gather({name: x.astype(bucket.weights[0].copy)})
        return found

    def _exchange(self) -> contextlib.AbstractContextManager:
        return jax.named_scope("exchange") if self.sharded else contextlib.nullcontext()

    def sum_squares(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The sum of squares of each group of weights over all devices: one all-reduce of one
        number per group."""
        return self._over_devices(item for bucket in self.buckets for item in bucket.sums(buckets))[
            0
        ]

    def own_parts(self, tree: Any) -> Any:
        """For each weight of a device, equal parts for all devices with the same: rows of its last
        dim, zeros for those without a row. A single device has all; an owner's weights are its own.
        """
        if not self.sharded:
            return tree

        def own(w, x):
            if w.path in self.copied:
                return x
            shared = tuple(name for name in self.grid.names if name not in w.axes)
            # rows, not numbers: there may be more numbers than an int32 counts
            x = x.reshape(-1, x.shape[-1])
            count = -(-len(x) // self.grid.size(shared))
            wanted = count * (lax.axis_index(shared) if shared else 0)
            start = jnp.minimum(wanted, len(x) - count)  # the last parts would reach past the end
            part = lax.dynamic_slice_in_dim(x, start, count)
            return jnp.where((start + jnp.arange(count) < wanted)[:, None], 0, part)

        return jax.tree.unflatten(self.treedef, map(own, self.weights, jax.tree.leaves(tree)))

    def tree_sum_squares(self, *parts: Any) -> list[dict[str, jax.Array]]:
        """The sum of squares of each group of the results of `own_parts`, for several trees: one
        all-reduce."""
        leaves = [zip(self.weights, jax.tree.leaves(tree), strict=True) for tree in parts]
        return self._over_devices(*(((w.group, _square(x)) for w, x in tree) for tree in leaves))

    def _over_devices(self, *parts: Iterable[tuple[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        """The groups' totals over all devices, of several series of numbers by group."""
        totals: list[dict[str, jax.Array]] = [{} for _ in parts]
        for total, part in zip(totals, parts, strict=True):
            for group, value in part:
                total[group] = total[group] + value if group in total else value
        if not self.sharded:
            return totals
        rows = jnp.stack([jnp.stack([total[group] for group in self.groups]) for total in totals])
        sums = lax.psum(rows, self.grid.names)
        return [dict(zip(self.groups, row, strict=True)) for row in sums]


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _sums(arrays: dict[str, tuple[tuple[str, ...], jax.Array]]) -> dict[str, jax.Array]:
    """Small arrays summed over their axes: one all-reduce for all arrays with the same axes."""
    result: dict[str, jax.Array] = {}
    for axes in dict.fromkeys(axes for axes, _ in arrays.values()):
        chosen = {name: x for name, (over, x) in arrays.items() if over == axes}
        if not axes:
            result |= chosen
            continue
        flat = [x.reshape(-1) for x in chosen.values()]
        total = lax.psum(jnp.concatenate(flat) if len(flat) > 1 else flat[0], axes)
        ends = np.cumsum([x.size for x in flat])[:-1].tolist()
        for (name, x), part in zip(chosen.items(), jnp.split(total, ends), strict=True):
            result[name] = part.reshape(x.shape)
    return result
