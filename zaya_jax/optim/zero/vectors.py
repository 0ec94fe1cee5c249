"""AdamW's state over the devices of a mesh: a large weight is cut into boxes, a small one is whole
on every device.

The method is elementwise, so any cut works; checkpoints can write boxes of leading dims without
rearranging them. A weight of N units (layers, matrices or rows, the largest that leave at most
`OVER` of it over) gives N // S of them to each of S devices, without padding. The rest is summed
and kept on all devices, as are weights of less than `SMALL` of all numbers: norms, biases and
scales are together a thousandth of ZAYA1.
"""

import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zaya_jax.optim.zero.grid import Bucket, Grid, Held, Weight, boxes

OVER = 0.01  # of a weight at most may be on all devices for the sake of larger units
SMALL = 1e-3  # of all weights' numbers


def cut(shape: tuple[int, ...], shards: int) -> int:
    """The number of a weight's numbers for each device: whole units from its beginning."""
    numbers, lead = math.prod(shape), 1
    rows = shape[:-1] if len(shape) > 1 else shape
    for size in rows:
        for q in _divisors(size):
            units = lead * q
            if units >= shards and units % shards <= OVER * units:
                return units // shards * (numbers // units)
        lead *= size
    return lead // shards * (numbers // lead)


class Vectors(Bucket):
    """All weights of AdamW with the same axes; two buckets, `cut` and `whole`."""

    method = "adamw"

    def __init__(self, own: tuple[str, ...], weights: list[Weight], total: int, grid: Grid):
        self.own, self.weights, self.grid = own, weights, grid
        self.shared = tuple(axis for axis in grid.names if axis not in own)
        self.shards = grid.size(self.shared)
        self.numbers = {w.path: math.prod(w.local(grid)) for w in weights}
        self.each = {
            w.path: (
                cut(w.local(grid), self.shards)
                if self.shards == 1 or math.prod(w.shape) >= SMALL * total
                else 0
            )
            for w in weights
        }
        self.left = {path: n - self.shards * self.each[path] for path, n in self.numbers.items()}
        of = f" of {'+'.join(own)}" if own else ""
        self.cut, self.whole = f"adamw cut{of}", f"adamw whole{of}"
        sizes = {self.cut: sum(self.each.values()), self.whole: sum(self.left.values())}
        self.sizes = {name: size for name, size in sizes.items() if size}  # on each device
        self.names = tuple(self.sizes)
        self.summed = {self.whole: self.shared} if self.whole in self.sizes else {}

    def shape(self, name: str) -> tuple[int, ...]:
        return (self.sizes[name] * self.devices(name),)

    def devices(self, name: str) -> int:
        return self.grid.num_devices if name == self.cut else self.grid.size(self.own)

    def spec(self, name: str) -> PartitionSpec:
        axes = self.grid.names if name == self.cut else self.own
        return PartitionSpec(axes) if axes else PartitionSpec()

    def traffic(self, name: str, direction_bytes: int) -> dict[str, int]:
        """Without padding, and with float32 directions."""
        if self.shards == 1:
            return {}
        size = 4 * self.sizes[name]
        if name == self.whole:
            return {"all-reduce": size}
        return dict.fromkeys(("reduce-scatter", "all-gather"), size * self.shards)

    # Inside shard_map.

    def reduce(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        flat = {w.path: leaves[w.path].astype(jnp.float32).reshape(-1) for w in self.weights}
        result = {}
        if self.cut in self.sizes:
            parts = [
                flat[path][: self.shards * n].reshape(self.shards, n)
                for path, n in self.each.items()
                if n
            ]
            x = jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]
            x = (
                lax.psum_scatter(x, self.shared, scatter_dimension=0, tiled=True)
                if self.shards > 1
                else x
            )
            result[self.cut] = x.reshape(-1)
        if self.whole in self.sizes:
            result[self.whole] = jnp.concatenate(
                [flat[path][self.shards * self.each[path] :] for path, n in self.left.items() if n]
            )
        return result

    def gather(self, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        parts: dict[str, list[jax.Array]] = {w.path: [] for w in self.weights}
        if self.cut in self.sizes:
            x = buckets[self.cut][None]
            x = lax.all_gather(x, self.shared, tiled=True) if self.shards > 1 else x
            for path, start, stop in _spans(self.each):
                parts[path].append(x[:, start:stop].reshape(-1))
        for path, start, stop in _spans(self.left):
            parts[path].append(buckets[self.whole][start:stop])
        joined = {
            path: jnp.concatenate(found) if len(found) > 1 else found[0]
            for path, found in parts.items()
        }
        return {w.path: joined[w.path].reshape(w.local(self.grid)) for w in self.weights}

    def sums(self, buckets: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
        groups = {w.path: w.group for w in self.weights}
        for path, start, stop in _spans(self.each):
            yield (
                groups[path],
                jnp.sum(jnp.square(buckets[self.cut][start:stop].astype(jnp.float32))),
            )
        if self.whole in self.sizes:
            first = True if self.shards == 1 else lax.axis_index(self.shared) == 0
            for path, start, stop in _spans(self.left):
                squares = jnp.square(buckets[self.whole][start:stop].astype(jnp.float32))
                yield groups[path], jnp.where(first, jnp.sum(squares), 0.0)

    # Outside, on global arrays.

    def held(self, name: str) -> Iterator[Held]:
        weights = {w.path: w for w in self.weights}
        spans = _spans(self.each if name == self.cut else self.left)
        for path, start, _ in spans:
            w, each = weights[path], self.each[path]
            local = w.local(self.grid)
            for number, group in enumerate(self.grid.groups(self.own, self.shared).tolist()):
                places = self.grid.places(self.own, number)
                corner = [
                    self.grid.linear(axes, places) * n
                    for axes, n in zip(w.dims, local, strict=True)
                ]
                for s, device in enumerate(group):
                    begin, end = s * each, (s + 1) * each
                    if name == self.whole:
                        begin, end = self.shards * each, self.numbers[path]
                    at = start
                    for box in boxes(local, begin, end):
                        size = math.prod(b.stop - b.start for b in box)
                        moved = (
                            slice(b.start + c, b.stop + c) for b, c in zip(box, corner, strict=True)
                        )
                        yield Held(path, device, (slice(at, at + size),), tuple(moved))
                        at += size


@functools.cache
def _divisors(size: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, size + 1) if size % n == 0)


def _spans(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    start = 0
    for path, n in sizes.items():
        if n:
            yield path, start, start + n
        start += n
