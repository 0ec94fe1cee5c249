"""Attention on a GPU in three kernels: the output, the gradient of queries, those of keys and
values.

    attention_forward, a program for each tile i of rows (`_forward_body`): for each block j of keys that it meets
        scores = q_i k_j^T, masked if j lies on an edge
        weights = exp(scores - top), where top is each row's greatest score so far
        out_i = out_i + weights v_j, and total = total + sum of weights, both first shrunk to the new top
      then the output is out_i / total, and the log-sum-exp (lse) top + log(total)
    attention_queries, a program for each tile i too (`_queries_body`): for the same blocks, with
        delta = sum(d_out_i out_i) - d_lse
        weights = exp(q_i k_j^T - lse)
        d_scores = weights (d_out_i v_j^T - delta)
        dq_i = dq_i + d_scores k_j
    attention_keys, a program for each block j of keys (`_keys_body`): for each tile i of rows that it meets
        weights and d_scores as above, transposed
        dv_j = dv_j + weights^T d_out_i, and dk_j = dk_j + d_scores^T q_i

The rows of a tile are some queries times the heads of their group, so that a key and value that a
program loads serve all of them, and in the third kernel the sum over a group's heads is a part of
the product: each gradient is written once, without atomics. The price is that both backward kernels
compute the scores: seven products for five.

Which blocks a tile meets is arithmetic on their bounds (`_Masks.met_by_queries`); with segments it
is asked of the least and the greatest id of each block (`ranges_of`). Of the blocks [lo, hi), those
of [start, end) go first, without a mask, since every row sees every key in them; then those on
either edge, with one (`_over_blocks`). The scale and log2(e) are one factor of the exponential's
argument, since GPUs have 2 ** x.

They take heads of a multiple of 16 channels, up to 256, all in one number format (on NVIDIA's chips
not float32), and sequences of 16 tokens or more (`suits`); `xla` has the rest. A tile has the
largest power of two that divides the heads of a group. Letters as in `pallas_kernels.attention`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy import typing as npt

from pallas_kernels import tiles
from pallas_kernels.attention import xla
from pallas_kernels.attention.reference import MASKED, NO_WINDOW
from pallas_kernels.rows import LOG2E, HeadRows, Tile, facing, flat, flat_like, formats

Met = tuple[Any, Any, Any, Any]  # blocks [lo, hi), and of these [start, end) without a mask


def suits(q, k, v, scale) -> bool:
    """Whether the kernels take these arrays; NVIDIA's matrix units take no float32 whole, and
    registers would spill."""
    channels, alike = q.shape[-1], q.dtype == k.dtype == v.dtype
    fits = channels % 16 == 0 and channels <= 256 and min(q.shape[1], k.shape[1]) >= 16
    return fits and alike and q.dtype in formats() and scale > 0


def tile_of(kernel: str, channels: int, dtype: Any, block: int | None) -> Tile:
    """The tile of "forward", "queries" or "keys"; with a `block` (tests), of this many rows and
    keys.

    None spills registers, and at most 2% of the work is behind the diagonal at 4,096 tokens: half a
    tile's queries and half its keys against half the sequence. benchmarks/kernels.md has other
    tiles' results.
    """
    if block:
        side = max(1 << (block.bit_length() - 1), 16)
        return Tile(side, side)
    return Tile.of(f"attention_{kernel}", channels, dtype)


def visited(q_len: int, k_len: int, starts: npt.ArrayLike, windows: Sequence[int | None]) -> float:
    """See `xla.visited`: here in blocks that are small compared with any sequence."""
    return xla.visited(q_len, k_len, starts, windows, block=64)


def forward(
    q, k, v, q_segments, k_segments, window, offset, *, scale, block
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention`."""
    if not suits(q, k, v, scale):
        return xla.forward(
            q, k, v, q_segments, k_segments, window, offset, scale=scale, block=block
        )
    call = _Call("forward", q, k, q_segments, k_segments, window, offset, scale, block)
    inputs, results = {"q": q, "k": k, "v": v}, [(q, v.dtype), (call.sums, jnp.float32)]
    out, lse = call.run(_forward_body, call.grid_of_queries, inputs, results, 2)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def backward(saved, d_out, d_lse, *, scale, block, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.attention`; dq too is in `dtype`."""
    q, k, v, q_segments, k_segments, window, offset, out, lse = saved
    if not suits(q, k, v, scale):
        return xla.backward(saved, d_out, d_lse, scale=scale, block=block, dtype=dtype)
    d_out = d_out.astype(v.dtype)
    masks = q_segments, k_segments, window, offset, scale, block
    call = _Call("queries", q, k, *masks)
    inputs = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}
    results = [(q, dtype), (call.sums, jnp.float32)]
    dq, delta = call.run(_queries_body, call.grid_of_queries, inputs, results, 3)
    call = _Call("keys", q, k, *masks)
    inputs = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": lse, "delta": delta}
    dk, dv = call.run(_keys_body, call.grid_of_keys, inputs, [(k, dtype), (v, dtype)], 4)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


class _Shape(NamedTuple):
    """The static sizes of a kernel."""

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
    """One kernel's shape, grid and work, and the operands of its masks."""

    def __init__(self, kernel, q, k, q_segments, k_segments, window, offset, scale, block):
        self.name, (self.batch, q_len, num_heads, channels) = f"attention_{kernel}", q.shape
        k_len, num_kv = k.shape[1:3]
        group = num_heads // num_kv
        self.sums = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
        self.tile = tile_of(kernel, channels, q.dtype, block)
        heads = self.tile.heads_of(group)
        known = (x is not None for x in (q_segments, window, offset))
        sizes = group // heads, heads, channels, self.tile.rows // heads, self.tile.keys
        self.shape = _Shape(q_len, k_len, num_kv, *sizes, scale, *known)
        bounds = jax.tree.map(lambda x: x.reshape(1), (window, offset))
        ranges: Any = (None, None)
        if q_segments is not None:
            ranges = (
                ranges_of(q_segments, self.shape.queries),
                ranges_of(k_segments, self.shape.keys),
            )
        self.masks = {"bounds": bounds, "ids": (q_segments, k_segments), "ranges": ranges}

    def run(self, body, grid, inputs, results, products) -> Any:
        """body(shape, operands, results), arrays as [B, tokens times heads, C] or without C: no
        copy."""
        return tiles.call(
            functools.partial(body, self.shape),
            flat(**inputs) | self.masks,
            name=self.name,
            grid=grid,
            out_shapes=[flat_like(x.shape, to) for x, to in results],
            work=self.work(products),
            warps=self.tile.warps,
            stages=self.tile.stages,
        )

    @property
    def grid_of_queries(self) -> tuple[int, int]:
        # Neighbours in the grid start together; those of one head would ask for the same keys.
        return self.batch * self.shape.num_kv * self.shape.parts, self.shape.blocks[0]

    @property
    def grid_of_keys(self) -> tuple[int, int]:
        return self.batch * self.shape.num_kv, self.shape.blocks[1]

    def work(self, products: int) -> tiles.Work:
        """That of this many products for each block of a causal sequence, and at most of all
        blocks.

        Blocks that segments leave out are not known before they come.
        """
        shape = self.shape
        num_q, num_k = shape.blocks
        ends = np.minimum(np.arange(1, num_q + 1) * shape.queries, shape.k_len)
        met, most = float(np.sum(-(-ends // shape.keys))), num_q * num_k
        each = (
            2.0
            * products
            * self.batch
            * shape.num_kv
            * shape.parts
            * shape.rows
            * shape.keys
            * tiles.power(shape.channels)
        )
        if not shape.offset and not shape.window:
            return tiles.Work(each * met)
        return tiles.Work(each * (most / 2 if shape.offset else met), each * most)


def ranges_of(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each block, [B, blocks]: the least and greatest id but for 0, and whether it has 0, which
    is padding.

    Apart, because padding behind the last document would else stretch a block's range over all of
    them. There are a power of two of them; those behind the sequence are like its end.
    """
    batch, length = segments.shape
    more = tiles.power(-(-length // block)) * block - length
    ids = jnp.pad(segments, ((0, 0), (0, more)), mode="edge").reshape(batch, -1, block)
    info = jnp.iinfo(jnp.int32)
    least, greatest = (
        jnp.where(ids == 0, info.max, ids).min(-1),
        jnp.where(ids == 0, info.min, ids).max(-1),
    )
    # not one array: that is one launch more
    return (least, greatest, (ids == 0).any(-1).astype(jnp.int32))


class _Masks:
    """The masks among the operands: positions, segments, and which blocks meet."""

    def __init__(self, shape: _Shape, refs, batch):
        self.shape, self.batch = shape, batch
        window, offset = refs["bounds"]
        self.window = window[0] if shape.window else NO_WINDOW
        self.offset = offset[0] if shape.offset else 0
        self.q_ids, self.k_ids = refs["ids"]
        self.q_ranges, self.k_ranges = refs["ranges"]

    def met_by_queries(self, i) -> Met:
        """Blocks of keys [lo, hi) that block i of queries meets, and of these [start, end) that it
        sees whole."""
        shape = self.shape
        first = i * shape.queries + self.offset
        last = jnp.minimum((i + 1) * shape.queries, shape.q_len) - 1 + self.offset
        oldest = jnp.maximum(first - self.window + 1, 0)
        lo = lax.div(oldest, shape.keys)
        start = lax.div(jnp.maximum(last - self.window + 1, 0) + shape.keys - 1, shape.keys)
        hi = lax.div(jnp.clip(last + 1, 0, shape.k_len) + shape.keys - 1, shape.keys)
        hi = jnp.where(oldest < shape.k_len, hi, lo)
        end = lax.div(jnp.clip(first + 1, 0, shape.k_len), shape.keys)
        return self._by_segments(lo, hi, start, end, i, self.q_ranges, self.k_ranges)

    def met_by_keys(self, j) -> Met:
        """Blocks of queries [lo, hi) that block j of keys meets, and of these [start, end) that see
        it whole."""
        shape = self.shape
        first = j * shape.keys - self.offset
        last = jnp.minimum((j + 1) * shape.keys, shape.k_len) - 1 - self.offset
        earliest = jnp.maximum(first, 0)
        lo = lax.div(earliest, shape.queries)
        start = lax.div(jnp.maximum(last, 0) + shape.queries - 1, shape.queries)
        hi = lax.div(
            jnp.clip(self.window + last, 0, shape.q_len) + shape.queries - 1, shape.queries
        )
        hi = jnp.where(earliest < shape.q_len, hi, lo)
        end = lax.div(jnp.clip(self.window + first, 0, shape.q_len), shape.queries)
        return self._by_segments(lo, hi, start, end, j, self.k_ranges, self.q_ranges)

    def _by_segments(self, lo, hi, start, end, index, ranges, other_ranges) -> Met:
        """Of these blocks, those that may share a document with block `index`, and those of them
        that are of its one document; `ranges` are of its own side (`ranges_of`)."""
        if self.shape.segments:
            least, greatest, padded = (x[self.batch, index] for x in ranges)
            num = other_ranges[0].shape[1]
            blocks = tiles.steps(num)
            leasts, greatests, paddeds = (x[self.batch, blocks] for x in other_ranges)
            meets = (leasts <= greatest) & (least <= greatests) | (padded * paddeds > 0)
            lo = jnp.maximum(lo, jnp.min(jnp.where(meets, blocks, num)))
            hi = jnp.minimum(hi, jnp.max(jnp.where(meets, blocks + 1, 0)))
            alike = (
                _one_document(least, greatest, padded)
                & _one_document(leasts, greatests, paddeds)
                & meets
            )
            # The last run of blocks of the same document.
            inside = alike & (blocks >= start) & (blocks < end)
            end = jnp.max(jnp.where(inside, blocks + 1, 0))
            start = jnp.max(jnp.where(inside | (blocks >= end), 0, blocks + 1))
        hi = jnp.maximum(hi, lo)
        end = jnp.clip(end, lo, hi)
        return lo, hi, jnp.clip(start, lo, end), end

    def seen(self, rows, keys, q_ids, k_ids, by_row) -> jax.Array:
        """Whether each row sees each key, of a tile as `facing` has it."""
        query, key = facing(rows.tokens, keys.tokens, by_row)
        back = query + self.offset - key
        seen = (back >= 0) & (key < self.shape.k_len)
        if self.shape.window:
            seen &= back < self.window
        if q_ids is not None:
            query, key = facing(q_ids, k_ids, by_row)
            seen &= query == key
        return seen


def _one_document(least, greatest, padded):
    return jnp.where(padded > 0, least > greatest, least == greatest)


def _over_blocks(lo, hi, start, end, step, carry):
    """carry after step(block, carry, masked) of the blocks [lo, hi); those of [start, end) without
    a mask."""
    before = start - lo

    def edge(n, carry):
        return step(jnp.where(n < before, lo + n, end + n - before), carry, True)

    carry = lax.fori_loop(start, end, lambda n, carry: step(n, carry, False), carry)
    return lax.fori_loop(0, before + hi - end, edge, carry)


def _queries_of(shape: _Shape, batch, head, i) -> HeadRows:
    """Block i of queries, each with the heads of its tile, from this one on."""
    n, num_heads = tiles.steps(shape.rows), shape.num_kv * shape.parts * shape.heads
    tokens = i * shape.queries + lax.div(n, shape.heads)
    real = tokens < shape.q_len if shape.q_len % shape.queries else None
    return HeadRows(batch, tokens, head + lax.rem(n, shape.heads), num_heads, shape.channels, real)


def _keys_of(shape: _Shape, batch, head, j) -> HeadRows:
    """Block j of a head's keys, or values."""
    tokens = j * shape.keys + tiles.steps(shape.keys)
    real = tokens < shape.k_len if shape.k_len % shape.keys else None
    return HeadRows(batch, tokens, head, shape.num_kv, shape.channels, real)


def _place_of_queries(shape: _Shape) -> tuple:
    """Batch, key-value head, first query head and block of queries of a program; the last, longest
    blocks first."""
    n, i = tiles.program_id(0), shape.blocks[0] - 1 - tiles.program_id(1)
    head = lax.rem(n, shape.num_kv * shape.parts)
    return lax.div(n, shape.num_kv * shape.parts), lax.div(head, shape.parts), head * shape.heads, i


def _forward_body(shape: _Shape, refs, out, lse):
    q, k, v = refs["q"], refs["k"], refs["v"]
    batch, kv_head, head, i = _place_of_queries(shape)
    masks, rows = _Masks(shape, refs, batch), _queries_of(shape, batch, head, i)
    q_i, q_ids, factor = rows.load(q), rows.ids(masks.q_ids), shape.scale * LOG2E

    def step(j, carry, masked):
        acc, top, total = carry
        keys = _keys_of(shape, batch, kv_head, j)
        scores = tiles.dot(q_i, keys.load(k, inner=not masked), transpose_y=True)
        if masked:
            seen = masks.seen(rows, keys, q_ids, keys.ids(masks.k_ids), by_row=True)
            scores = jnp.where(seen, scores, MASKED)
        # Scores times log2(e), so that a weight is one multiply-add and a power of two.
        new_top = jnp.maximum(top, scores.max(1) * factor)
        weights = tiles.exp2(scores, factor, new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        update = tiles.dot(tiles.narrow(weights, v.dtype), keys.load(v, inner=not masked))
        return acc * shrink[:, None] + update, new_top, total * shrink + weights.sum(1)

    # Above masked scores, so that a row's weights are 0, not 1, as long as it has seen no key.
    lowest = MASKED * min(factor, 1.0) / 2
    start = (
        jnp.zeros((shape.rows, tiles.power(shape.channels)), jnp.float32),
        jnp.full(shape.rows, lowest),
        jnp.zeros(shape.rows),
    )
    acc, top, total = _over_blocks(*masks.met_by_queries(i), step, start)
    safe = jnp.where(total > 0, total, 1.0)
    rows.store(out, acc / safe[:, None])
    rows.store(lse, jnp.where(total > 0, top / LOG2E + jnp.log(safe), MASKED))


def _weights(scores, lse, factor, seen):
    """exp(scores - lse), 0 where not `seen`."""
    weights = tiles.exp2(scores, factor, lse)
    return weights if seen is None else jnp.where(seen, weights, 0)


def _queries_body(shape: _Shape, refs, dq, delta):
    q, k, v = refs["q"], refs["k"], refs["v"]
    batch, kv_head, head, i = _place_of_queries(shape)
    masks, rows = _Masks(shape, refs, batch), _queries_of(shape, batch, head, i)
    q_i, d_i, q_ids = rows.load(q), rows.load(refs["d_out"]), rows.ids(masks.q_ids)
    delta_i = (d_i.astype(jnp.float32) * rows.load(refs["out"]).astype(jnp.float32)).sum(1)
    if refs["d_lse"] is not None:
        delta_i -= rows.load(refs["d_lse"])
    rows.store(delta, delta_i)
    lse_i, factor = rows.load(refs["lse"]) * LOG2E, shape.scale * LOG2E

    def step(j, dq_i, masked):
        keys = _keys_of(shape, batch, kv_head, j)
        k_j, v_j, seen = keys.load(k, inner=not masked), keys.load(v, inner=not masked), None
        if masked:
            seen = masks.seen(rows, keys, q_ids, keys.ids(masks.k_ids), by_row=True)
        weights = _weights(tiles.dot(q_i, k_j, transpose_y=True), lse_i[:, None], factor, seen)
        d_scores = weights * (tiles.dot(d_i, v_j, transpose_y=True) - delta_i[:, None])
        return dq_i + tiles.dot(tiles.narrow(d_scores, q.dtype), k_j)

    dq_i = jnp.zeros((shape.rows, tiles.power(shape.channels)), jnp.float32)
    rows.store(dq, _over_blocks(*masks.met_by_queries(i), step, dq_i) * shape.scale)


def _keys_body(shape: _Shape, refs, dk, dv):
    q, k, v, d_out, lse, delta = (refs[name] for name in ("q", "k", "v", "d_out", "lse", "delta"))
    n, j = tiles.program_id(0), tiles.program_id(1)  # the first blocks meet the most queries
    batch, kv_head = lax.div(n, shape.num_kv), lax.rem(n, shape.num_kv)
    masks, keys = _Masks(shape, refs, batch), _keys_of(shape, batch, kv_head, j)
    k_j, v_j, k_ids, factor = keys.load(k), keys.load(v), keys.ids(masks.k_ids), shape.scale * LOG2E

    def step(part, i, carry, masked):
        dk_j, dv_j = carry
        rows = _queries_of(shape, batch, (kv_head * shape.parts + part) * shape.heads, i)
        q_i, d_i = rows.load(q, inner=not masked), rows.load(d_out, inner=not masked)
        lse_i, delta_i = (
            rows.load(lse, inner=not masked) * LOG2E,
            rows.load(delta, inner=not masked),
        )
        seen = None
        if masked:
            seen = masks.seen(rows, keys, rows.ids(masks.q_ids), k_ids, by_row=False)
        weights = _weights(tiles.dot(k_j, q_i, transpose_y=True), lse_i[None], factor, seen)
        dv_j += tiles.dot(tiles.narrow(weights, v.dtype), d_i)
        d_scores = weights * (tiles.dot(v_j, d_i, transpose_y=True) - delta_i[None])
        return dk_j + tiles.dot(tiles.narrow(d_scores, q.dtype), q_i), dv_j

    met = masks.met_by_keys(j)
    zero = jnp.zeros((shape.keys, tiles.power(shape.channels)), jnp.float32)
    carry = (zero, zero)
    for part in range(shape.parts):
        carry = _over_blocks(*met, functools.partial(step, part), carry)
    dk_j, dv_j = carry
    keys.store(dk, dk_j * shape.scale)
    keys.store(dv, dv_j)
