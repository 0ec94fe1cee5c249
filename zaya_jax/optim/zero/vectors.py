"""AdamW's state over the devices of a mesh: a large weight is cut into boxes, a small one is whole
on every device.

The method is elementwise, so any cut works; checkpoints can write boxes of leading dims without
rearranging them. A weight of N units (layers, matrices or rows, the largest that leave at most
`MAX_LEFT_OVER` of it over) gives N // S of them to each of S devices, without padding. The rest is
summed and kept on all devices, as are weights of less than `SMALL` of all numbers: norms, biases
and scales are together a thousandth of ZAYA1.
"""

import collections
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.optim.zero.grid import Bucket, Grid, StateBox, Weight, boxes, sum_of_squares

MAX_LEFT_OVER = 0.01  # of a weight, on all devices for the sake of larger units
SMALL = 1e-3  # of all weights' numbers


def numbers_per_device(shape: tuple[int, ...], replicas: int) -> int:
    """How many of a weight's numbers each device gets: whole units from the weight's beginning."""
    size, lead = math.prod(shape), 1
    leading_dims = shape[:-1] if len(shape) > 1 else shape
    for dim in leading_dims:
        for q in _divisors(dim):
            units = lead * q
            if units >= replicas and units % replicas <= MAX_LEFT_OVER * units:
                return units // replicas * (size // units)
        lead *= dim
    return lead // replicas * (size // lead)


class Vectors(Bucket):
    """All weights of AdamW with the same axes, in two buckets: what is cut, and what all devices
    have."""

    method = "adamw"

    def __init__(
        self, sharded_axes: tuple[str, ...], weights: list[Weight], total: int, grid: Grid
    ):
        self.sharded_axes, self.weights, self.grid = sharded_axes, weights, grid
        self.replica_axes = grid.other_axes(sharded_axes)
        self.num_replicas = grid.size(self.replica_axes)
        # Numbers of each weight on a device: its part of the cut, and what all replicas have.
        self.cut: dict[str, int] = {}
        self.left_over: dict[str, int] = {}
        for w in weights:
            local, large = w.local(grid), math.prod(w.shape) >= SMALL * total
            cut = 0
            if large or self.num_replicas == 1:
                cut = numbers_per_device(local, self.num_replicas)
            self.cut[w.path] = cut
            self.left_over[w.path] = math.prod(local) - self.num_replicas * cut
        of = f" of {'+'.join(sharded_axes)}" if sharded_axes else ""
        self.cut_name, self.whole_name = f"adamw cut{of}", f"adamw whole{of}"
        sizes = {
            self.cut_name: sum(self.cut.values()),
            self.whole_name: sum(self.left_over.values()),
        }
        self.sizes = {name: size for name, size in sizes.items() if size}  # on each device
        self.names = tuple(self.sizes)
        if self.whole_name in self.sizes:
            self.pending_sum_axes = {self.whole_name: self.replica_axes}

    def shape(self, name: str) -> tuple[int, ...]:
        return (self.sizes[name] * self.grid.size(self.axes(name)),)

    def axes(self, name: str) -> tuple[str, ...]:
        return self.grid.names if name == self.cut_name else self.sharded_axes

    def traffic(self, name: str, direction_bytes: int) -> dict[str, int]:
        """Without padding, and with float32 directions."""
        if self.num_replicas == 1:
            return {}
        size = 4 * self.sizes[name]
        if name == self.whole_name:
            return {"all-reduce": size}
        return dict.fromkeys(("reduce-scatter", "all-gather"), size * self.num_replicas)

    # ############################################################################################
    # Inside shard_map
    # ############################################################################################

    def reduce(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        replicas = self.num_replicas
        flat = {w.path: leaves[w.path].astype(jnp.float32).reshape(-1) for w in self.weights}
        shares = {}
        if self.cut_name in self.sizes:
            parts = []
            for path, size in self.cut.items():
                if size:
                    parts.append(flat[path][: replicas * size].reshape(replicas, size))
            x = jnp.concatenate(parts, 1)
            if replicas > 1:
                x = lax.psum_scatter(x, self.replica_axes, scatter_dimension=0, tiled=True)
            shares[self.cut_name] = x.reshape(-1)
        if self.whole_name in self.sizes:
            parts = []
            for path, size in self.left_over.items():
                if size:
                    parts.append(flat[path][replicas * self.cut[path] :])
            shares[self.whole_name] = jnp.concatenate(parts)
        return shares

    def gather(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        parts = collections.defaultdict(list)
        if self.cut_name in self.sizes:
            x = buckets[self.cut_name][None]
            if self.num_replicas > 1:
                x = lax.all_gather(x, self.replica_axes, tiled=True)
            for w, start, stop in self._spans(self.cut):
                parts[w.path].append(x[:, start:stop].reshape(-1))
        for w, start, stop in self._spans(self.left_over):
            parts[w.path].append(buckets[self.whole_name][start:stop])
        joined = {path: jnp.concatenate(both) for path, both in parts.items()}
        return {w.path: joined[w.path].reshape(w.local(self.grid)) for w in self.weights}

    def sums(self, buckets: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
        for w, start, stop in self._spans(self.cut):
            yield w.group, sum_of_squares(buckets[self.cut_name][start:stop])
        if self.whole_name in self.sizes:
            counts = lax.axis_index(self.replica_axes) == 0
            for w, start, stop in self._spans(self.left_over):
                numbers = buckets[self.whole_name][start:stop]
                yield w.group, jnp.where(counts, sum_of_squares(numbers), 0.0)

    def _spans(self, sizes: Mapping[str, int]) -> Iterator[tuple[Weight, int, int]]:
        """(weight, start, stop) of each weight that has numbers, one after the other."""
        start = 0
        for w in self.weights:
            stop = start + sizes[w.path]
            if start < stop:
                yield w, start, stop
            start = stop

    # ############################################################################################
    # Outside, on global arrays
    # ############################################################################################

    def state_boxes(self, name: str) -> Iterator[StateBox]:
        sizes = self.cut if name == self.cut_name else self.left_over
        groups = self.grid.device_groups(self.sharded_axes, self.replica_axes).tolist()
        for w, start, _ in self._spans(sizes):
            local, cut = w.local(self.grid), self.cut[w.path]
            for group in groups:
                part = w.part(self.grid, group[0])
                for replica, device in enumerate(group):
                    begin, end = replica * cut, (replica + 1) * cut
                    if name == self.whole_name:
                        begin, end = self.num_replicas * cut, math.prod(local)
                    first = start
                    for box in boxes(local, begin, end):
                        last = first + math.prod(dim.stop - dim.start for dim in box)
                        yield StateBox(w.path, device, (slice(first, last),), inside(part, box))
                        first = last


@functools.cache
def _divisors(size: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, size + 1) if size % n == 0)


def inside(part: tuple[slice, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
    """A box of a part, as a box of the whole."""
    pairs = zip(part, box, strict=True)
    return tuple(slice(outer.start + b.start, outer.start + b.stop) for outer, b in pairs)
