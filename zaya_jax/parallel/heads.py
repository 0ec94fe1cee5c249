"""Tensor parallelism of attention: which heads a device computes, and its columns of what is packed by head.

Query heads are cut evenly over the tensor axis, with the columns of q and the rows of o. A device computes the keys
and values of the heads that its queries need: where there are fewer key-value heads than devices, several compute the
same one. k, the two halves of v, the convolutions and the temperatures are whole on every device (`rules`), which
takes its columns of them. Forward, a layer sums [tokens, D] over the axis once for attention and once for the
experts, and, where a group's queries lie on several devices, [tokens, K C] for their mean; backward the same.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.parallel.spread import Spread

AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Part:
    """A device's share of `all_heads` query and `all_kv` key-value heads with `channels` each; `over` devices share."""

    all_heads: int
    all_kv: int
    channels: int
    over: int = 1

    @property
    def heads(self) -> int:
        """Query heads of this device."""
        return self.all_heads // self.over

    @property
    def kv(self) -> int:
        """Key-value heads of this device."""
        return max(self.all_kv // self.over, 1)

    @property
    def packed(self) -> int:
        """Both."""
        return self.heads + self.kv

    def _first_kv(self):
        return lax.axis_index(AXIS) * self.all_kv // self.over

    def kv_dim(self, x: jax.Array, dim: int = 0, per_head: int = 1) -> jax.Array:
        """This device's part of a dim that has `per_head` entries for each key-value head."""
        if self.over == 1:
            return x
        return lax.dynamic_slice_in_dim(x, self._first_kv() * per_head, self.kv * per_head, dim)

    def kv_columns(self, x: jax.Array) -> jax.Array:
        """This device's part of the last dim, C columns a key-value head."""
        return self.kv_dim(x, x.ndim - 1, self.channels)

    value_columns = kv_columns

    def packed_dim(self, x: jax.Array, dim: int, per_head: int = 1) -> jax.Array:
        """This device's part of a dim that has `per_head` entries for each query head, then each key-value head."""
        if self.over == 1:
            return x
        q, k = jnp.split(x, (self.all_heads * per_head,), axis=dim)
        own = self.heads * per_head
        q = lax.dynamic_slice_in_dim(q, lax.axis_index(AXIS) * own, own, dim)
        return jnp.concatenate([q, self.kv_dim(k, dim, per_head)], axis=dim)

    def packed_columns(self, x: jax.Array) -> jax.Array:
        """The same of the last dim, C columns per head."""
        return self.packed_dim(x, x.ndim - 1, self.channels)

    def split_values(self, values: jax.Array) -> list[jax.Array]:
        """Columns of the current token's and of the delayed half of the values; see `join_values`."""
        return jnp.split(values, 2, axis=-1) if self.over == 1 else [values, values]

    def join_values(self, now: jax.Array, delayed: jax.Array) -> jax.Array:
        """The values of this device's heads. The first half of all heads' channels is of now, the second delayed, so
        a device may need either or both: where heads are cut, both come for all its columns."""
        if self.over == 1:
            return jnp.concatenate([now, delayed], axis=-1)
        column = self._first_kv() * self.channels + jnp.arange(self.kv * self.channels)
        return jnp.where(column < self.all_kv * self.channels // 2, now, delayed)

    def mean_queries(self, packed: jax.Array) -> jax.Array | None:
        """The mean of q over each group, [B, S, K, C], where its queries lie on several devices; otherwise None."""
        if self.over <= self.all_kv:
            return None
        own = packed[..., : self.heads * self.channels].astype(jnp.float32)
        own = own.reshape(*own.shape[:-1], 1, self.heads, self.channels).sum(-2)
        slot = jnp.arange(self.all_kv) == self._first_kv()
        sums = lax.psum(jnp.where(slot[:, None], own, 0.0), AXIS)
        return self.kv_dim(sums, 2) / (self.all_heads // self.all_kv)

    def sum(self, y: jax.Array) -> jax.Array:
        """A product whose inner dim is cut by heads or width, summed over devices."""
        return y if self.over == 1 else lax.psum(y, AXIS)


def part(heads: int, kv: int, channels: int, spread: Spread) -> Part:
    """The part of a device; `rules.check` has seen that heads divide."""
    return Part(heads, kv, channels, spread.heads)
