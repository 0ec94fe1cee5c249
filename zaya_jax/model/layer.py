"""ZAYA's layer: attention in a compressed space (`cca`), then experts that a router chooses
(`router`, `experts`).

It is written as if all tokens and weights were local; `placement` says where they come from. A
layer of your own (`own_parts`) is a subclass of `Layer`, or any module with its constructor and its
`__call__`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from zaya_jax.config import Model, Precision
from zaya_jax.model.cca import CCA
from zaya_jax.model.experts import masked
from zaya_jax.model.own_parts import own_class
from zaya_jax.model.placement import LayerOutput, Placement
from zaya_jax.model.router import Router
from zaya_jax.model.weights import PAIR, Join, RMSNorm, weight


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        e, d, f, std = (
            model.num_experts,
            model.hidden_size,
            model.moe_intermediate_size,
            model.initializer_range,
        )
        # The gate's columns, then up's: devices that share the width have both of a channel.
        self.gate_up = weight(rngs, (e, d, 2, f), ("expert", "embed", PAIR, "mlp"), std)
        self.down = weight(rngs, (e, f, d), ("expert", "mlp", "embed"), std)
        self.num_experts = e  # gate_up may hold only a device's own
        self.dtype = jnp.dtype(precision.compute)

    def __call__(
        self,
        x: Float[Array, "N D"],
        choice: Int[Array, "N"],
        gate: Float[Array, "N"],
        placement: Placement,
    ) -> tuple[Float[Array, "N D"], Float[Array, "N"], Float[Array, "L N F2"] | None]:
        """The experts' outputs; their factors, the gates (zero for skipped tokens), by which the
        join multiplies them; and the stack of `LayerOutput`."""
        y, hidden_stack = placement.weights.experts(
            x, choice, self.gate_up[...], self.down[...], self.dtype
        )
        y = placement.weights.sum(y, self.dtype)
        self.outputs = nnx.Intermediate(y)  # for a trace; otherwise nothing reads it
        return y, masked(gate, choice, self.num_experts), hidden_stack


class Layer(nnx.Module):
    """Attention, then experts; each reads a norm of the residual stream and joins it through its
    own scaling."""

    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        self.attn_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        self.cca = CCA(rngs, model, precision)
        self.attn_join = Join(rngs, model.hidden_size)
        self.moe_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        router = own_class(model, "router") or Router
        self.router = router(rngs, model, precision)
        self.experts = Experts(rngs, model, precision)
        self.moe_join = Join(rngs, model.hidden_size)
        self.dtype = jnp.dtype(precision.compute)

    def __call__(
        self,
        h: Float[Array, "B S D"],
        router_state: Float[Array, "N R"],
        balance: Float[Array, "E1"],
        rope: list[tuple[Any, jax.Array]],
        placement: Placement,
    ) -> LayerOutput:
        """The layer of a pass, for B rows of S tokens (N = B S) as a device has them.

        `h` is the residual stream, `router_state` what the router of the layer below returned
        (zeros at the bottom), `balance` this layer's balancing biases of E experts and of none.
        `rope` are the rotary tables (selected, table), which attention takes as they are.
        """
        with jax.named_scope("cca"):
            x, h = self.attn_norm.norm_and_stream(h, self.dtype)
            y, cache = self.cca(x, rope, placement)
        with jax.named_scope("router"):
            router = self.router
            h, x, projected = self.attn_join.join_norm_project(
                y, h, self.moe_norm, self.dtype, router.down, router.dtype
            )
            choice, gate, logits, router_state = router(
                projected.reshape(router_state.shape), router_state, balance
            )
        with jax.named_scope("experts"):
            y, gate, hidden_stack = self.experts(
                x.reshape(-1, x.shape[-1]), choice, gate, placement
            )
            h = self.moe_join(y.reshape(h.shape), h, gate.reshape(h.shape[:-1]))
        return LayerOutput(h, router_state, choice, logits, cache, hidden_stack)
