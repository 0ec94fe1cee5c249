"""Tensor parallelism of attention: a device's heads, and its columns of arrays packed by head.

Query heads are cut evenly over the tensor axis, with the columns of q and the rows of o. A device
computes the keys and values that its queries need: if there are fewer key-value heads than devices,
several compute the same head. k, the two halves of v, the convolutions and the temperatures are
whole on every device (`sharding`), which uses its columns. Forward, a layer sums [tokens, D] over
the axis once for attention and once for the experts, and, if a group's queries are on several
devices, [tokens, K C] for their mean; backward the same.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.model.placement import LogicalAxes, Weights
from zaya_jax.parallel.spread import TENSOR


@dataclasses.dataclass(frozen=True)
class Heads(Weights):
    """A device's share of `all_heads` query and `all_kv` key-value heads, which `shards` devices
    share."""

    all_heads: int = 1
    all_kv: int = 1
    shards: int = 1

    @property
    def heads(self) -> int:
        """Query heads of this device."""
        return self.all_heads // self.shards

    @property
    def kv(self) -> int:
        """Key-value heads of this device."""
        return max(self.all_kv // self.shards, 1)

    def _first_kv(self):
        return lax.axis_index(TENSOR) * self.all_kv // self.shards

    def localize(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """The part of this device's heads in dims that are whole on every device; `sharding` has
        cut the others."""
        for dim, name in enumerate(axes):
            if name == "kv_heads":
                x = self._of_kv(x, dim, x.shape[dim] // self.all_kv)
            elif name == "packed":
                x = self._of_packed(x, dim, x.shape[dim] // (self.all_heads + self.all_kv))
        return x

    def _of_kv(self, x, dim, per_head):
        """Its part of a dim with `per_head` entries for each key-value head."""
        return lax.dynamic_slice_in_dim(x, self._first_kv() * per_head, self.kv * per_head, dim)

    def _of_packed(self, x, dim, per_head):
        """Its part of a dim with `per_head` entries for each query head, then each key-value
        head."""
        q, k = jnp.split(x, (self.all_heads * per_head,), axis=dim)
        size = self.heads * per_head
        q = lax.dynamic_slice_in_dim(q, lax.axis_index(TENSOR) * size, size, dim)
        return jnp.concatenate([q, self._of_kv(k, dim, per_head)], axis=dim)

    def split_values(self, values: jax.Array) -> list[jax.Array]:
        return [values, values]

    def join_values(self, current: jax.Array, delayed: jax.Array) -> jax.Array:
        """The first half of all heads' channels is current, the second delayed, so a device may
        need either or both: both come for all its columns."""
        per_head = current.shape[-1] // self.kv
        column = self._first_kv() * per_head + jnp.arange(self.kv * per_head)
        return jnp.where(column < self.all_kv * per_head // 2, current, delayed)

    def mean_queries(self, packed: jax.Array, channels: int) -> jax.Array | None:
        """The mean of q over each group, [B, S, K, C], if its queries are on several devices;
        otherwise None."""
        if self.shards <= self.all_kv:
            return None
        q = packed[..., : self.heads * channels].astype(jnp.float32)
        total = q.reshape(*q.shape[:-1], 1, self.heads, channels).sum(-2)
        group = jnp.arange(self.all_kv) == self._first_kv()
        sums = lax.psum(jnp.where(group[:, None], total, 0.0), TENSOR)
        return self._of_kv(sums, 2, 1) / (self.all_heads // self.all_kv)

    def sum(self, y: jax.Array, dtype: Any) -> jax.Array:
        return lax.psum(y.astype(dtype), TENSOR)
