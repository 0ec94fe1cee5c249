"""Reading and joining the residual stream, on GPUs: one pass of kernels of our own where XLA takes
several.

There are two: `_forward`, a join and the norm behind it, and `_backward`, the gradients of a join, of
a norm, or of both. A program has `steps` tiles of `tall` rows with all their columns, one below the
other. Its loop goes down these tiles. Each has the sums over columns that a norm and its gradient
need; sums over rows, for the gradients of scales and biases, are carried from tile to tile. In the
end the program writes its share of them, and XLA adds the shares of all: no atomic addition, the
same bits every time. A forward read or join by itself is left to XLA, which makes one pass of each.

Rows of more than MOST numbers are XLA's: a thread would hold more of them than it has registers
for.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import chip, tiles
from pallas_kernels.products import DOTS, dot, full_precision, sum_rows
from pallas_kernels.residual_norm import xla
from pallas_kernels.residual_norm.xla import Joining, vectors

MOST = 8192


def read(h, scale, eps, dtype) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_norm`."""
    return (_read if h.shape[-1] <= MOST else xla.read)(h, scale, eps, jnp.dtype(dtype))


def join(y, h, how, gate=None) -> jax.Array:
    """See `pallas_kernels.residual_norm`."""
    return (_join if h.shape[-1] <= MOST else xla.join)(y, h, how, gate)


def join_and_read(y, h, how, scale, kernel, eps, dtype, kernel_dtype) -> tuple:
    """See `pallas_kernels.residual_norm`.

    A norm that is wanted wider than it is written is not written twice: the product is taken of the
    stream itself, with the norm's scale on the kernel's rows and 1 / rms on the product's, and so
    is its gradient.
    """
    types = jnp.dtype(dtype), jnp.dtype(kernel_dtype)
    if h.shape[-1] > MOST:
        return xla.join_and_read(y, h, how, scale, kernel, eps, *types)
    if jnp.promote_types(*types) != types[0]:
        return _join_and_read_wide(y, h, how, scale, kernel, eps, *types)
    h, x = _join_and_read(y, h, how, scale, eps, types[0])
    return h, x, dot(x, kernel, types[1], jnp.float32, full_precision(types[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _read(h, scale, eps, dtype):
    return xla.read(h, scale, eps, dtype)


def _read_fwd(h, scale, eps, dtype):
    return xla.read(h, scale, eps, dtype), (h, scale)


def _read_bwd(eps, dtype, saved, d):
    h, scale = saved
    gradients = _backward(h, d[1], norm=(scale, eps), d_x=(d[0],))
    return gradients.d_h, gradients.d_norm


_read.defvjp(_read_fwd, _read_bwd)


@jax.custom_vjp
def _join(y, h, how, gate):
    return xla.join(y, h, how, gate)


def _join_bwd(saved, d):
    y, h, how, gate = saved
    gradients = _backward(h, d, joined=(y, how, gate))
    return gradients.d_y, gradients.d_h, vectors(gradients.sums, how), gradients.d_gate


_join.defvjp(lambda *args: (_join(*args), args), _join_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _join_and_read(y, h, how, scale, eps, dtype):
    return _forward(y, h, how, scale, eps, dtype)[:2]


def _join_and_read_fwd(y, h, how, scale, eps, dtype):
    return _join_and_read(y, h, how, scale, eps, dtype), (y, h, how, scale)


def _join_and_read_bwd(eps, dtype, saved, d):
    y, h, how, scale = saved
    gradients = _backward(h, d[0], norm=(scale, eps), d_x=(d[1],), joined=(y, how, None))
    return gradients.d_y, gradients.d_h, vectors(gradients.sums, how), gradients.d_norm


_join_and_read.defvjp(_join_and_read_fwd, _join_and_read_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _join_and_read_wide(y, h, how, scale, kernel, eps, dtype, kernel_dtype):
    return _join_and_read_wide_fwd(y, h, how, scale, kernel, eps, dtype, kernel_dtype)[0]


def _join_and_read_wide_fwd(y, h, how, scale, kernel, eps, dtype, kernel_dtype):
    after, x, inverse = _forward(y, h, how, scale, eps, dtype)
    product = dot(
        after, scale[:, None] * kernel, kernel_dtype, jnp.float32, full_precision(kernel_dtype)
    )
    product = checkpoint_name(product * inverse[..., None], DOTS)
    return (after, x, product), (y, h, how, scale, kernel, after, inverse)


def _join_and_read_wide_bwd(eps, dtype, kernel_dtype, saved, d):
    y, h, how, scale, kernel, after, inverse = saved
    d_after, d_x, d_product = d
    precision = full_precision(kernel_dtype)
    d_product, columns = d_product.astype(kernel_dtype), after.shape[-1]
    rows = (d_product * inverse[..., None].astype(kernel_dtype)).reshape(-1, kernel.shape[1])
    stream = after.astype(kernel_dtype).reshape(-1, columns)
    d_kernel = scale[:, None] * sum_rows("nd", "nr", "dr", stream, rows, precision)
    wide = jnp.einsum(
        "...r,dr->...d",
        d_product,
        kernel.astype(kernel_dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    ).astype(dtype)
    gradients = _backward(h, d_after, norm=(scale, eps), d_x=(d_x, wide), joined=(y, how, None))
    return (
        gradients.d_y,
        gradients.d_h,
        vectors(gradients.sums, how),
        gradients.d_norm,
        d_kernel.astype(kernel.dtype),
    )


_join_and_read_wide.defvjp(_join_and_read_wide_fwd, _join_and_read_wide_bwd)


class _Tile(NamedTuple):
    """Rows and columns that a program has at once, and how many such tiles it walks down."""

    rows: int  # of the whole array
    columns: int
    tall: int
    wide: int
    steps: int
    warps: int

    @property
    def programs(self) -> int:
        return -(-self.rows // (self.tall * self.steps))

    def masks(self, row):
        """Masks of the tile from this row on: real rows [tall, 1], columns [1, wide], both; None:
        all are."""
        rows = columns = both = None
        if self.rows % (self.tall * self.steps):
            rows = row + lax.broadcasted_iota(jnp.int32, (self.tall, 1), 0) < self.rows
        if self.wide != self.columns:
            columns = lax.broadcasted_iota(jnp.int32, (1, self.wide), 1) < self.columns
        masks = [
            jnp.broadcast_to(m, (self.tall, self.wide)) for m in (rows, columns) if m is not None
        ]
        if masks:
            both = functools.reduce(jnp.logical_and, masks)
        return rows, columns, both

    def like(self, x) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.columns), x)


class _Sizes(NamedTuple):
    """What the table says of a kernel."""

    numbers: int  # of a thread; 8 of bfloat16 are 16 bytes
    # At most. More of a backward pass write more shares (16.8 MB of 512 at 2,048 columns, where the
    # stream of 16,384 tokens has 134), fewer leave a GPU of 304 units idle.
    programs: int


def _tile(rows: int, columns: int, kernel: str) -> _Tile:
    sizes = tiles.tile_of(_Sizes, kernel)
    wide = max(tiles.power(columns), 16)
    tall = max(2048 // wide, 1)
    warps = min(max(tall * wide // (sizes.numbers * chip.current().lanes), 1), 16)
    return _Tile(rows, columns, tall, wide, -(-rows // (tall * sizes.programs)), warps)


class _Block:
    """A program's access to its rows of the arrays, from `row` on."""

    def __init__(self, tile: _Tile, row: Any):
        self.tile, self.row = tile, row
        self.in_rows, self.in_columns, self.in_both = tile.masks(row)
        # A traced zero: known ones may not reach over an array's end.
        self.columns = tiles.slice_of(row * 0, tile.wide)

    def _of(self, ref):
        return ref.at[tiles.slice_of(self.row, self.tile.tall), self.columns]

    def take(self, ref):
        """The tile, float32, zero where there is nothing."""
        return tiles.load_masked(self._of(ref), self.in_both).astype(jnp.float32)

    def give(self, ref, x):
        tiles.store(self._of(ref), x.astype(ref.dtype), mask=self.in_both)

    def take_each(self, ref):
        """A number of each row, [tall, 1]."""
        mask = None if self.in_rows is None else self.in_rows[:, 0]
        return tiles.load_masked(ref.at[tiles.slice_of(self.row, self.tile.tall)], mask)[:, None]

    def give_each(self, ref, x):
        mask = None if self.in_rows is None else self.in_rows[:, 0]
        tiles.store(ref.at[tiles.slice_of(self.row, self.tile.tall)], x[:, 0], mask=mask)

    def vector(self, ref):
        """A number of each column, [1, wide]."""
        mask = None if self.in_columns is None else self.in_columns[0]
        return tiles.load_masked(ref.at[self.columns], mask)[None]


def _joined(y, h, how):
    y_scale, y_bias, h_scale, h_bias = how
    return (y + y_bias) * y_scale + (h + h_bias) * h_scale


def _inverse_rms(h, columns, eps):
    return lax.rsqrt((h * h).sum(1, keepdims=True) / columns + eps)


def _forward(y, h, how, scale, eps, dtype):
    """The joined stream, its norm, and 1 / rms of its rows."""
    shape = h.shape
    name = "residual_join_and_read"
    tile = _tile(h.size // shape[-1], shape[-1], name)

    def body(refs, after, x, inverse):
        first = tiles.program_id(0) * tile.tall * tile.steps
        columns = [_Block(tile, first).vector(ref) for ref in (*refs["how"], refs["scale"])]

        def step(i, _):
            block = _Block(tile, first + i * tile.tall)
            joined = _joined(block.take(refs["y"]), block.take(refs["h"]), columns[:4])
            r = _inverse_rms(joined, tile.columns, eps)
            block.give(after, joined)
            block.give(x, joined * r * columns[4])
            block.give_each(inverse, r)
            return 0

        lax.fori_loop(0, tile.steps, step, 0)

    shapes = [
        tile.like(jnp.float32),
        tile.like(dtype),
        jax.ShapeDtypeStruct((tile.rows,), jnp.float32),
    ]
    operands = {"y": _flat(y), "h": _flat(h), "how": how, "scale": scale}
    after, x, inverse = tiles.call(
        body, operands, name=name, grid=(tile.programs,), out_shapes=shapes, warps=tile.warps
    )
    return after.reshape(shape), x.reshape(shape), inverse.reshape(shape[:-1])


class _Gradients(NamedTuple):
    d_h: jax.Array
    d_norm: jax.Array | None  # of the norm's scale
    d_y: jax.Array | None
    d_gate: jax.Array | None
    sums: list[jax.Array]  # over tokens, of d, d y and d h, where d is the joined stream's gradient


def _backward(
    h: jax.Array,
    d_h: jax.Array,
    *,
    norm: tuple[jax.Array, float] | None = None,
    d_x: tuple[jax.Array, ...] = (),
    joined: Any = None,
) -> _Gradients:
    """Gradients of a stream's join with `joined` (y, how, gate), and then its norm (scale, eps), from
    `d_h`, those of the stream after it, and `d_x`, those of the norm, to be added up."""
    name = f"residual_{'_and_'.join(['join'] * bool(joined) + ['read'] * bool(norm))}_gradients"
    tile = _tile(h.size // h.shape[-1], h.shape[-1], name)
    y, how, gate = joined or (None, None, None)
    scale, eps = norm or (None, 0.0)
    operands = {"h": _flat(h), "d_h": _flat(d_h), "d_x": tuple(map(_flat, d_x)), "scale": scale}
    if joined is not None:
        operands |= {"y": _flat(y), "how": how, "gate": None if gate is None else gate.reshape(-1)}
    outputs, names = _results(tile, scale, y, gate)

    def body(ins, *refs):
        outs = dict(zip(outputs, refs, strict=True))
        first = tiles.program_id(0) * tile.tall * tile.steps
        top = _Block(tile, first)
        joining: Any = how and Joining(*(top.vector(ref) for ref in ins["how"]))
        norm_scale = None if scale is None else top.vector(ins["scale"])

        def step(i, sums):
            block, sums = _Block(tile, first + i * tile.tall), dict(zip(names, sums, strict=True))
            d, stream = block.take(ins["d_h"]), block.take(ins["h"])
            after = stream

            def add(name, x):
                sums[name] += x.sum(0, keepdims=True)

            if how is not None:
                branch = block.take(ins["y"])
                factor = None if gate is None else block.take_each(ins["gate"])
                y = branch if gate is None else branch * factor
                after = _joined(y, stream, joining)
            if scale is not None:
                r = _inverse_rms(after, tile.columns, eps)
                x = after * r
                of_norm = sum(block.take(ref) for ref in ins["d_x"])
                add("scale", of_norm * x)
                of_norm = of_norm * norm_scale
                d += r * (of_norm - x * ((of_norm * x).sum(1, keepdims=True) / tile.columns))
            if how is not None:
                add("total", d)
                add("by_y", d * y)
                add("by_h", d * stream)
                d_y = d * joining.y_scale
                if gate is not None:
                    block.give_each(outs["gate"], (d_y * branch).sum(1, keepdims=True))
                    d_y *= factor
                block.give(outs["y"], d_y)
                d *= joining.h_scale
            block.give(outs["h"], d)
            return tuple(sums.values())

        nothing = jnp.zeros((1, tile.wide), jnp.float32)
        sums = lax.fori_loop(0, tile.steps, step, (nothing,) * len(names))
        mask = None if top.in_columns is None else top.in_columns[0]
        for i, x in enumerate(sums):
            row = tiles.program_id(0) * len(names) + i
            tiles.store(outs["sums"].at[row, top.columns], x[0], mask=mask)

    shapes = [*outputs.values()]
    results = tiles.call(
        body, operands, name=name, grid=(tile.programs,), out_shapes=shapes, warps=tile.warps
    )
    arrays = dict(zip(outputs, results, strict=True))
    shares = arrays["sums"].reshape(tile.programs, len(names), tile.columns)
    sums = dict(zip(names, shares.sum(0), strict=True))
    return _Gradients(
        arrays["h"].reshape(h.shape).astype(h.dtype),
        sums.get("scale"),
        arrays["y"].reshape(h.shape) if how is not None else None,
        arrays["gate"].reshape(gate.shape) if gate is not None else None,
        [sums[name] for name in names if name != "scale"],
    )


def _results(tile: _Tile, scale, y, gate) -> tuple[dict[str, Any], list[str]]:
    """Results of `_backward`'s kernel, by name, and the names of the sums, which it makes side by
    side."""
    outputs: dict[str, Any] = {"h": tile.like(jnp.float32)}
    names = []
    if scale is not None:
        names.append("scale")
    if y is not None:
        outputs["y"] = tile.like(y.dtype)
        names += ["total", "by_y", "by_h"]
    if gate is not None:
        outputs["gate"] = jax.ShapeDtypeStruct((tile.rows,), jnp.float32)
    outputs["sums"] = jax.ShapeDtypeStruct((tile.programs * len(names), tile.columns), jnp.float32)
    return outputs, names


def _flat(x):
    return x.reshape(-1, x.shape[-1])
