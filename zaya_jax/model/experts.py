"""Dropless top-1 experts: tokens sorted by expert, grouped matrix products, un-sorted.

Letters: N tokens, D model, E experts, F expert width. Router classes run from 0 to E; class E is the skip class, which
costs nothing and gives zero. `pallas_kernels.grouped_mlp` multiplies the groups.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_mlp import grouped_mlp, layer_mlp, routed_mlp, routes, stacked_mlp


def sort_by_expert(choice: Int[Array, "N"], num_classes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order that groups tokens by class, its inverse, and the size of each group."""
    order = jnp.argsort(choice, stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    counts = (choice[:, None] == jnp.arange(num_classes)).sum(0, dtype=jnp.int32)
    return order, inverse, counts


@jax.custom_vjp
def permute(x: Float[Array, "N D"], order: Int[Array, "N"], inverse: Int[Array, "N"]) -> Float[Array, "N D"]:
    """x[order], whose gradient is a gather too: a scatter-add would be serial on a CPU."""
    return x[order]


permute.defvjp(lambda x, order, inverse: (x[order], (order, inverse)), lambda saved, g: (g[saved[1]], None, None))


def expert_mlp(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate: Float[Array, "N"] | None,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    *,
    dtype,
) -> Float[Array, "N D"]:
    """gate * SwiGLU of each token's chosen expert; zero for tokens of the skip class.

    In float32, or in `dtype` if the kernels' own last step has rounded it. Without a gate it comes in `dtype`: its
    caller multiplies it by another factor and does both at once.
    """
    if gate is None or routes():
        return of_own_expert(x.astype(dtype), choice, gate_up, down, gate)
    return gated(of_own_expert(x.astype(dtype), choice, gate_up, down), choice, gate, gate_up.shape[0])


def of_own_expert(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    gate: Float[Array, "N"] | None = None,
) -> Float[Array, "N D"]:
    """The gated MLP of each token's chosen expert, in x's number format; zero for the class after the last.

    `gate` scales the result, if the kernels can do that in passing.
    """
    if routes():
        order, _, counts = sort_by_expert(choice, gate_up.shape[0] + 1)
        return routed_mlp(x, order, counts[: gate_up.shape[0]], gate, gate_up, down)
    assert gate is None
    return through_groups(x, choice, gate_up.shape[0], lambda rows, sizes: grouped_mlp(rows, sizes, gate_up, down))


def through_groups(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    num_experts: int,
    function: Callable[[jax.Array, jax.Array], jax.Array],
) -> Float[Array, "N D"]:
    """function(rows sorted by expert, rows of each expert) [N, D], in the tokens' own order again."""
    order, inverse, counts = sort_by_expert(choice, num_experts + 1)
    return permute(function(permute(x, order, inverse), counts[:num_experts]), inverse, order)


@functools.partial(jax.checkpoint, static_argnums=3)  # y is kept as it comes, not in float32
def gated(
    y: Float[Array, "N D"], choice: Int[Array, "N"], gate: Float[Array, "N"], num_experts: int
) -> Float[Array, "N D"]:
    """gate * y, float32; zero for tokens of the skip class."""
    return y.astype(jnp.float32) * masked(gate, choice, num_experts)[:, None]


def masked(gate: Float[Array, "N"], choice: Int[Array, "N"], num_experts: int) -> Float[Array, "N"]:
    """The gates, zero for tokens of the skip class."""
    return jnp.where(choice < num_experts, gate, 0.0)


def read_and_written_in_place(
    gate_up: Float[Array, "L E D F2"],
    down: Float[Array, "L E F D"],
    gradients: tuple[jax.Ref, jax.Ref],
    add: bool,
    shares: tuple[Callable, Callable] | None,
) -> Callable[[jax.Array], Callable]:
    """A function of a layer's number: an `expert_mlp` with that layer's weights and places for their gradients.

    Otherwise a layer's weights are copied out of their stack for each pass, and their gradients into it. Gradients are
    float32, added to the present values if `add`; with `shares`, their function of a layer's gradient is written.
    """

    def of_layer(layer):
        def mlp(x, choice, gate, own_gate_up, own_down, *, dtype):
            order, _, counts = sort_by_expert(choice, gate_up.shape[1] + 1)
            sizes = counts[: gate_up.shape[1]]
            return stacked_mlp(x.astype(dtype), order, sizes, gate, gate_up, down, layer, gradients, add, shares)

        return mlp

    return of_layer


def read_in_place(gate_up: Float[Array, "L E D F2"], down: Float[Array, "L E F D"]) -> Callable[[jax.Array], Callable]:
    """The same without a gate and gradients, for decoding: only experts that a token chose are read."""

    def of_layer(layer):
        def mlp(x, choice, gate, own_gate_up, own_down, *, dtype):
            assert gate is None
            x, num_experts = x.astype(dtype), gate_up.shape[1]
            if routes():
                order, _, counts = sort_by_expert(choice, num_experts + 1)
                return layer_mlp(x, counts[:num_experts], gate_up, down, layer, order)
            return through_groups(
                x, choice, num_experts, lambda rows, sizes: layer_mlp(rows, sizes, gate_up, down, layer)
            )

        return mlp

    return of_layer
