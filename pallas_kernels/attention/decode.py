"""One new token's attention to a cache: a product over all of its columns, on any chip."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention.reference import MASKED


def decode_attention(
    q: Float[Array, "B 1 H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    valid: Bool[Array, "B T"],
    *,
    scale: float,
) -> Float[Array, "B 1 H C"]:
    """One new query per row against a cache; `valid` says which keys count."""
    batch, _, num_heads, channels = q.shape
    q = q.reshape(batch, k.shape[2], num_heads // k.shape[2], channels)
    scores = jnp.einsum("bkgc,bjkc->bkgj", q, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum(
        "bkgj,bjkc->bkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.reshape(batch, 1, num_heads, channels).astype(v.dtype)


def in_window(valid: Bool[Array, "B T"], index, window) -> Bool[Array, "B T"]:
    """The visible columns of a cache within the window of the query at `index`, one for each row or
    for all."""
    if window is None:
        return valid
    return valid & (jnp.asarray(index)[..., None] - jnp.arange(valid.shape[1]) < window)
