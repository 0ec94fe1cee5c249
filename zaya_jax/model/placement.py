"""The places of a layer's tokens and weights: everything that a layer knows about devices.

A layer is written once, as if all tokens and weights were local. It gets `here: Placement`, which
has the rows before its tokens and lets them attend, and `here.weights`, which makes its weights
local and sums partial results. The classes here are those of one device; `zaya_jax.parallel`
derives the others from them and imports this package, never the reverse.

    tokens      Placement                      rows of whole sequences
                Prompt, Piece, Token           the same into a cache, some more of them, and one more token
                parallel.context.Cut           chunks of sequences split over devices (gathered, ring, LASP-2)
    weights     Weights                        all of a layer, whole
                parallel.heads.Heads           tensor: the columns of some heads and of part of the width
                parallel.tsp.Fetched           ZAYA with TSP: a part each, fetched before the layer
                parallel.tsp.Travelling        a dense model with TSP: a part each, used as it passes by
    cache       cache.Cache                    whole
                parallel.tree.Parts            columns split over devices
    devices     Devices                        one: the first of each
                parallel.devices.Over          a training mesh
                parallel.tree.InParts          decoding with the cache in parts

Any class of `Weights` may get two functions: `gather`, with which fsdp makes weights whole, and
`expert_mlp`, for experts on other devices.
"""

import dataclasses
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
    decode_linear_attention,
    goes_on_linear_attention,
    linear_attention,
    prompt_state,
)
from pallas_kernels.loops import visiting
from zaya_jax.config import Model
from zaya_jax.model.cache import WHOLE, Cache
from zaya_jax.model.experts import expert_mlp
from zaya_jax.model.weights import PAIR

Axes = tuple[str | None, ...]
Kept = dict[str, Any] | None  # with a cache, the layer's entries
NO_ADAPTERS: Mapping[str, jax.Array] = types.MappingProxyType({})
Windows = tuple[int | None, ...]  # one for each softmax layer, bottom first


class Rows(NamedTuple):
    """The tokens of a pass. `segments` (0 = padding) cuts packed documents; `mask` (1 = real) is
    for left padding."""

    tokens: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None = None
    positions: Int[Array, "B S"] | None = None  # None: each token's index in its row
    mask: Int[Array, "B S"] | None = None


class Cached(NamedTuple):
    """A cache that the tokens of a pass are written to, at column `index`.

    They are a prompt into an empty cache; or a piece of one, if `counts` gives the number of real
    tokens in each row, which come first; or a single new token of each row, possibly at a separate
    index for each, if `valid` says which columns the token sees.
    """

    arrays: dict
    index: Any  # an array, or a number
    valid: Bool[Array, "B T"] | None = None
    counts: Int[Array, "B"] | None = None


@dataclasses.dataclass(frozen=True)
class Weights:
    """All weights of a layer are local and whole."""

    gather: Callable[[jax.Array, Axes], jax.Array] | None = None
    expert_mlp: Callable[..., jax.Array] = expert_mlp
    adapters: Mapping[str, jax.Array] = (
        NO_ADAPTERS  # of this layer, "cca/q/kernel/a" and "../b" (`lora`)
    )

    @property
    def fetched(self) -> bool:
        """Whether weights come from other devices, so that a backward pass should fetch them again,
        not keep them."""
        return self.gather is not None

    def local(self, weights: Any) -> Any:
        """A layer's weights, an nnx state, as the layer computes with them."""

        def one(path, w):
            axes, name = w.get_metadata()["axes"], "/".join(map(str, path))
            x = self._whole(w[...], axes)
            if f"{name}/a" in self.adapters:
                *stack, rows, columns = (axis for axis in axes if axis != PAIR)
                a = self._whole(self.adapters[f"{name}/a"], (*stack, rows, None))
                b = self._whole(self.adapters[f"{name}/b"], (*stack, None, columns))
                update = jnp.matmul(a, b, precision="highest").reshape(x.shape)
                x = (x + update).astype(x.dtype)
            return w.replace(self.own(x, axes))

        return nnx.from_flat_state([(path, one(path, w)) for path, w in nnx.to_flat_state(weights)])

    def _whole(self, x: jax.Array, axes: Axes) -> jax.Array:
        return x if self.gather is None else self.gather(x, axes)

    def own(self, x: jax.Array, axes: Axes) -> jax.Array:
        """This device's part of an array whose dims have these logical axes."""
        return x

    def sum(self, y: jax.Array, dtype: Any) -> jax.Array:
        """A product whose inner dim is cut by heads or width, summed over devices in `dtype`."""
        return y

    def split_values(self, values: jax.Array) -> list[jax.Array]:
        """Columns of the current and of the delayed half of the values; see `join_values`."""
        return jnp.split(values, 2, axis=-1)

    def join_values(self, now: jax.Array, delayed: jax.Array) -> jax.Array:
        """The values of this device's heads."""
        return jnp.concatenate([now, delayed], axis=-1)

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

    def self_attention(
        self,
        function: Callable,
        x: jax.Array,
        kernels: tuple[jax.Array, ...],
        channels: int,
        rope: list,
        here: Any,
    ) -> tuple[jax.Array, Kept]:
        """function(x, kernels of q, k, v and o, channels, rope, here), summed over the parts of the
        heads."""
        y, kept = function(x, kernels, channels, rope, here)
        return self.sum(y, y.dtype), kept


class Before(NamedTuple):
    """The tokens before the first one of each row."""

    columns: Float[Array, "B T P"] | None  # packed; None means zeros
    value: Float[Array, "B 1 V"]  # to be delayed
    segments: Int[Array, "B T"] | None  # their documents; None means documents other than the row's


@dataclasses.dataclass(frozen=True)
class Placement:
    """Rows of whole sequences, as in training on one device; `of_layer` adds what differs by layer.

    `segments` cuts packed documents; `mask` (1 = real) is for left-padded rows.
    """

    segments: Int[Array, "B S"] | None = None
    mask: Int[Array, "B S"] | None = None
    weights: Weights = Weights()
    window: Int[Array, ""] | int | None = None
    linear: bool = False  # linear attention instead of softmax
    # of all softmax layers, whose loops share one program: for its cost account
    windows: Windows = (None,)
    cache: Any = None  # the cache of decoding, if any

    def of_layer(self, window: jax.Array | None, linear: bool, cache: Kept) -> "Placement":
        """The same for one layer: its window, its kind, and its cache, if any."""
        return dataclasses.replace(self, window=window, linear=linear, cache=cache)

    @property
    def visible(self) -> Int[Array, "B S"] | None:
        """Ids such that tokens attend only to tokens with the same id."""
        return self.segments if self.segments is not None else self.mask

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
        nothing: Float[Array, "B 1 V"],
    ) -> Before:
        """The past of the rows of x: `history` packed columns, and the value to be delayed.

        `project` gives packed columns and values of inputs, `nothing` is the value after no token.
        """
        return Before(None, nothing, None)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, **last: jax.Array
    ) -> tuple[jax.Array, Kept]:
        """The tokens' attention, and with a cache the layer's new one, with the last tokens of
        `last` by name."""
        return self._linear(q, k, v) if self.linear else self._softmax(q, k, v)

    def _softmax(self, q, k, v):
        scale = softmax_scale(q.shape[-1])
        with visiting(visited(q.shape[1], k.shape[1], (0,), self.windows)):
            return attention(q, k, v, self.visible, self.visible, self.window, scale=scale)[0], None

    def _linear(self, q, k, v):
        return linear_attention(q, k, v, self.visible), None


@dataclasses.dataclass(frozen=True)
class Prompt(Placement):
    """Whole sequences that start an empty cache, so they attend only to themselves."""

    index: Any = None  # the column to write at
    store: Cache = WHOLE

    def of_layer(self, window, linear, cache) -> Placement:
        cache = {name: x if name in ("k", "v") else x.read_at_once() for name, x in cache.items()}
        return super().of_layer(window, linear, cache)

    def before(self, x, project, history, nothing) -> Before:
        return Before(self.cache["columns"].read(), nothing, None)

    def attend(self, q, k, v, **last) -> tuple[jax.Array, Kept]:
        out, kept = super().attend(q, k, v)
        for name, x in last.items():
            held = self.cache[name]
            kept = (kept or {}) | {name: held.write(self._last(held.read(), x))}
        return out, kept

    def _last(self, held, new):
        """The held entries, [B, T, ..] or the last token's [B, ..], after these new tokens [B, S,
        ..]."""
        if held.ndim < new.ndim:
            return new[:, -1].astype(held.dtype)
        both = jnp.concatenate([held, new.astype(held.dtype)], axis=1)
        return both[:, both.shape[1] - held.shape[1] :]

    def _softmax(self, q, k, v):
        kept = self._extended(k, v)
        return super()._softmax(q, k, v)[0], kept

    def _linear(self, q, k, v):
        state = self.cache["state"].write(prompt_state(k, v, self.visible))
        return super()._linear(q, k, v)[0], {"state": state}

    def _extended(self, k, v):
        assert self.index is not None, "a cache comes with the column to write at"
        new = {"k": k, "v": v}
        return {name: self.store.write(self.cache[name], x, self.index) for name, x in new.items()}


@dataclasses.dataclass(frozen=True)
class Piece(Prompt):
    """The next piece of sequences that come piece by piece; all sequences begin in column 0.

    `index` is the piece's first column, 0 itself for the first piece. The first `counts` tokens of
    a row are real; the rest is padding that no real token sees and that leaves only columns of K
    and V, which the row's next tokens overwrite.
    """

    counts: Any = None  # [B]

    @property
    def _first(self) -> bool:
        return isinstance(self.index, int)

    def before(self, x, project, history, nothing) -> Before:
        value = nothing if self._first else self.cache["value"].read()[:, None]
        return Before(self.cache["columns"].read(), value, None)

    def _last(self, held, new):
        alone = held.ndim < new.ndim
        both = jnp.concatenate([held[:, None] if alone else held, new.astype(held.dtype)], axis=1)
        length = both.shape[1] - new.shape[1]
        kept = jax.vmap(lambda x, count: jax.lax.dynamic_slice_in_dim(x, count, length))(
            both, self.counts
        )
        return kept[:, 0] if alone else kept

    def _softmax(self, q, k, v):
        if self._first:
            return super()._softmax(q, k, v)
        kept, scale = self._extended(k, v), softmax_scale(q.shape[-1])
        k, v = kept["k"].read(), kept["v"].read()
        return self.store.read_piece(q, k, v, self.window, self.index, scale), kept

    def _linear(self, q, k, v):
        held = self.cache["state"]
        out, state = goes_on_linear_attention(q, k, v, held.read(), self.counts)
        return out, {"state": held.write(state)}


@dataclasses.dataclass(frozen=True)
class Token(Prompt):
    """One new token a row, written at `index` (one for each row, or for all), after the `valid`
    columns."""

    valid: Any = None  # [B, T]

    def before(self, x, project, history, nothing) -> Before:
        return Before(self.cache["columns"].read(), self.cache["value"].read()[:, None], None)

    def _softmax(self, q, k, v):
        kept, scale = self._extended(k, v), softmax_scale(q.shape[-1])
        valid = in_window(self.valid, self.index, self.window)
        return self.store.read(q, kept["k"].read(), kept["v"].read(), valid, scale), kept

    def _linear(self, q, k, v):
        held = self.cache["state"]
        out, state = decode_linear_attention(q, k, v, held.read())
        return out, {"state": held.write(state)}


class Devices:
    """The devices that a model runs on; this class is one device."""

    alone = True  # no collective in any program
    mesh: Mesh | None = None  # the mesh of decoding

    def cache(self) -> Cache:
        """The layout of a layer's keys and values."""
        return WHOLE

    def weights(self, model: Model, dtype: Any) -> Weights:
        """The layout of a layer's weights, for products in `dtype`."""
        return Weights()

    def sequences(
        self,
        length: int,
        segments: Int[Array, "B S"] | None,
        mask: Int[Array, "B S"] | None,
        weights: Weights,
    ) -> Placement:
        """The layout of sequences with `length` tokens on a device; with a cache they are whole."""
        return Placement(segments, mask, weights)

    def place(self, model: Model, dtype: Any, rows: Rows, cached: Cached | None) -> Placement:
        """The placement of one pass through the model."""
        weights, segments, mask = self.weights(model, dtype), rows.segments, rows.mask
        if cached is None:
            here = self.sequences(rows.tokens.shape[1], segments, mask, weights)
            kinds = [kind for kind in model.kinds if kind != "hybrid_linear"]
            windows = tuple(
                model.sliding_window if kind == "hybrid_sliding" else None for kind in kinds
            )
            return dataclasses.replace(here, windows=windows or (None,))
        at: dict[str, Any] = {"index": cached.index, "store": self.cache()}
        if cached.counts is not None:
            return Piece(segments, mask, weights, **at, counts=cached.counts)
        if cached.valid is not None:
            return Token(segments, mask, weights, **at, valid=cached.valid)
        return Prompt(segments, mask, weights, **at)


ALONE = Devices()
