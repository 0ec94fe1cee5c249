"""Dropless top-1 experts: tokens sorted by expert, grouped matrix products, un-sorted.

Letters: N tokens, D model, E experts, F expert width. Router classes run from 0 to E; class E is the skip class, which
costs nothing and gives zero. How a chip multiplies groups is `pallas_kernels.grouped_mlp`'s.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_mlp import grouped_mlp, layer_mlp, routed_mlp, routes, stacked_mlp


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
    """x[order], whose gradient is a gather too: a scatter-add would be serial on a CPU."""
    return x[order]


permute.defvjp(
    lambda x, order, inverse: (x[order], (order, inverse)), lambda saved, g: (g[saved[1]], None, None)
)


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

    In float32, or in `dtype` where the kernels' own last step has rounded it. Without a gate it comes in `dtype`: who
    multiplies it with something else does both at once.
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
    """The gated MLP of each token's chosen expert, in x's number format; zero where that is one past the last.

    `gate` scales what it gives, where kernels do that in passing.
    """
    if routes():
        order, _, counts = sort_by_expert(choice, gate_up.shape[0] + 1)
        return routed_mlp(x, order, counts[: gate_up.shape[0]], gate, gate_up, down)
    assert gate is None
    return through_groups(
        x, choice, gate_up.shape[0], lambda rows, sizes: grouped_mlp(rows, sizes, gate_up, down)
    )


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


@dataclasses.dataclass(frozen=True)
class Stacks:
    """All layers' experts and where their gradients go, for kernels that read and write a layer's in its place.

    Otherwise a layer's weights are copied out of their stack for each pass, and their gradients into it.
    """

    weights: dict[str, jax.Array]  # gate_up and down, with a leading dim for the layers
    gradients: dict[str, jax.Ref]  # likewise, float32
    add: bool  # to what is there
    # What is made of a layer's first, where a device keeps its share alone.
    shares: dict[str, Callable] | None = None

    def of_layer(self, layer: Int[Array, ""]) -> Callable:
        """`expert_mlp` with the weights of this layer, whatever it is given."""

        def mlp(x, choice, gate, gate_up, down, *, dtype):
            order, _, counts = sort_by_expert(choice, gate_up.shape[0] + 1)
            (w1, w2), sums = ((of["gate_up"], of["down"]) for of in (self.weights, self.gradients))
            sizes, shares = (
                counts[: gate_up.shape[0]],
                self.shares and (self.shares["gate_up"], self.shares["down"]),
            )
            return stacked_mlp(x.astype(dtype), order, sizes, gate, w1, w2, layer, sums, self.add, shares)

        return mlp


@dataclasses.dataclass(frozen=True)
class InPlace:
    """All layers' experts, for decoding: read where they lie, those alone that a token chose."""

    weights: dict[str, jax.Array]  # as in Stacks

    def of_layer(self, layer: Int[Array, ""]) -> Callable:
        """`expert_mlp` without a gate, with the weights of this layer, whatever it is given."""

        def mlp(x, choice, gate, gate_up, down, *, dtype):
            assert gate is None
            gate_up, down = self.weights["gate_up"], self.weights["down"]
            x, num_experts = x.astype(dtype), gate_up.shape[1]
            if routes():
                order, _, counts = sort_by_expert(choice, num_experts + 1)
                return layer_mlp(x, counts[:num_experts], gate_up, down, layer, order)
            return through_groups(
                x, choice, num_experts, lambda rows, sizes: layer_mlp(rows, sizes, gate_up, down, layer)
            )

        return mlp
