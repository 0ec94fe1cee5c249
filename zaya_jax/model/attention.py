"""Causal grouped-query attention in blocks: online softmax forward, recomputing backward, never an [S, S] array.

Letters: B batch, S sequence, H query heads, K key-value heads, G = H / K queries a group, C head channels.
The loops over blocks have run-time bounds, so blocks that lie wholly above the diagonal or outside the window cost
nothing. `offset` is the index of the first query minus that of the first key: 0 for a sequence attending to itself.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zaya_jax.model import short_attention as short
from zaya_jax.model.matmul import apart
from zaya_jax.model.short_attention import MASKED, mask_of

NO_WINDOW = 1 << 30  # wider than any sequence, with room to add a position to it in int32
SAVED = "attention"  # the name under which a remat policy finds the output and its log-sum-exp
SHORT = 4  # blocks of queries or keys up to which a CPU gets no loops


def reference_attention(q, k, v, q_segments=None, k_segments=None, window=None, offset=0, *, scale) -> tuple:
    """The definition, with the whole [S, S] matrix: for tests and for reading."""
    batch, q_len, num_heads, channels = q.shape
    num_kv = k.shape[2]
    q = q.reshape(batch, q_len, num_kv, num_heads // num_kv, channels)
    scores = jnp.einsum("bqkgc,bjkc->bkgqj", q, k, preferred_element_type=jnp.float32) * scale
    mask = mask_of(
        q_len,
        k.shape[1],
        offset,
        0,
        NO_WINDOW if window is None else window,
        k.shape[1],
        q_segments,
        k_segments,
    )
    scores = jnp.where(mask, scores, MASKED)
    lse = jnp.where(mask.any(-1), jax.nn.logsumexp(scores, axis=-1), MASKED)
    weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
    out = jnp.einsum("bkgqj,bjkc->bqkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    lse = jnp.moveaxis(lse, 3, 1).reshape(batch, q_len, num_heads)
    return out.reshape(batch, q_len, num_heads, channels).astype(v.dtype), lse


def attention(
    q: Float[Array, "B Sq H C"],
    k: Float[Array, "B Sk K C"],
    v: Float[Array, "B Sk K C"],
    q_segments: Int[Array, "B Sq"] | None = None,
    k_segments: Int[Array, "B Sk"] | None = None,
    window: int | Int[Array, ""] | None = None,
    offset: int | Int[Array, ""] = 0,
    *,
    scale: float,
    block: int | None = None,
) -> tuple[Float[Array, "B Sq H C"], Float[Array, "B Sq H"]]:
    """Attention output and the log-sum-exp of each query's scores (float32), both differentiable.

    A query at i attends to keys at j with 0 <= i - j < window and the same segment. A query without any key gives 0
    and a log-sum-exp of -1e30.
    """
    q_len, k_len = q.shape[1], k.shape[1]
    q, k, v, q_segments, k_segments, blocks = _arrange(q, k, v, q_segments, k_segments, block)
    out, lse = _blockwise(q, k, v, q_segments, k_segments, *_bounds(window, offset), scale, *blocks, k_len)
    return _by_token(out)[:, :q_len], _by_token(lse[..., None])[:, :q_len, :, 0]


def attention_gradients(
    q: Float[Array, "B Sq H C"],
    k: Float[Array, "B Sk K C"],
    v: Float[Array, "B Sk K C"],
    out: Float[Array, "B Sq H C"],
    lse: Float[Array, "B Sq H"],
    d_out: Float[Array, "B Sq H C"],
    q_segments: Int[Array, "B Sq"] | None = None,
    k_segments: Int[Array, "B Sk"] | None = None,
    window: int | Int[Array, ""] | None = None,
    offset: int | Int[Array, ""] = 0,
    *,
    scale: float,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What keys that are a part of all give to dq, dk and dv (float32); `out` and `lse` are those of all keys."""
    q_len, (k_len, num_kv) = q.shape[1], k.shape[1:3]
    q, k, v, q_segments, k_segments, (block_q, block_k) = _arrange(q, k, v, q_segments, k_segments, block)
    out, d_out, lse = (_by_group(x, num_kv, block_q) for x in (out, d_out, lse[..., None]))
    saved = (q, k, v, q_segments, k_segments, *_bounds(window, offset), out, lse[..., 0])
    dq, dk, dv = _gradients(scale, block_q, block_k, k_len, saved, (d_out, 0.0), jnp.float32)
    dk, dv = (x.transpose(0, 2, 1, 3)[:, :k_len] for x in (dk, dv))
    return _by_token(dq)[:, :q_len], dk, dv


def _arrange(q, k, v, q_segments, k_segments, block):
    """Heads first, lengths padded to whole blocks: q [B, K, G, Sq, C], k and v [B, K, Sk, C], and the blocks' sides."""
    q_len, (k_len, num_kv) = q.shape[1], k.shape[1:3]
    block = block or default_block(max(q_len, k_len))
    block_q, block_k = min(block, _round_up(q_len, 8)), min(block, _round_up(k_len, 8))
    pad_k = -k_len % block_k
    if q_segments is not None and k_segments is not None:
        q_segments = jnp.pad(q_segments, ((0, 0), (0, -q_len % block_q)))
        k_segments = jnp.pad(k_segments, ((0, 0), (0, pad_k)))
    k, v = (jnp.pad(x, ((0, 0), (0, pad_k), (0, 0), (0, 0))).transpose(0, 2, 1, 3) for x in (k, v))
    return _by_group(q, num_kv, block_q), k, v, q_segments, k_segments, (block_q, block_k)


def _by_group(x, num_kv, block):
    """[B, S, H, C] to [B, K, G, S, C], S padded to whole blocks."""
    batch, length, num_heads, channels = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    return x.reshape(batch, -1, num_kv, num_heads // num_kv, channels).transpose(0, 2, 3, 1, 4)


def _by_token(x):
    """[B, K, G, S, C] to [B, S, H, C]."""
    batch, num_kv, group, length, channels = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_kv * group, channels)


def _bounds(window, offset):
    # None is known while tracing: a model without windows has none in its program, and nor has a sequence that attends
    # to itself an offset.
    known = isinstance(offset, int) and offset == 0
    return tuple(
        None if x is None else jnp.asarray(x, jnp.int32) for x in (window, None if known else offset)
    )


def default_block(length: int) -> int:
    """Side of a block of scores: small enough for a core's cache on a CPU, fewer and larger blocks on a GPU."""
    if jax.default_backend() == "cpu":
        return 64 if length <= 256 else 128 if length <= 4096 else 256
    return 512 if length <= 8192 else 1024


def decode_attention(q, k, v, valid, *, scale) -> jax.Array:
    """One new query a row against a cache: q [B, 1, H, C], k and v [B, T, K, C], valid [B, T] says which keys count."""
    batch, _, num_heads, channels = q.shape
    q = q.reshape(batch, k.shape[2], num_heads // k.shape[2], channels)
    scores = jnp.einsum("bkgc,bjkc->bkgj", q, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum("bkgj,bjkc->bkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(batch, 1, num_heads, channels).astype(v.dtype)


def in_window(valid, index, window) -> jax.Array:
    """Of the columns [B, T] of a cache that may be seen, those within the window of the query at `index`."""
    if window is None:
        return valid
    return valid & (index - jnp.arange(valid.shape[1]) < window)


def _round_up(n, multiple):
    return -(-n // multiple) * multiple


def key_blocks(i, window, offset, block_q, block_k, num_k) -> tuple:
    """Key blocks [lo, hi) that query block i can see: all that is ever computed for it."""
    first = 0 if window is None else jnp.maximum(i * block_q + offset - window + 1, 0) // block_k
    last = (i * block_q + block_q - 1 + offset) // block_k + 1
    return first, jnp.clip(last, first, num_k)


def _query_blocks(j, window, offset, block_q, block_k, num_q):
    """Query blocks [lo, hi) that can see key block j: the transpose of `key_blocks`."""
    first = jnp.clip((j * block_k - offset) // block_q, 0, num_q)
    if window is None:
        return first, num_q
    last = -(-(window + j * block_k + block_k - 1 - offset) // block_q)
    return first, jnp.clip(last, first, num_q)


def _is_short(num_q, num_k, window, offset) -> bool:
    """Whether a CPU computes it without loops: few blocks, of a sequence that attends to itself without a window."""
    if jax.default_backend() != "cpu" or window is not None or offset is not None:
        return False
    return max(num_q, num_k) <= SHORT


def _block_of(x, index, size, axis):
    return None if x is None else lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _scores(q_i, k_j, scale):
    return jnp.einsum("bkgqc,bkjc->bkgqj", q_i, k_j, preferred_element_type=jnp.float32) * scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9, 10))
def _blockwise(q, k, v, q_segments, k_segments, window, offset, scale, block_q, block_k, k_len):
    return _forward(q, k, v, q_segments, k_segments, window, offset, scale, block_q, block_k, k_len)


def _forward(q, k, v, q_segments, k_segments, window, offset, scale, block_q, block_k, k_len):
    batch, num_kv, group, q_pad, channels = q.shape
    num_q, num_k = q_pad // block_q, k.shape[2] // block_k
    if _is_short(num_q, num_k, window, offset):
        return short.forward(q, k, v, q_segments, k_segments, scale, block_q, k_len)
    offset = 0 if offset is None else offset

    def query_block(i):
        q_i = _block_of(q, i, block_q, 3)
        q_seg = _block_of(q_segments, i, block_q, 1)

        def step(j, carry):
            acc, top, total = carry
            k_j, v_j = _block_of(k, j, block_k, 2), _block_of(v, j, block_k, 2)
            mask = mask_of(
                block_q, block_k, i * block_q + offset, j * block_k, window, k_len,
                q_seg, _block_of(k_segments, j, block_k, 1),
            )  # fmt: skip
            scores = jnp.where(mask, _scores(q_i, k_j, scale), MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            update = jnp.einsum(
                "bkgqj,bkjc->bkgqc", weights.astype(v.dtype), v_j, preferred_element_type=jnp.float32
            )
            return acc * shrink[..., None] + update, new_top, total * shrink + weights.sum(-1)

        row = (batch, num_kv, group, block_q)
        # Above MASKED, so that a row's weights are 0, not 1, as long as it has seen no key.
        start = (jnp.zeros((*row, channels), jnp.float32), jnp.full(row, MASKED / 2), jnp.zeros(row))
        bounds = key_blocks(i, window, offset, block_q, block_k, num_k)
        acc, top, total = lax.fori_loop(*bounds, step, start)
        seen = total > 0
        safe = jnp.where(seen, total, 1.0)
        return (acc / safe[..., None]).astype(v.dtype), jnp.where(seen, top + jnp.log(safe), MASKED)

    out, lse = lax.map(query_block, jnp.arange(num_q))
    return (
        jnp.moveaxis(out, 0, 3).reshape(batch, num_kv, group, q_pad, channels),
        jnp.moveaxis(lse, 0, 3).reshape(batch, num_kv, group, q_pad),
    )


def _blockwise_fwd(q, k, v, q_segments, k_segments, window, offset, scale, block_q, block_k, k_len):
    out, lse = _forward(q, k, v, q_segments, k_segments, window, offset, scale, block_q, block_k, k_len)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return (out, lse), (q, k, v, q_segments, k_segments, window, offset, out, lse)


def _blockwise_bwd(scale, block_q, block_k, k_len, saved, cotangents):
    q, k = saved[:2]
    dq, dk, dv = _gradients(scale, block_q, block_k, k_len, saved, cotangents, k.dtype)
    return dq.astype(q.dtype), dk, dv, None, None, None, None


def _gradients(scale, block_q, block_k, k_len, saved, cotangents, dtype):
    """dq in float32, dk and dv in `dtype`."""
    q, k, v, q_segments, k_segments, window, offset, out, lse = saved
    d_out, d_lse = cotangents
    batch, num_kv, group, q_pad, channels = q.shape
    num_q, num_k = q_pad // block_q, k.shape[2] // block_k
    delta = apart(d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse
    d_out = d_out.astype(v.dtype)
    if _is_short(num_q, num_k, window, offset):
        dq, dk, dv = short.gradients(
            q, k, v, q_segments, k_segments, lse, d_out, delta, scale, block_q, k_len
        )
        return dq, dk.astype(dtype), dv.astype(dtype)
    offset = 0 if offset is None else offset

    # Scores stand with keys first and queries last, and dq with channels first: no product then needs a transposed
    # copy of anything as large as the scores.
    def key_block(dq, j):
        k_j, v_j = _block_of(k, j, block_k, 2), _block_of(v, j, block_k, 2)
        k_seg, k_turned = _block_of(k_segments, j, block_k, 1), apart(k_j.swapaxes(2, 3))

        def step(i, carry):
            dq, dk_j, dv_j = carry
            q_i, do_i = _block_of(q, i, block_q, 3), _block_of(d_out, i, block_q, 3)
            mask = mask_of(
                block_q, block_k, i * block_q + offset, j * block_k, window, k_len,
                _block_of(q_segments, i, block_q, 1), k_seg,
            )  # fmt: skip
            mask = mask.transpose(0, 1, 4, 2, 3)
            lse_i, delta_i = (_block_of(x, i, block_q, 3)[:, :, None] for x in (lse, delta))
            weights = jnp.exp(jnp.where(mask, _by_key(k_j, q_i) * scale - lse_i, MASKED))
            d_scores = (weights * (_by_key(v_j, do_i) - delta_i) * scale).astype(q.dtype)
            weights = weights.astype(v.dtype)
            dv_j += jnp.einsum("bkjgq,bkgqc->bkjc", weights, do_i, preferred_element_type=jnp.float32)
            dk_j += jnp.einsum("bkjgq,bkgqc->bkjc", d_scores, q_i, preferred_element_type=jnp.float32)
            dq_i = jnp.einsum("bkcj,bkjgq->bkcgq", k_turned, d_scores, preferred_element_type=jnp.float32)
            dq_i += _block_of(dq, i, block_q, 4)
            return lax.dynamic_update_slice_in_dim(dq, dq_i, i * block_q, 4), dk_j, dv_j

        zero = jnp.zeros(k_j.shape, jnp.float32)
        bounds = _query_blocks(j, window, offset, block_q, block_k, num_q)
        dq, dk_j, dv_j = lax.fori_loop(*bounds, step, (dq, zero, zero))
        return dq, (dk_j.astype(dtype), dv_j.astype(dtype))

    dq = jnp.zeros((batch, num_kv, channels, group, q_pad), jnp.float32)
    dq, (dk, dv) = lax.scan(key_block, dq, jnp.arange(num_k))
    dk, dv = (jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in (dk, dv))
    return jnp.moveaxis(dq, 2, -1), dk, dv


def _by_key(k_j, q_i):
    """Products of each key with each query, [B, K, keys, G, queries]."""
    return jnp.einsum("bkjc,bkgqc->bkjgq", k_j, q_i, preferred_element_type=jnp.float32)


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def softmax_scale(channels: int) -> float:
    """1 / sqrt(C)."""
    return 1.0 / math.sqrt(channels)
