"""The gated MLP of groups by kernels of Pallas's Triton backend: for GPUs.

Rows are read in place: `order` names them, sorted by expert, so that nothing is gathered before the
products or scattered after them. Weights are read in their own number format and converted on the
way to the products: no copy of them is made. Six products, each one kernel, for row i of the sorted
ones:

    gate_up       hidden[i] = x[order[i]] @ gate_up, a tile of both halves at once, and swiglu[i] of it
    down          out[order[i]] = swiglu[i] @ down
    d_hidden      d_out[order[i]] @ down^T, backwards through SwiGLU; and swiglu[i] again
    d_x           d_x[order[i]] = d_hidden[i] @ gate_up^T
    d_gate_up     for each expert x[order]^T @ d_hidden over its rows, float32
    d_down        for each expert swiglu^T @ d_out[order] over its rows, float32

A program of the first four has a tile of rows of one expert (`_block_of`) and of columns; its loop
goes down the depth of the product, and after it comes what is not a product (`_by_rows`,
`_products`). A program of the last two has a tile of an expert's gradient; its loop goes down the
expert's rows (`_over_rows`).

With a `layer`, weights and gradients are stacks over all layers, and hidden may be one: a kernel
writes the layer's own part. XLA copies a custom call's slice out of a stack, or into one, 3.6 GB a
layer of ZAYA1 and step.

Offsets of groups are found inside the kernels, from `sizes`: each expert has its own tiles of rows,
the last of them ragged, so a grid has room for one more per expert than M rows fill, and programs
that find no rows do nothing. Rows past the last expert's are a further group, whose loops do not
turn: it gives zero. A weight's gradient is summed in float32 and written once, that of an expert
without rows as zeros.

Columns are the grid's fastest axis: programs that run at once share a few tiles of rows and one
expert's columns. An MI300X gives workgroups in turn to its 8 parts (XCDs), so that with 8 n columns
of tiles each part's 4 MB of L2 hold its own n strips of the weights, and each strip is read from
memory once for some 9 tiles of rows. The account of a compiled program (`tiles.call`) counts each
operand once, and the products of the rows that there are: a ragged tile computes more, on average
half a tile for each expert (6% at 1,024 rows an expert and 128 a tile, 12% at 256).

Any sides and formats work; if sides are not whole tiles, numbers past the edge are masked, which is
slow.

Letters as in `pallas_kernels.grouped_mlp`; N tokens are as many as M rows.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.tiles import ProductTile as Tile


def forward(
    x, sizes, gate_up, down, order=None, layer=None, keep=True, stack=None
) -> tuple[jax.Array, Any]:
    """See `pallas_kernels.grouped_mlp`: out [N, D] and hidden [M, 2 F], or None unless `keep`.

    With a `layer`, its number, weights are stacks [L, E, ..]; they are read in place. Given a
    `stack` [L, M, 2 F], hidden is the stack with the layer's own in its place.
    """
    (num, dim), width = x.shape, down.shape[-2]
    like = functools.partial(jax.ShapeDtypeStruct, dtype=x.dtype)
    route = _Route(order, sizes, layer)
    made = [*[like((num, 2 * width) if stack is None else stack.shape)] * keep, like((num, width))]
    *hidden, activation = _by_rows(
        _gate_and_up, "gate_up", route, (x, gate_up), made, width, dim, products=2, into=stack
    )
    of_rows = functools.partial(_to_tokens, transposed=False)
    (out,) = _by_rows(of_rows, "down", route, (activation, down), [like(x.shape)], dim, width)
    return out, hidden[0] if keep else None


def backward(
    x, sizes, gate_up, down, hidden, d_out, order=None, layer=None, into=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of x, and of both weights in float32.

    With a `layer` and `into` = (stacks of gradients, whether to add), stacks are given with the
    layer's own in its place, or added there; without `into` the layer's alone. `hidden` may be a
    stack too.
    """
    (num, dim), width = x.shape, down.shape[-2]
    like = functools.partial(jax.ShapeDtypeStruct, dtype=x.dtype)
    route = _Route(order, sizes, layer)
    made = [like(hidden.shape[-2:]), like((num, width))]
    d_hidden, activation = _by_rows(
        _d_hidden, "d_hidden", route, (d_out, down, hidden), made, width, dim
    )
    of_rows = functools.partial(_to_tokens, transposed=True)
    (d_x,) = _by_rows(of_rows, "d_x", route, (d_hidden, gate_up), [like(x.shape)], dim, 2 * width)
    sums, add = into or ((None, None), False)
    over_rows = functools.partial(
        _over_rows, order=order, sizes=sizes, layer=layer if into else None, add=add
    )
    d_gate_up = over_rows(x, d_hidden, sums[0], order_of_x=True, kernel="d_gate_up")
    d_down = over_rows(activation, d_out, sums[1], order_of_x=False, kernel="d_down")
    return d_x, d_gate_up, d_down


def _tile(kernel: str, *whole: int, dtype) -> Tile:
    """One that is no larger than the whole array needs, of these rows, columns and depth."""
    wide = jnp.dtype(dtype).itemsize > 2
    tile = tiles.tile_of(Tile, f"experts_{kernel}", "wide" if wide else "")
    sides = zip(("rows", "columns", "depth"), whole, strict=True)
    return tile._replace(
        **{side: min(getattr(tile, side), max(16, tiles.power(size))) for side, size in sides}
    )


class _Block(NamedTuple):
    """A program's part of its group."""

    lead: tuple[jax.Array, ...]  # its number among the weights
    live: jax.Array  # whether it is an expert's
    inside: jax.Array  # which of the tile's rows are the group's
    rows: jax.Array  # places among the sorted rows, all valid
    tokens: jax.Array  # the tokens' places of these rows
    num: int

    def to(self, places: jax.Array) -> jax.Array:
        """Where to write: past the end for rows of other groups."""
        return jnp.where(self.inside, places, self.num)


def _groups(sizes_ref, num: int) -> tuple[jax.Array, jax.Array]:
    """Lanes, and the rows of each group; the one past the last expert has the rest."""
    experts = sizes_ref.shape[0]
    lane = jnp.arange(tiles.power(experts + 1), dtype=jnp.int32)
    sizes = tiles.load(sizes_ref.at[lane], mask=lane < experts, other=0)
    return lane, jnp.where(lane == experts, num - jnp.sum(sizes), sizes)


def _block_of(refs, num: int, side: int, tile) -> _Block:
    """The rows and the group of the tile with this number."""
    lane, sizes = _groups(refs["sizes"], num)
    blocks = (sizes + (side - 1)) >> (side.bit_length() - 1)
    group = jnp.sum((jnp.cumsum(blocks) <= tile).astype(jnp.int32))
    before = lane < group
    lanes = (tile - jnp.sum(jnp.where(before, blocks, 0))) * side + jnp.arange(
        side, dtype=jnp.int32
    )
    inside = lanes < jnp.sum(jnp.where(lane == group, sizes, 0))
    rows = jnp.minimum(jnp.sum(jnp.where(before, sizes, 0)) + lanes, num - 1)
    lead, live = _lead(refs["layer"], group), group < refs["sizes"].shape[0]
    return _Block(lead, live, inside, rows, _tokens(refs["order"], rows), num)


def _lead(layer_ref, group) -> tuple[jax.Array, ...]:
    return (group,) if layer_ref is None else (layer_ref[0], group)


def _tokens(order_ref, rows):
    return rows if order_ref is None else tiles.load(order_ref.at[rows])


class _Route(NamedTuple):
    """The places of rows and the weights that they use; see `forward`."""

    order: jax.Array | None
    sizes: jax.Array
    layer: jax.Array | None


def _by_rows(
    body, kind, route, arrays, outs, columns, depth, products=1, into=None
) -> list[jax.Array]:
    """A kernel whose programs give a tile of rows of one expert and of `columns`, of x, w and
    perhaps one more. The first result takes the place of `into`, a stack."""
    order, sizes, layer = route
    layer = None if layer is None else layer.reshape(1)
    x, w, more = (*arrays, None)[:3]
    num = x.shape[0]
    tile = _tile(kind, num, columns, depth, dtype=x.dtype)

    def kernel(refs, *results):
        body(_block_of(refs, num, tile.rows, tiles.program_id(1)), tile, refs, *results)

    grid = -(-columns // tile.columns), -(-num // tile.rows) + sizes.shape[0] + 1
    operands = {"sizes": sizes, "x": x, "w": w, "layer": layer, "order": order, "more": more}
    reads = _bytes(w, 3) + sum(_bytes(a) for a in (sizes, x, layer, order, more) if a is not None)
    written = sum(_bytes(a) for a in outs)
    return tiles.call(
        kernel,
        operands | {"into": into},
        name=f"experts_{kind}",
        grid=grid,
        out_shapes=outs,
        work=tiles.Work(2.0 * num * columns * depth * products, moved=(reads, written)),
        warps=tile.warps,
        stages=tile.stages,
        in_place=into is not None,
    )


def _bytes(array, dims: int = 2) -> float:
    """Those of a layer, whose arrays have so many dims; a stack has one more."""
    return math.prod(array.shape[-dims:]) * array.dtype.itemsize


def _in_stack(block: _Block, ref) -> tuple[jax.Array, ...]:
    """What leads to a layer's hidden in a stack."""
    return block.lead[:1] if len(ref.shape) == 3 else ()


def _products(
    block: _Block,
    tile: Tile,
    x_ref,
    x_rows: jax.Array,
    w_ref,
    columns: jax.Array,
    real_columns: jax.Array | None,
    depth: int,
    *,
    transposed: bool,
    further: tuple[int, ...] = (),
) -> list[jax.Array]:
    """x[x_rows] times these columns of the weights of the block's expert, and times those that lie
    so much `further`: a tile each. If `transposed`, they are rows of the weights.

    The loop goes down the depth. For rows of no expert it does not turn, which leaves zeros.
    """
    dtype = x_ref.dtype

    def turn(i, sums):
        places, real_depth = tiles.within(i * tile.depth, tile.depth, depth)
        x = tiles.take(x_ref, rows=x_rows, columns=places, real=(None, real_depth))
        products = []
        for side in (columns, *(columns + distance for distance in further)):
            down, across, real = places, side, (real_depth, real_columns)
            if transposed:
                down, across, real = side, places, (real_columns, real_depth)
            w = tiles.take(w_ref, *block.lead, rows=down, columns=across, real=real, dtype=dtype)
            products.append(tiles.dot(x, w, transpose_y=transposed))
        return tuple(a + b for a, b in zip(sums, products, strict=True))

    shape = tile.rows, tile.columns
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in (0, *further))
    turns = block.live.astype(jnp.int32) * -(-depth // tile.depth)
    return list(jax.lax.fori_loop(0, turns, turn, zeros))


def _columns(tile: Tile, length: int):
    return tiles.within(tiles.program_id(0) * tile.columns, tile.columns, length)


def _gate_and_up(block, tile, refs, *results):
    x_ref, w_ref = refs["x"], refs["w"]
    (dim, both), dtype = w_ref.shape[-2:], x_ref.dtype
    width = both // 2
    columns, real_columns = _columns(tile, width)
    products = _products(
        block,
        tile,
        x_ref,
        block.tokens,
        w_ref,
        columns,
        real_columns,
        dim,
        transposed=False,
        further=(width,),
    )
    gate, up = (product.astype(dtype) for product in products)
    *hidden_refs, activation_ref = results
    values = [(activation_ref, _swiglu(gate, up)[0], columns)]
    for ref in hidden_refs:
        values += [(ref, gate, columns), (ref, up, columns + width)]
    for ref, value, side in values:
        lead, rows = _in_stack(block, ref), block.to(block.rows)
        tiles.put(ref, value, *lead, rows=rows, columns=side, real=(block.inside, real_columns))


def _to_tokens(block, tile, refs, out_ref, *, transposed: bool):
    """The product of the sorted rows, written to the tokens' places."""
    *_, down, across = refs["w"].shape
    depth, length = (across, down) if transposed else (down, across)
    columns, real_columns = _columns(tile, length)
    sides = block.rows, refs["w"], columns, real_columns, depth
    (out,) = _products(block, tile, refs["x"], *sides, transposed=transposed)
    real = block.inside, real_columns
    tiles.put(out_ref, out, rows=block.to(block.tokens), columns=columns, real=real)


def _d_hidden(block, tile, refs, d_hidden_ref, activation_ref):
    d_ref, w_ref, hidden_ref = refs["x"], refs["w"], refs["more"]
    width, dim = w_ref.shape[-2:]
    columns, real_columns = _columns(tile, width)
    (d,) = _products(
        block, tile, d_ref, block.tokens, w_ref, columns, real_columns, dim, transposed=True
    )
    lead, inside = _in_stack(block, hidden_ref), (block.inside, real_columns)
    gate, up = (
        tiles.take(hidden_ref, *lead, rows=block.rows, columns=side, real=inside)
        for side in (columns, columns + width)
    )
    activation, d_silu, silu = _swiglu(gate, up)
    for ref, value, side in (
        (d_hidden_ref, d * up.astype(jnp.float32) * d_silu, columns),
        (d_hidden_ref, d * silu, columns + width),
        (activation_ref, activation, columns),
    ):
        tiles.put(ref, value, rows=block.to(block.rows), columns=side, real=inside)


def _swiglu(gate, up) -> tuple[jax.Array, jax.Array, jax.Array]:
    """SwiGLU, the derivative of its silu, and silu itself; float32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    share = jax.nn.sigmoid(gate)
    silu = gate * share
    return silu * up, share + silu * (1 - share), silu


def _over_rows(x, y, sums, *, order, sizes, layer, add, order_of_x: bool, kernel: str) -> jax.Array:
    """For each group x^T @ y over its rows, float32; `order` gives the places of the rows of x or
    of y.

    With a `layer`, `sums` with this in the layer's place.
    """
    (num, height), width, dtype = x.shape, y.shape[1], x.dtype
    # The rows' numbers are loaded first, which takes two stages: on NVIDIA's chips 3 and 4 are the
    # same code, with one turn's loads in flight; with 5 two turns' are.
    tile = _tile(kernel, height, width, num, dtype=dtype)

    def body(refs, out_ref):
        x_ref, y_ref, group = refs["x"], refs["y"], tiles.program_id(2)
        lane, sizes = _groups(refs["sizes"], num)
        first, size = (
            jnp.sum(jnp.where(lane < group, sizes, 0)),
            jnp.sum(jnp.where(lane == group, sizes, 0)),
        )
        out_rows, in_x = tiles.within(tiles.program_id(1) * tile.rows, tile.rows, height)
        columns, in_y = _columns(tile, width)

        def term(i, whole):
            lanes = i * tile.depth + jnp.arange(tile.depth, dtype=jnp.int32)
            real = None if whole else lanes < size
            rows = first + lanes if whole else jnp.minimum(first + lanes, num - 1)
            tokens = _tokens(refs["order"], rows)
            of_x, of_y = (tokens, rows) if order_of_x else (rows, tokens)
            a = tiles.take(x_ref, rows=of_x, columns=out_rows, real=(real, in_x), dtype=dtype)
            b = tiles.take(y_ref, rows=of_y, columns=columns, real=(real, in_y), dtype=dtype)
            return tiles.dot(a, b, transpose_x=True)

        whole = size >> (tile.depth.bit_length() - 1)
        total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
        total = jax.lax.fori_loop(0, whole, lambda i, total: total + term(i, True), total)
        rest = ((size & (tile.depth - 1)) > 0).astype(jnp.int32)
        total = jax.lax.fori_loop(
            whole, whole + rest, lambda i, total: total + term(i, False), total
        )
        lead = _lead(refs["layer"], group)
        if add:
            total += tiles.take(
                refs["sums"], *lead, rows=out_rows, columns=columns, real=(in_x, in_y)
            )
        out_rows, columns = (
            places if real is None else jnp.where(real, places, side)
            for places, real, side in ((out_rows, in_x, height), (columns, in_y, width))
        )
        tiles.put(out_ref, total, *lead, rows=out_rows, columns=columns, real=(in_x, in_y))

    layer = None if layer is None else layer.reshape(1)
    operands = {"sizes": sizes, "x": x, "y": y, "order": order, "layer": layer, "sums": sums}
    written = 4.0 * sizes.size * height * width
    reads = x.nbytes + y.nbytes + sizes.nbytes + written * add
    if order is not None:
        reads += order.nbytes
    shape = (*sizes.shape, height, width) if layer is None else sums.shape
    return tiles.call(
        body,
        operands,
        name=f"experts_{kernel}",
        grid=(-(-width // tile.columns), -(-height // tile.rows), sizes.size),
        out_shapes=jax.ShapeDtypeStruct(shape, jnp.float32),
        work=tiles.Work(2.0 * num * height * width, moved=(reads, written)),
        warps=tile.warps,
        stages=tile.stages,
        in_place=layer is not None,
    )
