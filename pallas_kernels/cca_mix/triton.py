"""CCA's mixing on a GPU: one kernel from projected columns to queries and keys, three for the
gradients.

A program of the first three has a block of tokens of one head. It loads them anew for each tap, and
the heads of its mean, whose programs run at the same time. Values between the two convolutions, and
up to the norm, stay in registers.

    mix, columns → q, k (`_forward`)
        taps[i] = the first convolution's output for the tokens t1 - i before (`_between`), for each tap i of the second
        sums = mean of the head and its others + bias + sum over i of taps[i] by_head[i]     (`_entering`)
        q or k = sums / norm(sums) sqrt(C) scale, rotated; the scale of a query is 1
    mix_sums, d_q, d_k → d_sums (`_sums`)
        sums again, then the gradient through rotation and norm; and the program's share of the scale's gradient
    mix_columns, d_sums → the gradient of the columns (`_columns`)
        the means backwards, then for each tap a of the first convolution
            passed = sum over taps b of the second of d_sums, a + b tokens after, by_head[t1 - b]^T
            d_columns += passed by_channel[t0 - a]; and the program's share of by_channel's gradient
        a head number behind the last is a part of the values' columns, whose gradient `d_rest` is copied: so the
        gradient of all columns is one array, written once
    mix_taps, d_sums → shares of the gradient of by_head (`_taps`)
        a program has a tap of a head, and one of `splits` parts of the tokens: y^T d_sums over that part's blocks,
        where y is `_between` again

Nothing is added atomically; XLA adds up the shares. The rotation turns pairs of channels half a
table apart, and a tile cannot be cut once it is in registers: so it is made of blocks of channels,
each as wide as that half. Distances count backwards: a negative one is of tokens after.

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
    shape = _Shape(
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
    query_segments = None if segments is None else segments[:, reach:]
    return _mix(
        shape,
        columns,
        by_channel,
        by_head,
        bias,
        temperature,
        rope[0][1] if rope else None,
        query_segments,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(shape, columns, by_channel, by_head, bias, temperature, table, segments):
    return _mix_fwd(shape, columns, by_channel, by_head, bias, temperature, table, segments)[0]


def _mix_fwd(shape, columns, by_channel, by_head, bias, temperature, table, segments):
    saved = columns, by_channel, by_head, bias, temperature, table, segments
    q, k = _call(
        shape,
        _forward,
        saved,
        {},
        "mix",
        (shape.all_heads, shape.blocks, shape.batch),
        [
            jax.ShapeDtypeStruct((*columns.shape[:2], heads * shape.channels), shape.dtype)
            for heads in (shape.heads, shape.num_kv)
        ],
        flops=shape.flops(shape.t1 + 1),
        passes=(1, 1),
    )
    q, k = (x.reshape(*x.shape[:2], -1, shape.channels) for x in (q, k))
    return (q, k, columns[..., shape.all_heads * shape.channels :]), saved


def _mix_bwd(shape, saved, d):
    columns, d_rest = saved[0], d[2]
    d_q, d_k = (x.reshape(*x.shape[:2], -1) for x in d[:2])
    packed, all_tokens = shape.all_heads * shape.channels, shape.batch * shape.blocks
    wide = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    d_sums, d_scales = _call(
        shape,
        _sums,
        saved,
        {"d_q": d_q, "d_k": d_k},
        "mix_sums",
        (shape.all_heads, shape.blocks, shape.batch),
        [
            jax.ShapeDtypeStruct((*columns.shape[:2], packed), shape.dtype),
            wide((shape.all_heads, all_tokens)),
        ],
        flops=shape.flops(shape.t1 + 1),
        passes=(2, 1),
    )
    d_columns, of_channels = _call(
        shape,
        _columns,
        saved,
        {"d_sums": d_sums, "d_rest": d_rest if d_rest.size else None},
        "mix_columns",
        (shape.width // shape.channels, shape.blocks, shape.batch),
        [
            jax.ShapeDtypeStruct(columns.shape, columns.dtype),
            wide((all_tokens * (shape.t0 + 1), packed)),
        ],
        flops=shape.flops((shape.t0 + 1) * (shape.t1 + 1)),
        passes=(2 + shape.width / packed - 1, shape.width / packed),
    )
    taps, splits = (shape.t1 + 1) * shape.all_heads, tiles.tile_of(_Tile, "mix_taps").splits
    of_heads, of_biases = _call(
        shape,
        functools.partial(_taps, splits),
        saved,
        {"d_sums": d_sums},
        "mix_taps",
        (taps, splits),
        [
            wide((splits, taps, shape.channels, shape.channels)),
            wide((splits, taps, shape.channels)),
        ],
        flops=shape.flops(shape.t1 + 1),
        passes=(2, 0),
    )
    of_taps = shape.t1 + 1, shape.all_heads, shape.channels
    d_bias = of_biases.reshape(splits, *of_taps)[:, -1].sum(0)
    d_by_head = of_heads.reshape(splits, *of_taps, shape.channels).sum(0)
    d_by_channel = of_channels.reshape(
        all_tokens, shape.t0 + 1, shape.all_heads, shape.channels
    ).sum(0)
    d_temperature = d_scales[shape.heads :].sum(1)
    return d_columns, d_by_channel, d_by_head, d_bias, d_temperature, None, None


_mix.defvjp(_mix_fwd, _mix_bwd)


def _call(shape, body, saved, gradients, name, grid, out_shapes, *, flops, passes):
    columns, by_channel, by_head, bias, temperature, table, segments = saved
    scales = jnp.concatenate([jnp.ones((shape.heads,), jnp.float32), temperature])
    inputs = {
        "x": columns,
        "by_channel": by_channel,
        "by_head": by_head.astype(shape.dtype),
        "bias": bias,
        "scales": scales,
        "table": table,
        "segments": segments,
    }
    others = sum(x.nbytes for x in (inputs["by_head"], table, segments) if x is not None)
    shares = sum(x.size * 4 for x in out_shapes if x.dtype == jnp.float32 and x.ndim != 3)

    return tiles.call(
        functools.partial(body, shape),
        inputs | gradients,
        name=name,
        grid=grid,
        out_shapes=out_shapes,
        work=tiles.Work(
            flops, moved=(shape.bytes(passes[0]) + others, shape.bytes(passes[1]) + shares)
        ),
        warps=tiles.tile_of(_Tile, name).threads // chip.current().lanes,
    )


class _Tokens:
    """Tokens of a row that a program has: their columns in a kernel's operands, and which of their
    neighbours they know."""

    def __init__(self, shape: _Shape, refs: dict[str, Any], batch, block):
        self.shape, self.refs, self.batch = shape, refs, batch
        self.index = block * shape.tokens + tiles.steps(shape.tokens)
        self.real = self.index < shape.length

    def columns(self, name, distance, column, wide, seen):
        """Columns of the tokens at this distance before these, zero where they are not `seen`."""
        rows, columns = self.index - distance, column + tiles.steps(wide)
        return tiles.take(
            self.refs[name], self.batch, rows=rows, columns=columns, real=(seen, None)
        )

    def store(self, out, column, x, real):
        """Writes columns of these tokens where they are `real`."""
        columns = column + tiles.steps(x.shape[1])
        tiles.put(out, x, self.batch, rows=self.index, columns=columns, real=(real, None))

    def linked(self, a, b):
        """Whether the tokens at the distances a and b before each are there, and of one segment."""
        first, second = self.index - a, self.index - b
        there = (
            (first >= 0)
            & (second >= 0)
            & (first < self.shape.length)
            & (second < self.shape.length)
        )
        if not self.shape.segments:
            return there
        ids = self.refs["segments"]
        first, second = (
            tiles.load(ids.at[jnp.full(i.shape, self.batch), i], mask=there, other=0)
            for i in (first, second)
        )
        return there & (first == second)


def _between(shape, tokens, head, distance):
    """The first convolution's output for tokens this far before, zero where these are of another
    segment."""
    total = jnp.zeros((shape.tokens, shape.channels), jnp.float32)
    for j in range(shape.t0 + 1):
        back = distance + shape.t0 - j
        x = tokens.columns(
            "x", back, head * shape.channels, shape.channels, tokens.linked(distance, back)
        ).astype(jnp.float32)
        total += x * _vector(tokens.refs["by_channel"], j, head, start=0, wide=shape.channels)
    return jnp.where(tokens.linked(0, distance)[:, None], total, 0).astype(shape.dtype)


def _others(shape, head):
    """The heads of a head's mean besides itself, [first, first + count), for a query its key, for a
    key its queries; and whether it is a query."""
    query = head < shape.heads
    key = head - shape.heads
    first = jnp.where(query, shape.heads + lax.div(head, shape.group), key * shape.group)
    return first, _either(query, 1, shape.group), query


def _entering(shape, tokens, head):
    """The norm's input, as blocks of channels: both convolutions, the mean, the bias."""
    taps = [_between(shape, tokens, head, shape.t1 - i) for i in range(shape.t1 + 1)]
    places = range(0, shape.channels, shape.wide)

    def of(other, place):
        column = other * shape.channels + place
        return tokens.columns("x", 0, column, shape.wide, tokens.real).astype(jnp.float32)

    first, count, query = _others(shape, head)
    nothing = tuple(jnp.zeros((shape.tokens, shape.wide), jnp.float32) for _ in places)
    others = lax.fori_loop(
        0,
        count,
        lambda i, sums: tuple(s + of(first + i, p) for s, p in zip(sums, places, strict=True)),
        nothing,
    )
    share = _either(query, 0.5, 0.5 / shape.group)
    blocks = []
    for place, other in zip(places, others, strict=True):
        total = 0.5 * of(head, place) + share * other
        total += _vector(tokens.refs["bias"], head, start=place, wide=shape.wide)
        for i, tap in enumerate(taps):
            total += tiles.dot(
                tap, tokens.refs["by_head"][i, head, :, tiles.slice_of(place, shape.wide)]
            )
        blocks.append(total)
    return blocks


def _norms(shape, blocks):
    """The factor that gives each token's channels the norm √C, and whether the floor is under
    it."""
    norm = jnp.sqrt(sum((x * x).sum(1, keepdims=True) for x in blocks))
    return shape.channels**0.5 / jnp.maximum(norm, NORM_FLOOR), norm > NORM_FLOOR


def _turned(shape, tokens, blocks, back=False):
    """The blocks with their pairs of channels turned by the tokens' angles, or turned back."""
    if not shape.half:
        return blocks
    cos, sin = (
        tokens.columns("table", 0, start, shape.half, tokens.real) for start in (0, shape.half)
    )
    sin = -sin if back else sin
    first, second, *rest = blocks
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def _forward(shape, refs, q, k):
    head = tiles.program_id(0)
    tokens = _Tokens(shape, refs, tiles.program_id(2), tiles.program_id(1))
    blocks = _entering(shape, tokens, head)
    factor = _norms(shape, blocks)[0] * refs["scales"][head]
    blocks = _turned(shape, tokens, [x * factor for x in blocks])
    for out, (out_head, mine) in zip((q, k), _queries_and_keys(shape, tokens, head), strict=True):
        for i, x in enumerate(blocks):
            tokens.store(out, out_head * shape.channels + i * shape.wide, x, mine)


def _sums(shape, refs, d_sums, d_scales):
    head, block, batch = (tiles.program_id(i) for i in range(3))
    tokens = _Tokens(shape, refs, batch, block)
    blocks = _entering(shape, tokens, head)
    factor, above = _norms(shape, blocks)
    units = [x * factor for x in blocks]
    (query, of_query), (key, of_key) = _queries_and_keys(shape, tokens, head)
    d = []
    for place in range(0, shape.channels, shape.wide):
        d_q = tokens.columns("d_q", 0, query * shape.channels + place, shape.wide, of_query)
        d_k = tokens.columns("d_k", 0, key * shape.channels + place, shape.wide, of_key)
        d.append(d_q.astype(jnp.float32) + d_k.astype(jnp.float32))
    d = _turned(shape, tokens, d, back=True)
    along = sum((a * b).sum(1, keepdims=True) for a, b in zip(d, units, strict=True))
    d_scales[head, batch * shape.blocks + block] = jnp.sum(
        jnp.where(tokens.real[:, None], along, 0)
    )
    scale = refs["scales"][head]
    along = jnp.where(above, along / shape.channels, 0)
    for i, (x, unit) in enumerate(zip(d, units, strict=True)):
        x = scale * factor * (x - unit * along)
        tokens.store(d_sums, head * shape.channels + i * shape.wide, x, tokens.real)


def _columns(shape, refs, d_columns, of_channels):
    head, block, batch = (tiles.program_id(i) for i in range(3))
    tokens = _Tokens(shape, refs, batch, block)

    if refs["d_rest"] is not None:

        @tiles.when(head >= shape.all_heads)
        def copied():
            column = (head - shape.all_heads) * shape.channels
            x = tokens.columns("d_rest", 0, column, shape.channels, tokens.real)
            tokens.store(d_columns, head * shape.channels, x, tokens.real)

    @tiles.when(head < shape.all_heads)
    def mixed():
        _own_columns(shape, tokens, head, batch * shape.blocks + block, d_columns, of_channels)


def _own_columns(shape, tokens, head, number, d_columns, of_channels):
    """The gradient of a token's columns: from itself and the tokens after it, and from the
    means."""
    wide = min(shape.channels, 64)
    first, count, query = _others(shape, head)
    share = _either(query, 0.5 / shape.group, 0.5)
    for place in range(0, shape.channels, wide):

        def of(other, name="d_sums", place=place):
            column = other * shape.channels + place
            return tokens.columns(name, 0, column, wide, tokens.real).astype(jnp.float32)

        nothing = jnp.zeros((shape.tokens, wide), jnp.float32)
        others = lax.fori_loop(0, count, lambda i, s, of=of: s + of(first + i), nothing)
        total = 0.5 * of(head) + share * others
        x = of(head, "x")
        for a in range(shape.t0 + 1):
            passed = jnp.zeros((shape.tokens, wide), jnp.float32)
            for b in range(shape.t1 + 1):
                linked = tokens.linked(-a, -a - b)
                later = tokens.columns(
                    "d_sums", -a - b, head * shape.channels, shape.channels, linked
                )
                taps = tokens.refs["by_head"][shape.t1 - b, head, tiles.slice_of(place, wide), :]
                passed += tiles.dot(later, taps, transpose_y=True)
            passed = jnp.where(tokens.linked(0, -a)[:, None], passed, 0)
            total += passed * _vector(
                tokens.refs["by_channel"], shape.t0 - a, head, start=place, wide=wide
            )
            row = number * (shape.t0 + 1) + shape.t0 - a
            of_channels[row, tiles.slice_of(head * shape.channels + place, wide)] = (
                passed * x
            ).sum(0)
        tokens.store(d_columns, head * shape.channels + place, total, tokens.real)


def _taps(splits, shape, refs, of_heads, of_biases):
    tap, part = tiles.program_id(0), tiles.program_id(1)
    head, distance = lax.rem(tap, shape.all_heads), shape.t1 - lax.div(tap, shape.all_heads)
    num = shape.batch * shape.blocks
    each = -(-num // splits)

    def add(i, sums):
        by_taps, by_bias = sums
        tokens = _Tokens(shape, refs, lax.div(i, shape.blocks), lax.rem(i, shape.blocks))
        d = tokens.columns("d_sums", 0, head * shape.channels, shape.channels, tokens.real)
        y = _between(shape, tokens, head, distance)
        by_bias += d.astype(jnp.float32).sum(0, keepdims=True)
        return by_taps + tiles.dot(y, d, transpose_x=True), by_bias

    nothing = tuple(jnp.zeros((n, shape.channels), jnp.float32) for n in (shape.channels, 1))
    end = jnp.minimum((part + 1) * each, num)
    by_taps, by_bias = lax.fori_loop(jnp.minimum(part * each, num), end, add, nothing)
    of_heads[part, tap] = by_taps
    of_biases[part, tap] = by_bias[0]


def _queries_and_keys(shape, tokens, head):
    """A head's number among the queries' and among the keys', and its tokens where it is one."""
    query = head < shape.heads
    of_query = jnp.minimum(head, shape.heads - 1), tokens.real & query
    return of_query, (jnp.maximum(head - shape.heads, 0), tokens.real & ~query)


def _vector(ref, *index, start, wide):
    """A vector [1, wide] along the last dim, from a place on."""
    return ref[(*index, tiles.slice_of(start, wide))][None]


def _either(condition: jax.Array, this: float, that: float) -> jax.Array:
    """One of two known numbers: `where` takes both for booleans when it is lowered for Triton."""
    return that + condition.astype(jnp.result_type(this)) * (this - that)
