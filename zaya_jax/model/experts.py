"""Dropless top-1 experts: tokens sorted by expert, grouped matrix products, un-sorted.

Letters: N tokens, D model, E experts, F expert width. Router classes run from 0 to E; class E is the skip class, which
costs nothing and gives zero. `of_own_expert` is the one place that knows how a backend multiplies groups.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from zaya_jax.model import blocks
from zaya_jax.model.blocks import PRODUCTS


def sort_by_expert(choice: Int[Array, "N"], num_classes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order that groups tokens by class, its inverse, and the size of each group."""
    order = jnp.argsort(choice, stable=True)
    inverse = (
        jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )
    counts = (choice[:, None] == jnp.arange(num_classes)).sum(0, dtype=jnp.int32)
    return order, inverse, counts


@jax.custom_vjp
def permute(x: Float[Array, "N D"], order: Int[Array, "M"], inverse: Int[Array, "N"]) -> Float[Array, "M D"]:
    """x[order], whose gradient is a gather too (a scatter-add would be serial on a CPU).

    `order` or `inverse` may be longer than the other by places of no meaning.
    """
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
    return gated(of_own_expert(x.astype(dtype), choice, gate_up, down), choice, gate, gate_up.shape[0])


def of_own_expert(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
    """The gated MLP of each token's chosen expert, in x's number format; zero where that is one past the last."""
    num_experts = gate_up.shape[0]
    if jax.default_backend() == "cpu":
        heights = blocks.heights(x.shape[0], num_experts)

        def mlp(rows, sizes):
            return blocks.swiglu(rows, sizes, gate_up, down, heights)

        y = through_groups(x, choice, num_experts, mlp, spare=heights[-1])
        return _where(choice < num_experts, y)
    return through_groups(x, choice, num_experts, lambda rows, sizes: swiglu(rows, sizes, gate_up, down))


def through_groups(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    num_experts: int,
    function: Callable[[jax.Array, jax.Array], jax.Array],
    spare: int = 0,
) -> Float[Array, "N D"]:
    """function(rows sorted by expert, rows of each expert) [N, D], in the tokens' own order again.

    `spare` rows follow the last one, whose numbers have no meaning, as those that the function gives for them.
    """
    order, inverse, counts = sort_by_expert(choice, num_experts + 1)
    order = jnp.pad(order, (0, spare))
    return permute(function(permute(x, order, inverse), counts[:num_experts]), inverse, order)


def swiglu(
    rows: Float[Array, "N D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
    """The gated MLP of rows sorted by expert; rows past the last group give zero."""
    return grouped_dot(jax.checkpoint(blocks.gated)(grouped_dot(rows, gate_up, sizes)), down, sizes)


@jax.checkpoint  # else the mask would be kept for each channel
def _where(own: Bool[Array, "N"], y: Float[Array, "N D"]) -> Float[Array, "N D"]:
    return jnp.where(own[:, None], y, 0)


@functools.partial(jax.checkpoint, static_argnums=3)  # y is kept as it comes, not in float32
def gated(
    y: Float[Array, "N D"], choice: Int[Array, "N"], gate: Float[Array, "N"], num_experts: int
) -> Float[Array, "N D"]:
    """gate * y, float32; zero for tokens of the skip class."""
    return y.astype(jnp.float32) * jnp.where(choice < num_experts, gate, 0.0)[:, None]


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

    For GPUs. With bfloat16 rows the numbers of w's gradient add up in float32 and are then rounded to bfloat16, once a
    call at most (a compiler may leave it out), so once for each micro-batch and each round in which experts exchange
    tokens; they are given as float32, and their sums are float32 from there on. That costs 0.0017 of the gradient's
    norm where rounding rows and dy to bfloat16 costs 0.0024 (normally distributed, one call or 16). Asked for float32
    instead, XLA 0.12.0 gives up MI300X's grouped product (hipBLASLt's) for a dense one: E times the work and operands.
    """
    return checkpoint_name(_ragged_dot(x, w, sizes), PRODUCTS)


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
