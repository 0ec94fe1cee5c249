"""Attention on a GPU in three kernels: the output, the gradient of queries, those of keys and values.

A program of the first two has a tile of rows: some queries times the heads of their group, so that a key and value
that it loads serve all of them. Keys pass by in blocks, with an online soft-max. A program of the third has a block of
keys, by which the queries pass: the sum over a group's heads is a part of the product, and each gradient is written
once, without atomics. The price is that both backward kernels compute the scores: seven products for five.

Which blocks a tile meets is arithmetic on their bounds; with segments it is asked of the least and the greatest id of
each block (`ranges_of`). Those of which every row sees every key go without a mask, which costs a fifth of the work
there is beside the products.

They take heads of a multiple of 16 channels, up to 256, all in one number format, and sequences of 16 tokens or more
(`suits`); `xla` has the rest. A tile has the largest power of two that divides the heads of a group. Letters as in
`pallas_kernels.attention`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import chip, tiles
from pallas_kernels.attention import xla
from pallas_kernels.attention.reference import MASKED, NO_WINDOW

LOG2E = math.log2(math.e)
FORMATS = (jnp.bfloat16, jnp.float16, jnp.float32)
Met = tuple[Any, Any, Any, Any]  # blocks [lo, hi), and of these [start, end) without a mask


class Tile(NamedTuple):
    """Sizes of a kernel: rows (queries times heads) against keys."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 1


def suits(q, k, v, scale) -> bool:
    """Whether the kernels take these arrays."""
    channels, alike = q.shape[-1], q.dtype == k.dtype == v.dtype
    fits = channels % 16 == 0 and channels <= 256 and min(q.shape[1], k.shape[1]) >= 16
    return fits and alike and q.dtype in FORMATS and scale > 0


def tile_of(kernel: str, channels: int, dtype: Any, block: int | None) -> Tile:
    """The tile of "forward", "queries" or "keys"; with a `block` (tests), of this many rows and keys."""
    if block:
        side = max(1 << (block.bit_length() - 1), 16)
        return Tile(side, side)
    maker, wide = chip.current().maker, jnp.dtype(dtype).itemsize > 2 or channels > 128
    if wide:
        return Tile(32, 32)
    if kernel == "keys":
        return Tile(64, 64)
    return Tile(128, 64, warps=8 if maker == "cuda" else 4)


def forward(q, k, v, q_segments, k_segments, window, offset, *, scale, block) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention`."""
    if not suits(q, k, v, scale):
        return xla.forward(q, k, v, q_segments, k_segments, window, offset, scale=scale, block=block)
    at = _Call("forward", q, k, q_segments, k_segments, window, offset, scale, block)
    return tiles.call(
        functools.partial(_forward, at.shape),
        q, k, v, *at.masks,
        name="attention", grid=at.grid_of_queries, ins=[tiles.WHOLE] * (3 + len(at.masks)), outs=[tiles.WHOLE] * 2,
        out_shapes=[jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
        flops=at.flops(2), warps=at.tile.warps, stages=at.tile.stages,
    )  # fmt: skip


def backward(saved, d_out, d_lse, *, scale, block, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.attention`; dq too is in `dtype`."""
    q, k, v, q_segments, k_segments, window, offset, out, lse = saved
    if not suits(q, k, v, scale):
        return xla.backward(saved, d_out, d_lse, scale=scale, block=block, dtype=dtype)
    d_out = d_out.astype(v.dtype)
    of_masks = (q_segments, k_segments, window, offset, scale, block)
    at = _Call("queries", q, k, *of_masks)
    cotangents = (d_out,) if d_lse is None else (d_out, d_lse)
    given = (q, k, v, out, lse, *cotangents, *at.masks)
    dq, delta = tiles.call(
        functools.partial(_queries, at.shape, d_lse is not None),
        *given,
        name="attention_queries", grid=at.grid_of_queries, ins=[tiles.WHOLE] * len(given), outs=[tiles.WHOLE] * 2,
        out_shapes=[jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)],
        flops=at.flops(3), warps=at.tile.warps, stages=at.tile.stages,
    )  # fmt: skip
    at = _Call("keys", q, k, *of_masks)
    given = (q, k, v, d_out, lse, delta, *at.masks)
    dk, dv = tiles.call(
        functools.partial(_keys, at.shape),
        *given,
        name="attention_keys", grid=at.grid_of_keys, ins=[tiles.WHOLE] * len(given), outs=[tiles.WHOLE] * 2,
        out_shapes=[jax.ShapeDtypeStruct(x.shape, dtype) for x in (k, v)],
        flops=at.flops(4), warps=at.tile.warps, stages=at.tile.stages,
    )  # fmt: skip
    return dq, dk, dv


class _Shape(NamedTuple):
    """What a kernel knows before it runs."""

    q_len: int
    k_len: int
    num_kv: int
    parts: int  # tiles that a group's heads are cut into
    heads: int  # of a group in one tile
    channels: int
    queries: int  # of a tile: rows / heads
    keys: int
    scale: float
    segments: bool
    window: bool
    offset: bool

    @property
    def rows(self):
        return self.queries * self.heads

    @property
    def blocks(self):
        """Blocks of queries, and of keys."""
        return -(-self.q_len // self.queries), -(-self.k_len // self.keys)


class _Call:
    """One kernel's shape, grid, work, and the operands that say what is masked."""

    def __init__(self, kernel, q, k, q_segments, k_segments, window, offset, scale, block):
        self.batch, q_len, num_heads, channels = q.shape
        k_len, num_kv = k.shape[1:3]
        group = num_heads // num_kv
        self.tile = tile_of(kernel, channels, q.dtype, block)
        heads = min(group & -group, self.tile.rows)  # the largest power of two that divides the group
        known = (x is not None for x in (q_segments, window, offset))
        sizes = group // heads, heads, channels, self.tile.rows // heads, self.tile.keys
        self.shape = _Shape(q_len, k_len, num_kv, *sizes, scale, *known)
        self.masks = [x.reshape(1) for x in (window, offset) if x is not None]
        if q_segments is not None:
            q_ranges, k_ranges = (
                ranges_of(q_segments, self.shape.queries),
                ranges_of(k_segments, self.shape.keys),
            )
            self.masks += [q_segments, k_segments, q_ranges, k_ranges]

    @property
    def grid_of_queries(self) -> tuple[int, int]:
        # Neighbours in the grid start together; those of one head would ask for the same keys.
        return self.batch * self.shape.num_kv * self.shape.parts, self.shape.blocks[0]

    @property
    def grid_of_keys(self) -> tuple[int, int]:
        return self.batch * self.shape.num_kv, self.shape.blocks[1]

    def flops(self, products: int) -> float:
        """Of so many products for each block of a causal sequence; what windows and segments save is not known here."""
        at = self.shape
        num_q, num_k = at.blocks
        if at.offset:
            met = num_q * num_k / 2
        else:
            ends = np.minimum(np.arange(1, num_q + 1) * at.queries, at.k_len)
            met = float(np.sum(-(-ends // at.keys)))
        tiles_met = met * self.batch * at.num_kv * at.parts
        return 2.0 * products * tiles_met * at.rows * at.keys * _width(at.channels)


def ranges_of(segments: jax.Array, block: int) -> jax.Array:
    """[B, 3, blocks]: the least and greatest id of each block but for 0, and whether it has 0, which is padding.

    Apart, because padding behind the last document would else stretch a block's range over all of them. There are a
    power of two of them; those behind the sequence meet no other one.
    """
    length = segments.shape[1]
    num = -(-length // block)
    ids = jnp.pad(segments, ((0, 0), (0, num * block - length)), mode="edge").reshape(-1, num, block)
    info = jnp.iinfo(jnp.int32)
    least = jnp.where(ids == 0, info.max, ids).min(-1)
    greatest = jnp.where(ids == 0, info.min, ids).max(-1)
    found = jnp.stack([least, greatest, (ids == 0).any(-1).astype(jnp.int32)], axis=1)
    more = _width(num) - num
    nothing = jnp.asarray([info.max, info.min, 0], jnp.int32)[None, :, None]
    return found if not more else jnp.concatenate([found, jnp.broadcast_to(nothing, (len(ids), 3, more))], 2)


class _Masks:
    """What the operands behind the arrays say: positions, segments, and which blocks meet."""

    def __init__(self, at: _Shape, refs, batch):
        refs = list(refs)
        self.at, self.batch = at, batch
        self.window = refs.pop(0)[0] if at.window else NO_WINDOW
        self.offset = refs.pop(0)[0] if at.offset else 0
        if at.segments:
            self.q_ids, self.k_ids, self.q_ranges, self.k_ranges = refs

    def met_by_queries(self, i) -> Met:
        """Blocks of keys [lo, hi) that block i of queries meets, and of these [start, end) that it sees whole."""
        at = self.at
        first = i * at.queries + self.offset
        last = jnp.minimum((i + 1) * at.queries, at.q_len) - 1 + self.offset
        oldest = jnp.maximum(first - self.window + 1, 0)
        lo = lax.div(oldest, at.keys)
        start = lax.div(jnp.maximum(last - self.window + 1, 0) + at.keys - 1, at.keys)
        hi = lax.div(jnp.clip(last + 1, 0, at.k_len) + at.keys - 1, at.keys)
        hi = jnp.where(oldest < at.k_len, hi, lo)
        end = lax.div(jnp.clip(first + 1, 0, at.k_len), at.keys)
        return self._by_segments(lo, hi, start, end, "q", i)

    def met_by_keys(self, j) -> Met:
        """Blocks of queries [lo, hi) that block j of keys meets, and of these [start, end) that see it whole."""
        at = self.at
        first = j * at.keys - self.offset
        last = jnp.minimum((j + 1) * at.keys, at.k_len) - 1 - self.offset
        earliest = jnp.maximum(first, 0)
        lo = lax.div(earliest, at.queries)
        start = lax.div(jnp.maximum(last, 0) + at.queries - 1, at.queries)
        hi = lax.div(jnp.clip(self.window + last, 0, at.q_len) + at.queries - 1, at.queries)
        hi = jnp.where(earliest < at.q_len, hi, lo)
        end = lax.div(jnp.clip(self.window + first, 0, at.q_len), at.queries)
        return self._by_segments(lo, hi, start, end, "k", j)

    def _by_segments(self, lo, hi, start, end, side, index) -> Met:
        if self.at.segments:
            own, others = (self.q_ranges, self.k_ranges) if side == "q" else (self.k_ranges, self.q_ranges)
            least, greatest, padded = (own[self.batch, n, index] for n in range(3))
            blocks = _steps(others.shape[2])
            leasts, greatests, paddeds = (others[self.batch, n, blocks] for n in range(3))
            meets = (leasts <= greatest) & (least <= greatests) | (padded * paddeds > 0)
            lo = jnp.maximum(lo, jnp.min(jnp.where(meets, blocks, others.shape[2])))
            hi = jnp.minimum(hi, jnp.max(jnp.where(meets, blocks + 1, 0)))
            alike = _one_document(least, greatest, padded) & _one_document(leasts, greatests, paddeds) & meets
            # The last run of blocks of the same document.
            inside = alike & (blocks >= start) & (blocks < end)
            end = jnp.max(jnp.where(inside, blocks + 1, 0))
            start = jnp.max(jnp.where(inside | (blocks >= end), 0, blocks + 1))
        hi = jnp.maximum(hi, lo)
        end = jnp.clip(end, lo, hi)
        return lo, hi, jnp.clip(start, lo, end), end

    def seen(self, queries, keys, q_ids, k_ids) -> jax.Array:
        """Whether these queries see these keys, by their indices; both as columns and rows of one tile."""
        back = queries + self.offset - keys
        seen = (back >= 0) & (keys < self.at.k_len)
        if self.at.window:
            seen &= back < self.window
        return seen & (q_ids == k_ids) if self.at.segments else seen


def _one_document(least, greatest, padded):
    return jnp.where(padded > 0, least > greatest, least == greatest)


def _width(n: int) -> int:
    """The next power of two, of which all tiles are."""
    return 1 << (n - 1).bit_length()


def _steps(n: int) -> jax.Array:
    return lax.iota(jnp.int32, n)


def _over(lo, hi, start, end, step, carry):
    """carry after step(block, carry, masked) of the blocks [lo, hi); those of [start, end) without a mask."""
    before = start - lo

    def edge(n, carry):
        return step(jnp.where(n < before, lo + n, end + n - before), carry, True)

    carry = lax.fori_loop(start, end, lambda n, carry: step(n, carry, False), carry)
    return lax.fori_loop(0, before + hi - end, edge, carry)


class _Rows:
    """A tile's rows: queries times the heads of a group that lie in it."""

    def __init__(self, at: _Shape, batch, head, i):
        n = _steps(at.rows)
        self.at, self.batch = at, batch
        self.tokens = i * at.queries + lax.div(n, at.heads)
        self.heads = head + lax.rem(n, at.heads)
        self.real = self.tokens < at.q_len
        self.whole = at.q_len % at.queries == 0

    def load(self, ref, whole=False) -> jax.Array:
        """[rows, C], or [rows] of an array without channels; zeros behind the sequence."""
        mask = None if whole or self.whole else self.real
        if len(ref.shape) == 3:
            view = ref.at[self.batch, self.tokens, self.heads]
        else:
            channels, kept = _channels(self.at)
            view = ref.at[self.batch, self.tokens[:, None], self.heads[:, None], channels[None]]
            mask = _both(None if mask is None else mask[:, None], kept)
        return tiles.load(view) if mask is None else tiles.load(view, mask=mask, other=0)

    def store(self, ref, x) -> None:
        mask = None if self.whole else self.real
        x = x.astype(ref.dtype)
        if len(ref.shape) == 3:
            tiles.store(ref.at[self.batch, self.tokens, self.heads], x, mask=mask)
            return
        channels, kept = _channels(self.at)
        view = ref.at[self.batch, self.tokens[:, None], self.heads[:, None], channels[None]]
        mask = _both(None if mask is None else mask[:, None], kept)
        tiles.store(view, x, mask=mask if mask is None else jnp.broadcast_to(mask, x.shape))


class _Keys:
    """A block of keys."""

    def __init__(self, at: _Shape, batch, head, j):
        self.at, self.batch, self.head = at, batch, head
        self.tokens = j * at.keys + _steps(at.keys)
        self.real = self.tokens < at.k_len

    def load(self, ref, whole=False) -> jax.Array:
        """[keys, C]; zeros behind the sequence."""
        channels, kept = _channels(self.at)
        mask = _both(None if whole or self.at.k_len % self.at.keys == 0 else self.real[:, None], kept)
        view = ref.at[self.batch, self.tokens[:, None], self.head, channels[None]]
        return tiles.load(view) if mask is None else tiles.load(view, mask=mask, other=0)

    def store(self, ref, x) -> None:
        channels, kept = _channels(self.at)
        mask = _both(None if self.at.k_len % self.at.keys == 0 else self.real[:, None], kept)
        view = ref.at[self.batch, self.tokens[:, None], self.head, channels[None]]
        tiles.store(view, x.astype(ref.dtype), mask=mask if mask is None else jnp.broadcast_to(mask, x.shape))


def _channels(at: _Shape) -> tuple[jax.Array, jax.Array | None]:
    """Indices of a tile's channels, and which of them there are."""
    channels = _steps(_width(at.channels))
    return channels, None if len(channels) == at.channels else (channels < at.channels)[None]


def _both(a, b):
    return b if a is None else a if b is None else a & b


def _place_of_queries(at: _Shape) -> tuple:
    """Batch, key-value head, first query head and block of queries of a program; the last, longest blocks first."""
    n, i = tiles.program_id(0), at.blocks[0] - 1 - tiles.program_id(1)
    head = lax.rem(n, at.num_kv * at.parts)
    return lax.div(n, at.num_kv * at.parts), lax.div(head, at.parts), head * at.heads, i


def _ids(masks: _Masks, of: "_Rows | _Keys") -> jax.Array | None:
    """Segments of rows or keys; what lies behind the sequence is masked by position, or not stored."""
    if not masks.at.segments:
        return None
    ids = masks.q_ids if isinstance(of, _Rows) else masks.k_ids
    return tiles.load(ids.at[masks.batch, of.tokens], mask=of.real, other=0)


def _as(x, column: bool):
    return None if x is None else x[:, None] if column else x[None]


def _forward(at: _Shape, q, k, v, *refs):
    *said, out, lse = refs
    batch, kv_head, head, i = _place_of_queries(at)
    masks, rows = _Masks(at, said, batch), _Rows(at, batch, head, i)
    q_i, q_ids, factor = rows.load(q), _ids(masks, rows), at.scale * LOG2E

    def step(j, carry, masked):
        acc, top, total = carry
        keys = _Keys(at, batch, kv_head, j)
        scores = tiles.dot(q_i, keys.load(k, not masked), transpose_y=True)
        if masked:
            seen = masks.seen(
                rows.tokens[:, None], keys.tokens[None], _as(q_ids, True), _as(_ids(masks, keys), False)
            )
            scores = jnp.where(seen, scores, MASKED)
        # Scores times log2(e), so that a weight is one multiply-add and a power of two.
        new_top = jnp.maximum(top, scores.max(1) * factor)
        weights = jnp.exp2(scores * factor - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        update = tiles.dot(weights.astype(v.dtype), keys.load(v, not masked))
        return acc * shrink[:, None] + update, new_top, total * shrink + weights.sum(1)

    # Above what is masked, so that a row's weights are 0, not 1, as long as it has seen no key.
    lowest = MASKED * min(factor, 1.0) / 2
    start = (
        jnp.zeros((at.rows, _width(at.channels)), jnp.float32),
        jnp.full(at.rows, lowest),
        jnp.zeros(at.rows),
    )
    acc, top, total = _over(*masks.met_by_queries(i), step, start)
    safe = jnp.where(total > 0, total, 1.0)
    rows.store(out, acc / safe[:, None])
    rows.store(lse, jnp.where(total > 0, top / LOG2E + jnp.log(safe), MASKED))


def _weights(scores, lse, factor, seen):
    """exp(scores - lse), 0 where not `seen`."""
    power = scores * factor - lse
    return jnp.exp2(power if seen is None else jnp.where(seen, power, MASKED))


def _queries(at: _Shape, has_d_lse: bool, q, k, v, out, lse, d_out, *refs):
    (d_lse, *said), (dq, delta) = refs[:-2] if has_d_lse else (None, *refs[:-2]), refs[-2:]
    batch, kv_head, head, i = _place_of_queries(at)
    masks, rows = _Masks(at, said, batch), _Rows(at, batch, head, i)
    q_i, d_i, q_ids = rows.load(q), rows.load(d_out), _ids(masks, rows)
    delta_i = (d_i.astype(jnp.float32) * rows.load(out).astype(jnp.float32)).sum(1)
    if d_lse is not None:
        delta_i -= rows.load(d_lse)
    rows.store(delta, delta_i)
    lse_i, factor = rows.load(lse) * LOG2E, at.scale * LOG2E

    def step(j, dq_i, masked):
        keys = _Keys(at, batch, kv_head, j)
        k_j, v_j, seen = keys.load(k, not masked), keys.load(v, not masked), None
        if masked:
            seen = masks.seen(
                rows.tokens[:, None], keys.tokens[None], _as(q_ids, True), _as(_ids(masks, keys), False)
            )
        weights = _weights(tiles.dot(q_i, k_j, transpose_y=True), lse_i[:, None], factor, seen)
        d_scores = weights * (tiles.dot(d_i, v_j, transpose_y=True) - delta_i[:, None])
        return dq_i + tiles.dot(d_scores.astype(q.dtype), k_j)

    dq_i = jnp.zeros((at.rows, _width(at.channels)), jnp.float32)
    rows.store(dq, _over(*masks.met_by_queries(i), step, dq_i) * at.scale)


def _keys(at: _Shape, q, k, v, d_out, lse, delta, *refs):
    *said, dk, dv = refs
    n, j = tiles.program_id(0), tiles.program_id(1)  # the first blocks meet the most queries
    batch, kv_head = lax.div(n, at.num_kv), lax.rem(n, at.num_kv)
    masks, keys = _Masks(at, said, batch), _Keys(at, batch, kv_head, j)
    k_j, v_j, k_ids, factor = keys.load(k), keys.load(v), _ids(masks, keys), at.scale * LOG2E

    def step(part, i, carry, masked):
        dk_j, dv_j = carry
        rows = _Rows(at, batch, (kv_head * at.parts + part) * at.heads, i)
        q_i, d_i = rows.load(q, not masked), rows.load(d_out, not masked)
        lse_i, delta_i = rows.load(lse, not masked) * LOG2E, rows.load(delta, not masked)
        seen = None
        if masked:
            seen = masks.seen(
                rows.tokens[None], keys.tokens[:, None], _as(_ids(masks, rows), False), _as(k_ids, True)
            )
        weights = _weights(tiles.dot(k_j, q_i, transpose_y=True), lse_i[None], factor, seen)
        dv_j += tiles.dot(weights.astype(v.dtype), d_i)
        d_scores = weights * (tiles.dot(v_j, d_i, transpose_y=True) - delta_i[None])
        return dk_j + tiles.dot(d_scores.astype(q.dtype), q_i), dv_j

    met = masks.met_by_keys(j)
    zero = jnp.zeros((at.keys, _width(at.channels)), jnp.float32)
    carry = (zero, zero)
    for part in range(at.parts):
        carry = _over(*met, functools.partial(step, part), carry)
    dk_j, dv_j = carry
    keys.store(dk, dk_j * at.scale)
    keys.store(dv, dv_j)
