"""ZeRO-1: the optimizer's state and work spread over all devices that hold the same weights.

Weights of one kind form a bucket, for whose state a layout gives every device its share:

    Muon    all stacks of one matrix shape; a device owns whole matrices, by Newton–Schulz's work (`matrices`)
    AdamW   all weights that lie over the same axes; a device holds boxes of large ones, small ones whole (`vectors`)

A step then is, for each bucket that is worth it,

    one reduce-scatter of the gradients (`reduce`), 4 bytes a number, without more padding than a row a device
        (a layer's at a time, beside the backward pass, of stacks that can be and are large: `by_layer`)
    an exchange of less than that share, after which each device has whole matrices
    the optimizer on the device's share, with no collective
    the same exchange back, and one all-gather of the directions (`gather`), 4 bytes a number, or 2 for Muon in bfloat16

one all-reduce for all small weights together and one for the directions of small matrices, and one of a vector with one
number a group of weights, for the norms. Everything here runs inside `jax.shard_map`, on a device's part of each array;
gradients come in as each device's own partial sums.

State for checkpoints is un-padded, one array per weight in the weight's own shape: independent of the mesh. `held`
says which device has which box of it; `to_logical` and `from_logical` carry it over. `WholeLayout` is the same
interface for weights that nobody shares: buckets are the weights.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zaya_jax.optim import placing
from zaya_jax.optim.by_layer import ByLayer
from zaya_jax.optim.matrices import Form, Matrices
from zaya_jax.optim.vectors import Vectors
from zaya_jax.optim.weights import Held, Weight

__all__ = ["Held", "ShardedLayout", "Weight", "WholeLayout"]


class WholeLayout:
    """No sharing and no copy: each weight is a bucket of its own, under its path."""

    def __init__(self, weights: list[Weight], treedef: Any):
        self.weights, self.treedef = weights, treedef
        self.methods = {w.path: w.method for w in weights}
        self.by_layer: dict[str, ByLayer] = {}

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

    def held(self, name: str) -> list[Held]:
        """Which device holds which box of which weight: all is with the one."""
        (shape,) = [w.shape for w in self.weights if w.path == name]
        whole = tuple(slice(0, n) for n in shape)
        return [Held(name, 0, whole, whole)]

    def owned(self) -> dict[str, jax.Array | int]:
        """How many matrices of a bucket this device has, where that is not all of them."""
        return {}

    def reduce(self, grads: Any) -> dict[str, jax.Array]:
        """Gradients as buckets."""
        return dict(zip(self.methods, jax.tree.leaves(grads), strict=True))

    def gather(self, buckets: Mapping[str, jax.Array]) -> Any:
        """Buckets as a tree like the parameters'."""
        return jax.tree.unflatten(self.treedef, [buckets[w.path] for w in self.weights])

    def sum_squares(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The sum of squares of each group of weights."""
        return group_sum_squares(self.weights, [buckets[w.path] for w in self.weights])

    def own_parts(self, tree: Any) -> Any:
        """A tree like the parameters' as it is: this device has all."""
        return tree

    def tree_sum_squares(self, *parts: Any) -> list[dict[str, jax.Array]]:
        """The same of each of several trees that `own_parts` gives."""
        return [group_sum_squares(self.weights, jax.tree.leaves(tree)) for tree in parts]

    def to_logical(self, buckets: Mapping[str, Any]) -> dict[str, Any]:
        """One array per weight, by path."""
        return dict(buckets)

    def from_logical(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `to_logical`."""
        return dict(arrays)


class ShardedLayout:
    """Buckets over the devices of a mesh; see the module's head. `axes` gives the mesh's axis sizes, in its order."""

    def __init__(self, weights: list[Weight], treedef: Any, axes: Mapping[str, int]):
        self.weights, self.treedef, self.grid = weights, treedef, placing.Grid(axes)
        self.groups = list(dict.fromkeys(w.group for w in weights))
        forms: dict[Form, list[Weight]] = {}
        own: dict[tuple[str, ...], list[Weight]] = {}
        for w in weights:
            w.local(self.grid)
            if w.method == "muon":
                forms.setdefault(Form.of(w, self.grid), []).append(w)
            else:
                own.setdefault(w.axes, []).append(w)
        spread = len(self.grid.names)  # AdamW's weights on so many axes go nowhere
        travelling = sum(
            math.prod(w.local(self.grid)) for w in weights if w.method == "muon" or len(w.axes) < spread
        )
        self.matrices = {
            form.name: Matrices(form, found, travelling, self.grid) for form, found in forms.items()
        }
        buckets = list(self.matrices.values())
        counts, self.work = placing.place([b.kind for b in buckets], self.grid.num_devices)
        for bucket, each in zip(buckets, counts, strict=True):
            bucket.settle(each)
        ways = {bucket.weights[0].path: ByLayer.of(bucket) for bucket in buckets}
        self.by_layer = {path: way for path, way in ways.items() if way}
        total = sum(math.prod(w.shape) for w in weights)
        self.vectors = [Vectors(axes, found, total, self.grid) for axes, found in own.items()]
        self.methods = dict.fromkeys(self.matrices, "muon")
        self.methods |= {name: "adamw" for v in self.vectors for name in v.sizes}

    def vectors_of(self, name: str) -> Vectors:
        """The weights of AdamW that one of its buckets is of."""
        return next(v for v in self.vectors if name in v.sizes)

    # Sizes, for plans and tests.

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each bucket over all devices."""
        return {
            name: self.matrices[name].shape if method == "muon" else self.vectors_of(name).shape(name)
            for name, method in self.methods.items()
        }

    def spec(self, name: str) -> PartitionSpec:
        """How a bucket's state lies on the mesh: its first dim over every axis, or over those of its weights."""
        return PartitionSpec(self.grid.names) if name in self.matrices else self.vectors_of(name).spec(name)

    def parts(self, name: str) -> int:
        """On how many devices different parts of a bucket lie."""
        return self.grid.num_devices if name in self.matrices else self.vectors_of(name).copies(name)

    def held(self, name: str) -> list[Held]:
        """Which device holds which box of which weight's state: every box once, or once for each device that has it.

        A device's part of a bucket's array is what `spec` gives it.
        """
        return list(self.matrices[name].held() if name in self.matrices else self.vectors_of(name).held(name))

    def traffic(self, name: str, direction_bytes: int = 4) -> dict[str, int]:
        """Bytes that a device puts into or gets out of each kind of collective, and what of them is padding."""
        if name in self.matrices:
            return self.matrices[name].traffic(direction_bytes)
        vectors = self.vectors_of(name)
        kinds = ("reduce-scatter", "all-gather") if name == vectors.cut else ("all-reduce",)
        return {kind: size for kind, size in vectors.traffic().items() if kind in kinds}

    def padding_share(self) -> float:
        """The share of all that travels that is padding."""
        found = [self.traffic(name) for name in self.methods]
        padding = sum(kinds.pop("padding", 0) for kinds in found)
        return padding / max(sum(sum(kinds.values()) for kinds in found), 1)

    # Inside shard_map.

    def owned(self) -> dict[str, jax.Array | int]:
        """How many matrices of a bucket this device has: the first ones of its slots."""
        return {name: bucket.owned() for name, bucket in self.matrices.items()}

    @jax.named_scope("exchange")
    def reduce(self, grads: Any) -> dict[str, jax.Array]:
        """Every device's partial gradients summed, and each device's share of the sum, in float32.

        Of weights in `by_layer` they may be what its `share` gave of each layer's.
        """
        leaves = dict(zip((w.path for w in self.weights), jax.tree.leaves(grads), strict=True))
        result: dict[str, jax.Array] = {}
        small: dict[str, tuple[tuple[str, ...], jax.Array]] = {}
        for name, bucket in self.matrices.items():
            if bucket.together:
                small[name] = bucket.form.shared, bucket.whole(leaves)
                continue
            way, x = self.by_layer.get(bucket.weights[0].path), leaves[bucket.weights[0].path]
            result[name] = way.to_owners(x) if way and x.shape == way.shape else bucket.reduce(leaves)
        for vectors in self.vectors:
            result |= (found := vectors.reduce(leaves))
            if vectors.whole in found:
                small[vectors.whole] = vectors.shared, found[vectors.whole]
        for name, x in _sums(small).items():
            result[name] = self.matrices[name].take(x) if name in self.matrices else x
        return {name: result[name] for name in self.methods}

    @jax.named_scope("exchange")
    def gather(self, buckets: Mapping[str, jax.Array]) -> Any:
        """All devices' shares, as a tree like the parameters' (of a sharded weight, the device's part)."""
        leaves: dict[str, jax.Array] = {}
        small = {}
        for name, bucket in self.matrices.items():
            if bucket.together:
                small[name] = (*bucket.form.shared, *bucket.form.swapped), bucket.put(buckets[name])
            else:
                leaves |= bucket.leaves(bucket.gather(buckets[name]))
        for name, x in _sums(small).items():
            bucket = self.matrices[name]
            leaves |= bucket.leaves(bucket.part_of(x).astype(buckets[name].dtype))
        for vectors in self.vectors:
            leaves |= vectors.gather(buckets)
        return jax.tree.unflatten(self.treedef, [leaves[w.path] for w in self.weights])

    def sum_squares(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The sum of squares of each group over all devices: one all-reduce of one number per group."""
        totals = {group: jnp.zeros((), jnp.float32) for group in self.groups}
        for group, value in self._own_sums(buckets):
            totals[group] += value
        vector = lax.psum(jnp.stack([totals[group] for group in self.groups]), self.grid.names)
        return {group: vector[i] for i, group in enumerate(self.groups)}

    def _own_sums(self, buckets: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
        for name, bucket in self.matrices.items():
            yield from bucket.sums(buckets[name])
        for vectors in self.vectors:
            yield from vectors.sums(buckets)

    def own_parts(self, tree: Any) -> Any:
        """Of each weight that a device has, equal parts for all that have the same: rows of its last dim, zeros for
        who has none."""

        def own(w, x):
            shared = tuple(name for name in self.grid.names if name not in w.axes)
            x = x.reshape(-1, x.shape[-1])  # no numbers one by one: they may be more than an int32 counts
            count = -(-len(x) // self.grid.size(shared))
            wanted = count * (lax.axis_index(shared) if shared else 0)
            start = jnp.minimum(wanted, len(x) - count)  # the last parts would reach past the end
            part = lax.dynamic_slice_in_dim(x, start, count)
            return jnp.where((start + jnp.arange(count) < wanted)[:, None], 0, part)

        return jax.tree.unflatten(self.treedef, map(own, self.weights, jax.tree.leaves(tree)))

    def tree_sum_squares(self, *parts: Any) -> list[dict[str, jax.Array]]:
        """The sum of squares of each group of what `own_parts` gives, for several trees: one all-reduce."""
        own = [group_sum_squares(self.weights, jax.tree.leaves(tree)) for tree in parts]
        sums = lax.psum(
            jnp.stack([jnp.stack([x[group] for group in self.groups]) for x in own]), self.grid.names
        )
        return [dict(zip(self.groups, row, strict=True)) for row in sums]

    # Outside shard_map, on global arrays (NumPy's or JAX's).

    def to_logical(self, buckets: Mapping[str, Any]) -> dict[str, Any]:
        """One array per weight in the weight's own shape, by path, for those buckets that are given."""
        arrays: dict[str, Any] = {}
        for name, bucket in self.matrices.items():
            if name in buckets:
                arrays |= bucket.to_logical(buckets[name])
        for vectors in self.vectors:
            if vectors.sizes.keys() <= buckets.keys():
                arrays |= vectors.to_logical(buckets, _library(buckets))
        return arrays

    def from_logical(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `to_logical`: the buckets of this mesh, whichever mesh the arrays come from."""
        result, xp = {}, _library(arrays)
        for name, bucket in self.matrices.items():
            if bucket.weights[0].path in arrays:
                result[name] = bucket.from_logical(arrays, xp)
        for vectors in self.vectors:
            if vectors.weights[0].path in arrays:
                result |= vectors.from_logical(arrays, xp)
        return result


def group_sum_squares(weights: list[Weight], arrays: list[jax.Array]) -> dict[str, jax.Array]:
    """The sum of squares of each group of weights, of the arrays as they are on this device."""
    totals: dict[str, jax.Array] = {}
    for w, x in zip(weights, arrays, strict=True):
        value = jnp.sum(jnp.square(x.astype(jnp.float32)))
        totals[w.group] = totals[w.group] + value if w.group in totals else value
    return totals


def _sums(arrays: dict[str, tuple[tuple[str, ...], jax.Array]]) -> dict[str, jax.Array]:
    """Small arrays summed over their axes: one all-reduce for all that have the same ones."""
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


def _library(arrays: Mapping[str, Any]) -> Any:
    return np if all(isinstance(x, np.ndarray) for x in arrays.values()) else jnp
