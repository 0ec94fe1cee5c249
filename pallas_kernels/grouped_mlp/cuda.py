"""The gated MLP of groups as loops over experts and blocks of their rows: for NVIDIA's chips.

XLA 0.12.0 makes `lax.ragged_dot` dense there: E times the work, and an [E, M, 2 F] array. A block is written whole, and
what of it lies past its expert's rows is written again by the next one's. Weights' gradients add up in float32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_mlp.xla import swiglu
from pallas_kernels.loops import turning

MOST, LEAST = 1024, 64  # rows of a block


def forward(rows, sizes, gate_up, down) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.grouped_mlp`."""
    dtype, side = rows.dtype, block_rows(*rows.shape[:1], *sizes.shape)
    x = _with_room(rows, side)

    def block(e, start, _, carry):
        hidden, out = carry
        h = _product("md,df->mf", _block(x, start, side), gate_up[e].astype(dtype)).astype(dtype)
        y = _product("mf,fd->md", swiglu(h).astype(dtype), down[e].astype(dtype)).astype(dtype)
        return _put(hidden, h, start), _put(out, y, start)

    hidden = jnp.zeros((len(x), gate_up.shape[2]), dtype)
    hidden, out = _over_blocks(block, sizes, side, len(rows), (hidden, jnp.zeros_like(x)))
    return _of_groups(out, sizes, len(rows)), hidden[: len(rows)]


def backward(rows, sizes, gate_up, down, hidden, d_out) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.grouped_mlp`."""
    dtype, side = rows.dtype, block_rows(*rows.shape[:1], *sizes.shape)
    x, h, d = (_with_room(a, side) for a in (rows, hidden, d_out))

    def block(e, start, count, carry):
        d_rows, d_gate_up, d_down = carry
        x_i, h_i, d_i = (_block(a, start, side) for a in (x, h, d))
        activation, pull = jax.vjp(swiglu, h_i)
        (d_h,) = pull(_product("md,fd->mf", d_i, down[e].astype(dtype)))
        d_rows = _put(d_rows, _product("mf,df->md", d_h, gate_up[e].astype(dtype)).astype(dtype), start)
        own = (jnp.arange(side) < count)[:, None]
        # Both sides: what lies past an expert's rows need not be finite.
        x_i, activation, d_i, d_h = (jnp.where(own, a, 0) for a in (x_i, activation.astype(dtype), d_i, d_h))
        return (
            d_rows,
            lax.dynamic_update_index_in_dim(d_gate_up, d_gate_up[e] + _product("md,mf->df", x_i, d_h), e, 0),
            lax.dynamic_update_index_in_dim(d_down, d_down[e] + _product("mf,md->fd", activation, d_i), e, 0),
        )

    zeros = [jnp.zeros(w.shape, jnp.float32) for w in (gate_up, down)]
    d_rows, *d_weights = _over_blocks(block, sizes, side, len(rows), (jnp.zeros_like(x), *zeros))
    return _of_groups(d_rows, sizes, len(rows)), *d_weights


def block_rows(rows: int, experts: int) -> int:
    """What an expert has with an even load: a third of the work is then for nothing, and a weight's gradient is read
    and written one and a half times."""
    return min(MOST, max(LEAST, 1 << max(rows // experts, 1).bit_length() - 1))


def _over_blocks(block, sizes, side, rows, carry):
    """carry after block(expert, first row, rows that are the expert's own, carry) for each block of each expert."""
    starts = jnp.cumsum(sizes) - sizes

    def expert(e, carry):
        def turn(i, carry):
            return block(e, starts[e] + i * side, sizes[e] - i * side, carry)

        with turning(rows / len(sizes) / side + 0.5):
            return lax.fori_loop(0, -(-sizes[e] // side), turn, carry)

    return lax.fori_loop(0, len(sizes), expert, carry)


def _of_groups(x, sizes, rows):
    """The first rows, and zeros past the last expert's."""
    return jnp.where((jnp.arange(rows) < sizes.sum())[:, None], x[:rows], 0)


def _with_room(x, side):
    return jnp.pad(x, ((0, side), (0, 0)))


def _block(x, start, side):
    return lax.dynamic_slice_in_dim(x, start, side)


def _put(x, part, start):
    return lax.dynamic_update_slice_in_dim(x, part, start, 0)


def _product(subscripts, x, y) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
