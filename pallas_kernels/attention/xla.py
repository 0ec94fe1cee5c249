"""Attention in blocks, for XLA: online softmax forward, recomputing backward.

The loops over blocks have run-time bounds, so that blocks wholly above the diagonal or outside the
window cost nothing. Letters as in `pallas_kernels.attention`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy import typing as npt

from pallas_kernels.attention.reference import MASKED, mask_of
from pallas_kernels.loops import expected_turns


def forward(
    q, k, v, q_segments, k_segments, window, offset, *, scale, block, loops=None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention`. A CPU has another function in the place of the `loops`."""
    q_len, k_len = q.shape[1], k.shape[1]
    block = block or default_block(max(q_len, k_len))
    q, k, v, q_segments, k_segments, blocks = arrange(q, k, v, q_segments, k_segments, block)
    masks = q_segments, k_segments, window, offset
    out, lse = (loops or _forward)(q, k, v, *masks, scale, (*blocks, k_len))
    return by_token(out)[:, :q_len], by_token(lse[..., None])[:, :q_len, :, 0]


def backward(
    saved, d_out, d_lse, *, scale, block, dtype, loops=None, before_sum=lambda x: x
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.attention`; `loops` as in `forward`."""
    q, k, v, q_segments, k_segments, window, offset, out, lse = saved
    q_len, (k_len, num_kv) = q.shape[1], k.shape[1:3]
    block = block or default_block(max(q_len, k_len))
    delta = before_sum(d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    delta = delta if d_lse is None else delta - d_lse
    q, k, v, q_segments, k_segments, blocks = arrange(q, k, v, q_segments, k_segments, block)
    d_out, lse, delta = (
        by_group(x, num_kv, blocks[0]) for x in (d_out, lse[..., None], delta[..., None])
    )
    lse, delta, d_out = lse[..., 0], delta[..., 0], d_out.astype(v.dtype)
    saved = (q, k, v, q_segments, k_segments, window, offset, lse, delta)
    dq, dk, dv = (loops or _gradients)(saved, d_out, scale, (*blocks, k_len), dtype)
    dk, dv = (x.transpose(0, 2, 1, 3)[:, :k_len] for x in (dk, dv))
    return by_token(dq)[:, :q_len], dk, dv


def default_block(length: int) -> int:
    """Side of a block of scores: few and large ones."""
    return 512 if length <= 8192 else 2048


def arrange(
    q, k, v, q_segments, k_segments, block
) -> tuple[Any, Any, Any, Any, Any, tuple[int, int]]:
    """Heads first, lengths padded to whole blocks: q [B, K, G, Sq, C], k and v [B, K, Sk, C], and
    the blocks' sides."""
    q_len, (k_len, num_kv) = q.shape[1], k.shape[1:3]
    block_q, block_k = min(block, _round_up(q_len, 8)), min(block, _round_up(k_len, 8))
    pad_k = -k_len % block_k
    if q_segments is not None and k_segments is not None:
        q_segments = jnp.pad(q_segments, ((0, 0), (0, -q_len % block_q)))
        k_segments = jnp.pad(k_segments, ((0, 0), (0, pad_k)))
    k, v = (jnp.pad(x, ((0, 0), (0, pad_k), (0, 0), (0, 0))).transpose(0, 2, 1, 3) for x in (k, v))
    return by_group(q, num_kv, block_q), k, v, q_segments, k_segments, (block_q, block_k)


def by_group(x, num_kv, block) -> jax.Array:
    """[B, S, H, C] to [B, K, G, S, C], S padded to whole blocks."""
    batch, length, num_heads, channels = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    return x.reshape(batch, -1, num_kv, num_heads // num_kv, channels).transpose(0, 2, 3, 1, 4)


def by_token(x) -> jax.Array:
    """[B, K, G, S, C] to [B, S, H, C]."""
    batch, num_kv, group, length, channels = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_kv * group, channels)


def _round_up(n, multiple):
    return -(-n // multiple) * multiple


def key_blocks(i, window, offset, block_q, block_k, num_k) -> tuple:
    """Key blocks [lo, hi) that query block i can see; only these are computed for it."""
    first = 0 if window is None else jnp.maximum(i * block_q + offset - window + 1, 0) // block_k
    last = (i * block_q + block_q - 1 + offset) // block_k + 1
    return first, jnp.clip(last, first, num_k)


def visited(
    q_len: int,
    k_len: int,
    starts: npt.ArrayLike,
    windows: Sequence[int | None],
    block: int | None = None,
) -> float:
    """The share of all pairs of blocks that is computed, the mean over queries that begin at these
    starts, and over layers with these windows: for `loops.expected_share`."""
    block = block or default_block(max(q_len, k_len))
    block_q, block_k = min(block, _round_up(q_len, 8)), min(block, _round_up(k_len, 8))
    num_k, found = -(-k_len // block_k), []
    for window in windows:
        first_query = np.add.outer(starts, np.arange(0, q_len, block_q))
        last = np.clip((first_query + block_q - 1) // block_k + 1, 0, num_k)
        first = 0 if window is None else np.maximum(first_query - window + 1, 0) // block_k
        found.append(np.mean(np.maximum(last - first, 0)) / num_k)
    return float(np.mean(found))


def _query_blocks(j, window, offset, block_q, block_k, num_q):
    """Query blocks [lo, hi) that can see key block j: the transpose of `key_blocks`."""
    first = jnp.clip((j * block_k - offset) // block_q, 0, num_q)
    if window is None:
        return first, num_q
    last = -(-(window + j * block_k + block_k - 1 - offset) // block_q)
    return first, jnp.clip(last, first, num_q)


def _block_of(x, index, size, axis):
    return None if x is None else lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _forward(q, k, v, q_segments, k_segments, window, offset, scale, sides):
    block_q, block_k, k_len = sides
    batch, num_kv, group, q_pad, channels = q.shape
    num_q, num_k = q_pad // block_q, k.shape[2] // block_k
    offset = 0 if offset is None else offset

    def query_block(i):
        q_i = _block_of(q, i, block_q, 3)
        q_seg = _block_of(q_segments, i, block_q, 1)

        def step(j, carry):
            acc, top, total = carry
            k_j, v_j = _block_of(k, j, block_k, 2), _block_of(v, j, block_k, 2)
            mask = mask_of(
                block_q,
                block_k,
                i * block_q + offset,
                j * block_k,
                window,
                k_len,
                q_seg,
                _block_of(k_segments, j, block_k, 1),
            )
            products = jnp.einsum("bkgqc,bkjc->bkgqj", q_i, k_j, preferred_element_type=jnp.float32)
            scores = jnp.where(mask, products * scale, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            update = jnp.einsum(
                "bkgqj,bkjc->bkgqc",
                weights.astype(v.dtype),
                v_j,
                preferred_element_type=jnp.float32,
            )
            return acc * shrink[..., None] + update, new_top, total * shrink + weights.sum(-1)

        row = (batch, num_kv, group, block_q)
        # Above MASKED, so that a row's weights are 0, not 1, as long as it has seen no key.
        start = (
            jnp.zeros((*row, channels), jnp.float32),
            jnp.full(row, MASKED / 2),
            jnp.zeros(row),
        )
        bounds = key_blocks(i, window, offset, block_q, block_k, num_k)
        with expected_turns((num_k + 1) / 2, of=num_k):  # of a whole causal sequence
            acc, top, total = lax.fori_loop(*bounds, step, start)
        seen = total > 0
        safe = jnp.where(seen, total, 1.0)
        return (acc / safe[..., None]).astype(v.dtype), jnp.where(seen, top + jnp.log(safe), MASKED)

    out, lse = lax.map(query_block, jnp.arange(num_q))
    return (
        jnp.moveaxis(out, 0, 3).reshape(batch, num_kv, group, q_pad, channels),
        jnp.moveaxis(lse, 0, 3).reshape(batch, num_kv, group, q_pad),
    )


def _gradients(saved, d_out, scale, sides, dtype):
    """dq in float32, dk and dv in `dtype`; delta is the sum of d_out times out, less the
    log-sum-exp's cotangent."""
    block_q, block_k, k_len = sides
    q, k, v, q_segments, k_segments, window, offset, lse, delta = saved
    batch, num_kv, group, q_pad, channels = q.shape
    num_q, num_k = q_pad // block_q, k.shape[2] // block_k
    offset = 0 if offset is None else offset

    # Scores have keys first and queries last, and dq has channels first, so no product needs a
    # transposed copy of anything as large as the scores.
    def key_block(dq, j):
        k_j, v_j = _block_of(k, j, block_k, 2), _block_of(v, j, block_k, 2)
        k_seg, k_turned = _block_of(k_segments, j, block_k, 1), k_j.swapaxes(2, 3)

        def step(i, carry):
            dq, dk_j, dv_j = carry
            q_i, do_i = _block_of(q, i, block_q, 3), _block_of(d_out, i, block_q, 3)
            mask = mask_of(
                block_q,
                block_k,
                i * block_q + offset,
                j * block_k,
                window,
                k_len,
                _block_of(q_segments, i, block_q, 1),
                k_seg,
            )
            mask = mask.transpose(0, 1, 4, 2, 3)
            lse_i, delta_i = (_block_of(x, i, block_q, 3)[:, :, None] for x in (lse, delta))
            weights = jnp.exp(jnp.where(mask, _by_key(k_j, q_i) * scale - lse_i, MASKED))
            d_scores = (weights * (_by_key(v_j, do_i) - delta_i) * scale).astype(q.dtype)
            weights = weights.astype(v.dtype)
            dv_j += jnp.einsum(
                "bkjgq,bkgqc->bkjc", weights, do_i, preferred_element_type=jnp.float32
            )
            dk_j += jnp.einsum(
                "bkjgq,bkgqc->bkjc", d_scores, q_i, preferred_element_type=jnp.float32
            )
            dq_i = jnp.einsum(
                "bkcj,bkjgq->bkcgq", k_turned, d_scores, preferred_element_type=jnp.float32
            )
            dq_i += _block_of(dq, i, block_q, 4)
            return lax.dynamic_update_slice_in_dim(dq, dq_i, i * block_q, 4), dk_j, dv_j

        zero = jnp.zeros(k_j.shape, jnp.float32)
        bounds = _query_blocks(j, window, offset, block_q, block_k, num_q)
        with expected_turns((num_q + 1) / 2, of=num_q):
            dq, dk_j, dv_j = lax.fori_loop(*bounds, step, (dq, zero, zero))
        return dq, (dk_j.astype(dtype), dv_j.astype(dtype))

    dq = jnp.zeros((batch, num_kv, channels, group, q_pad), jnp.float32)
    dq, (dk, dv) = lax.scan(key_block, dq, jnp.arange(num_k))
    dk, dv = (jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in (dk, dv))
    return jnp.moveaxis(dq, 2, -1), dk, dv


def _by_key(k_j, q_i):
    """Products of each key with each query, [B, K, keys, G, queries]."""
    return jnp.einsum("bkjc,bkgqc->bkjgq", k_j, q_i, preferred_element_type=jnp.float32)
