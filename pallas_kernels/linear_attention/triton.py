"""Linear attention on a GPU: all chunks at once, where XLA has a scan over them.

    linear_states        each chunk's own contribution to the state: k^T v, and the sum of k (its `total`)
    linear_carry         a sum over the chunks before, as far as a document goes on: the state that enters each chunk
    linear_outputs       a chunk's queries, against its own keys and against that state
    linear_d_queries     dq in the same way
    linear_states        again: each chunk's contribution to the gradient of the state that enters it, q^T d
    linear_carry         again, from the last chunk to the first: the gradient of each chunk's contribution
    linear_d_keys        dk and dv, from the chunk's own queries and from that

A program of `linear_states` has one chunk of a key-value head, and its loop goes over blocks of the
chunk's rows. One of `linear_carry` has some numbers of the states of a head, and goes over chunks.
The other three first go over slices of the entering state's channels (`_sliced`), whose product
with the tile counts for rows of the document that reaches into the chunk (`_only`); then over
blocks on the other side of the diagonal: keys for a tile of queries, queries for a block of keys.
Their names are those of the functions below with `_body` behind them.

A state is never as long as the sequence, and each is written once, alone and summed. The sum is in
float32; a chunk reads it rounded to the number format of the products, as it does in XLA. In each
kernel that has queries a program's rows are some queries times the heads of their group, as in
`pallas_kernels.attention.triton`.

`linear_attention` has everything in them, quotient and features too, and keeps the output and each
row's denominator for the backward pass. Features of keys are made once by XLA, those of queries
once in each pass: made anew for each tile that meets them they are nine tenths of an inner loop's
instructions. `sums` is for callers that add other devices' states: features come in, and numerators
go out in float32.

They take heads of up to 256 channels, all in one number format; in float32 of up to 128, on
NVIDIA's chips none (`suits`). `xla` has the rest. Letters as in `pallas_kernels.linear_attention`,
and N chunks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import tiles
from pallas_kernels.attention import SAVED
from pallas_kernels.linear_attention.reference import features
from pallas_kernels.linear_attention.shapes import FilledTile, Shape, chunk_of, shape_of
from pallas_kernels.rows import LOG2E, HeadRows, Tile, facing, flat, flat_like, formats

AHEAD = 8  # chunks whose states `linear_carry` loads before it adds them up
CARRIED = 1024  # numbers of a state that one of its programs has


def suits(q, k, v) -> bool:
    """Whether the kernels take these arrays; NVIDIA's matrix units take no float32 whole, wide
    heads spill."""
    alike = q.dtype == k.dtype == v.dtype
    most = 256 if q.dtype.itemsize == 2 else 128
    return alike and q.dtype in formats() and q.size > 0 and q.shape[-1] <= most


def linear_attention(q, k, v, segments, chunk) -> jax.Array:
    """See `pallas_kernels.linear_attention`."""
    return _whole(q, k, v, segments, chunk_of(chunk, q.shape[1]))


def sums(q, k, v, segments, chunk) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.linear_attention`."""
    batch, num_kv, group, seq, channels = q.shape
    # The kernels' order is that of the model. XLA takes these for `heads_first` and `finish`,
    # turned back.
    q = q.transpose(0, 3, 1, 2, 4).reshape(batch, seq, num_kv * group, channels)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    numerator, denominator = _parts(q, k, v, segments, chunk_of(chunk, seq))
    numerator = numerator.reshape(batch, seq, num_kv, group, channels).transpose(0, 2, 3, 1, 4)
    return numerator, denominator.reshape(batch, seq, num_kv, group).transpose(0, 2, 3, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _whole(q, k, v, segments, chunk):
    return _whole_fwd(q, k, v, segments, chunk)[0]


def _whole_fwd(q, k, v, segments, chunk):
    shape = shape_of(q, k, segments, chunk, whole=True)
    of_keys = features(k)
    states = _entering(shape, of_keys, v, segments)
    out, denominator = _outputs(shape, q, of_keys, v, segments, states)
    out, denominator = (checkpoint_name(x, SAVED) for x in (out, denominator))
    return out, (q, k, v, segments, states, out, denominator)


def _whole_bwd(chunk, saved, d_out):
    q, k, v, segments, states, out, denominator = saved
    shape = shape_of(q, k, segments, chunk, whole=True)
    inputs = {"q": q, "k": features(k), "v": v, "d": d_out, "out": out, "denominator": denominator}
    return *_gradients(shape, inputs, k, segments, states), None


_whole.defvjp(_whole_fwd, _whole_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _parts(q, k, v, segments, chunk):
    return _parts_fwd(q, k, v, segments, chunk)[0]


def _parts_fwd(q, k, v, segments, chunk):
    shape = shape_of(q, k, segments, chunk, whole=False)
    states = _entering(shape, k, v, segments)
    return _outputs(shape, q, k, v, segments, states), (q, k, v, segments, states)


def _parts_bwd(chunk, saved, d):
    q, k, v, segments, states = saved
    shape = shape_of(q, k, segments, chunk, whole=False)
    inputs = {"q": q, "k": k, "v": v, "d": d[0].astype(v.dtype), "d_denominator": d[1]}
    return *_gradients(shape, inputs, None, segments, states), None


_parts.defvjp(_parts_fwd, _parts_bwd)


def _call(kernel, body, inputs, segments, grid, outs, flops, tile=None):
    sizes = tile.sizes if tile else Tile(0, 0)
    return tiles.call(
        body,
        inputs | {"segments": segments},
        name=f"linear_{kernel}",
        grid=grid,
        out_shapes=outs,
        work=tiles.Work(flops),
        warps=sizes.warps,
        stages=sizes.stages,
    )


def _entering(shape: Shape, k, v, segments) -> tuple[jax.Array, jax.Array] | None:
    """The states that enter the chunks; None where there is one chunk."""
    if shape.chunks == 1:
        return None
    states, totals = _states(shape, flat(k=k, v=v), segments, of_keys=True)
    return _carried(shape, states, totals, segments, back=False)


def _states(shape: Shape, inputs, segments, of_keys):
    """k^T v and the sum of k of each chunk's rows of a document, float32, or q^T d and that of q
    d_denominator."""
    tile = shape.tile_of("states")
    if of_keys:
        tile = tile._replace(heads=1, parts=1, queries=min(tile.sizes.rows, shape.chunk))
    columns = shape.wide if shape.wide <= 128 else 64  # of a program: more spill
    states = shape.batch * shape.num_kv, shape.chunks, shape.channels
    across = -(-shape.channels // columns)
    rows = states[0] * shape.chunks * shape.chunk * tile.heads * tile.parts
    flops = 2.0 * rows * shape.wide * across * columns
    return _call(
        "states",
        functools.partial(_states_body, shape, tile, columns, of_keys),
        inputs,
        segments,
        (states[0], shape.chunks, across),
        [
            jax.ShapeDtypeStruct((*states, shape.channels), jnp.float32),
            jax.ShapeDtypeStruct(states, jnp.float32),
        ],
        flops,
        tile,
    )


def _carried(shape: Shape, states, totals, segments, back):
    numbers = states.reshape(*states.shape[:2], -1)
    size = min(CARRIED, tiles.power(numbers.shape[-1]))
    carried, totals = _call(
        "carry",
        functools.partial(_carry_body, shape, size, back),
        {"states": numbers, "totals": totals},
        segments,
        (len(numbers), -(-numbers.shape[-1] // size) + 1),
        [
            jax.ShapeDtypeStruct(numbers.shape, shape.dtype),
            jax.ShapeDtypeStruct(totals.shape, jnp.float32),
        ],
        0.0,
    )
    return carried.reshape(states.shape), totals


def _outputs(shape: Shape, q, k, v, segments, states):
    tile = shape.tile_of("outputs")
    like = q.shape, shape.dtype if shape.whole else jnp.float32
    out, denominator = _call(
        "outputs",
        functools.partial(_outputs_body, shape, tile),
        flat(q=q, k=k, v=v) | {"entering": states},
        segments,
        _grid_of_queries(shape, tile),
        [flat_like(*like), flat_like(q.shape[:3], jnp.float32)],
        _flops(shape, tile, 2),
        tile,
    )
    return out.reshape(q.shape), denominator.reshape(q.shape[:3])


def _gradients(shape: Shape, inputs, raw, segments, states):
    """dq, dk, dv; `d` among the given arrays is the gradient of the output, or of the numerator;
    `raw` are the keys before their features are made."""
    q, k, v, d = (inputs[name] for name in ("q", "k", "v", "d"))
    tile = shape.tile_of("d_queries")
    results = {"dq": flat_like(q.shape, q.dtype)}
    if shape.whole:  # with these the other kernels need neither the output nor the denominator
        results["d_denominator"] = results["factor"] = flat_like(q.shape[:3], jnp.float32)
        results["q"] = results["dq"]
    arrays = _call(
        "d_queries",
        functools.partial(_d_queries_body, shape, tile),
        flat(**inputs) | {"entering": states},
        segments,
        _grid_of_queries(shape, tile),
        list(results.values()),
        _flops(shape, tile, 2),
        tile,
    )
    arrays = dict(zip(results, arrays, strict=True))
    dq = arrays.pop("dq")
    operands = flat(q=q, d=d, d_denominator=inputs.get("d_denominator")) | arrays
    states = None
    if shape.chunks > 1:
        products, totals = _states(shape, operands, segments, of_keys=False)
        states = _carried(shape, products, totals, segments, back=True)
    tile = shape.tile_of("d_keys")
    dk, dv = _call(
        "d_keys",
        functools.partial(_d_keys_body, shape, tile),
        operands | flat(k=k, v=v, raw=raw) | {"entering": states},
        segments,
        (shape.batch * shape.num_kv, -(-shape.length // tile.keys)),
        [flat_like(x.shape, x.dtype) for x in (k, v)],
        _flops(shape, tile, 4),
        tile,
    )
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _grid_of_queries(shape: Shape, tile: FilledTile) -> tuple[int, int]:
    # Neighbours in the grid start together; those of one head ask for the same state.
    return shape.batch * shape.num_kv * tile.parts, -(-shape.length // tile.queries)


def _flops(shape: Shape, tile: FilledTile, products: int) -> float:
    """Those of this many products of queries with a chunk's keys, on and below the diagonal, and
    half as many with a state."""
    rows = 2.0 * shape.batch * shape.heads * shape.chunks * shape.chunk * shape.wide
    side = max(tile.queries, tile.keys)
    of_keys = products * rows * (shape.chunk + side) / 2
    if shape.chunks == 1:
        return of_keys
    return of_keys + (rows if products == 2 else 2 * rows / shape.group) * shape.wide


def _features_of(shape: Shape, rows: HeadRows, ref, columns=None) -> jax.Array:
    """Features of queries, zero where there are no queries; unchanged if they are features
    already."""
    x = rows.load(ref, columns)
    if not shape.whole:
        return x
    x = _features(x.astype(jnp.float32))
    for side, mask in ((0, rows.at_columns(columns)[1]), (1, rows.real)):
        if mask is not None:
            x = jnp.where(jnp.broadcast_to(jnp.expand_dims(mask, side), x.shape), x, 0)
    return tiles.narrow(x, ref.dtype)


def _factor(shape: Shape, rows: HeadRows, refs) -> jax.Array | None:
    """The factor from the output's gradient to the numerator's; None where the latter is given."""
    return rows.load(refs["factor"]) if shape.whole else None


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _features(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x + 1, jnp.exp2(jnp.minimum(x, 0) * LOG2E))


def _queries_of(shape: Shape, tile: FilledTile, batch, head, i) -> HeadRows:
    """Block i of queries, each with the heads of its tile, from this one on."""
    n = tiles.steps(tile.rows)
    tokens = i * tile.queries + lax.div(n, tile.heads)
    return _rows(shape, batch, tokens, head + lax.rem(n, tile.heads), shape.heads)


def _keys_of(shape: Shape, keys: int, batch, head, j) -> HeadRows:
    """Block j of a head's keys, or values."""
    return _rows(shape, batch, j * keys + tiles.steps(keys), head, shape.num_kv)


def _rows(shape: Shape, batch, tokens, head, num_heads) -> HeadRows:
    real = tokens < shape.length if shape.length % shape.chunk else None
    return HeadRows(batch, tokens, head, num_heads, shape.channels, real)


def _last(shape: Shape, refs, batch, n):
    """The document that chunk n ended with; the first token's, of the chunk before the first
    one. None where there is only one document."""
    if not shape.segments:
        return None
    return refs["segments"][batch, jnp.clip((n + 1) * shape.chunk - 1, 0, shape.length - 1)]


def _only(x, ids, document):
    """x, zero in rows of other documents."""
    return x if ids is None else jnp.where((ids == document)[:, None], x, jnp.zeros((), x.dtype))


def _times(x, factor, dim):
    """x, with each row or column, along `dim`, times its factor."""
    return x if factor is None else x * jnp.expand_dims(factor, dim)


def _sliced(shape: Shape, add, carry):
    """carry after `add((place, channels), carry)` of the slices of a state's channels."""
    size = shape.slice
    return lax.fori_loop(
        0, -(-shape.channels // size), lambda i, carry: add((i * size, size), carry), carry
    )


def _states_body(shape: Shape, tile: FilledTile, columns, of_keys, refs, states, totals):
    state, n, column = (tiles.program_id(i) for i in range(3))
    batch, kv_head = lax.div(state, shape.num_kv), lax.rem(state, shape.num_kv)
    place = column * columns, columns
    document = _last(shape, refs, batch, n if of_keys else n - 1)
    steps = shape.chunk // tile.queries

    def add(part, i, carry):
        products, total = carry
        block = n * steps + i
        if of_keys:
            rows = _keys_of(shape, tile.queries, batch, kv_head, block)
            x = _only(rows.load(refs["k"]), rows.ids(refs["segments"]), document)
            products += tiles.dot(x, rows.load(refs["v"], place), transpose_x=True)
            return products, total + _wide(x).sum(0)
        rows = _queries_of(shape, tile, batch, (kv_head * tile.parts + part) * tile.heads, block)
        x = _only(rows.load(refs["q"]), rows.ids(refs["segments"]), document)
        total += (_wide(x) * rows.load(refs["d_denominator"])[:, None]).sum(0)
        if shape.whole:
            x = tiles.narrow(_times(_wide(x), _factor(shape, rows, refs), 1), shape.dtype)
        return products + tiles.dot(x, rows.load(refs["d"], place), transpose_x=True), total

    carry = jnp.zeros((shape.wide, columns), jnp.float32), jnp.zeros(shape.wide, jnp.float32)
    for part in range(tile.parts):
        carry = lax.fori_loop(0, steps, functools.partial(add, part), carry)
    products, total = carry
    rows, real_rows = tiles.within(jnp.int32(0), shape.wide, shape.channels)
    places, real = tiles.within(place[0], columns, shape.channels)
    tiles.put(states, products, state, n, rows=rows, columns=places, real=(real_rows, real))

    @tiles.when(column == 0)
    def once():
        tiles.store(totals.at[state, n, rows], total, mask=real_rows)


def _carry_body(shape: Shape, size, back, refs, states, totals):
    state, part = tiles.program_id(0), tiles.program_id(1)
    batch = lax.div(state, shape.num_kv)
    ahead = min(AHEAD, shape.chunks)
    parts = -(-refs["states"].shape[-1] // size)

    def run(parts_of, result, start, size):
        places, real = tiles.within(start, size, parts_of.shape[-1])
        real = jnp.ones(size, bool) if real is None else real

        def step(i, carry):
            chunks = []
            for count in range(ahead):
                n = i * ahead + count
                exists = real & (n < shape.chunks)
                n = jnp.minimum(n, shape.chunks - 1)
                if back:
                    n = shape.chunks - 1 - n
                x = tiles.load(parts_of.at[state, n, places], mask=exists, other=0)
                link = None
                if shape.segments:
                    link = _last(shape, refs, batch, n) == _last(shape, refs, batch, n - 1)
                chunks.append((n, exists, x, link))
            for n, exists, x, link in chunks:
                entered = tiles.narrow(carry, result.dtype)
                tiles.store(result.at[state, n, places], entered, mask=exists)
                kept = carry if link is None else jnp.where(link, carry, jnp.zeros_like(carry))
                carry = kept + x
            return carry

        lax.fori_loop(0, -(-shape.chunks // ahead), step, jnp.zeros(size, jnp.float32))

    @tiles.when(part < parts)
    def products():
        run(refs["states"], states, part * size, size)

    @tiles.when(part == parts)
    def sums_of_keys():
        run(refs["totals"], totals, jnp.int32(0), shape.wide)


def _place_of_queries(shape: Shape, tile: FilledTile) -> tuple:
    """State, batch, key-value head, rows, chunk, and the blocks of keys [lo, hi) of a program."""
    m, i = tiles.program_id(0), tiles.program_id(1)
    state = lax.div(m, tile.parts)
    batch, kv_head = lax.div(state, shape.num_kv), lax.rem(state, shape.num_kv)
    head = (kv_head * tile.parts + lax.rem(m, tile.parts)) * tile.heads
    n = lax.div(i * tile.queries, shape.chunk)
    keys = (
        n * (shape.chunk // tile.keys),
        lax.div((i + 1) * tile.queries + tile.keys - 1, tile.keys),
    )
    return state, batch, kv_head, _queries_of(shape, tile, batch, head, i), n, keys


def _seen(rows, keys, q_ids, k_ids, by_row) -> jax.Array:
    """Whether each row sees each key, of a tile as `facing` has it."""
    query, key = facing(rows.tokens, keys.tokens, by_row)
    seen = query >= key
    if q_ids is not None:
        query, key = facing(q_ids, k_ids, by_row)
        seen &= query == key
    return seen


def _totals(shape: Shape, refs, state, n, columns=None):
    start, size = (jnp.int32(0), shape.wide) if columns is None else columns
    places, real = tiles.within(start, size, shape.channels)
    return tiles.load_masked(refs["entering"][1].at[state, n, places], real)[None]


def _slice_of_state(shape: Shape, refs, state, n, columns, by_row=True):
    """Some rows of a state, or some columns."""
    states, _ = refs["entering"]
    some, real = tiles.within(columns[0], columns[1], shape.channels)
    places, real_places = tiles.within(jnp.int32(0), shape.wide, shape.channels)
    if by_row:
        masks = real, real_places
        return tiles.take(states, state, n, rows=some, columns=places, real=masks)
    return tiles.take(states, state, n, rows=places, columns=some, real=(real_places, real))


def _outputs_body(shape: Shape, tile: FilledTile, refs, out, denominator):
    state, batch, kv_head, rows, n, blocks = _place_of_queries(shape, tile)
    q_ids = rows.ids(refs["segments"])
    carry = jnp.zeros((tile.rows, shape.wide), jnp.float32), jnp.zeros(tile.rows, jnp.float32)
    if shape.chunks > 1:
        document = _last(shape, refs, batch, n - 1)

        def add(columns, carry):
            numerator, total = carry
            q = _only(_features_of(shape, rows, refs["q"], columns), q_ids, document)
            total += (_wide(q) * _totals(shape, refs, state, n, columns)).sum(1)
            return numerator + tiles.dot(q, _slice_of_state(shape, refs, state, n, columns)), total

        carry = _sliced(shape, add, carry)
    q_i = _features_of(shape, rows, refs["q"])

    def step(j, carry):
        numerator, total = carry
        keys = _keys_of(shape, tile.keys, batch, kv_head, j)
        seen = _seen(rows, keys, q_ids, keys.ids(refs["segments"]), by_row=True)
        weights = jnp.where(seen, tiles.dot(q_i, keys.load(refs["k"]), transpose_y=True), 0)
        numerator += tiles.dot(tiles.narrow(weights, shape.dtype), keys.load(refs["v"]))
        return numerator, total + weights.sum(1)

    numerator, total = lax.fori_loop(*blocks, step, carry)
    rows.store(out, numerator / total[:, None] if shape.whole else numerator)
    rows.store(denominator, total)


def _d_queries_body(shape: Shape, tile: FilledTile, refs, dq, *more):
    state, batch, kv_head, rows, n, blocks = _place_of_queries(shape, tile)
    q_ids, factor = rows.ids(refs["segments"]), None
    if shape.whole:
        factor = 1 / rows.load(refs["denominator"], other=1)
        d_total = -(_wide(rows.load(refs["d"])) * _wide(rows.load(refs["out"]))).sum(1) * factor
        rows.store(more[0], d_total)
        rows.store(more[1], factor)
    else:
        d_total = rows.load(refs["d_denominator"])
    dq_i = jnp.zeros((tile.rows, shape.wide), jnp.float32)
    if shape.chunks > 1:
        document = _last(shape, refs, batch, n - 1)

        def add(columns, dq_i):
            of_state = _slice_of_state(shape, refs, state, n, columns, by_row=False)
            return dq_i + tiles.dot(rows.load(refs["d"], columns), of_state, transpose_y=True)

        dq_i = _times(_sliced(shape, add, dq_i), factor, 1) + d_total[:, None] * _totals(
            shape, refs, state, n
        )
        dq_i = _only(dq_i, q_ids, document)
    d_i = rows.load(refs["d"])

    def step(j, dq_i):
        keys = _keys_of(shape, tile.keys, batch, kv_head, j)
        seen = _seen(rows, keys, q_ids, keys.ids(refs["segments"]), by_row=True)
        d_weights = _times(tiles.dot(d_i, keys.load(refs["v"]), transpose_y=True), factor, 1)
        d_weights = tiles.narrow(jnp.where(seen, d_weights + d_total[:, None], 0), shape.dtype)
        return dq_i + tiles.dot(d_weights, keys.load(refs["k"]))

    dq_i = lax.fori_loop(*blocks, step, dq_i)
    if shape.whole:
        of_q = _features(_wide(rows.load(refs["q"])))
        rows.store(more[2], tiles.narrow(of_q, shape.dtype))
        dq_i *= jnp.minimum(of_q, 1)
    rows.store(dq, dq_i)


def _d_keys_body(shape: Shape, tile: FilledTile, refs, dk, dv):
    state, j = tiles.program_id(0), tiles.program_id(1)
    batch, kv_head = lax.div(state, shape.num_kv), lax.rem(state, shape.num_kv)
    keys, n = _keys_of(shape, tile.keys, batch, kv_head, j), lax.div(j * tile.keys, shape.chunk)
    k_ids = keys.ids(refs["segments"])
    zero = jnp.zeros((tile.keys, shape.wide), jnp.float32)
    carry = zero, zero
    if shape.chunks > 1:
        document = _last(shape, refs, batch, n)

        def add(columns, carry):
            dk_j, dv_j = carry
            v, k = keys.load(refs["v"], columns), keys.load(refs["k"], columns)
            of_state = _slice_of_state(shape, refs, state, n, columns, by_row=False)
            dk_j += tiles.dot(v, of_state, transpose_y=True)
            return dk_j, dv_j + tiles.dot(k, _slice_of_state(shape, refs, state, n, columns))

        dk_j, dv_j = _sliced(shape, add, carry)
        dk_j += _totals(shape, refs, state, n)
        carry = _only(dk_j, k_ids, document), _only(dv_j, k_ids, document)
    k_j, v_j = keys.load(refs["k"]), keys.load(refs["v"])

    def step(part, i, carry):
        dk_j, dv_j = carry
        rows = _queries_of(shape, tile, batch, (kv_head * tile.parts + part) * tile.heads, i)
        q_i, d_i, factor = rows.load(refs["q"]), rows.load(refs["d"]), _factor(shape, rows, refs)
        seen = _seen(rows, keys, rows.ids(refs["segments"]), k_ids, by_row=False)
        weights = jnp.where(seen, _times(tiles.dot(k_j, q_i, transpose_y=True), factor, 0), 0)
        d_weights = _times(tiles.dot(v_j, d_i, transpose_y=True), factor, 0)
        d_weights = jnp.where(seen, d_weights + rows.load(refs["d_denominator"])[None], 0)
        return (
            dk_j + tiles.dot(tiles.narrow(d_weights, shape.dtype), q_i),
            dv_j + tiles.dot(tiles.narrow(weights, shape.dtype), d_i),
        )

    first, end = lax.div(j * tile.keys, tile.queries), (n + 1) * (shape.chunk // tile.queries)
    for part in range(tile.parts):
        carry = lax.fori_loop(first, end, functools.partial(step, part), carry)
    dk_j, dv_j = carry
    if shape.whole:
        dk_j *= jnp.minimum(_features(_wide(keys.load(refs["raw"]))), 1)
    keys.store(dk, dk_j)
    keys.store(dv, dv_j)
