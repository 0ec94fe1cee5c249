"""Where a layer's tokens and weights are: the only thing that a layer knows about devices and
caches.

A layer is written once, as if all tokens and weights were local. It is handed a `Placement`, which
has the tokens before its own and lets them attend; `placement.weights` makes its weights local and
sums partial results. The classes here are those of one device; `zaya_jax.parallel` derives the
others from them and imports this package, never the reverse.

    tokens      Placement                                rows of whole sequences
                Prefill, PrefillPiece, DecodeStep        the same into a cache, some more of them, and one more token
                parallel.context.ZigzagChunks            chunks of sequences split over devices (gathered, ring, LASP-2)
    weights     Weights                                  all of a layer, whole
                parallel.heads.Heads                     tensor: the columns of some heads and of part of the width
                parallel.tsp.Fetched                     ZAYA with TSP: a part each, fetched before the layer
                parallel.tsp.Travelling                  a dense model with TSP: a part each, used as it passes by
    cache       cache.CacheLayout                        keys and values on one device
                parallel.tree.SplitCache                 their columns dealt out to devices
    devices     Devices                                  one: the first of each
                parallel.devices.MeshDevices             a training mesh
                parallel.tree.DecodeDevices              decoding with a split cache

Any class of `Weights` may get functions: `gather`, with which fsdp makes weights whole;
`expert_mlp`, for experts on other devices; `experts_in_stack`, for experts that a kernel reads in
the stack of all layers.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import attention, in_window, softmax_scale, visited
from pallas_kernels.linear_attention import (
    continue_linear_attention,
    decode_linear_attention,
    linear_attention,
    prompt_state,
)
from pallas_kernels.loops import expected_share
from zaya_jax.config import Model
from zaya_jax.model import quantized
from zaya_jax.model.cache import WHOLE_CACHE, CacheLayout, LayerSlice
from zaya_jax.model.experts import expert_mlp
from zaya_jax.model.weights import PAIR

LogicalAxes = tuple[str | None, ...]  # the meaning of each dim of a weight
CacheEntries = dict[str, LayerSlice]  # a layer's, by name
NOTHING: Mapping = types.MappingProxyType({})
Windows = tuple[int | None, ...]  # one for each softmax layer, bottom first


class TokenRows(NamedTuple):
    """The tokens of a pass. `segments` (0 = padding) cuts packed documents; `mask` (1 = real) is
    for left padding."""

    tokens: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None = None
    positions: Int[Array, "B S"] | None = None  # None: each token's index in its row
    mask: Int[Array, "B S"] | None = None


class CacheInput(NamedTuple):
    """A cache that the tokens of a pass are written to, from `column` on.

    They are a prompt into an empty cache; or a piece of one, if `counts` gives the number of real
    tokens in each row, which come first (`first`: of its first piece); or a single new token of
    each row, possibly in a separate column for each, if `valid` says which columns the token sees.
    """

    arrays: dict
    column: jax.Array | int
    valid: Bool[Array, "B T"] | None = None
    counts: Int[Array, "B"] | None = None
    first: bool = False


class LayerOutput(NamedTuple):
    """What a layer returns; one of your own may return a plain tuple of these."""

    h: Float[Array, "B S D"]  # the residual stream after the layer
    router_state: Float[Array, "N R"]  # the router's own stream, handed to the layer above
    choice: Int[Array, "N"]  # each token's expert; the number of experts for none
    logits: Float[Array, "N E1"] | None  # the router's, for a trace
    cache: CacheEntries | None  # the layer's new entries, as `Placement.attend` gave them
    hidden_stack: Float[Array, "L N F2"] | None = None  # the usual layer's, by `Weights.experts`


@dataclasses.dataclass(frozen=True)
class Weights:
    """How a layer gets at its weights, and sums products of parts of them; here all are local and
    whole."""

    dtype: Any = jnp.float32  # of their products
    gather: Callable[[jax.Array, LogicalAxes], jax.Array] | None = None
    expert_mlp: Callable[..., jax.Array] = expert_mlp
    experts_in_stack: Callable | None = None  # this layer's, by `ScanHooks.experts`
    # of this layer, "cca/q/kernel/a" and "../b" (`lora`), "experts/down/scale" (`quantized`)
    beside: Mapping[str, jax.Array] = NOTHING

    @property
    def fetched(self) -> bool:
        """Whether weights come from other devices, so that a backward pass should fetch them again,
        not keep them."""
        return self.gather is not None

    def local(self, weights: nnx.State) -> nnx.State:
        """A layer's weights as the layer computes with them."""
        local = []
        for path, weight in nnx.to_flat_state(weights):
            axes, name = weight.get_metadata()["axes"], "/".join(map(str, path))
            x = self._whole(weight[...], axes)
            x = self._decoded(x, name, axes)
            x = self._with_adapter(x, name, axes)
            local.append((path, weight.replace(self.localize(x, axes))))
        return nnx.from_flat_state(local)

    def _decoded(self, x: jax.Array, name: str, axes: LogicalAxes) -> jax.Array:
        if f"{name}/scale" not in self.beside:
            return x
        scale = self._whole(self.beside[f"{name}/scale"], quantized.scale_axes(name, axes))
        return quantized.decode(x, scale, quantized.INPUT_AXES[name], jnp)

    def _with_adapter(self, x: jax.Array, name: str, axes: LogicalAxes) -> jax.Array:
        if f"{name}/a" not in self.beside:
            return x
        *stack, rows, columns = (axis for axis in axes if axis != PAIR)
        a = self._whole(self.beside[f"{name}/a"], (*stack, rows, None))
        b = self._whole(self.beside[f"{name}/b"], (*stack, None, columns))
        update = jnp.matmul(a, b, precision="highest").reshape(x.shape)
        return (x + update).astype(self.dtype)

    def _whole(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        return x if self.gather is None else self.gather(x, axes)

    def localize(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """What this device computes with, of an array whose dims have these logical axes."""
        return x

    def sum(self, y: jax.Array, dtype: Any) -> jax.Array:
        """A product whose inner dim is cut by heads or width, summed over devices in `dtype`."""
        return y

    def split_values(self, values: jax.Array) -> list[jax.Array]:
        """Columns of the current and of the delayed half of the values; see `join_values`."""
        return jnp.split(values, 2, axis=-1)

    def join_values(self, current: jax.Array, delayed: jax.Array) -> jax.Array:
        """The values of this device's heads."""
        return jnp.concatenate([current, delayed], axis=-1)

    def mean_queries(
        self, packed: Float[Array, "B S P"], channels: int
    ) -> Float[Array, "B S K C"] | None:
        """The mean query of each group if its queries are on several devices; otherwise None."""
        return None

    def mlp(
        self, function: Callable, x: jax.Array, kernels: tuple[jax.Array, ...], dtype: Any
    ) -> jax.Array:
        """function(x, kernels), summed over the parts of the width."""
        return self.sum(function(x, kernels), dtype)

    def experts(
        self,
        x: Float[Array, "N D"],
        choice: Int[Array, "N"],
        gate_up: Float[Array, "E D 2 F"],
        down: Float[Array, "E F D"],
        dtype: Any,
    ) -> tuple[Float[Array, "N D"], Float[Array, "L N F2"] | None]:
        """The outputs of the experts that the tokens chose, and the hidden stack of
        `ScanHooks.experts`, if any."""
        if self.experts_in_stack is not None:
            return self.experts_in_stack(x, choice, dtype)
        return self.expert_mlp(x, choice, gate_up, down, dtype=dtype), None

    def self_attention(
        self,
        function: Callable,
        x: jax.Array,
        kernels: tuple[jax.Array, ...],
        channels: int,
        rope: list,
        placement: Any,
    ) -> tuple[jax.Array, CacheEntries | None]:
        """function(x, kernels of q, k, v and o, channels, rope, placement), summed over the parts
        of the heads."""
        y, entries = function(x, kernels, channels, rope, placement)
        return self.sum(y, y.dtype), entries


class PrecedingTokens(NamedTuple):
    """The tokens before the first one of each row."""

    history: Float[Array, "B T P"] | None  # packed queries and keys; None means zeros
    value: Float[Array, "B 1 V"]  # to be delayed
    segments: Int[Array, "B T"] | None  # their documents; None means documents other than the row's


@dataclasses.dataclass(frozen=True)
class Placement:
    """Rows of whole sequences, as in training on one device; `for_layer` sets what differs by layer.

    `segments` cuts packed documents; `mask` (1 = real) is for left-padded rows.
    """

    segments: Int[Array, "B S"] | None = None
    mask: Int[Array, "B S"] | None = None
    weights: Weights = Weights()
    window: Int[Array, ""] | int | None = None
    linear: bool = False  # linear attention instead of softmax
    # of all softmax layers, whose loops share one program: for its cost account
    windows: Windows = (None,)
    cache: Any = None  # in decoding the layer's CacheEntries

    def for_layer(
        self, weights: Weights, window: jax.Array | None, linear: bool, cache: CacheEntries | None
    ) -> "Placement":
        """The same for one layer: how it gets at its weights, its window, its kind, and its cache,
        if any."""
        return dataclasses.replace(self, weights=weights, window=window, linear=linear, cache=cache)

    @property
    def visible(self) -> Int[Array, "B S"] | None:
        """Ids such that tokens attend only to tokens with the same id."""
        return self.segments if self.segments is not None else self.mask

    def real(self, h: Float[Array, "B S D"]) -> Bool[Array, "B S"]:
        """Which tokens of the residual stream are not padding."""
        if self.visible is None:
            return jnp.ones(h.shape[:2], bool)
        return self.visible > 0

    def rows(self, x: jax.Array) -> jax.Array:
        """[B, S, ..] as layers see it: each contiguous part of a sequence is a row."""
        return x

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `rows`."""
        return x

    def positions(self, batch: int, length: int) -> Int[Array, "B S"]:
        """Each token's index in its sequence, in the order of `rows`."""
        return jnp.broadcast_to(jnp.arange(length), (batch, length))

    def before(
        self,
        x: Float[Array, "B S D"],
        project: Callable,
        history: int,
        initial_value: Float[Array, "B 1 V"],
    ) -> PrecedingTokens:
        """The past of the rows of x: `history` tokens' packed queries and keys, and the value to be
        delayed.

        `project` gives packed columns and both halves of the values of inputs; `initial_value` is
        the value after no token.
        """
        return PrecedingTokens(None, initial_value, None)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, **last: jax.Array
    ) -> tuple[jax.Array, CacheEntries | None]:
        """The tokens' attention, and with a cache the layer's new one, with the last tokens of
        `last` by name."""
        return self._linear(q, k, v) if self.linear else self._softmax(q, k, v)

    def _softmax(self, q, k, v):
        scale = softmax_scale(q.shape[-1])
        with expected_share(visited(q.shape[1], k.shape[1], (0,), self.windows)):
            return attention(q, k, v, self.visible, self.visible, self.window, scale=scale)[0], None

    def _linear(self, q, k, v):
        return linear_attention(q, k, v, self.visible), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(Placement):
    """Whole sequences that start an empty cache, so they attend only to themselves."""

    column: Any  # to write at
    cache_layout: CacheLayout = WHOLE_CACHE

    def for_layer(self, weights, window, linear, cache) -> Placement:
        # What the layer replaces is read before it is written; keys and values are added to.
        entries = {
            name: entry if name in ("k", "v") else entry.read_at_once()
            for name, entry in cache.items()
        }
        return super().for_layer(weights, window, linear, entries)

    def before(self, x, project, history, initial_value) -> PrecedingTokens:
        return PrecedingTokens(self.cache["history"].read(), initial_value, None)

    def attend(self, q, k, v, **last) -> tuple[jax.Array, CacheEntries]:
        out, entries = super().attend(q, k, v)
        assert entries is not None
        for name, x in last.items():
            entry = self.cache[name]
            entries[name] = entry.write(self._last(entry.read(), x))
        return out, entries

    def _last(self, old, new):
        """The last of the old tokens [B, T, ..], or the last old one [B, ..], and the new tokens
        [B, S, ..], in the shape of the old ones."""
        if old.ndim < new.ndim:
            return new[:, -1].astype(old.dtype)
        both = jnp.concatenate([old, new.astype(old.dtype)], axis=1)
        return both[:, both.shape[1] - old.shape[1] :]

    def _softmax(self, q, k, v):
        entries = self._extended(k, v)
        return super()._softmax(q, k, v)[0], entries

    def _linear(self, q, k, v):
        state = self.cache["state"].write(prompt_state(k, v, self.visible))
        return super()._linear(q, k, v)[0], {"state": state}

    def _extended(self, k, v) -> CacheEntries:
        write = self.cache_layout.write
        return {name: write(self.cache[name], x, self.column) for name, x in (("k", k), ("v", v))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPiece(Prefill):
    """The next piece of sequences that come piece by piece; all sequences begin in column 0.

    `column` is the piece's first. The first `counts` tokens of a row are real; the rest is
    padding that no real token sees and that leaves only columns of K and V, which the row's next
    tokens overwrite.
    """

    counts: Int[Array, "B"]
    first: bool

    def real(self, h: Float[Array, "B S D"]) -> Bool[Array, "B S"]:
        return jnp.arange(h.shape[1]) < self.counts[:, None]

    def before(self, x, project, history, initial_value) -> PrecedingTokens:
        value = initial_value if self.first else self.cache["value"].read()[:, None]
        return PrecedingTokens(self.cache["history"].read(), value, None)

    def _last(self, old, new):
        single = old.ndim < new.ndim
        both = jnp.concatenate([old[:, None] if single else old, new.astype(old.dtype)], axis=1)
        length = both.shape[1] - new.shape[1]
        take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=length)
        last = jax.vmap(take)(both, self.counts)
        return last[:, 0] if single else last

    def _softmax(self, q, k, v):
        if self.first:
            return super()._softmax(q, k, v)
        entries, scale = self._extended(k, v), softmax_scale(q.shape[-1])
        k, v = entries["k"].read(), entries["v"].read()
        return self.cache_layout.read_piece(q, k, v, self.window, self.column, scale), entries

    def _linear(self, q, k, v):
        entry = self.cache["state"]
        out, state = continue_linear_attention(q, k, v, entry.read(), self.counts)
        return out, {"state": entry.write(state)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep(Prefill):
    """One new token a row, written at `column` (one for each row, or for all), after the `valid`
    columns."""

    valid: Bool[Array, "B T"]

    def before(self, x, project, history, initial_value) -> PrecedingTokens:
        value = self.cache["value"].read()[:, None]
        return PrecedingTokens(self.cache["history"].read(), value, None)

    def _softmax(self, q, k, v):
        entries, scale = self._extended(k, v), softmax_scale(q.shape[-1])
        valid = in_window(self.valid, self.column, self.window)
        k, v = entries["k"].read(), entries["v"].read()
        return self.cache_layout.read(q, k, v, valid, scale), entries

    def _linear(self, q, k, v):
        entry = self.cache["state"]
        out, state = decode_linear_attention(q, k, v, entry.read())
        return out, {"state": entry.write(state)}


class Devices:
    """The devices that a model runs on; this class is one device."""

    alone = True  # no collective in any program
    mesh: Mesh | None = None  # the mesh of decoding

    def cache_layout(self) -> CacheLayout:
        """Where a layer's keys and values are."""
        return WHOLE_CACHE

    def weights(self, model: Model, dtype: Any) -> Weights:
        """How a layer gets at its weights, for products in `dtype`."""
        return Weights(dtype)

    def sequences(
        self,
        length: int,
        segments: Int[Array, "B S"] | None,
        mask: Int[Array, "B S"] | None,
        weights: Weights,
    ) -> Placement:
        """The placement of sequences with `length` tokens on a device; with a cache they are
        whole."""
        return Placement(segments, mask, weights)

    def placement(
        self, model: Model, dtype: Any, rows: TokenRows, cached: CacheInput | None
    ) -> Placement:
        """The placement of one pass through the model."""
        common = rows.segments, rows.mask, self.weights(model, dtype)
        layout = self.cache_layout()
        placement: Placement
        if cached is None:
            placement = self.sequences(rows.tokens.shape[1], *common)
        elif cached.counts is not None:
            placement = PrefillPiece(
                *common,
                column=cached.column,
                cache_layout=layout,
                counts=cached.counts,
                first=cached.first,
            )
        elif cached.valid is not None:
            placement = DecodeStep(
                *common, column=cached.column, cache_layout=layout, valid=cached.valid
            )
        else:
            placement = Prefill(*common, column=cached.column, cache_layout=layout)
        widths = {"hybrid": None, "hybrid_sliding": model.sliding_window}
        windows = tuple(widths[kind] for kind in model.kinds if kind in widths)
        return dataclasses.replace(placement, windows=windows or (None,))


ONE_DEVICE = Devices()
