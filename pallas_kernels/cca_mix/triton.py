"""CCA's mixing on a GPU: one kernel from projected columns to queries and keys, three for the
gradients.

A program has some tokens of one head: it loads them as often as there are taps, and the heads of
its means, whose programs run at the same time. Values between the two convolutions, and up to the
norm, stay in registers.

    mix            columns → q, k
    mix_sums       the gradient of the norm's input, from dq and dk; all before it is computed again
    mix_columns    from that, the columns' own, by both convolutions backwards and the means; shares of the taps' of
                   channels. The columns behind those of queries and keys (values) are copied, so that the gradient of
                   all columns is one array, written once
    mix_taps       shares of the gradient of the taps of heads, one of each of `splits` parts of the tokens

Nothing is added atomically; XLA adds up the shares. The rotation turns pairs of channels half a
table apart, and a tile cannot be cut once it is in registers: so it is made of blocks of channels,
each as wide as that half.

They take heads of 16 to 256 channels, a power of two, and one table that turns a power of two of
them (`suits`); `xla` has the rest. Letters as in `pallas_kernels.cca_mix`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import chip, tiles
from pallas_kernels.cca_mix.xla import NORM_FLOOR

TOKENS = 64  # of a program
FORMATS = (jnp.bfloat16, jnp.float16, jnp.float32)


class _Tile(NamedTuple):
    threads: int
    # Parts of all tokens that `mix_taps` sums apart: each writes as much as the taps of heads, 1.3
    # MB of float32 at ZAYA1's size. 26 are 520 programs of its 20 taps, nearly four for each of
    # NVIDIA's 132 multiprocessors.
    splits: int = 0


class _Shape(NamedTuple):
    """The static sizes of the kernels."""

    batch: int
    length: int
    heads: int  # of queries
    num_kv: int
    channels: int
    width: int  # of all columns
    t0: int
    t1: int
    half: int  # pairs of channels that turn
    segments: bool
    dtype: Any

    @property
    def all_heads(self) -> int:
        return self.heads + self.num_kv

    @property
    def group(self) -> int:
        return self.heads // self.num_kv

    @property
    def tokens(self) -> int:
        return TOKENS if self.channels <= 128 else TOKENS // 2

    @property
    def blocks(self) -> int:
        """Of tokens, in a row."""
        return -(-self.length // self.tokens)

    @property
    def wide(self) -> int:
        """Channels of a block."""
        return self.half or self.channels

    def flops(self, products: int) -> float:
        """Those of this many products of all tokens with a tap."""
        return (
            2.0
            * self.batch
            * self.blocks
            * self.tokens
            * self.all_heads
            * self.channels**2
            * products
        )

    def bytes(self, passes: float) -> float:
        """Those of this many passes over the columns of queries and keys."""
        return (
            passes * self.batch * self.length * self.all_heads * self.channels * self.dtype.itemsize
        )


def suits(
    columns, before, by_channel, by_head, bias, temperature, rope, segments, mean_q, dtype
) -> bool:
    """Whether the kernels take these arrays."""
    channels = by_channel.shape[2]
    fits = (
        channels == tiles.power(channels)
        and 16 <= channels <= 256
        and columns.shape[2] % channels == 0
    )
    fits &= columns.size > 0 and all(table.shape[:2] == columns.shape[:2] for _, table in rope)
    turned = [table.shape[-1] // 2 for _, table in rope]
    turns = all(16 <= half == tiles.power(half) for half in turned) and len(rope) <= 1
    alone = before is None and mean_q is None
    return alone and fits and turns and columns.dtype == dtype and dtype in FORMATS


def mix(
    columns, before, by_channel, by_head, bias, temperature, rope, segments, mean_q, dtype
) -> tuple:
    """See `pallas_kernels.cca_mix`."""
    del before, mean_q
    (num_taps, all_heads, channels), num_kv = by_channel.shape, temperature.size
    reach = num_taps + by_head.shape[0] - 2
    half = rope[0][1].shape[-1] // 2 if rope else 0
    batch, length, width = columns.shape
    at = _Shape(
        batch,
        length,
        all_heads - num_kv,
        num_kv,
        channels,
        width,
        num_taps - 1,
        by_head.shape[0] - 1,
        half,
        segments is not None,
        jnp.dtype(dtype),
    )
    own = None if segments is None else segments[:, reach:]
    return _mix(
        at, columns, by_channel, by_head, bias, temperature, rope[0][1] if rope else None, own
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(at, columns, by_channel, by_head, bias, temperature, table, segments):
    return _mix_fwd(at, columns, by_channel, by_head, bias, temperature, table, segments)[0]


def _mix_fwd(at, columns, by_channel, by_head, bias, temperature, table, segments):
    saved = columns, by_channel, by_head, bias, temperature, table, segments
    q, k = _call(
        at,
        _forward,
        saved,
        (),
        "mix",
        (at.all_heads, at.blocks, at.batch),
        [
            jax.ShapeDtypeStruct((at.batch, at.length, heads, at.channels), at.dtype)
            for heads in (at.heads, at.num_kv)
        ],
        flops=at.flops(at.t1 + 1),
        passes=(1, 1),
    )
    return (q, k, columns[..., at.all_heads * at.channels :]), saved


def _mix_bwd(at, saved, d):
    columns, (d_q, d_k, d_rest) = saved[0], d
    packed, all_tokens = at.all_heads * at.channels, at.batch * at.blocks
    wide = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    d_sums, d_scales = _call(
        at,
        _sums,
        saved,
        (d_q, d_k),
        "mix_sums",
        (at.all_heads, at.blocks, at.batch),
        [
            jax.ShapeDtypeStruct((*columns.shape[:2], packed), at.dtype),
            wide((at.all_heads, all_tokens)),
        ],
        flops=at.flops(at.t1 + 1),
        passes=(2, 1),
    )
    d_columns, of_channels = _call(
        at,
        _columns,
        saved,
        (d_sums, d_rest),
        "mix_columns",
        (at.width // at.channels, at.blocks, at.batch),
        [
            jax.ShapeDtypeStruct(columns.shape, columns.dtype),
            wide((all_tokens * (at.t0 + 1), packed)),
        ],
        flops=at.flops((at.t0 + 1) * (at.t1 + 1)),
        passes=(2 + at.width / packed - 1, at.width / packed),
    )
    taps, splits = (at.t1 + 1) * at.all_heads, tiles.tile_of(_Tile, "mix_taps").splits
    of_heads, of_biases = _call(
        at,
        functools.partial(_taps, splits),
        saved,
        (d_sums,),
        "mix_taps",
        (taps, splits),
        [wide((splits, taps, at.channels, at.channels)), wide((splits, taps, at.channels))],
        flops=at.flops(at.t1 + 1),
        passes=(2, 0),
    )
    shape = at.t1 + 1, at.all_heads, at.channels
    d_bias = of_biases.reshape(splits, *shape)[:, -1].sum(0)
    d_by_head = of_heads.reshape(splits, *shape, at.channels).sum(0)
    d_by_channel = of_channels.reshape(all_tokens, at.t0 + 1, at.all_heads, at.channels).sum(0)
    d_temperature = d_scales[at.heads :].sum(1)
    return d_columns, d_by_channel, d_by_head, d_bias, d_temperature, None, None


_mix.defvjp(_mix_fwd, _mix_bwd)


def _call(at, body, saved, gradients, name, grid, out_shapes, *, flops, passes):
    columns, by_channel, by_head, bias, temperature, table, segments = saved
    scales = jnp.concatenate([jnp.ones((at.heads,), jnp.float32), temperature])
    given = {
        "x": columns,
        "by_channel": by_channel,
        "by_head": by_head.astype(at.dtype),
        "bias": bias,
        "scales": scales,
        "table": table,
        "segments": segments,
    }
    given |= {f"d{i}": d for i, d in enumerate(gradients)}
    given = {name: x for name, x in given.items() if x is not None and x.size}
    others = sum(
        given[n].size * given[n].dtype.itemsize
        for n in ("by_head", "table", "segments")
        if n in given
    )
    shares = sum(x.size * 4 for x in out_shapes if x.dtype == jnp.float32 and x.ndim != 3)

    def run(*refs):
        body(at, _Refs(at, dict(zip(given, refs, strict=False))), *refs[len(given) :])

    return tiles.call(
        run,
        *given.values(),
        name=name,
        grid=grid,
        out_shapes=out_shapes,
        work=tiles.Work(flops, moved=(at.bytes(passes[0]) + others, at.bytes(passes[1]) + shares)),
        warps=tiles.tile_of(_Tile, name).threads // chip.current().lanes,
    )


class _Refs:
    """The operands of a kernel, and how they are asked for tiles."""

    def __init__(self, at: _Shape, refs: dict[str, Any]):
        self.at, self.refs = at, refs

    def columns(self, name, tokens, distance, column, wide, seen):
        """Columns of the tokens so far before these, zero where they are not seen; before is
        negative after."""
        rows, columns = tokens.index - distance, column + tiles.steps(wide)
        return tiles.take(
            self.refs[name], tokens.batch, rows=rows, columns=columns, own=(seen, None)
        )

    def of_head(self, name, tokens, head, place, seen):
        """A block of channels of [B, S, heads, C]."""
        shape = self.at.tokens, self.at.wide
        row = jnp.broadcast_to(tokens.index[:, None], shape)
        channel = jnp.broadcast_to(place + tiles.steps(shape[1])[None], shape)
        mask = jnp.broadcast_to(seen[:, None], shape)
        at = self.refs[name].at[tokens.batch, row, jnp.broadcast_to(head, shape), channel]
        return tiles.load(at, mask=mask, other=0).astype(jnp.float32)

    def vector(self, name, *index, start, wide):
        """A vector [1, wide] along the last dim, from a place on."""
        return self.refs[name][(*index, tiles.slice_of(start, wide))][None]

    def turns(self, tokens):
        """cos and sin of the pairs of channels, [tokens, half] each."""
        halves = (
            self.columns("table", tokens, 0, n * self.at.half, self.at.half, tokens.real)
            for n in (0, 1)
        )
        return tuple(halves)


class _Tokens:
    """Tokens of a row that a program has, and which of their neighbours they know."""

    def __init__(self, at: _Shape, refs: _Refs, batch, block):
        self.at, self.refs, self.batch = at, refs, batch
        self.index = block * at.tokens + tiles.steps(at.tokens)
        self.real = self.index < at.length

    def linked(self, a, b):
        """Whether the tokens so far before each are there, and of one segment."""
        first, second = self.index - a, self.index - b
        there = (first >= 0) & (second >= 0) & (first < self.at.length) & (second < self.at.length)
        if not self.at.segments:
            return there
        ids = self.refs.refs["segments"]
        first, second = (
            tiles.load(ids.at[jnp.full(i.shape, self.batch), i], mask=there, other=0)
            for i in (first, second)
        )
        return there & (first == second)


def _between(at, refs, tokens, head, distance):
    """The first convolution's output for tokens this far before, zero where these are of another
    segment."""
    total = jnp.zeros((at.tokens, at.channels), jnp.float32)
    for j in range(at.t0 + 1):
        back = distance + at.t0 - j
        x = refs.columns(
            "x", tokens, back, head * at.channels, at.channels, tokens.linked(distance, back)
        ).astype(jnp.float32)
        total += x * refs.vector("by_channel", j, head, start=0, wide=at.channels)
    return jnp.where(tokens.linked(0, distance)[:, None], total, 0).astype(at.dtype)


def _others(at, head):
    """The heads of a head's mean besides itself, [first, first + count), for a query its key, for a
    key its queries; and whether it is a query."""
    query = head < at.heads
    key = head - at.heads
    first = jnp.where(query, at.heads + lax.div(head, at.group), key * at.group)
    return first, _either(query, 1, at.group), query


def _entering(at, refs, tokens, head):
    """The norm's input, as blocks of channels: both convolutions, the mean, the bias."""
    taps = [_between(at, refs, tokens, head, at.t1 - i) for i in range(at.t1 + 1)]
    places = range(0, at.channels, at.wide)

    def of(other, place):
        column = other * at.channels + place
        return refs.columns("x", tokens, 0, column, at.wide, tokens.real).astype(jnp.float32)

    first, count, query = _others(at, head)
    nothing = tuple(jnp.zeros((at.tokens, at.wide), jnp.float32) for _ in places)
    others = lax.fori_loop(
        0,
        count,
        lambda i, sums: tuple(s + of(first + i, p) for s, p in zip(sums, places, strict=True)),
        nothing,
    )
    share = _either(query, 0.5, 0.5 / at.group)
    blocks = []
    for place, other in zip(places, others, strict=True):
        total = 0.5 * of(head, place) + share * other
        total += refs.vector("bias", head, start=place, wide=at.wide)
        for i, tap in enumerate(taps):
            total += tiles.dot(
                tap, refs.refs["by_head"][i, head, :, tiles.slice_of(place, at.wide)]
            )
        blocks.append(total)
    return blocks


def _norms(at, blocks):
    """The factor that gives each token's channels the norm √C, and whether the floor is under
    it."""
    norm = jnp.sqrt(sum((x * x).sum(1, keepdims=True) for x in blocks))
    return at.channels**0.5 / jnp.maximum(norm, NORM_FLOOR), norm > NORM_FLOOR


def _turned(at, refs, tokens, blocks, back=False):
    if not at.half:
        return blocks
    cos, sin = refs.turns(tokens)
    sin = -sin if back else sin
    first, second, *rest = blocks
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def _forward(at, refs, q, k):
    head, tokens = tiles.program_id(0), _Tokens(at, refs, tiles.program_id(2), tiles.program_id(1))
    blocks = _entering(at, refs, tokens, head)
    factor = _norms(at, blocks)[0] * refs.refs["scales"][head]
    blocks = _turned(at, refs, tokens, [x * factor for x in blocks])
    query = head < at.heads
    shape = at.tokens, at.wide
    row = jnp.broadcast_to(tokens.index[:, None], shape)
    for out, own, of in ((q, query, head), (k, ~query, head - at.heads)):
        of = jnp.broadcast_to(jnp.clip(of, 0, out.shape[2] - 1), shape)
        mask = jnp.broadcast_to((tokens.real & own)[:, None], shape)
        for i, x in enumerate(blocks):
            channel = jnp.broadcast_to(i * at.wide + tiles.steps(at.wide)[None], shape)
            tiles.store(out.at[tokens.batch, row, of, channel], x.astype(at.dtype), mask=mask)


def _sums(at, refs, d_sums, d_scales):
    head, block, batch = (tiles.program_id(i) for i in range(3))
    tokens = _Tokens(at, refs, batch, block)
    blocks = _entering(at, refs, tokens, head)
    factor, above = _norms(at, blocks)
    units = [x * factor for x in blocks]
    query = head < at.heads
    d = []
    for i in range(len(units)):
        of_q = refs.of_head(
            "d0", tokens, jnp.minimum(head, at.heads - 1), i * at.wide, tokens.real & query
        )
        of_k = refs.of_head(
            "d1", tokens, jnp.maximum(head - at.heads, 0), i * at.wide, tokens.real & ~query
        )
        d.append(of_q + of_k)
    d = _turned(at, refs, tokens, d, back=True)
    along = sum((a * b).sum(1, keepdims=True) for a, b in zip(d, units, strict=True))
    d_scales[head, batch * at.blocks + block] = jnp.sum(jnp.where(tokens.real[:, None], along, 0))
    scale = refs.refs["scales"][head]
    along = jnp.where(above, along / at.channels, 0)
    for i, (x, unit) in enumerate(zip(d, units, strict=True)):
        x = scale * factor * (x - unit * along)
        _store(at, d_sums, tokens, head * at.channels + i * at.wide, x)


def _columns(at, refs, d_columns, of_channels):
    head, block, batch = (tiles.program_id(i) for i in range(3))
    tokens = _Tokens(at, refs, batch, block)

    if "d1" in refs.refs:

        @tiles.when(head >= at.all_heads)
        def copied():
            column = (head - at.all_heads) * at.channels
            x = refs.columns("d1", tokens, 0, column, at.channels, tokens.real)
            _store(at, d_columns, tokens, head * at.channels, x)

    @tiles.when(head < at.all_heads)
    def mixed():
        _own_columns(at, refs, tokens, head, batch * at.blocks + block, d_columns, of_channels)


def _own_columns(at, refs, tokens, head, number, d_columns, of_channels):
    """The gradient of a token's columns: from itself and the tokens after it, and from the
    means."""
    wide = min(at.channels, 64)
    first, count, query = _others(at, head)
    share = _either(query, 0.5 / at.group, 0.5)
    for place in range(0, at.channels, wide):

        def of(other, name="d0", place=place):
            column = other * at.channels + place
            return refs.columns(name, tokens, 0, column, wide, tokens.real).astype(jnp.float32)

        nothing = jnp.zeros((at.tokens, wide), jnp.float32)
        others = lax.fori_loop(0, count, lambda i, s, of=of: s + of(first + i), nothing)
        total = 0.5 * of(head) + share * others
        own = of(head, "x")
        for a in range(at.t0 + 1):
            passed = jnp.zeros((at.tokens, wide), jnp.float32)
            for b in range(at.t1 + 1):
                linked = tokens.linked(-a, -a - b)
                later = refs.columns("d0", tokens, -a - b, head * at.channels, at.channels, linked)
                taps = refs.refs["by_head"][at.t1 - b, head, tiles.slice_of(place, wide), :]
                passed += tiles.dot(later, taps, transpose_y=True)
            passed = jnp.where(tokens.linked(0, -a)[:, None], passed, 0)
            total += passed * refs.vector("by_channel", at.t0 - a, head, start=place, wide=wide)
            row = number * (at.t0 + 1) + at.t0 - a
            of_channels[row, tiles.slice_of(head * at.channels + place, wide)] = (passed * own).sum(
                0
            )
        _store(at, d_columns, tokens, head * at.channels + place, total)


def _taps(splits, at, refs, of_heads, of_biases):
    tap, part = tiles.program_id(0), tiles.program_id(1)
    head, distance = lax.rem(tap, at.all_heads), at.t1 - lax.div(tap, at.all_heads)
    num = at.batch * at.blocks
    each = -(-num // splits)

    def add(i, sums):
        by_taps, by_bias = sums
        tokens = _Tokens(at, refs, lax.div(i, at.blocks), lax.rem(i, at.blocks))
        d = refs.columns("d0", tokens, 0, head * at.channels, at.channels, tokens.real)
        y = _between(at, refs, tokens, head, distance)
        by_bias += d.astype(jnp.float32).sum(0, keepdims=True)
        return by_taps + tiles.dot(y, d, transpose_x=True), by_bias

    nothing = tuple(jnp.zeros((n, at.channels), jnp.float32) for n in (at.channels, 1))
    end = jnp.minimum((part + 1) * each, num)
    by_taps, by_bias = lax.fori_loop(jnp.minimum(part * each, num), end, add, nothing)
    of_heads[part, tap] = by_taps
    of_biases[part, tap] = by_bias[0]


def _store(at, out, tokens, column, x):
    columns = column + tiles.steps(x.shape[1])
    tiles.put(out, x, tokens.batch, rows=tokens.index, columns=columns, own=(tokens.real, None))


def _either(condition: jax.Array, this: float, that: float) -> jax.Array:
    """One of two known numbers: `where` takes both for booleans when it is lowered for Triton."""
    return that + condition.astype(jnp.result_type(this)) * (this - that)
