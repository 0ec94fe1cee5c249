"""The layer of a dense model: causal attention without convolutions and one gated MLP, each on a
norm of the residual stream.

It takes the place of ZAYA's layer (`zaya.LAYERS`), so embedding, head, training and decoding are
the same; parallel schemes are compared on it because their papers use such models. There are no
biases and no residual scaling, and the router's stream, its balancing biases and counts pass
through untouched: the MLP counts as one expert for all tokens. Over the tensor axis heads and MLP
width are cut, and each block ends in a sum over it (two all-reduces of B S D numbers per layer
forward, two backward); with TSP weights travel instead (`zaya_jax.parallel.tsp`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.products import dot
from pallas_kernels.rotary import rotate
from zaya_jax.config import Model, Precision
from zaya_jax.model.placement import LayerOutput, Placement
from zaya_jax.model.weights import Linear, RMSNorm


class SelfAttention(nnx.Module):
    """Multi-head or grouped-query attention with rotary positions; q, k and v columns and o rows go
    by head."""

    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        d, c, std = model.hidden_size, model.head_dim, model.initializer_range
        h, k = model.num_attention_heads, model.num_key_value_heads
        self.q = Linear(rngs, d, h * c, ("embed", "heads"), std, bias=False)
        self.k = Linear(rngs, d, k * c, ("embed", "heads"), std, bias=False)
        self.v = Linear(rngs, d, k * c, ("embed", "heads"), std, bias=False)
        self.o = Linear(rngs, h * c, d, ("heads", "embed"), std, bias=False)
        self.channels, self.dtype = c, jnp.dtype(precision.compute)

    def __call__(
        self, x: Float[Array, "B S D"], rope: list[tuple[Any, jax.Array]], placement: Placement
    ) -> tuple[Float[Array, "B S D"], dict | None]:
        """The block's output, and with a cache the layer's new one."""
        kernels = tuple(part.kernel[...] for part in (self.q, self.k, self.v, self.o))
        return placement.weights.self_attention(
            self_attention, x.astype(self.dtype), kernels, self.channels, rope, placement
        )


def self_attention(
    x: Float[Array, "B S D"],
    kernels: tuple[jax.Array, ...],
    channels: int,
    rope: list[tuple[Any, jax.Array]],
    placement: Placement,
) -> tuple[Float[Array, "B S D"], dict | None]:
    """The output of the heads with these kernels of q, k, v and o, and with a cache the layer's new
    one."""
    *by_head, o = kernels
    q, k, v = (dot(x, w, x.dtype).reshape(*x.shape[:2], -1, channels) for w in by_head)
    q, k = (rotate(rope, y).astype(y.dtype) for y in (q, k))
    out, entries = placement.attend(q, k, v)
    return dot(out.reshape(*x.shape[:2], -1), o, x.dtype), entries


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). Gate and up are two weights, so any cut of the width keeps their
    pairs."""

    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        d, f, std = model.hidden_size, model.intermediate_size, model.initializer_range
        self.gate = Linear(rngs, d, f, ("embed", "width"), std, bias=False)
        self.up = Linear(rngs, d, f, ("embed", "width"), std, bias=False)
        self.down = Linear(rngs, f, d, ("width", "embed"), std, bias=False)
        self.dtype = jnp.dtype(precision.compute)

    def __call__(self, x: Float[Array, "B S D"], placement: Placement) -> Float[Array, "B S D"]:
        kernels = tuple(part.kernel[...] for part in (self.gate, self.up, self.down))
        return placement.weights.mlp(gated_mlp, x.astype(self.dtype), kernels, self.dtype)


def gated_mlp(x: Float[Array, "B S D"], weights: tuple[jax.Array, ...]) -> Float[Array, "B S D"]:
    """The output of channels with these gate, up and down weights, in float32; products in x's
    number format."""
    gate, up, down = weights
    return dot(_gated(dot(x, gate, x.dtype), dot(x, up, x.dtype)), down, x.dtype, jnp.float32)


@jax.checkpoint
def _gated(gate, up):
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


class DenseLayer(nnx.Module):
    """Attention, then the MLP; each reads a norm of the residual stream and is added to it."""

    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        self.attn_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        self.attention = SelfAttention(rngs, model, precision)
        self.mlp_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        self.mlp = GatedMLP(rngs, model, precision)

    def __call__(self, h, router_state, balance, rope, placement: Placement) -> LayerOutput:
        """As `layer.Layer`; the MLP counts as one expert for all tokens."""
        del balance
        with jax.named_scope("attention"):
            y, cache = self.attention(self.attn_norm(h), rope, placement)
            h = h + y
        with jax.named_scope("mlp"):
            h = h + self.mlp(self.mlp_norm(h), placement)
        choice = jnp.zeros(h.shape[0] * h.shape[1], jnp.int32)
        return LayerOutput(h, router_state, choice, None, cache)


def empty_cache(model: Model, precision: Precision, batch: int, length: int) -> dict:
    """The cache of decoding, stacked over layers: K and V."""
    shape = (model.num_hidden_layers, batch, length, model.num_key_value_heads, model.head_dim)
    return {name: jnp.zeros(shape, precision.compute) for name in ("k", "v")}
