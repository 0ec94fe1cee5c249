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
    block = block or default_block(max(q.shape[1], k.shape[1]))
    loops = _forward if _is_short(q, k, window, offset, block) else None
    masks = q_segments, k_segments, window, offset
    return xla.forward(q, k, v, *masks, scale=scale, block=block, loops=loops)


def backward(saved, d_out, d_lse, *, scale, block, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.attention`."""
    q, k, *_ = saved
    block = block or default_block(max(q.shape[1], k.shape[1]))
    options = {"scale": scale, "block": block, "dtype": dtype}
    if _is_short(q, k, saved.window, saved.offset, block):
        options |= {"loops": _gradients, "before_sum": unfused}
    return xla.backward(saved, d_out, d_lse, **options)


def default_block(length: int) -> int:
    """Side of a block of scores: small enough for a core's cache."""
    if length <= 256:
        return 64
    return 128 if length <= 4096 else 256


def _is_short(q, k, window, offset, block):
    """Whether no loops are needed: few blocks, of a sequence that attends to itself without a
    window."""
    length = max(q.shape[1], k.shape[1])
    return window is None and offset is None and length <= SHORT * block


def _forward(
    q, k, v, q_segments, k_segments, _window, _offset, scale, sides
) -> tuple[jax.Array, jax.Array]:
    """Output [B, K, G, S, C] and log-sum-exp [B, K, G, S] of q [B, K, G, S, C] and k, v [B, K, S,
    C]."""
    block, _, k_len = sides
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


def _gradients(saved, d_out, scale, sides, dtype):
    """dq in float32, dk and dv in `dtype`, with delta as in `xla`."""
    block, _, k_len = sides
    q, k, v, q_segments, k_segments, _, _, lse, delta = saved
    # Scores have keys first, and dq has channels first, so no product needs a transposed copy of
    # scores.
    k, v = row_major(k), row_major(v)
    turned = row_major(k.swapaxes(2, 3))
    dqs, dks, dvs = [], [], []
    for start, k_i, v_i, mask in _blocks(q, k, v, q_segments, k_segments, block, k_len):
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
    dk, dv = (_sum(parts, k).astype(dtype) for parts in (dks, dvs))
    return row_major(unfused(dq).transpose(0, 1, 3, 4, 2)), dk, dv


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
