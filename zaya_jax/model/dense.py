"""The layer of a dense model: causal attention without convolutions and one gated MLP, each on a norm of the stream.

It stands where ZAYA's layer does (`zaya.LAYERS`), so embedding, head, training and decoding are the same; parallel
schemes are compared on it because their papers use such models. There are no biases and no residual scaling, and the
router's stream, its balancing biases and counts pass through untouched: the MLP counts as one expert for all tokens.
Over the tensor axis heads and MLP width are cut, and each block ends in a sum over it (two all-reduces of B S D numbers
a layer forward, two backward); with TSP weights travel instead (`zaya_jax.parallel.tsp`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import attention, softmax_scale
from pallas_kernels.products import dot
from pallas_kernels.rotary import rotate
from zaya_jax.config import Model, Precision
from zaya_jax.model import cache as kept
from zaya_jax.model.layers import Linear, RMSNorm
from zaya_jax.parallel import context, tsp
from zaya_jax.parallel.spread import ALONE, Spread


class SelfAttention(nnx.Module):
    """Multi-head or grouped-query attention with rotary positions; q, k and v columns and o rows go by head."""

    def __init__(self, rngs, model: Model, precision: Precision):
        d, c, std = model.hidden_size, model.head_dim, model.initializer_range
        h, k = model.num_attention_heads, model.num_key_value_heads
        self.q = Linear(rngs, d, h * c, ("embed", "heads"), std, bias=False)
        self.k = Linear(rngs, d, k * c, ("embed", "heads"), std, bias=False)
        self.v = Linear(rngs, d, k * c, ("embed", "heads"), std, bias=False)
        self.o = Linear(rngs, h * c, d, ("heads", "embed"), std, bias=False)
        self.channels, self.dtype = c, jnp.dtype(precision.compute)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        rope: list[tuple[Any, jax.Array]],
        window: jax.Array | None,
        *,
        segments: Int[Array, "B S"] | None = None,
        mask: Int[Array, "B S"] | None = None,
        cache: dict | None = None,
        cache_index: jax.Array | None = None,
        cache_valid: jax.Array | None = None,
        linear: bool = False,
        spread: Spread = ALONE,
        place: context.Place | None = None,
    ) -> tuple[Float[Array, "B S D"], dict | None]:
        """The block's output, and the new cache where one was given; arguments are those of ZAYA's attention."""
        assert not linear, "the config refuses linear layers of a dense model"
        x = x.astype(self.dtype)
        scale, visible = softmax_scale(self.channels), segments if segments is not None else mask
        if place is not None and spread.tsp:
            weights = tuple(part.kernel[...] for part in (self.q, self.k, self.v, self.o))
            return tsp.attention(x, weights, self.channels, rope, window, place, spread), None
        q, k, v = (self._heads(part, x) for part in (self.q, self.k, self.v))
        q, k = (rotate(rope, y).astype(y.dtype) for y in (q, k))
        if place is not None:
            out = context.attend(q, k, v, window, place, scale=scale)
        elif cache_valid is None:  # a whole sequence, or a prompt, which starts an empty cache
            out, _ = attention(q, k, v, visible, visible, window, scale=scale)
        if cache is not None:
            cache = kept.extend(cache, k, v, cache_index, spread)
        if cache is not None and cache_valid is not None:
            out = kept.attend(q, cache, cache_valid, cache_index, window, spread, scale=scale)
        y = self.o(out.reshape(*x.shape[:2], -1), self.dtype)
        return lax.psum(y, "tensor") if spread.heads > 1 else y, cache

    def _heads(self, part: Linear, x):
        return part(x, self.dtype).reshape(*x.shape[:2], -1, self.channels)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). Gate and up are two weights, so that any cut of the width keeps their pairs."""

    def __init__(self, rngs, model: Model, precision: Precision):
        d, f, std = model.hidden_size, model.intermediate_size, model.initializer_range
        self.gate = Linear(rngs, d, f, ("embed", "width"), std, bias=False)
        self.up = Linear(rngs, d, f, ("embed", "width"), std, bias=False)
        self.down = Linear(rngs, f, d, ("width", "embed"), std, bias=False)
        self.dtype = jnp.dtype(precision.compute)

    def __call__(self, x: Float[Array, "B S D"], spread: Spread) -> Float[Array, "B S D"]:
        x = x.astype(self.dtype)
        weights = tuple(part.kernel[...] for part in (self.gate, self.up, self.down))
        if spread.tsp:
            return tsp.ring(gated_mlp, x, weights, self.dtype, spread)
        y = gated_mlp(x, weights)
        return lax.psum(y.astype(self.dtype), "tensor") if spread.heads > 1 else y


def gated_mlp(x: Float[Array, "B S D"], weights: tuple[jax.Array, ...]) -> Float[Array, "B S D"]:
    """What channels with these gate, up and down weights give, in float32; products in x's number format."""
    gate, up, down = weights
    return dot(_gated(dot(x, gate, x.dtype), dot(x, up, x.dtype)), down, x.dtype, jnp.float32)


@jax.checkpoint
def _gated(gate, up):
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


class DenseLayer(nnx.Module):
    """Attention, then the MLP; each reads a norm of the stream and is added to it."""

    def __init__(self, rngs, model: Model, precision: Precision):
        self.attn_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        self.attention = SelfAttention(rngs, model, precision)
        self.mlp_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        self.mlp = GatedMLP(rngs, model, precision)

    def __call__(self, h, stream, balance, attend, spread: Spread):
        del balance
        with jax.named_scope("attention"):
            y, cache = self.attention(self.attn_norm(h), spread=spread, **attend)
            h = h + y
        with jax.named_scope("mlp"):
            h = h + self.mlp(self.mlp_norm(h), spread)
        choice = jnp.zeros(h.shape[0] * h.shape[1], jnp.int32)
        return h, stream, choice, None, cache


def empty_cache(model: Model, precision: Precision, batch: int, length: int) -> dict:
    """What decoding keeps for each layer, stacked over layers: K and V."""
    shape = (model.num_hidden_layers, batch, length, model.num_key_value_heads, model.head_dim)
    return {name: jnp.zeros(shape, precision.compute) for name in ("k", "v")}
