"""TSP: each device of the tensor axis holds a part of the weights and a part of the sequence;
weights travel.

No sum of activations crosses devices. Letters: N devices, B batch, S sequence, D model, H query and
K key-value heads, G = H / K, C head channels, F the MLP's width; a device holds S / N tokens, H / N
heads and F / N channels.

`ring_sum`, for the gated MLP: the shards go round. In each of N rounds a device adds the visiting
shard's result for its own tokens, while the next one is on its way. Backward they go round once
more and each shard's gradient follows one step behind it, so that it arrives home complete.

`travelling_attention`, in K / N rounds. All devices must work on the same heads at a time, because
each needs the keys and values of all tokens. So a round takes one key-value head with its queries
from *every* device: their columns of q, k, v and rows of o, packed, are broadcast by all to all at
once, which is one all-gather of N equal pieces. Broadcasting one device's whole shard at a time
moves as many bytes, but over one device's links while the others' are idle, and its transpose,
which returns the gradients, would be a reduction to one device; as a sum of masked buffers (XLA has
no broadcast on every backend) it moves twice the bytes. The all-gather and its transpose, the
reduce-scatter, are native everywhere. Then each device computes the round's heads for its tokens,
gathers their keys and values along the sequence (`context`, zig-zag order) and adds their part of
the output. The next round's weights are fetched before this round computes. The backward pass
fetches weights, keys and values again and keeps nothing of size N: of the forward pass only the
device's own attention output and its log-sum-exp.

Elements received per layer and device, forward: (N - 1) / N of

    2 D (H + K) C + 3 D F      weights; 16 D² for multi-head attention with F = 4 D
    2 B S K C                  keys and values; then 2 B S D

and backward the same again, and the gradients of both: keys' and values' in the compute format,
weights' in float32. Tensor parallelism moves 4 B S D forward (two all-reduces, each in and out) and
as many backward: TSP moves fewer if a device group has more than 8 D tokens in flight.

ZAYA's attention has so few key-value heads that a device holds k, v, convolutions and temperatures
whole, as without TSP, and gathers keys and values of all heads at once (512 B S). Its q and o are
`Fetched`. Experts do not travel: they are spread over the tensor axis as over the expert axis, and
tokens go to them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import attention as blockwise
from pallas_kernels.products import dot, einsum
from pallas_kernels.rotary import rotate
from zaya_jax.model.placement import LogicalAxes, Weights, Windows
from zaya_jax.parallel import context
from zaya_jax.parallel.spread import TENSOR


@dataclasses.dataclass(frozen=True)
class Fetched(Weights):
    """ZAYA's weights: those split by heads are fetched whole, for products in `dtype`.

    A fetched weight's gradient is summed over devices in float32, each keeping its part.
    """

    @property
    def fetched(self) -> bool:
        return True

    def localize(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        if "heads" not in axes:
            return x
        return _fetch(axes.index("heads"), jnp.dtype(self.dtype), x)


@dataclasses.dataclass(frozen=True)
class Travelling(Weights):
    """A dense model's weights, which visit each device in turn."""

    parts: int = 1  # devices that share the weights

    def mlp(self, function, x, kernels, dtype) -> jax.Array:
        return ring_sum(function, x, kernels, dtype, self.parts)

    def self_attention(
        self, function, x, kernels, channels, rope, placement
    ) -> tuple[jax.Array, None]:
        rope = [(selected, placement.joined(table)) for selected, table in rope]
        y = travelling_attention(
            placement.joined(x), kernels, channels, rope, placement, self.parts
        )
        return placement.rows(y), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fetch(dim, dtype, part):
    gather = functools.partial(lax.all_gather, axis_name=TENSOR, axis=dim, tiled=True)
    return _as_bits(gather, part.astype(dtype)).astype(part.dtype)


_fetch.defvjp(
    lambda dim, dtype, part: (_fetch(dim, dtype, part), None),
    lambda dim, dtype, _, d: (lax.psum_scatter(d, TENSOR, scatter_dimension=dim, tiled=True),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def ring_sum(
    fn: Callable, x: Float[Array, "B S D"], shards: Any, dtype: Any, parts: int
) -> Float[Array, "B S D"]:
    """The sum over the axis's devices of fn(x, shards), for the device's own x: shards travel in
    `dtype`.

    A device sends (N - 1) / N of all shards; backward again, and as many gradients in float32. `fn`
    is a plain function, not a closure over traced arrays.
    """

    def step(carry, _):
        visiting, y = carry
        following = _pass_on(visiting, parts)
        return (following, y + fn(x, _wide(visiting))), None

    zero = jnp.zeros(x.shape, jnp.float32)
    start = jax.tree.map(lambda w: w.astype(dtype), shards)
    (visiting, y), _ = lax.scan(step, (start, zero), length=parts - 1)
    return y + fn(x, _wide(visiting))


def _ring_fwd(fn, x, shards, dtype, parts):
    return ring_sum(fn, x, shards, dtype, parts), (x, shards)


def _ring_bwd(fn, dtype, parts, saved, dy):
    x, shards = saved

    def visit(visiting, dx):
        d_x, d_shards = jax.vjp(fn, x, _wide(visiting))[1](dy)
        return dx + d_x.astype(jnp.float32), d_shards

    def step(carry, _):
        visiting, dx, behind = carry
        following, behind = _pass_on(visiting, parts), _pass_on(behind, parts)
        dx, added = visit(visiting, dx)
        return (following, dx, _add(behind, added)), None

    # A device's own shard is first; its gradients wait for those of the others, which begin at the
    # next device.
    own = jax.tree.map(lambda w: w.astype(dtype), shards)
    visiting = _pass_on(own, parts)
    dx, own_gradients = visit(own, jnp.zeros(x.shape, jnp.float32))
    if parts == 2:
        dx, behind = visit(visiting, dx)
    else:
        following = _pass_on(visiting, parts)
        dx, behind = visit(visiting, dx)
        (visiting, dx, behind), _ = lax.scan(step, (following, dx, behind), length=parts - 3)
        behind = _pass_on(behind, parts)
        dx, added = visit(visiting, dx)
        behind = _add(behind, added)
    return dx.astype(x.dtype), _add(own_gradients, _pass_on(behind, parts))


ring_sum.defvjp(_ring_fwd, _ring_bwd)


def _pass_on(tree, parts):
    pairs = [(i, (i + 1) % parts) for i in range(parts)]
    return jax.tree.map(lambda x: _as_bits(lambda bits: lax.ppermute(bits, TENSOR, pairs), x), tree)


def _as_bits(move, x):
    """Moves 2-byte numbers as bare bits: XLA:CPU would widen each to 4 bytes, and any compiler
    may."""
    if x.dtype.itemsize != 2:
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)


def _wide(tree):
    """As float32, which does not change products and gives float32 gradients."""
    return jax.tree.map(lambda w: w.astype(jnp.float32), tree)


def _add(a, b):
    return jax.tree.map(jnp.add, a, b)


class _RoundSizes(NamedTuple):
    """The static sizes of a round."""

    parts: int  # devices that share the weights
    axes: tuple[str, ...]  # that carry the sequence
    model: int
    group: int
    channels: int
    dtype: Any
    windows: Windows

    @property
    def columns(self) -> int:
        """Columns of q, k and v together, from one device."""
        return (self.group + 2) * self.channels


class _Masks(NamedTuple):
    """Positions and masks: the arrays of a round that have no gradient."""

    rope: Any
    window: Int[Array, ""] | None
    starts: Int[Array, "2"]
    segments: Int[Array, "B S"] | None


def travelling_attention(
    x: Float[Array, "B S/N D"],
    weights: tuple[jax.Array, ...],
    channels: int,
    rope: list[tuple[Any, jax.Array]],
    placement: context.ZigzagChunks,
    parts: int,
) -> Float[Array, "B S/N D"]:
    """Causal attention with the kernels of q, k, v [D, heads C] and o [heads C, D], each device
    with its heads."""
    q, k, v, o = weights
    rounds = k.shape[1] // channels
    sizes = _RoundSizes(
        parts,
        placement.axes,
        x.shape[-1],
        q.shape[1] // k.shape[1],
        channels,
        x.dtype,
        placement.windows,
    )
    by_round = (w.reshape(sizes.model, rounds, -1).transpose(1, 0, 2) for w in (q, k, v))
    columns = jnp.concatenate(list(by_round), axis=-1).reshape(rounds, -1)
    packed = jnp.concatenate([columns, o.reshape(rounds, -1)], axis=1)
    window = None if placement.window is None else jnp.asarray(placement.window, jnp.int32)
    masks = _Masks(rope, window, placement.starts, placement.whole_segments)
    return _attention(sizes, x, packed, masks)


def _fetch_round(part, sizes):
    """All devices' columns [N, D, (G + 2) C] and rows [N G C, D] of a round."""
    whole = _as_bits(lambda bits: lax.all_gather(bits, TENSOR), part.astype(sizes.dtype))
    columns, rows = jnp.split(whole, (sizes.model * sizes.columns,), axis=1)
    return columns.reshape(sizes.parts, sizes.model, -1), rows.reshape(-1, sizes.model)


def _project(sizes, rope, x, columns):
    """q [B, S, N G, C], k and v [B, S, N, C] of a round."""
    batch, seq, model = x.shape
    y = einsum("nd,gdf->ngf", x.reshape(-1, model), columns, sizes.dtype, sizes.dtype)
    q, k, v = jnp.split(
        y, (sizes.group * sizes.channels, (sizes.group + 1) * sizes.channels), axis=-1
    )
    q, k, v = (part.reshape(batch, seq, -1, sizes.channels) for part in (q, k, v))
    return rotate(rope, q).astype(q.dtype), jnp.concatenate(
        [rotate(rope, k).astype(k.dtype), v], axis=-1
    )


def _output(sizes, out, rows):
    return dot(out.reshape(*out.shape[:2], -1), rows, sizes.dtype, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(sizes, x, packed, masks):
    return _attention_fwd(sizes, x, packed, masks)[0]


def _attention_fwd(sizes, x, packed, masks):
    scale = blockwise.softmax_scale(sizes.channels)

    def compute(weights, y):
        columns, rows = weights
        q, kv = _project(sizes, masks.rope, x, columns)
        outs, lses = [], []
        kv = context.gather(kv, sizes.axes)
        for half in context.early_and_late(
            kv, masks.starts, masks.segments, masks.window, sizes.windows, q
        ):
            with half.cost:
                out, lse = blockwise.attention(*half.arrays, *half.masks, scale=scale)
            outs.append(out)
            lses.append(lse)
        out = checkpoint_name(jnp.concatenate(outs, axis=1), blockwise.SAVED)
        lse = checkpoint_name(jnp.concatenate(lses, axis=1), blockwise.SAVED)
        return y + _output(sizes, out, rows), (out, lse)

    def step(carry, following):
        weights, y = carry
        following = _fetch_round(following, sizes)
        y, kept = compute(weights, y)
        return (following, y), kept

    first = _fetch_round(packed[0], sizes)
    (weights, y), kept = lax.scan(step, (first, jnp.zeros(x.shape, jnp.float32)), packed[1:])
    y, last = compute(weights, y)
    return y, (x, packed, masks, kept, last)


def _attention_bwd(sizes, saved, dy):
    x, packed, masks, kept, last = saved
    scale = blockwise.softmax_scale(sizes.channels)

    def compute(weights, dx, out, lse):
        columns, rows = _wide(weights)
        d_out, d_rows = jax.vjp(functools.partial(_output, sizes), out, rows)[1](dy)
        (q, kv), back = jax.vjp(functools.partial(_project, sizes, masks.rope), x, columns)
        gathered, scatter = jax.vjp(lambda kv: context.gather(kv, sizes.axes), kv)
        halves = []
        for half in context.early_and_late(
            gathered, masks.starts, masks.segments, masks.window, sizes.windows, q, out, lse, d_out
        ):
            arrays = half.arrays
            with half.cost:
                halves.append(
                    blockwise.attention_gradients(arrays[:3], arrays[3:], *half.masks, scale=scale)
                )
        early, late = halves
        d_kv = [_seen_by_both(a, b, kv.dtype) for a, b in zip(early[1:], late[1:], strict=True)]
        (d_kv,) = scatter(jnp.concatenate(d_kv, axis=-1))
        d_q = jnp.concatenate([early[0], late[0]], axis=1).astype(q.dtype)
        d_x, d_columns = back((d_q, d_kv))
        flat = [d.reshape(sizes.parts, -1) for d in (d_columns, d_rows)]
        gradients = lax.psum_scatter(jnp.concatenate(flat, axis=1), TENSOR)
        return dx + d_x.astype(jnp.float32), gradients

    def step(carry, inputs):
        weights, dx = carry
        following, of_round = inputs
        following = _fetch_round(following, sizes)
        dx, gradients = compute(weights, dx, *of_round)
        return (following, dx), gradients

    first = _fetch_round(packed[0], sizes)
    start = (first, jnp.zeros(x.shape, jnp.float32))
    (weights, dx), gradients = lax.scan(step, start, (packed[1:], kept))
    dx, last_gradients = compute(weights, dx, *last)
    return dx.astype(x.dtype), jnp.concatenate([gradients, last_gradients[None]]), None


def _seen_by_both(early, late, dtype):
    """The gradient of keys or values: late queries see all of them, early ones the first half.
    Summed in float32, and sent home in the compute format."""
    unseen = late.shape[1] - early.shape[1]
    return (late + jnp.pad(early, [(0, 0), (0, unseen), (0, 0), (0, 0)])).astype(dtype)


_attention.defvjp(_attention_fwd, _attention_bwd)
