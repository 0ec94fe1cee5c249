"""The experts' gated MLP on a CPU, where `lax.ragged_dot` would compute every row for every expert.

One loop over the experts forward, one backward; an expert's rows go through all its products in
blocks of one of three heights: the tallest as often as it fits, then one for the rest. Each height
has programs of its own to compile. Short blocks alone would leave the second core idle (a product
of 64 rows runs at half the speed of one of 256). A block may run past the end of its expert's rows;
the next expert's then overwrite it. So spare rows are at the end meanwhile, as many as the greatest
block has. Letters as in `pallas_kernels.grouped_mlp`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_mlp.xla import swiglu
from pallas_kernels.loops import expected_turns
from pallas_kernels.products.cpu import strip_of, sum_rows

# Products of fewer rows take weights out of their stack in strips: XLA's copies then stay in a
# core's cache. With weights [1024, 2048] 4 rows then take 0.6 ms instead of 1.0, 16 rows 1.1
# instead of 1.3, 256 gain nothing.
TALL = 256
FEW = (1, 4, 8, 16, 24, 32, 48, 64)  # rows per block where even groups have fewer than the last


def heights(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Rows per block, lowest first: of an eighth of an even group to half of one, and of 128 to 512
    where groups are large."""
    eighth = num_rows // num_groups // 8
    lowest = next(side for side in (128, 64, 32, 16, 8) if side <= max(eighth, 8))
    return lowest, 2 * lowest, 4 * lowest


def forward(rows, sizes, gate_up, down) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.grouped_mlp`."""
    num_rows, sides = rows.shape[0], heights(rows.shape[0], sizes.shape[0])
    rows, gate_up, down = (
        _with_spare(rows, sides),
        gate_up.astype(rows.dtype),
        down.astype(rows.dtype),
    )
    starts = jnp.cumsum(sizes) - sizes

    def expert(carry, group):
        start, size, w1, w2 = group

        def block(height, row, count, carry):
            del count
            out, hidden = carry
            h = _slice(rows, row, height) @ w1
            out = _write(out, swiglu(h).astype(h.dtype) @ w2, row)
            return out, _write(hidden, h, row)

        carry = _rest(block, sides, start, size, lambda carry: carry, carry)
        return _whole_blocks(block, sides, start, size, carry), None

    carry = jnp.zeros_like(rows), jnp.zeros((rows.shape[0], gate_up.shape[2]), rows.dtype)
    out, hidden = lax.scan(expert, carry, (starts, sizes, gate_up, down))[0]
    real = jnp.arange(num_rows)[:, None] < sizes.sum()
    return jnp.where(real, out[:num_rows], 0), hidden[:num_rows]


def of_layer(rows, sizes, gate_up, down, layer) -> jax.Array:
    """See `pallas_kernels.grouped_mlp`. An expert without rows is not read."""
    num_rows, num_groups = rows.shape[0], sizes.shape[0]
    if num_rows < FEW[-1] * num_groups:
        sides = FEW[: sum(side < num_rows for side in FEW) + 1]
    else:
        sides = heights(num_rows, num_groups)
    rows = _with_spare(rows, sides)
    starts, chosen = jnp.cumsum(sizes) - sizes, jnp.argsort(sizes == 0)

    def expert(i, out):
        e = chosen[i]

        def block(height, row, count, out):
            del count
            hidden = _times_stacked(_slice(rows, row, height), gate_up, layer, e)
            return _write(
                out, _times_stacked(swiglu(hidden).astype(rows.dtype), down, layer, e), row
            )

        if num_rows == 1:
            return block(1, 0, None, out)
        out = _rest(block, sides, starts[e], sizes[e], lambda out: out, out)
        return _whole_blocks(block, sides, starts[e], sizes[e], out)

    with expected_turns(min(num_rows, num_groups), num_groups):
        out = lax.fori_loop(0, (sizes > 0).sum(), expert, jnp.zeros_like(rows))
    real = jnp.arange(num_rows)[:, None] < sizes.sum()
    return jnp.where(real, out[:num_rows], 0)


def backward(rows, sizes, gate_up, down, hidden, d_out) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.grouped_mlp`."""
    num_rows, sides = rows.shape[0], heights(rows.shape[0], sizes.shape[0])
    gate_up, down = gate_up.astype(rows.dtype), down.astype(rows.dtype)
    rows, hidden, d_out = (_with_spare(x, sides) for x in (rows, hidden, d_out))
    starts = jnp.cumsum(sizes) - sizes

    def expert(d_rows, group):
        start, size, w1, w2 = group

        def block(height, row, count, d_rows):
            """The gradients of a block's rows (the first `count` are the expert's), and their part
            of its weights'."""
            dy = _slice(d_out, row, height)
            if count is not None:
                dy = jnp.where(jnp.arange(height)[:, None] < count, dy, 0)
            activation, pull = jax.vjp(swiglu, _slice(hidden, row, height))
            (dh,) = pull(_times_transposed(dy, w2, jnp.float32))
            d_rows = _write(d_rows, _times_transposed(dh, w1, rows.dtype), row)
            return (
                d_rows,
                _outer(_slice(rows, row, height), dh),
                _outer(activation.astype(dy.dtype), dy),
            )

        def another(height, row, count, carry):
            d_rows, *sums = carry
            d_rows, *more = block(height, row, count, d_rows)
            return d_rows, *map(jnp.add, sums, more)

        def nothing(d_rows):
            return d_rows, jnp.zeros(w1.shape, jnp.float32), jnp.zeros(w2.shape, jnp.float32)

        carry = _rest(block, sides, start, size, nothing, d_rows)
        d_rows, *d_weights = _whole_blocks(another, sides, start, size, carry)
        return d_rows, d_weights

    d_rows, (d_gate_up, d_down) = lax.scan(
        expert, jnp.zeros_like(rows), (starts, sizes, gate_up, down)
    )
    return d_rows[:num_rows], d_gate_up, d_down


def _with_spare(x, sides):
    """x with room for the greatest block to run past its end."""
    return jnp.pad(x, ((0, sides[-1]), (0, 0)))


def _rest(
    block: Callable, heights: tuple[int, ...], start, size, nothing: Callable, carry: Any
) -> Any:
    """block(height, row, count, carry) of the group's first rows, as many as its whole blocks
    leave, or nothing(carry).

    They come first so that only this block covers rows that are not its own, which whole blocks
    then write again.
    """
    count = size % heights[-1]
    fitting = jnp.where(count == 0, 0, 1 + (count > jnp.asarray(heights)).sum())
    branches = [
        lambda row, count, carry: nothing(carry),
        *(functools.partial(block, h) for h in heights),
    ]
    return lax.switch(fitting, branches, start, count, carry)


def _whole_blocks(block: Callable, heights: tuple[int, ...], start, size, carry: Any) -> Any:
    """carry after block(height, row, None, carry) on the greatest height's blocks of the group."""
    most = heights[-1]
    first = start + size % most
    return lax.fori_loop(
        0, size // most, lambda i, carry: block(most, first + i * most, None, carry), carry
    )


def _slice(x, row, height):
    return lax.dynamic_slice_in_dim(x, row, height)


def _write(x, block, row):
    return lax.dynamic_update_slice_in_dim(x, block, row, 0)


def _times_stacked(x, stack, layer, expert):
    """x [n, a] times the matrix [a, b] of a layer's expert, out of its stack [L, E, a, b]; in x's
    number format."""
    depth, width = stack.shape[2:]
    strip = strip_of(stack, width)
    if x.shape[0] >= TALL or depth % strip:
        strip = depth

    def product(i):
        w = lax.dynamic_slice(stack, (layer, expert, i * strip, 0), (1, 1, strip, width))[0, 0]
        part = lax.dynamic_slice_in_dim(x, i * strip, strip, 1)
        return jnp.matmul(part, w.astype(x.dtype), preferred_element_type=jnp.float32)

    if strip == depth:
        return product(0).astype(x.dtype)
    zeros = jnp.zeros((x.shape[0], width), jnp.float32)
    y = lax.fori_loop(0, depth // strip, lambda i, y: y + product(i), zeros)
    return y.astype(x.dtype)


def _outer(x, y):
    """x [n, d] and y [n, f] to the sum over rows of their outer products, [d, f], float32."""
    return sum_rows("nd", "nf", "df", x, y)


def _times_transposed(x, w, dtype):
    """x [n, b] times w [a, b] transposed, given in `dtype`."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
