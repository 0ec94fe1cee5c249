"""Keys and values that decoding keeps: whole on each device, or in parts over the context axis.

With a cache it is the cache that `spread.context` cuts (`zaya_jax.parallel.tree`), not the tokens, which are few.
"""

import jax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import decode_attention, in_window
from zaya_jax.parallel import tree
from zaya_jax.parallel.spread import Spread

KeysAndValues = dict[str, jax.Array]


def extend(
    cache: KeysAndValues, k: jax.Array, v: jax.Array, index: jax.Array | None, spread: Spread
) -> KeysAndValues:
    """K and V with new columns from `index` on: a prompt's at the start of an empty cache, or a single token's."""

    assert index is not None, "a cache comes with the column to write at"

    def write(held, new):
        if spread.context > 1:
            return tree.write(held, new, index, "context")
        return lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), index, 1)

    return {"k": write(cache["k"], k), "v": write(cache["v"], v)}


def attend(
    q: Float[Array, "B 1 H C"],
    cache: KeysAndValues,
    valid: Bool[Array, "B T"],
    index: Int[Array, ""] | None,
    window: jax.Array | None,
    spread: Spread,
    *,
    scale: float,
) -> Float[Array, "B 1 H C"]:
    """A new token's attention, at column `index`, to those columns of the cache that are valid and in its window."""
    valid = in_window(valid, index, window)
    if spread.context > 1:
        return tree.tree_attention(q, cache["k"], cache["v"], valid, scale=scale, axis="context")
    return decode_attention(q, cache["k"], cache["v"], valid, scale=scale)
