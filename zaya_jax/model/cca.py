"""Compressed convolutional attention (CCA): the queries, keys and values of ZAYA, and its attention block.

Queries and keys live in a latent space, are mixed over the last few tokens by a depthwise and a per-head convolution,
and keep a path around it; half of each value comes from the token before. Letters: B batch, S sequence, D model,
H query heads, K key-value heads, G = H / K, C head channels, P = (H + K) C packed channels.

At a document's start, as at a sequence's, the tokens before count as absent: zero in the packed columns (so that the
second convolution sees the first one's bias) and a zero input for the delayed value (so that its bias remains).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import attention, softmax_scale
from pallas_kernels.cca_mix import by_head, convolve, queries_and_keys
from pallas_kernels.linear_attention import decode_linear_attention, linear_attention, prompt_state
from pallas_kernels.products import dot, whole
from zaya_jax.config import Model, Precision
from zaya_jax.model import cache as kept
from zaya_jax.model.layers import Linear, weight
from zaya_jax.parallel import context, heads, tsp
from zaya_jax.parallel.linear import lasp2
from zaya_jax.parallel.spread import ALONE, Spread


class Conv(nnx.Module):
    """The taps of a causal convolution (the last tap is the current token) and its bias."""

    def __init__(self, rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], channels: int, std: float):
        self.kernel = weight(rngs, shape, axes, std)
        self.bias = weight(rngs, (channels,), ("packed",), "zeros")


class CCA(nnx.Module):
    """Attention on x [B, S, D] in the compressed space; see SPEC §1 for the six steps."""

    def __init__(self, rngs, model: Model, precision: Precision):
        d, h, k, c = model.hidden_size, model.num_attention_heads, model.num_key_value_heads, model.head_dim
        std, bias = model.initializer_range, model.attention_bias
        self.q = Linear(rngs, d, h * c, ("embed", "heads"), std, bias)
        self.k = Linear(rngs, d, k * c, ("embed", "kv_heads"), std, bias)
        self.v_now = Linear(rngs, d, k * c // 2, ("embed", "kv_heads"), std, bias)
        self.v_prev = Linear(rngs, d, k * c // 2, ("embed", "kv_heads"), std, bias)
        self.conv_depthwise = Conv(rngs, (model.cca_time0, (h + k) * c), (None, "packed"), (h + k) * c, std)
        self.conv_grouped = Conv(
            rngs, (model.cca_time1, h + k, c, c), (None, "packed", None, None), (h + k) * c, std
        )
        self.temperature = weight(rngs, (k,), ("kv_heads",), "ones")
        self.o = Linear(rngs, h * c, d, ("heads", "embed"), std, bias)
        self.num_heads, self.num_kv, self.channels = h, k, c
        self.dtype = jnp.dtype(precision.compute)

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
        """The block's output, and the new cache where one was given.

        `segments` cuts packed documents; `mask` zeroes left padding, as the public port does (its columns then hold
        the projections' biases). `rope` is a list of (selected, table), empty for no rotation. `place` is where the
        device's two chunks of a sequence lie that is spread over several: they stand as rows of their own before the
        attention. Where there is a cache, the context axis holds its K and V in parts instead, and the tokens are the
        same on all its devices.
        """
        batch, seq, _ = x.shape
        if mask is not None:
            x = x * mask[..., None].astype(x.dtype)
        x = x.astype(self.dtype)
        part = self._part(spread)
        edges = None if place is None else context.halo(x, self._reach(), place)
        weights = self._side_by_side(part, spread)
        packed, v_now, v_prev = self._project(x, weights, part)
        going_on = cache_valid is not None  # else no token comes before the first one
        first = self._value_of_nothing(batch, part)
        before = cache["value"][:, None] if cache and going_on else first
        columns = None if cache is None else cache["columns"]
        rows, earlier = segments, None
        split, join = (lambda y: y), (lambda y: y)
        if place is not None:
            split, join = place.split, place.join
            columns, before = self._left_of(edges, place, weights, part)
            if segments is not None:
                rows, earlier = split(segments), place.segments_before(self._reach())
        heads_first = by_head(packed, self.channels)
        if place is None:
            mixed, bias = self._convolve(heads_first, columns, rows, earlier, part)
        else:
            chunks = by_head(split(packed), self.channels)
            mixed, bias = self._convolve(chunks, columns, rows, earlier, part)
            mixed = join(mixed.transpose(1, 2, 0, 3)).transpose(2, 0, 1, 3)
        delayed = jnp.concatenate([before.astype(v_prev.dtype), split(v_prev)[:, :-1]], axis=1)
        if segments is not None:
            fresh = rows != _with_earlier(rows, earlier, 1)[:, :-1]
            delayed = jnp.where(fresh[..., None], first[:1], delayed)
        v = part.join_values(v_now, join(delayed)).reshape(batch, seq, part.kv, self.channels)
        temperature = part.kv_dim(self.temperature[...])
        mean_q = part.mean_queries(packed)
        q, k = queries_and_keys(heads_first, mixed, bias, temperature, rope, part.kv, mean_q)

        scale, visible = softmax_scale(self.channels), segments if segments is not None else mask
        if linear:
            out, new_cache = self._attend_linearly(q, k, v, visible, cache, going_on, spread)
            if cache is not None:
                new_cache |= self._extend(cache, packed, v_prev)
        elif place is not None:
            out, new_cache = context.attend(q, k, v, window, place, scale=scale), None
        elif cache is None:
            out, _ = attention(q, k, v, visible, visible, window, scale=scale)
            new_cache = None
        else:
            new_cache = kept.extend(cache, k, v, cache_index, spread) | self._extend(cache, packed, v_prev)
            if cache_valid is not None:
                out = kept.attend(q, new_cache, cache_valid, cache_index, window, spread, scale=scale)
            else:  # the prompt: it starts an empty cache, so it attends to itself alone
                out, _ = attention(q, k, v, visible, visible, window, scale=scale)
        o = tsp.fetch(self.o.kernel[...], 0, self.dtype, spread)
        y = part.sum(dot(out.reshape(batch, seq, -1), o, self.dtype))
        return y + self.o.bias[...].astype(y.dtype) if hasattr(self.o, "bias") else y, new_cache

    def _part(self, spread: Spread) -> heads.Part:
        return heads.part(self.num_heads, self.num_kv, self.channels, spread)

    def _side_by_side(self, part: heads.Part, spread: Spread):
        """The kernels of q, k and both halves of v as one, of the device's heads, and their biases (or None)."""

        def joined(q, k, v_now, v_prev):
            values = part.value_columns(jnp.concatenate([v_now, v_prev], axis=-1))
            q = tsp.fetch(q, q.ndim - 1, self.dtype, spread)
            return jnp.concatenate([q, part.kv_columns(k), values], axis=-1)

        parts = (self.q, self.k, self.v_now, self.v_prev)
        biases = joined(*(p.bias[...] for p in parts)) if hasattr(self.q, "bias") else None
        return joined(*(p.kernel[...] for p in parts)), biases

    def _project(self, x, weights, part: heads.Part):
        """Packed queries and keys, current and delayed values: one product."""
        kernel, bias = weights
        y = dot(x, kernel, self.dtype)
        y = y if bias is None else y + bias.astype(y.dtype)
        packed, values = jnp.split(y, (part.packed * self.channels,), axis=-1)
        return packed, *part.split_values(values)

    def _convolve(self, heads_first, columns, segments, earlier, part: heads.Part):
        """Both convolutions of the packed columns, [H + K, B, S, C], and what is still to be added for their biases.

        Nothing stands between them but the first one's bias, so both biases are added once, at the end. Documents are
        cut alike: tokens of a document lie together, so what both would mask is what lies before it. `columns` and
        `earlier`, their segments, come before the first token.
        """
        w1, heads = part.packed_dim(self.conv_grouped.kernel[...], 1), part.packed
        w0 = part.packed_columns(self.conv_depthwise.kernel[...]).reshape(-1, heads, self.channels)
        if segments is not None:
            segments = _with_earlier(segments, earlier, self._history())
        before = None if columns is None else by_head(columns, self.channels)
        mixed = convolve(heads_first, before, w0, w1, segments, self.dtype)
        first_bias, last_bias = (
            part.packed_columns(conv.bias[...]).reshape(heads, self.channels)
            for conv in (self.conv_depthwise, self.conv_grouped)
        )
        passed_on = jnp.einsum("gc,tgcd->gd", first_bias, w1, precision=whole(w1.dtype))
        return mixed, passed_on + last_bias

    def _history(self):
        """How many packed columns the convolutions look back."""
        return self.conv_depthwise.kernel.shape[0] + self.conv_grouped.kernel.shape[0] - 2

    def _reach(self):
        return max(self._history(), 1)  # the delayed value looks one back

    def _left_of(self, edges, place, weights, part: heads.Part):
        """Packed columns and delayed value before each chunk, of the inputs there."""
        columns, _, values = self._project(edges, weights, part)
        # Before the sequence the input is zero: right for the value, but columns then hold the projections' biases.
        columns = jnp.where(place.first(edges.shape[0])[:, None, None], 0, columns)
        return columns[:, columns.shape[1] - self._history() :], values[:, -1:]

    def _value_of_nothing(self, batch, part: heads.Part):
        """The delayed value after a zero input: the projection's bias, where it has one."""
        value = jnp.zeros((part.kv * self.channels,), self.dtype)
        if hasattr(self.v_prev, "bias"):
            biases = (self.v_now.bias[...], self.v_prev.bias[...])
            value = part.value_columns(jnp.concatenate(biases)).astype(self.dtype)
        delayed = part.split_values(value)[1]
        return jnp.broadcast_to(delayed, (batch, 1, delayed.size))

    def _attend_linearly(self, q, k, v, visible, cache, going_on, spread):
        """Linear attention in the softmax's place: its output, and the state where there is a cache."""
        if cache is None:
            if spread.sequence_axes:
                return lasp2(q, k, v, visible, axis=spread.sequence_axes), None
            return linear_attention(q, k, v, visible), None
        if going_on:
            out, state = decode_linear_attention(q, k, v, cache["state"])
        else:
            out, state = linear_attention(q, k, v, visible), prompt_state(k, v, visible)
        return out, {"state": state}

    def _extend(self, cache, packed, v_prev):
        columns = jnp.concatenate([cache["columns"], packed.astype(cache["columns"].dtype)], axis=1)
        return {
            "columns": columns[:, columns.shape[1] - cache["columns"].shape[1] :],
            "value": v_prev[:, -1].astype(cache["value"].dtype),
        }


def empty_cache(model: Model, precision: Precision, batch: int, length: int) -> dict:
    """What decoding keeps, stacked over the layers that have it: all the last packed columns and the delayed value,
    those with a softmax K and V, those with linear attention its state."""
    layers, k, c = model.num_hidden_layers, model.num_key_value_heads, model.head_dim
    history = model.cca_time0 + model.cca_time1 - 2
    dtype = jnp.dtype(precision.compute)
    linear = model.kinds.count("hybrid_linear")
    cache = {
        "columns": jnp.zeros((layers, batch, history, (model.num_attention_heads + k) * c), dtype),
        "value": jnp.zeros((layers, batch, k * c // 2), dtype),
    }
    if linear < layers:
        cache |= {name: jnp.zeros((layers - linear, batch, length, k, c), dtype) for name in ("k", "v")}
    if linear:
        cache["state"] = jnp.zeros((linear, batch, k, c, c + 1), jnp.float32)
    return cache


def _with_earlier(segments, earlier, num):
    """Segments with those of the `num` tokens before the first; `earlier` [B, >= num] ends with them, otherwise -1."""
    if earlier is None:
        return jnp.pad(segments, ((0, 0), (num, 0)), constant_values=-1)
    return jnp.concatenate([earlier[:, earlier.shape[1] - num :], segments], axis=1)
