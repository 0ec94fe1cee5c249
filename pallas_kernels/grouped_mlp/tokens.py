"""Tokens in their own order: sorted by expert, grouped matrix products, un-sorted.

Letters: N tokens, D model, E experts, F expert width; class E, after the last expert, gives zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_mlp import grouped_mlp, takes_unsorted_rows


def sort_by_expert(
    choice: Int[Array, "N"], num_classes: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order that groups tokens by class, its inverse, and the size of each group."""
    order = jnp.argsort(choice, stable=True)
    inverse = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )
    counts = (choice[:, None] == jnp.arange(num_classes)).sum(0, dtype=jnp.int32)
    return order, inverse, counts


@jax.custom_vjp
def permute(
    x: Float[Array, "N D"], order: Int[Array, "N"], inverse: Int[Array, "N"]
) -> Float[Array, "N D"]:
    """x[order], whose gradient is a gather too: a scatter-add would be serial on a CPU."""
    return x[order]


permute.defvjp(
    lambda x, order, inverse: (x[order], (order, inverse)),
    lambda saved, g: (g[saved[1]], None, None),
)


def own_expert_mlp(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
    """The gated MLP of each token's chosen expert, in x's number format; zero for the class after
    the last."""
    if takes_unsorted_rows():
        order, _, counts = sort_by_expert(choice, gate_up.shape[0] + 1)
        return grouped_mlp(x, counts[: gate_up.shape[0]], gate_up, down, order)
    return through_groups(
        x, choice, gate_up.shape[0], lambda rows, sizes: grouped_mlp(rows, sizes, gate_up, down)
    )


def through_groups(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    num_experts: int,
    function: Callable[[jax.Array, jax.Array], jax.Array],
) -> Float[Array, "N D"]:
    """function(rows sorted by expert, rows of each expert) [N, D], in the tokens' own order
    again."""
    order, inverse, counts = sort_by_expert(choice, num_experts + 1)
    return permute(function(permute(x, order, inverse), counts[:num_experts]), inverse, order)
