"""Ring attention over zig-zag chunks: keys and values travel from device to device, one step before
they are needed.

In each of N steps a device attends to another one's two chunks and merges the result by its
log-sum-exp; meanwhile these chunks are on their way to the next. Pairs of chunks above the
diagonal, outside the window or in other documents are not in the step's loop. The backward pass
goes round once more, the gradients of keys and values behind them: its memory does not grow with N.
Letters as in `context.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import MASKED, SAVED, attention, attention_gradients, visited
from pallas_kernels.loops import expected_share, expected_turns
from zaya_jax.model.placement import Windows

# The pairs of halves (of the device's queries, of the visiting keys) that a step may need; an early
# chunk never sees a late one.
QUERY_HALF, KEY_HALF = ((0, 1, 1), (0, 0, 1))


def chunks_that_meet(segments: Int[Array, "B S"], chunk: int) -> jax.Array:
    """[2N, 2N]: whether two chunks share a document in some row, by the least and greatest of their
    ids.

    Padding, whose id is 0, is separate, so it joins only chunks that both have padding.
    """
    pieces = segments.reshape(segments.shape[0], -1, chunk)
    least = jnp.where(pieces == 0, jnp.iinfo(jnp.int32).max, pieces).min(-1)
    greatest, padded = pieces.max(-1), (pieces == 0).any(-1)
    overlap = (least[:, :, None] <= greatest[:, None]) & (least[:, None] <= greatest[:, :, None])
    return (overlap | (padded[:, :, None] & padded[:, None])).any(0)


def pairs_needed(
    me: Int[Array, ""],
    owner: Int[Array, ""],
    parts: int,
    chunk: int,
    meet: jax.Array | None,
    window: Array | None,
) -> jax.Array:
    """[3]: which of the pairs (QUERY_HALF, KEY_HALF) of the device's chunks and `owner`'s have a
    query that may see a key."""
    q_chunks, k_chunks = (jnp.stack([i, 2 * parts - 1 - i]) for i in (me, owner))
    q, k = q_chunks[jnp.asarray(QUERY_HALF)], k_chunks[jnp.asarray(KEY_HALF)]
    needed = k <= q
    if window is not None:
        needed &= (q - k - 1) * chunk + 1 < window
    if meet is not None:
        needed &= meet[q, k]
    return needed


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def ring_attention(
    q: Float[Array, "B S/N H C"],
    kv: Float[Array, "B S/N K C2"],
    segments: Int[Array, "B S"] | None,
    meet: jax.Array | None,
    window: Int[Array, ""] | None,
    axes: tuple[str, ...],
    parts: int,
    scale: float,
    windows: Windows = (None,),
) -> Float[Array, "B S/N H C"]:
    """Causal attention over the whole sequence; kv holds keys and values side by side.

    A device sends its kv N - 1 times forward; backwards kv N - 1 times and the gradients of kv, in
    float32, N times.
    """
    return _forward(q, kv, segments, meet, window, axes, parts, scale, windows)[0]


def _forward(q, kv, segments, meet, window, axes, parts, scale, windows):
    ring = _Ring(q, segments, meet, window, axes, parts, windows)

    def visit(kv, round_, merged):
        def pair(merged, q_i, k_j, v_j, where, masks):
            before = [_take(x, where[0], ring.chunk) for x in merged]
            after = _merge(before, attention(q_i, k_j, v_j, **masks, scale=scale))
            return tuple(_put(x, part, where[0]) for x, part in zip(merged, after, strict=True))

        return ring.over_pairs(pair, kv, round_, merged)

    merged = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], MASKED))

    def one_round(i, carry):
        kv, merged = carry
        return ring.send(kv), visit(kv, i, merged)

    kv, merged = lax.fori_loop(0, parts - 1, one_round, (kv, merged))
    out, lse = visit(kv, parts - 1, merged)
    return out.astype(q.dtype), lse


def _fwd(q, kv, segments, meet, window, axes, parts, scale, windows):
    out, lse = _forward(q, kv, segments, meet, window, axes, parts, scale, windows)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, kv, segments, meet, window, out, lse)


def _bwd(axes, parts, scale, windows, saved, d_out):
    q, kv, segments, meet, window, out, lse = saved
    ring = _Ring(q, segments, meet, window, axes, parts, windows)

    def visit(kv, round_, dq, d_kv):
        def pair(carry, q_i, k_j, v_j, where, masks):
            dq, d_kv = carry
            saved = tuple(_take(x, where[0], ring.chunk) for x in (out, lse, d_out))
            dq_i, dk_j, dv_j = attention_gradients((q_i, k_j, v_j), saved, **masks, scale=scale)
            dkv_j = jnp.concatenate([dk_j, dv_j], axis=-1)
            return _add(dq, dq_i, where[0]), _add(d_kv, dkv_j, where[1])

        return ring.over_pairs(pair, kv, round_, (dq, d_kv))

    # Gradients are one step behind their keys and values, so that both travel while the step
    # computes.
    dq, nothing = jnp.zeros(q.shape, jnp.float32), jnp.zeros(kv.shape, jnp.float32)
    following = ring.send(kv)
    dq, d_kv = visit(kv, 0, dq, nothing)

    def one_round(i, carry):
        kv, dq, d_kv = carry
        following, arriving = ring.send(kv), ring.send(d_kv)
        dq, added = visit(kv, i, dq, nothing)
        return following, dq, arriving + added

    kv, dq, d_kv = lax.fori_loop(1, parts - 1, one_round, (following, dq, d_kv))
    arriving = ring.send(d_kv)
    dq, added = visit(kv, parts - 1, dq, nothing)
    d_kv = ring.send(arriving + added)
    return dq.astype(q.dtype), d_kv.astype(kv.dtype), None, None, None


ring_attention.defvjp(_fwd, _bwd)


def expected_work(parts: int, chunk: int, windows: Windows) -> tuple[float, float]:
    """Pairs of chunks that a step needs without documents, and the share of their blocks that is
    computed: means over steps, devices and windows, for the cost account."""
    both = np.stack([np.arange(parts), 2 * parts - 1 - np.arange(parts)])
    apart = (both[list(QUERY_HALF), :, None] - both[list(KEY_HALF), None, :]).reshape(-1)
    pairs, blocks = [], []
    for window in windows:
        needed = apart[(apart >= 0) & (window is None or (apart - 1) * chunk + 1 < window)]
        pairs.append(len(needed) / parts**2)
        blocks.append(pairs[-1] * visited(chunk, chunk, needed * chunk, (window,)))
    return float(np.mean(pairs)), float(np.sum(blocks) / np.sum(pairs))


class _Ring:
    """The part that both passes share: the order of visits, and the loop over the pairs of chunks
    that a step needs."""

    def __init__(self, q, segments, meet, window, axes, parts, windows):
        self.q, self.segments, self.meet, self.window = q, segments, meet, window
        self.axes, self.parts, self.chunk = axes, parts, q.shape[1] // 2
        self.expected = expected_work(parts, self.chunk, windows)
        self.me = lax.axis_index(axes)

    def send(self, x):
        return lax.ppermute(x, self.axes, [(i, (i + 1) % self.parts) for i in range(self.parts)])

    def chunk_start(self, half, device):
        """Where a device's early (0) or late (1) chunk begins in the sequence."""
        return jnp.where(half == 0, device, 2 * self.parts - 1 - device) * self.chunk

    def over_pairs(self, pair, kv, round_, carry):
        """carry after pair(carry, q, k, v, their positions, masks) for each needed pair; no
        collectives."""
        chunk, owner = self.chunk, (self.me - round_) % self.parts
        pairs, share = self.expected
        needed = pairs_needed(self.me, owner, self.parts, chunk, self.meet, self.window)
        order = jnp.argsort(~needed, stable=True)

        def next_pair(n, carry):
            i, j = jnp.asarray(QUERY_HALF)[order[n]], jnp.asarray(KEY_HALF)[order[n]]
            q_start, k_start = self.chunk_start(i, self.me), self.chunk_start(j, owner)
            masks = {"window": self.window, "offset": q_start - k_start}
            if self.segments is not None:
                masks["q_segments"] = lax.dynamic_slice_in_dim(self.segments, q_start, chunk, 1)
                masks["k_segments"] = lax.dynamic_slice_in_dim(self.segments, k_start, chunk, 1)
            k_j, v_j = jnp.split(_take(kv, j, chunk), 2, axis=-1)
            with expected_share(share):
                return pair(carry, _take(self.q, i, chunk), k_j, v_j, (i, j), masks)

        with expected_turns(pairs):
            return lax.fori_loop(0, needed.sum(), next_pair, carry)


def _merge(a, b):
    """(out, lse) of all keys, from those of two parts."""
    top = jnp.maximum(a[1], b[1])
    weight_a, weight_b = jnp.exp(a[1] - top), jnp.exp(b[1] - top)
    total = weight_a + weight_b
    out = a[0] * (weight_a / total)[..., None] + b[0] * (weight_b / total)[..., None]
    return out, top + jnp.log(total)


def _take(x, half, chunk):
    return lax.dynamic_slice_in_dim(x, half * chunk, chunk, 1)


def _put(x, part, half):
    return lax.dynamic_update_slice_in_dim(x, part, half * part.shape[1], 1)


def _add(x, part, half):
    return _put(x, _take(x, half, part.shape[1]) + part, half)
