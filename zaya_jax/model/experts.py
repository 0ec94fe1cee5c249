"""Dropless top-1 experts: `pallas_kernels.grouped_mlp` sorts tokens by expert and multiplies the
groups.

Letters: N tokens, D model, E experts, F expert width. Router classes run from 0 to E; class E is
the skip class, which costs nothing and gives zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_mlp import layer_mlp, stacked_mlp, takes_unsorted_rows
from pallas_kernels.grouped_mlp.tokens import own_expert_mlp, sort_by_expert, through_groups


def expert_mlp(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    *,
    dtype,
) -> Float[Array, "N D"]:
    """SwiGLU of each token's chosen expert in `dtype`; zero for tokens of the skip class."""
    return own_expert_mlp(x.astype(dtype), choice, gate_up, down)


def masked(gate: Float[Array, "N"], choice: Int[Array, "N"], num_experts: int) -> Float[Array, "N"]:
    """The gates, zero for tokens of the skip class."""
    return jnp.where(choice < num_experts, gate, 0.0)


def read_and_written_in_place(
    gate_up: Float[Array, "L E D 2 F"],
    down: Float[Array, "L E F D"],
    gradients: tuple[jax.Ref, jax.Ref],
    add: bool,
    shares: tuple[Callable, Callable] | None,
) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
    """For `ScanHooks.experts`: reads a layer's weights inside these stacks, and writes their
    gradients into stacks too.

    Otherwise a layer's weights are copied out of their stack for each pass, and their gradients
    into it. Gradients are float32, added to the present values if `add`; with `shares`, their
    function of a layer's gradient is written.
    """

    def mlp_of_layer(layer, hidden_stack, x, choice, dtype):
        order, _, counts = sort_by_expert(choice, gate_up.shape[1] + 1)
        sizes, x = counts[: gate_up.shape[1]], x.astype(dtype)
        return stacked_mlp(
            x, order, sizes, gate_up, down, layer, gradients, hidden_stack, add, shares
        )

    return mlp_of_layer


def read_in_place(
    gate_up: Float[Array, "L E D 2 F"], down: Float[Array, "L E F D"]
) -> Callable[..., tuple[jax.Array, None]]:
    """The same for decoding, without gradients: only experts that a token chose are read."""

    def mlp_of_layer(layer, _, x, choice, dtype):
        x, num_experts = x.astype(dtype), gate_up.shape[1]
        if takes_unsorted_rows():
            order, _, counts = sort_by_expert(choice, num_experts + 1)
            return layer_mlp(x, counts[:num_experts], gate_up, down, layer, order), None
        y = through_groups(
            x, choice, num_experts, lambda rows, sizes: layer_mlp(rows, sizes, gate_up, down, layer)
        )
        return y, None

    return mlp_of_layer
