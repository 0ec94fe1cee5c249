"""The definition of attention, with the whole [S, S] matrix, and the constants of masking for all
implementations."""

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite, so that a row without any key gives 0 and not NaN
NO_WINDOW = 1 << 30  # wider than any sequence, with room to add a position to it in int32


def attention(q, k, v, q_segments=None, k_segments=None, window=None, offset=0, *, scale) -> tuple:
    """The result of `pallas_kernels.attention.attention`."""
    batch, q_len, num_heads, channels = q.shape
    num_kv, k_len = k.shape[2], k.shape[1]
    q = q.reshape(batch, q_len, num_kv, num_heads // num_kv, channels)
    scores = jnp.einsum("bqkgc,bjkc->bkgqj", q, k, preferred_element_type=jnp.float32) * scale
    window = NO_WINDOW if window is None else window
    mask = mask_of(q_len, k_len, offset, 0, window, k_len, q_segments, k_segments)
    scores = jnp.where(mask, scores, MASKED)
    lse = jnp.where(mask.any(-1), jax.nn.logsumexp(scores, axis=-1), MASKED)
    weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
    out = jnp.einsum(
        "bkgqj,bjkc->bqkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    lse = jnp.moveaxis(lse, 3, 1).reshape(batch, q_len, num_heads)
    return out.reshape(batch, q_len, num_heads, channels).astype(v.dtype), lse


def mask_of(num_q, num_k, q_start, k_start, window, k_len, q_segments, k_segments) -> jax.Array:
    """[1 or B, 1, 1, num_q, num_k]: the keys that each query may see; starts are positions on the
    key axis."""
    i = q_start + lax.broadcasted_iota(jnp.int32, (num_q, num_k), 0)
    j = k_start + lax.broadcasted_iota(jnp.int32, (num_q, num_k), 1)
    mask = (j <= i) & (j < k_len)
    if window is not None:
        mask &= i - j < window
    mask = mask[None, None, None]
    if q_segments is not None:
        mask = mask & (q_segments[:, :, None] == k_segments[:, None, :])[:, None, None]
    return mask
