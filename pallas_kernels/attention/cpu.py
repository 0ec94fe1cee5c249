"""Attention on a CPU: the loops of `xla` with smaller blocks, and without loops for short
sequences.

A short sequence is a few blocks of queries, each against all the keys that it may see at once. So
there is no online softmax, and no loop, in which a CPU would run element-wise work on one core.
Scores are [block, S], at most four blocks for a sequence; a block's keys end with its queries, so
few masked scores are computed. Letters as in `pallas_kernels.attention`; N = G times the block's
queries, its rows.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import xla
from pallas_kernels.attention.reference import MASKED, mask_of
from pallas_kernels.cpu import row_major, unfused

visited = xla.visited

SHORT = 4  # blocks of queries or keys up to which there are no loops


def forward(
    q, k, v, q_segments, k_segments, window, offset, *, scale, block
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention`."""
    q_len, k_len = q.shape[1], k.shape[1]
    block = block or default_block(max(q_len, k_len))
    if not _is_short(q_len, k_len, window, offset, block):
        return xla.forward(
            q, k, v, q_segments, k_segments, window, offset, scale=scale, block=block
        )
    q, k, v, q_segments, k_segments, (side, _) = xla.arrange(q, k, v, q_segments, k_segments, block)
    out, lse = _forward(q, k, v, q_segments, k_segments, scale, side, k_len)
    return xla.by_token(out)[:, :q_len], xla.by_token(lse[..., None])[:, :q_len, :, 0]


def backward(saved, d_out, d_lse, *, scale, block, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.attention`."""
    q, k, v, q_segments, k_segments, window, offset, out, lse = saved
    q_len, (k_len, num_kv) = q.shape[1], k.shape[1:3]
    block = block or default_block(max(q_len, k_len))
    if not _is_short(q_len, k_len, window, offset, block):
        return xla.backward(saved, d_out, d_lse, scale=scale, block=block, dtype=dtype)
    delta = unfused(d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    delta = delta if d_lse is None else delta - d_lse
    q, k, v, q_segments, k_segments, (side, _) = xla.arrange(q, k, v, q_segments, k_segments, block)
    d_out, lse, delta = (
        xla.by_group(x, num_kv, side) for x in (d_out, lse[..., None], delta[..., None])
    )
    dq, dk, dv = _gradients(
        q,
        k,
        v,
        (q_segments, k_segments),
        lse[..., 0],
        d_out.astype(v.dtype),
        delta[..., 0],
        scale,
        side,
        k_len,
    )
    dk, dv = (x.astype(dtype).transpose(0, 2, 1, 3)[:, :k_len] for x in (dk, dv))
    return xla.by_token(dq)[:, :q_len], dk, dv


def default_block(length: int) -> int:
    """Side of a block of scores: small enough for a core's cache."""
    if length <= 256:
        return 64
    return 128 if length <= 4096 else 256


def _is_short(q_len, k_len, window, offset, block):
    """Whether no loops are needed: few blocks, of a sequence that attends to itself without a
    window."""
    return window is None and offset is None and max(q_len, k_len) <= SHORT * block


def _forward(q, k, v, q_segments, k_segments, scale, block, k_len) -> tuple[jax.Array, jax.Array]:
    """Output [B, K, G, S, C] and log-sum-exp [B, K, G, S] of q [B, K, G, S, C] and k, v [B, K, S,
    C]."""
    outs, sums = [], []
    k, v = row_major(k), row_major(v)
    for start, k_i, v_i, mask in _blocks(q, k, v, q_segments, k_segments, block, k_len):
        products = _products("bknc,bkjc->bknj", _rows(q, start, block), k_i)
        scores = jnp.where(mask, _by_query(products, block) * scale, MASKED)
        # Above MASKED, so that a row without a key has weights of 0, not 1.
        top = jnp.maximum(scores.max(-1), MASKED / 2)
        weights = unfused(jnp.exp(scores - top[..., None]))
        total = weights.sum(-1)
        seen = total > 0
        safe = jnp.where(seen, total, 1.0)
        out = _products("bknj,bkjc->bknc", _merged(weights.astype(v.dtype), 2), v_i)
        outs.append((_by_query(out, block) / safe[..., None]).astype(v.dtype))
        sums.append(jnp.where(seen, top + jnp.log(safe), MASKED))
    return jnp.concatenate(outs, axis=3), jnp.concatenate(sums, axis=3)


def _gradients(q, k, v, segments, lse, d_out, delta, scale, block, k_len):
    """dq, dk and dv in float32, from the arguments and results of `_forward`, and delta as in
    `xla`."""
    # Scores have keys first, and dq has channels first, so no product needs a transposed copy of
    # scores.
    k, v = row_major(k), row_major(v)
    turned = row_major(k.swapaxes(2, 3))
    dqs, dks, dvs = [], [], []
    for start, k_i, v_i, mask in _blocks(q, k, v, segments[0], segments[1], block, k_len):
        q_i, do_i = _rows(q, start, block), _rows(d_out, start, block)
        lse_i, delta_i = (x[:, :, None, :, start : start + block] for x in (lse, delta))
        by_key = (*k_i.shape[:3], -1, block)
        scores = _products("bkjc,bknc->bkjn", k_i, q_i).reshape(by_key) * scale - lse_i
        weights = unfused(jnp.exp(jnp.where(mask.transpose(0, 1, 4, 2, 3), scores, MASKED)))
        d_weights = _products("bkjc,bknc->bkjn", v_i, do_i).reshape(by_key)
        d_scores = unfused(weights * (d_weights - delta_i) * scale).astype(q.dtype)
        weights, d_scores = _merged(weights.astype(v.dtype), 3), _merged(d_scores, 3)
        dvs.append(_products("bkjn,bknc->bkjc", weights, do_i))
        dks.append(_products("bkjn,bknc->bkjc", d_scores, q_i))
        dq = _products("bkcj,bkjn->bkcn", turned[..., : k_i.shape[2]], d_scores)
        dqs.append(dq.reshape(*dq.shape[:3], -1, block))
    dq = jnp.concatenate(dqs, axis=-1)
    return row_major(unfused(dq).transpose(0, 1, 3, 4, 2)), _sum(dks, k), _sum(dvs, k)


def _blocks(q, k, v, q_segments, k_segments, block, k_len):
    """For each block of queries: its start, the keys and values up to its last one, and the
    mask."""
    for start in range(0, q.shape[3], block):
        end = min(start + block, k.shape[2])
        own, seen = (
            None if x is None else x[:, a:b]
            for x, a, b in ((q_segments, start, start + block), (k_segments, 0, end))
        )
        yield (
            start,
            k[:, :, :end],
            v[:, :, :end],
            mask_of(block, end, start, 0, None, k_len, own, seen),
        )


def _rows(x, start, block):
    """[B, K, G, S, C] to the block's rows [B, K, N, C]."""
    return _merged(x[:, :, :, start : start + block], 2)


def _merged(x, axis):
    """x with this axis and the next one as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _by_query(x, block):
    """[B, K, N, ..] to [B, K, G, block, ..]."""
    return x.reshape(*x.shape[:2], -1, block, *x.shape[3:])


def _products(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _sum(parts, k):
    """The sum of each block of queries' contribution to the first keys."""
    length = k.shape[2]
    return sum(jnp.pad(p, ((0, 0), (0, 0), (0, length - p.shape[2]), (0, 0))) for p in parts)
