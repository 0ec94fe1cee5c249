"""The experts' gated MLP on a CPU, where `lax.ragged_dot` would compute every row for every expert.

One loop over the experts forward, one backward; an expert's rows go through all its products at once, as one block.
Blocks have one of a dozen heights, so that a fitting one is a few percent too high, and each has a program of its own:
small blocks in a loop would leave the second core idle (a product of 64 rows runs at half the speed of one of 256).
Letters: M rows sorted by expert, D model, E experts, F expert width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zaya_jax.model.matmul import apart, rows_dot

PRODUCTS = "experts"  # the name under which a remat policy finds what the grouped products gave


def gated(hidden: Float[Array, "M F2"]) -> Float[Array, "M F"]:
    """silu of the first half times the second, in float32, given in the number format that came."""
    g, u = jnp.split(apart(hidden.astype(jnp.float32)), 2, axis=-1)
    return apart(jax.nn.silu(g) * u).astype(hidden.dtype)


def _gated_gradients(hidden, d):
    """gated(hidden) again, and hidden's gradient for that of the output in float32, from one sigmoid."""
    g, u = jnp.split(apart(hidden.astype(jnp.float32)), 2, axis=-1)
    sigmoid = apart(jax.nn.sigmoid(g))
    silu = g * sigmoid
    dg, du = apart((d * u * (sigmoid + silu - silu * sigmoid), d * silu))
    gradient = apart(jnp.concatenate([dg, du], axis=-1)).astype(hidden.dtype)
    return apart(silu * u).astype(hidden.dtype), gradient


def heights(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Rows a block, lowest first: an even group fits the eighth of twelve, and the last is for two such groups.

    Each is more to compile, so where groups are small and cost little there are four at most.
    """
    even = num_rows // num_groups
    unit = min(64, 1 << (even // 8).bit_length() - 1) if even >= 64 else 8
    several = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16) if even >= 64 else (1, 2, 4, 8)
    enough = sum(unit * n < num_rows for n in several) + 1
    return tuple(unit * n for n in several[:enough])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def swiglu(
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    heights: tuple[int, ...],
) -> Float[Array, "M D"]:
    """The gated MLP of rows sorted by expert, in their number format; gradients of weights are float32.

    A block may run over the end of its expert's rows; the next expert's then write over it. So the last heights[-1] of
    all M rows are spare ones, and what comes for rows past the last expert's has no meaning.
    """
    w1, w2 = _cast(rows, gate_up, down)
    return _forward(rows, sizes, w1, w2, heights, keep=False)[0]


def _cast(rows, *weights) -> tuple[jax.Array, ...]:
    """The weights in the rows' number format, all experts' in one pass; the backward pass has them from the forward."""
    return tuple(w if w.dtype == rows.dtype else apart(w.astype(rows.dtype)) for w in weights)


def _forward(rows, sizes, gate_up, down, heights, keep):
    """The output [M, D], and with `keep` the hidden activations [M, 2 F]."""
    starts = jnp.cumsum(sizes) - sizes

    def expert(carry, own):
        start, size, w1, w2 = own

        def block(height, row, count, carry):
            del count
            out, hidden = carry
            h = _slice(rows, row, height) @ w1
            out = _write(out, gated(h) @ w2, row)
            return out, _write(hidden, h, row) if keep else None

        carry = _rest(block, heights, start, size, lambda carry: carry, carry)
        return _whole_blocks(block, heights, start, size, carry), None

    carry = jnp.zeros_like(rows), jnp.zeros((rows.shape[0], gate_up.shape[2]), rows.dtype) if keep else None
    return lax.scan(expert, carry, (starts, sizes, gate_up, down))[0]


def _swiglu_fwd(rows, sizes, gate_up, down, heights):
    w1, w2 = _cast(rows, gate_up, down)
    out, hidden = _forward(rows, sizes, w1, w2, heights, keep=True)
    out, hidden = checkpoint_name(out, PRODUCTS), checkpoint_name(hidden, PRODUCTS)
    return out, (rows, hidden, sizes, w1, w2, jnp.zeros((), gate_up.dtype), jnp.zeros((), down.dtype))


def _swiglu_bwd(heights, saved, d_out):
    rows, hidden, sizes, gate_up, down, like_gate_up, like_down = saved
    d_out = d_out.astype(rows.dtype)
    starts = jnp.cumsum(sizes) - sizes

    def expert(d_rows, own):
        start, size, w1, w2 = own

        def block(height, row, count, d_rows):
            """The gradients of a block's rows, of which `count` are the expert's, and what they give its weights'."""
            dy = _slice(d_out, row, height)
            if count is not None:
                dy = jnp.where(jnp.arange(height)[:, None] < count, dy, 0)
            activation, dh = _gated_gradients(
                _slice(hidden, row, height), _times_transposed(dy, w2, jnp.float32)
            )
            d_rows = _write(d_rows, _times_transposed(dh, w1, rows.dtype), row)
            return d_rows, rows_dot(_slice(rows, row, height), dh), rows_dot(activation, dy)

        def another(height, row, count, carry):
            d_rows, *sums = carry
            d_rows, *more = block(height, row, count, d_rows)
            return d_rows, *map(jnp.add, sums, more)

        def nothing(d_rows):
            return d_rows, jnp.zeros(w1.shape, jnp.float32), jnp.zeros(w2.shape, jnp.float32)

        carry = _rest(block, heights, start, size, nothing, d_rows)
        d_rows, *d_weights = _whole_blocks(another, heights, start, size, carry)
        return d_rows, d_weights

    d_rows, (d_gate_up, d_down) = lax.scan(expert, jnp.zeros_like(rows), (starts, sizes, gate_up, down))
    return d_rows, None, d_gate_up.astype(like_gate_up.dtype), d_down.astype(like_down.dtype)


swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


def _rest(block: Callable, heights: tuple[int, ...], start, size, nothing: Callable, carry: Any) -> Any:
    """block(height, row, count, carry) of the group's first rows, as many as its whole blocks leave, or nothing(carry).

    They come first so that this block alone runs over rows that are not its own, which whole blocks then write again.
    """
    count = size % heights[-1]
    fitting = jnp.where(count == 0, 0, 1 + (count > jnp.asarray(heights)).sum())
    branches = [lambda row, count, carry: nothing(carry), *(functools.partial(block, h) for h in heights)]
    return lax.switch(fitting, branches, start, count, carry)


def _whole_blocks(block: Callable, heights: tuple[int, ...], start, size, carry: Any) -> Any:
    """carry after block(height, row, None, carry) on the greatest height's blocks of the group."""
    most = heights[-1]
    first = start + size % most
    return lax.fori_loop(0, size // most, lambda i, carry: block(most, first + i * most, None, carry), carry)


def _slice(x, row, height):
    return lax.dynamic_slice_in_dim(x, row, height)


def _write(x, block, row):
    return lax.dynamic_update_slice_in_dim(x, block, row, 0)


def _times_transposed(x, w, dtype):
    """x [n, b] times w [a, b] transposed, given in `dtype`."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
