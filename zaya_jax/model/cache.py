"""Keys and values that decoding keeps, as one device has them whole; `zaya_jax.parallel.tree` has them in parts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import attention, decode_attention


class Cache:
    """How keys and values [B, T, K, C] of a layer are written and read."""

    axis: str | None = None  # the mesh axis that columns lie over
    parts = 1  # the devices along it

    def columns(self, length: int) -> int:
        """Columns that a device has of a cache of this length."""
        return length

    def write(
        self, held: Float[Array, "B T K C"], new: Float[Array, "B S K C"], index: jax.Array
    ) -> jax.Array:
        """With new columns from `index` on: a prompt's or a piece's, or a single token's, of each row at its own."""
        new = new.astype(held.dtype)
        if jnp.ndim(index):
            return write_rows(held, new, index)
        return lax.dynamic_update_slice_in_dim(held, new, index, 1)

    def read(
        self,
        q: Float[Array, "B 1 H C"],
        k: Float[Array, "B T K C"],
        v: Float[Array, "B T K C"],
        valid: Bool[Array, "B T"],
        scale: float,
    ) -> Float[Array, "B 1 H C"]:
        """A new token's attention to the columns that are valid, of all devices."""
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
        """Attention of tokens from column `start` on, which are written already, to all that came before them."""
        return attention(q, k, v, None, None, window, start, scale=scale)[0]


def write_rows(
    held: Float[Array, "B T K C"], new: Float[Array, "B 1 K C"], index: Int[Array, "B"]
) -> jax.Array:
    """With a new column in each row, at an index of its own."""
    if len(held) == 1:  # no scatter
        return lax.dynamic_update_slice_in_dim(held, new, index[0], 1)
    return held.at[jnp.arange(len(held)), index].set(new[:, 0], mode="promise_in_bounds", unique_indices=True)


WHOLE = Cache()
