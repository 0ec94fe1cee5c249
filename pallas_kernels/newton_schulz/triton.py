"""The iteration on a GPU: of both symmetric products one half of the tiles, and sums where the
products leave them.

X X^T and (X X^T)² are symmetric: a tile on or under the diagonal is computed and stored twice, the
second time transposed. So a square matrix takes 2/3 of the FLOPs of three full products, a wide one
up to 3/4, and each polynomial is three kernels. XLA takes all tiles, and also passes over float32
results.

Sides must be whole tiles (`fits`); other matrices are XLA's.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.newton_schulz import xla

TILE = tiles.Product(128, 128, 64, warps=8)


def fits(a: int, b: int, dtype) -> bool:
    """Whether the kernels take matrices [a, b]."""
    return a % 64 == 0 and b % 64 == 0 and dtype in (jnp.bfloat16, jnp.float32)


def iterate(x, polynomials, dtype) -> jax.Array:
    """See `pallas_kernels.newton_schulz`."""
    a, b = x.shape[-2:]
    if not fits(a, b, dtype):
        return xla.iterate(x, polynomials, dtype)
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:]).astype(dtype)
    for own, once, twice in polynomials:
        gram = symmetric(x)
        x = added_product(symmetric(gram, once, twice), x, own)
    return x.reshape(shape)


def symmetric(x: jax.Array, own: float = 0.0, scale: float = 1.0) -> jax.Array:
    """own x + scale x x^T of matrices [n, a, b], summed in float32; `own` is only for symmetric
    x."""
    num, a, b = x.shape
    tile = _tile(a, x.dtype)
    side, deep, down = tile.rows, tile.depth, a // tile.rows
    half = down * (down + 1) // 2
    return tiles.call(
        functools.partial(_symmetric, half=half, side=side, deep=deep, own=own, scale=scale),
        x,
        name="newton_schulz_symmetric",
        grid=(num * half,),
        out_shapes=jax.ShapeDtypeStruct((num, a, a), x.dtype),
        work=tiles.Work(2.0 * num * half * side * side * b),
        warps=tile.warps,
        stages=tile.stages,
    )


def _symmetric(x, out, half, side, deep, own, scale):
    which, place = tiles.program_id(0) // half, tiles.program_id(0) % half
    # The place counts the tiles on and under the diagonal row by row: row i begins at i (i + 1) /
    # 2.
    i = ((jnp.sqrt(8.0 * place.astype(jnp.float32) + 1) - 1) / 2).astype(jnp.int32)
    i = jnp.where(i * (i + 1) // 2 > place, i - 1, i)
    i = jnp.where((i + 1) * (i + 2) // 2 <= place, i + 1, i)
    j = place - i * (i + 1) // 2
    rows, columns = tiles.slice_of(i * side, side), tiles.slice_of(j * side, side)

    def step(k, acc):
        inner = tiles.slice_of(k * deep, deep)
        return acc + tiles.dot(x[which, rows, inner], x[which, columns, inner], transpose_y=True)

    found = scale * jax.lax.fori_loop(
        0, x.shape[2] // deep, step, jnp.zeros((side, side), jnp.float32)
    )
    if own:
        found += own * x[which, rows, columns].astype(jnp.float32)
    found = found.astype(out.dtype)
    out[which, rows, columns] = found
    # The diagonal is written already, and rounding may make a tile differ from its own transpose.
    tiles.store(out.at[which, columns, rows], found.T, mask=jnp.full((side, side), i != j))


def added_product(factor: jax.Array, x: jax.Array, own: float) -> jax.Array:
    """own x + factor x of matrices [n, a, b], summed in float32."""
    num, a, b = x.shape
    tile = _tile(math.gcd(a, b), x.dtype)
    side, deep = tile.rows, tile.depth
    return tiles.call(
        functools.partial(_added, down=a // side, side=side, deep=deep, own=own),
        factor,
        x,
        name="newton_schulz_apply",
        grid=(num * (a // side) * (b // side),),
        out_shapes=jax.ShapeDtypeStruct(x.shape, x.dtype),
        work=tiles.Work(2.0 * num * a * a * b),
        warps=tile.warps,
        stages=tile.stages,
    )


def _added(factor, x, out, down, side, deep, own):
    across = x.shape[2] // side
    which, place = tiles.program_id(0) // (down * across), tiles.program_id(0) % (down * across)
    rows, columns = (
        tiles.slice_of(place % down * side, side),
        tiles.slice_of(place // down * side, side),
    )

    def step(k, acc):
        inner = tiles.slice_of(k * deep, deep)
        return acc + tiles.dot(factor[which, rows, inner], x[which, inner, columns])

    found = jax.lax.fori_loop(0, x.shape[1] // deep, step, jnp.zeros((side, side), jnp.float32))
    out[which, rows, columns] = (found + own * x[which, rows, columns].astype(jnp.float32)).astype(
        out.dtype
    )


def _tile(length: int, dtype) -> tiles.Product:
    """A square one: of `suited`'s sides the smaller; four warps have a half."""
    wide = dtype == jnp.float32
    tile = TILE._replace(depth=TILE.depth // 2) if wide else TILE
    tile = tile.suited("newton_schulz", dtype)
    side = min(tile.rows, tile.columns, 64 if wide or length % 128 else 128)
    return tile._replace(rows=side, columns=side, warps=8 if side == 128 else 4)
