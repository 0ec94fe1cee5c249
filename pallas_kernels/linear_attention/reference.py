"""The definition of linear attention, with the whole [S, S] matrix."""

import jax
import jax.numpy as jnp


def features(x: jax.Array) -> jax.Array:
    """elu(x) + 1 in float32, given in x's own format; positive, so that weights are and their sum
    is never near 0."""
    return (jax.nn.elu(x.astype(jnp.float32)) + 1).astype(x.dtype)


def linear_attention(q, k, v, segments=None) -> jax.Array:
    """The result of `pallas_kernels.linear_attention.linear_attention`."""
    batch, seq, num_heads, channels = q.shape
    q = features(q).reshape(batch, seq, k.shape[2], -1, channels)
    weights = jnp.einsum("bikgc,bjkc->bkgij", q, features(k), preferred_element_type=jnp.float32)
    mask = jnp.tril(jnp.ones((seq, seq), bool))[None]
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    weights = jnp.where(mask[:, None, None], weights, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    out = jnp.einsum("bkgij,bjkc->bikgc", weights, v.astype(jnp.float32))
    return out.reshape(batch, seq, num_heads, channels).astype(v.dtype)
