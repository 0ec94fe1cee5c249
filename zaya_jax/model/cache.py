"""The cache of decoding: a layer's part of each stack, with all keys and values on one device.

`zaya_jax.parallel.tree` splits keys and values over devices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import attention, decode_attention
from pallas_kernels.cpu import apart_on_cpus


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """One layer's part of a stack over all layers.

    A new column is written into the stack. Written into a layer's own array, taken out of the
    stack, all columns of the layer would be copied for each token, out of the stack and into it.
    """

    stack: Float[Array, "L ..."]
    layer: Int[Array, ""]
    own: jax.Array | None = None  # the layer's array, once it has been read

    def read(self) -> jax.Array:
        """The whole array of this layer."""
        if self.own is not None:
            return self.own
        return lax.dynamic_index_in_dim(self.stack, self.layer, 0, keepdims=False)

    def read_at_once(self) -> "Held":
        """For an array that a layer will replace: read before the write, or a CPU's compiler copies
        the stack."""
        own, stack = apart_on_cpus((self.read(), self.stack))
        return Held(stack, self.layer, own)

    def write(self, new: jax.Array, *start: jax.Array | int) -> "Held":
        """With `new` in the layer's array, from the indices `start` on (0 by default)."""
        new = new.astype(self.stack.dtype)[None]
        rest = (0,) * (new.ndim - 1 - len(start))
        return Held(
            lax.dynamic_update_slice(self.stack, new, (self.layer, *start, *rest)), self.layer
        )

    def write_rows(self, new: Float[Array, "B ..."], index: Int[Array, "B"]) -> "Held":
        """With a new column in each row, at an index of its own."""
        if len(new) == 1:  # no scatter
            return self.write(new[:, None], 0, index[0])
        rows, new = (
            self.stack.at[self.layer, jnp.arange(len(new)), index],
            new.astype(self.stack.dtype),
        )
        return Held(rows.set(new, mode="promise_in_bounds", unique_indices=True), self.layer)


class Cache:
    """How keys and values [B, T, K, C] of a layer are written and read."""

    axis: str | None = None  # the mesh axis that splits the columns
    parts = 1  # devices along that axis

    def columns(self, length: int) -> int:
        """The number of columns of a cache of this length that one device holds."""
        return length

    def write(self, held: Held, new: Float[Array, "B S K C"], index: jax.Array) -> Held:
        """With new columns from `index` on: a prompt's or a piece's, or a single token's at each
        row's own index."""
        if jnp.ndim(index):
            return held.write_rows(new[:, 0], index)
        return held.write(new, 0, index)

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
        start: jax.Array,
        scale: float,
    ) -> Float[Array, "B S H C"]:
        """Attention of the tokens from column `start` on, already written, to all earlier ones."""
        return attention(q, k, v, None, None, window, start, scale=scale)[0]


WHOLE = Cache()
