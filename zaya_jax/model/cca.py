"""Compressed convolutional attention (CCA): the queries, keys and values of ZAYA, and its attention
block.

Queries and keys are in a latent space, are mixed over the last few tokens by a depthwise and a
per-head convolution, and keep a path around it; half of each value comes from the token before.
Letters: B batch, S sequence, D model, H query heads, K key-value heads, G = H / K, C head channels,
P = (H + K) C packed channels.

At the start of a document or sequence, the tokens before count as absent: zero in the packed
columns (so that the second convolution sees the first one's bias) and a zero input for the delayed
value (so that its bias remains).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.cca_mix import mix
from pallas_kernels.products import dot, full_precision
from zaya_jax.config import Model, Precision
from zaya_jax.model.placement import Placement, PrecedingTokens
from zaya_jax.model.weights import Linear, weight


class Conv(nnx.Module):
    """The taps of a causal convolution (the last tap is the current token) and its bias."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        channels: int,
        std: float,
    ):
        self.kernel = weight(rngs, shape, axes, std)
        self.bias = weight(rngs, (channels,), ("packed",), "zeros")


class CCA(nnx.Module):
    """Attention on x [B, S, D] in the compressed space; docs/explain/cca.md has the steps."""

    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        d, c = model.hidden_size, model.head_dim
        h, k = model.num_attention_heads, model.num_key_value_heads
        std, bias = model.initializer_range, model.attention_bias
        self.q = Linear(rngs, d, h * c, ("embed", "heads"), std, bias)
        self.k = Linear(rngs, d, k * c, ("embed", "kv_heads"), std, bias)
        self.v_now = Linear(rngs, d, k * c // 2, ("embed", "values"), std, bias)
        self.v_prev = Linear(rngs, d, k * c // 2, ("embed", "values"), std, bias)
        packed = (h + k) * c
        depthwise, grouped = (model.cca_time0, packed), (model.cca_time1, h + k, c, c)
        self.conv_depthwise = Conv(rngs, depthwise, (None, "packed"), packed, std)
        self.conv_grouped = Conv(rngs, grouped, (None, "packed", None, None), packed, std)
        self.temperature = weight(rngs, (k,), ("kv_heads",), "ones")
        self.o = Linear(rngs, h * c, d, ("heads", "embed"), std, bias)
        self.channels = c
        self.dtype = jnp.dtype(precision.compute)

    def __call__(
        self, x: Float[Array, "B S D"], rope: list[tuple[Any, jax.Array]], placement: Placement
    ) -> tuple[Float[Array, "B S D"], dict | None]:
        """The block's output, and with a cache the layer's new one.

        `rope` is a list of (selected, table), empty for no rotation. Left padding is zeroed, as the
        public port does: its columns then hold the projections' biases.
        """
        if placement.mask is not None:
            x = x * placement.mask[..., None].astype(x.dtype)
        x = x.astype(self.dtype)
        project = functools.partial(self._project, self._joined_kernels(placement))
        columns = project(x)
        initial_value = self._initial_value(len(x), placement)
        before = placement.before(
            x, lambda x: self._split(project(x), placement), self._history(), initial_value
        )
        packed = self._split(columns, placement)[0]
        mean_q = placement.weights.mean_queries(packed, self.channels)
        q, k, values = self._mix(columns, before, rope, placement.segments, mean_q)
        current, later = placement.weights.split_values(values)
        v = self._values(current, later, before, initial_value, placement)
        out, entries = placement.attend(q, k, v, history=packed, value=later)
        y = dot(out.reshape(*x.shape[:2], -1), self.o.kernel[...], self.dtype)
        y = placement.weights.sum(y, self.dtype)
        if hasattr(self.o, "bias"):
            y = y + self.o.bias[...].astype(y.dtype)
        return y, entries

    def _joined_kernels(self, placement: Placement):
        """The kernels of q, k and both halves of v, and their biases as one (or None)."""

        def parts(q, k, v_now, v_prev):
            axes = (None,) * (q.ndim - 1) + ("kv_heads",)
            return q, k, placement.weights.localize(jnp.concatenate([v_now, v_prev], axis=-1), axes)

        all_four = (self.q, self.k, self.v_now, self.v_prev)
        biases = None
        if hasattr(self.q, "bias"):
            biases = jnp.concatenate(parts(*(p.bias[...] for p in all_four)), axis=-1)
        return parts(*(p.kernel[...] for p in all_four)), biases

    def _project(self, weights, x):
        """Packed queries and keys, the values' current half and the one to be delayed: one product.

        For a single token a row, the product takes as long as reading the kernels, so they are not
        joined.
        """
        kernels, bias = weights
        if x.shape[1] > 1:
            kernels = (jnp.concatenate(kernels, axis=-1),)
        y = jnp.concatenate([dot(x, kernel, self.dtype) for kernel in kernels], axis=-1)
        return y if bias is None else y + bias.astype(y.dtype)

    def _split(self, columns, placement):
        """Queries and keys side by side, the current half of the values, and the one that the next
        token gets."""
        packed, values = jnp.split(columns, (self.conv_depthwise.kernel.shape[-1],), axis=-1)
        return packed, *placement.weights.split_values(values)

    def _mix(self, columns, before: PrecedingTokens, rope, segments, mean_q):
        """Queries, keys, and the columns of the values.

        Only the first one's bias comes between them, so both biases are added once, at the end.
        Documents are cut the same way: a document's tokens are contiguous, so both would mask the
        tokens before it.
        """
        w1 = self.conv_grouped.kernel[...]
        heads = w1.shape[1]
        w0 = self.conv_depthwise.kernel[...].reshape(-1, heads, self.channels)
        if segments is not None:
            segments = _with_earlier(segments, before.segments, self._history())
        first_bias, last_bias = (
            conv.bias[...].reshape(heads, self.channels)
            for conv in (self.conv_depthwise, self.conv_grouped)
        )
        passed_on = jnp.einsum("gc,tgcd->gd", first_bias, w1, precision=full_precision(w1.dtype))
        bias, temperature = passed_on + last_bias, self.temperature[...]
        return mix(
            columns, before.history, w0, w1, bias, temperature, rope, segments, mean_q, self.dtype
        )

    def _values(self, current, later, before: PrecedingTokens, initial_value, placement: Placement):
        """Half of each token's own value and half of the one before it, [B, S, K, C]."""
        delayed = jnp.concatenate([before.value.astype(later.dtype), later[:, :-1]], axis=1)
        if placement.segments is not None:
            fresh = (
                placement.segments != _with_earlier(placement.segments, before.segments, 1)[:, :-1]
            )
            delayed = jnp.where(fresh[..., None], initial_value[:1], delayed)
        v = placement.weights.join_values(current, delayed)
        return v.reshape(*v.shape[:2], self.temperature.size, self.channels)

    def _history(self):
        """How many tokens the convolutions look back."""
        return self.conv_depthwise.kernel.shape[0] + self.conv_grouped.kernel.shape[0] - 2

    def _initial_value(self, batch, placement: Placement):
        """The delayed value after a zero input: the projection's bias, if it has one."""
        value = jnp.zeros((self.temperature.size * self.channels,), self.dtype)
        if hasattr(self.v_prev, "bias"):
            biases = (self.v_now.bias[...], self.v_prev.bias[...])
            value = placement.weights.localize(jnp.concatenate(biases), ("kv_heads",)).astype(
                self.dtype
            )
        delayed = placement.weights.split_values(value)[1]
        return jnp.broadcast_to(delayed, (batch, 1, delayed.size))


def empty_cache(model: Model, precision: Precision, batch: int, length: int) -> dict:
    """The cache of decoding, stacked over layers: every layer has its last packed columns and
    delayed value; softmax layers have K and V, linear layers a state."""
    layers, k, c = model.num_hidden_layers, model.num_key_value_heads, model.head_dim
    history = model.cca_time0 + model.cca_time1 - 2
    dtype = jnp.dtype(precision.compute)
    linear = model.kinds.count("hybrid_linear")
    cache = {
        "history": jnp.zeros((layers, batch, history, (model.num_attention_heads + k) * c), dtype),
        "value": jnp.zeros((layers, batch, k * c // 2), dtype),
    }
    if linear < layers:
        cache |= {
            name: jnp.zeros((layers - linear, batch, length, k, c), dtype) for name in ("k", "v")
        }
    if linear:
        cache["state"] = jnp.zeros((linear, batch, k, c, c + 1), jnp.float32)
    return cache


def _with_earlier(segments, earlier, num):
    """Segments with those of the `num` tokens before the first; `earlier` [B, >= num] ends with
    them, otherwise -1."""
    if earlier is None:
        return jnp.pad(segments, ((0, 0), (num, 0)), constant_values=-1)
    return jnp.concatenate([earlier[:, earlier.shape[1] - num :], segments], axis=1)
