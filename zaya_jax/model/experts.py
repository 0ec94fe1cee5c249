"""Dropless top-1 experts: tokens sorted by expert, grouped matrix products, un-sorted.

Letters: N tokens, D model, E experts, F expert width. Router classes run from 0 to E; class E is the skip class, which
costs nothing and gives zero. `grouped_dot` is the one place that knows how a backend multiplies groups.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zaya_jax.model.matmul import rows_dot

PRODUCTS = "experts"  # the name under which a remat policy finds what the grouped products gave


def sort_by_expert(choice: Int[Array, "N"], num_classes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order that groups tokens by class, its inverse, and the size of each group."""
    order = jnp.argsort(choice, stable=True)
    inverse = (
        jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )
    counts = (choice[:, None] == jnp.arange(num_classes)).sum(0, dtype=jnp.int32)
    return order, inverse, counts


@jax.custom_vjp
def permute(x: Float[Array, "N D"], order: Int[Array, "N"], inverse: Int[Array, "N"]) -> Float[Array, "N D"]:
    """x[order], whose gradient is a gather too (a scatter-add would be serial on a CPU)."""
    return x[order]


permute.defvjp(
    lambda x, order, inverse: (x[order], (order, inverse)), lambda saved, g: (g[saved[1]], None, None)
)


def expert_mlp(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate: Float[Array, "N"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    *,
    dtype,
) -> Float[Array, "N D"]:
    """gate * SwiGLU of each token's chosen expert, float32; zero for tokens of the skip class."""
    num_experts = gate_up.shape[0]
    y = through_groups(
        x.astype(dtype), choice, num_experts, lambda rows, sizes: swiglu(rows, sizes, gate_up, down)
    )
    return gated(y, choice, gate, num_experts)


def through_groups(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    num_experts: int,
    function: Callable[[jax.Array, jax.Array], jax.Array],
) -> Float[Array, "N D"]:
    """function(rows sorted by expert, rows of each expert) [N, D], in the tokens' own order again."""
    order, inverse, counts = sort_by_expert(choice, num_experts + 1)
    return permute(function(permute(x, order, inverse), counts[:num_experts]), inverse, order)


def swiglu(
    rows: Float[Array, "N D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
    """The gated MLP of rows sorted by expert; rows past the last group give zero."""
    return grouped_dot(_swiglu(grouped_dot(rows, gate_up, sizes)), down, sizes)


def gated(
    y: Float[Array, "N D"], choice: Int[Array, "N"], gate: Float[Array, "N"], num_experts: int
) -> Float[Array, "N D"]:
    """gate * y, float32; zero for tokens of the skip class."""
    return y.astype(jnp.float32) * jnp.where(choice < num_experts, gate, 0.0)[:, None]


@jax.checkpoint
def _swiglu(hidden: Float[Array, "N F2"]) -> Float[Array, "N F"]:
    g, u = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(g) * u).astype(hidden.dtype)


def reference_grouped_dot(x, w, sizes) -> jax.Array:
    """The definition: row n times its group's matrix, rows past the last group zero."""
    ends = jnp.cumsum(sizes)
    group = (jnp.arange(x.shape[0])[:, None] >= ends).sum(-1)
    one_hot = jax.nn.one_hot(group, w.shape[0], dtype=x.dtype)
    return jnp.einsum("nd,ne,edf->nf", x, one_hot, w.astype(x.dtype))


def grouped_dot(
    x: Float[Array, "N I"], w: Float[Array, "E I O"], sizes: Int[Array, "E"]
) -> Float[Array, "N O"]:
    """Rows of x, sorted by group, times their group's matrix in x's dtype; rows past the last group give zero.

    The gradient of w is float32. On a CPU `lax.ragged_dot` computes every row for every expert, so there it is a loop
    over blocks of rows; elsewhere it is `lax.ragged_dot`.
    """
    product = _block_dot if jax.default_backend() == "cpu" else _ragged_dot
    return checkpoint_name(product(x, w, sizes), PRODUCTS)


@jax.custom_vjp
def _ragged_dot(x, w, sizes):
    return lax.ragged_dot(x, w.astype(x.dtype), sizes)


def _ragged_fwd(x, w, sizes):
    return _ragged_dot(x, w, sizes), (x, w, sizes)


def _ragged_bwd(saved, dy):
    x, w, sizes = saved
    dy = dy.astype(x.dtype)
    dx = lax.ragged_dot(dy, w.swapaxes(1, 2).astype(x.dtype), sizes)
    rows = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    dw = lax.ragged_dot_general(x, dy, sizes, rows)
    return dx, dw.astype(w.dtype), None


_ragged_dot.defvjp(_ragged_fwd, _ragged_bwd)


def _block_rows(num_rows: int, num_groups: int) -> int:
    """Rows a block: about a quarter of a balanced group, so that the partly filled last blocks waste an eighth."""
    return (
        int(min(256, max(32, 1 << (num_rows // num_groups // 4).bit_length() - 1))) if num_rows >= 32 else 32
    )


def _for_each_block(starts, size, block, step, carry, group):
    """carry after step(row, carry) at each block's first row of one group."""
    num_blocks = (size[group] + block - 1) // block
    return lax.fori_loop(0, num_blocks, lambda i, c: step(starts[group] + i * block, c), carry)


def _pad_rows(x, rows):
    return jnp.pad(x, ((0, rows), (0, 0)))


def _apply_blocks(x, w, sizes, out_dim, multiply):
    """Rows of every group through `multiply(block, matrix)`.

    Groups are visited in order and a group's last block runs over into the next group's rows, which the next group
    then writes again: so no block needs a mask, only the rows past the last group do.
    """
    block = _block_rows(x.shape[0], w.shape[0])
    starts = jnp.cumsum(sizes) - sizes
    padded = _pad_rows(x, block)

    def group(out, e_and_w):
        e, w_e = e_and_w
        w_e = w_e.astype(x.dtype)

        def step(row, out):
            rows = lax.dynamic_slice_in_dim(padded, row, block)
            return lax.dynamic_update_slice_in_dim(out, multiply(rows, w_e).astype(x.dtype), row, 0)

        return _for_each_block(starts, sizes, block, step, out, e), None

    out = jnp.zeros((padded.shape[0], out_dim), x.dtype)
    out, _ = lax.scan(group, out, (jnp.arange(w.shape[0]), w))
    inside = jnp.arange(x.shape[0]) < sizes.sum()
    return jnp.where(inside[:, None], out[: x.shape[0]], 0)


@jax.custom_vjp
def _block_dot(x, w, sizes):
    return _apply_blocks(x, w, sizes, w.shape[2], lambda rows, w_e: rows @ w_e)


def _block_dot_fwd(x, w, sizes):
    return _block_dot(x, w, sizes), (x, w, sizes)


def _block_dot_bwd(saved, dy):
    x, w, sizes = saved
    dy = dy.astype(x.dtype)
    dx = _apply_blocks(
        dy, w, sizes, w.shape[1], lambda rows, w_e: lax.dot_general(rows, w_e, (((1,), (1,)), ((), ())))
    )
    block = _block_rows(x.shape[0], w.shape[0])
    starts = jnp.cumsum(sizes) - sizes
    x_pad, dy_pad = _pad_rows(x, block), _pad_rows(dy, block)

    def group(_, e):
        def step(row, dw):
            rows = lax.dynamic_slice_in_dim(x_pad, row, block)
            own = row + jnp.arange(block) < starts[e] + sizes[e]
            d_rows = jnp.where(own[:, None], lax.dynamic_slice_in_dim(dy_pad, row, block), 0)
            return dw + rows_dot(rows, d_rows)

        return None, _for_each_block(starts, sizes, block, step, jnp.zeros(w.shape[1:], jnp.float32), e)

    _, dw = lax.scan(group, None, jnp.arange(w.shape[0]))
    return dx, dw.astype(w.dtype), None


_block_dot.defvjp(_block_dot_fwd, _block_dot_bwd)
