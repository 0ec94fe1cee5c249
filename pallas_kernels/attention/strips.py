"""Attention of a short sequence to itself, for XLA on a GPU: strips of queries, each against all keys up to its end.

No online softmax and no loop: a strip's scores are one array, which few kernels write and read. Against the loops of
`xla` over blocks of 512, a layer at 4,096 tokens takes 80 launches for 860, and three fifths of the bytes. What
causality hides of a strip's own keys is computed: a ninth of the work with eight strips.

Masks are sums and products with numbers, never `where` with a constant: JAX would take that, as an array as large as
the scores, out of the scan over layers, and each layer would read it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import MASKED

STRIPS = 8
LONGEST = 8192  # tokens: scores of a strip are 256 MiB a head and sequence there


def side(q_len: int, k_len: int, window, offset) -> int | None:
    """Rows of a strip; None where a sequence is long, is not its own keys, or has a window, which blocks leave out."""
    if window is not None or offset is not None or q_len != k_len or q_len > LONGEST or q_len % (8 * STRIPS):
        return None
    return q_len // STRIPS


def forward(q, k, v, q_segments, k_segments, scale, side) -> tuple[jax.Array, jax.Array]:
    """Output [B, K, G, S, C] and log-sum-exp [B, K, G, S] of q [B, K, G, S, C] and k, v [B, K, S, C]."""
    outs, sums = [], []
    for first in range(0, q.shape[3], side):
        end = first + side
        scores = _product("bkgqc,bkjc->bkgqj", q[..., first:end, :], k[:, :, :end]) * scale
        seen = _seen(q_segments, k_segments, first, end)
        # Above MASKED, so that a row without a key has weights of 0, not 1.
        top = jnp.maximum((scores + (seen - 1) * -MASKED).max(-1), MASKED / 2)
        # No score that counts is above the top: the minimum keeps the others' from overflowing.
        weights = jnp.exp(jnp.minimum(scores - top[..., None], 0.0)) * seen
        total = weights.sum(-1)
        out = _product("bkgqj,bkjc->bkgqc", weights.astype(v.dtype), v[:, :, :end])
        safe = jnp.where(total > 0, total, 1.0)
        outs.append((out / safe[..., None]).astype(v.dtype))
        sums.append(jnp.where(total > 0, top + jnp.log(safe), MASKED))
    return jnp.concatenate(outs, 3), jnp.concatenate(sums, 3)


def gradients(q, k, v, q_segments, k_segments, lse, d_out, delta, scale, side) -> tuple:
    """dq, dk and dv in float32, of what `forward` took and gave; delta is `xla`'s."""
    d_queries = []
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for first in range(0, q.shape[3], side):
        end = first + side
        q_i, d_i, k_i, v_i = q[..., first:end, :], d_out[..., first:end, :], k[:, :, :end], v[:, :, :end]
        scores = _product("bkgqc,bkjc->bkgqj", q_i, k_i) * scale - lse[..., first:end, None]
        # As in `forward`: a row without a key has a log-sum-exp of MASKED, below all its scores.
        weights = jnp.exp(jnp.minimum(scores, 0.0)) * _seen(q_segments, k_segments, first, end)
        d_weights = _product("bkgqc,bkjc->bkgqj", d_i, v_i) - delta[..., first:end, None]
        d_scores = (weights * d_weights * scale).astype(q.dtype)
        d_queries.append(_product("bkgqj,bkjc->bkgqc", d_scores, k_i))
        dk = _added(dk, _product("bkgqj,bkgqc->bkjc", d_scores, q_i))
        dv = _added(dv, _product("bkgqj,bkgqc->bkjc", weights.astype(v.dtype), d_i))
    return jnp.concatenate(d_queries, 3), dk, dv


def _added(x, first) -> jax.Array:
    """x with an array added to its first keys; no scatter, which a GPU adds in an order of its own."""
    return lax.dynamic_update_slice_in_dim(x, x[:, :, : first.shape[2]] + first, 0, 2)


def _seen(q_segments, k_segments, first, end) -> jax.Array:
    """1 where a query of a strip may see a key, otherwise 0: [1 or B, 1, 1, queries, keys]."""
    seen = (jnp.arange(first, end)[:, None] >= jnp.arange(end))[None]
    if q_segments is not None:
        seen = seen & (q_segments[:, first:end, None] == k_segments[:, None, :end])
    return seen[:, None, None].astype(jnp.float32)


def _product(subscripts, x, y) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
