"""Keys and values that decoding keeps, as one device has them whole; `zaya_jax.parallel.tree` has them in parts."""

import jax
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import decode_attention


class Cache:
    """How keys and values [B, T, K, C] of a layer are written and read."""

    axis: str | None = None  # the mesh axis that columns lie over

    def columns(self, length: int) -> int:
        """Columns that a device has of a cache of this length."""
        return length

    def write(
        self, held: Float[Array, "B T K C"], new: Float[Array, "B S K C"], index: jax.Array
    ) -> jax.Array:
        """With new columns from `index` on: a prompt's at the start of an empty cache, or a single token's."""
        return lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), index, 1)

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


WHOLE = Cache()
