"""The cache of decoding: the layers' entries, stacked, and where keys and values lie.

`zaya_jax.parallel.tree` splits keys and values over devices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import attention, decode_attention
from pallas_kernels.cpu import unfused_on_cpus


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerSlice:
    """One layer's part of a stack over all layers.

    A new column is written into the stack. Written into a layer's own array, taken out of the
    stack, all columns of the layer would be copied for each token, out of the stack and into it.
    """

    stack: Float[Array, "L ..."]
    layer: Int[Array, ""]
    value: jax.Array | None = None  # the layer's array, once it has been read

    def read(self) -> jax.Array:
        """The whole array of this layer."""
        if self.value is not None:
            return self.value
        return lax.dynamic_index_in_dim(self.stack, self.layer, 0, keepdims=False)

    def read_at_once(self) -> "LayerSlice":
        """For an array that a layer will replace: read before the write, or a CPU's compiler copies
        the stack."""
        value, stack = unfused_on_cpus((self.read(), self.stack))
        return LayerSlice(stack, self.layer, value)

    def write(self, new: jax.Array, *start: jax.Array | int) -> "LayerSlice":
        """With `new` in the layer's array, from the indices `start` on (0 by default)."""
        new = new.astype(self.stack.dtype)[None]
        start = (self.layer, *start, *(0,) * (new.ndim - 1 - len(start)))
        return LayerSlice(lax.dynamic_update_slice(self.stack, new, start), self.layer)

    def write_rows(self, new: Float[Array, "B ..."], index: Int[Array, "B"]) -> "LayerSlice":
        """With a new column in each row, at an index of its own."""
        if len(new) == 1:  # no scatter
            return self.write(new[:, None], 0, index[0])
        columns = self.stack.at[self.layer, jnp.arange(len(new)), index]
        new = new.astype(self.stack.dtype)
        stack = columns.set(new, mode="promise_in_bounds", unique_indices=True)
        return LayerSlice(stack, self.layer)


class CacheLayout:
    """How keys and values [B, T, K, C] of a layer lie in a cache: all on one device."""

    axis: str | None = None  # the mesh axis that splits the columns
    parts = 1  # devices along that axis

    def local_length(self, length: int) -> int:
        """The number of columns of a cache of this length that one device holds."""
        return length

    def write(self, entry: LayerSlice, new: Float[Array, "B S K C"], column: Any) -> LayerSlice:
        """With new columns from `column` on: a prompt's or a piece's, or a single token's at each
        row's own column."""
        if jnp.ndim(column):
            return entry.write_rows(new[:, 0], column)
        return entry.write(new, 0, column)

    def read(
        self,
        q: Float[Array, "B 1 H C"],
        k: Float[Array, "B T K C"],
        v: Float[Array, "B T K C"],
        valid: Bool[Array, "B T"],
        scale: float,
    ) -> Float[Array, "B 1 H C"]:
        """A new token's attention to the valid columns of all devices."""
        return decode_attention(q, k, v, valid, scale=scale)

    def read_piece(
        self,
        q: Float[Array, "B S H C"],
        k: Float[Array, "B T K C"],
        v: Float[Array, "B T K C"],
        window: Any,
        start: jax.Array | int,
        scale: float,
    ) -> Float[Array, "B S H C"]:
        """Attention of the tokens from column `start` on, already written, to all earlier ones."""
        return attention(q, k, v, None, None, window, start, scale=scale)[0]


WHOLE_CACHE = CacheLayout()
