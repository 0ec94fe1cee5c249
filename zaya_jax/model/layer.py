"""ZAYA's layer: attention in a compressed space (`cca`), then experts that a router chooses (`router`, `experts`).

It is written for tokens and weights that are simply there; `placement` tells where they come from.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from zaya_jax.config import Model, Precision
from zaya_jax.model.cca import CCA
from zaya_jax.model.placement import Placement
from zaya_jax.model.router import Router
from zaya_jax.model.weights import Join, RMSNorm, weight


class Experts(nnx.Module):
    def __init__(self, rngs, model: Model, precision: Precision):
        e, d, f, std = (
            model.num_experts,
            model.hidden_size,
            model.moe_intermediate_size,
            model.initializer_range,
        )
        self.gate_up = weight(rngs, (e, d, 2 * f), ("expert", "embed", "mlp"), std)
        self.down = weight(rngs, (e, f, d), ("expert", "mlp", "embed"), std)
        self.dtype = jnp.dtype(precision.compute)

    def __call__(
        self, x: Float[Array, "N D"], choice: Int[Array, "N"], gate: Float[Array, "N"], here: Placement
    ) -> Float[Array, "N D"]:
        experts = here.weights.expert_mlp
        y = experts(x, choice, gate, self.gate_up[...], self.down[...], dtype=self.dtype)
        return here.weights.sum(y, self.dtype)


class Layer(nnx.Module):
    """Attention, then experts; each reads a norm of the stream and joins it through a scaling of its own."""

    def __init__(self, rngs, model: Model, precision: Precision):
        self.attn_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        self.cca = CCA(rngs, model, precision)
        self.attn_join = Join(rngs, model.hidden_size)
        self.moe_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        self.router = Router(rngs, model, precision)
        self.experts = Experts(rngs, model, precision)
        self.moe_join = Join(rngs, model.hidden_size)

    def __call__(self, h, stream, balance, rope, here: Placement):
        with jax.named_scope("cca"):
            y, cache = self.cca(self.attn_norm(h), rope, here)
            h = self.attn_join(y, h)
        with jax.named_scope("router"):
            x = self.moe_norm(h).reshape(-1, h.shape[-1])
            choice, gate, logits, stream = self.router(x, stream, balance)
        with jax.named_scope("experts"):
            h = self.moe_join(self.experts(x, choice, gate, here).reshape(h.shape), h)
        return h, stream, choice, logits, cache
