"""Algorithms that ours are compared with, by the benchmarks and in the tests; no program runs them.

For one new token in each of B rows of a cache over N devices, H heads of C channels, T columns in
all, K key-value heads (compare `tree_attention`, which is `zaya_jax.parallel.tree.SplitCache`'s), a
layer sends

    ring_of_parts    N - 1 collective-permutes one after the other, of outputs and log-sum-exps: 4 B H (C + 1) each
    ring_of_keys     N - 1 of the keys and values: 2 B T / N K C numbers each, in the cache's own format

For linear attention over pieces of a sequence, two a device, X = K C (C + 1) numbers per state (the
rival of `zaya_jax.parallel.linear.lasp2`):

    lasp1            2 (N - 1) collective-permutes one after the other, B (X + 1) 4 bytes each, and as many backward

All run inside `jax.shard_map`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zaya_jax.parallel import linear, tree


def tree_attention(q, k, v, valid, *, scale, axis) -> jax.Array:
    """Ours: attention of one new query per row to a cache in parts."""
    return tree.SplitCache(lax.axis_size(axis), axis).read(q, k, v, valid, scale)


def ring_of_parts(q, k, v, valid, *, scale: float, axis: str) -> jax.Array:
    """The same by outputs that travel round: each device adds up those of all others."""
    part = tree.attend_to_part(q, k, v, tree.own_columns(valid, axis), scale)

    def travel(part):
        out, lse = part
        packed = lax.ppermute(jnp.concatenate([out, lse[..., None]], axis=-1), axis, _round(axis))
        return packed[..., :-1], packed[..., -1]

    return _add_up(part, travel, lambda _, part: part, axis).astype(v.dtype)


def ring_of_keys(q, k, v, valid, *, scale: float, axis: str) -> jax.Array:
    """The same by keys and values that travel round, as in ring attention."""

    def attend(source, kv):
        return tree.attend_to_part(q, kv[0], kv[1], tree.columns_on(source, valid, axis), scale)

    def travel(kv):
        return lax.ppermute(kv, axis, _round(axis))

    return _add_up(jnp.stack([k, v]), travel, attend, axis).astype(v.dtype)


def _add_up(held, travel: Callable, attend: Callable, axis: str) -> Float[Array, "B 1 H C"]:
    """Attention to everything that comes round, which `attend` turns into parts; N - 1 journeys."""
    me, devices = lax.axis_index(axis), lax.axis_size(axis)
    out, lse = attend(me, held)
    for distance in range(1, devices):
        held = travel(held)
        new, new_lse = attend((me - distance) % devices, held)
        top = jnp.maximum(lse, new_lse)
        total = top + jnp.log(jnp.exp(lse - top) + jnp.exp(new_lse - top))
        out = out * jnp.exp(lse - total)[..., None] + new * jnp.exp(new_lse - total)[..., None]
        lse = total
    return out[:, None]


def _round(axis: str) -> list[tuple[int, int]]:
    devices = lax.axis_size(axis)
    return [(i, (i + 1) % devices) for i in range(devices)]


def lasp1(q, k, v, segments=None, *, axis, chunk: int | None = None) -> jax.Array:
    """The same by states that go from device to device, each waiting for the one before."""
    return linear.lasp2(q, k, v, segments, axis=axis, chunk=chunk, exchange=_passed_on)


def _passed_on(states, first, last, axis):
    """As `_gathered`, by states that travel: up the devices through their first pieces, down
    through the second."""
    size, me = lax.axis_size(axis), lax.axis_index(axis)

    def leave(piece, entering):
        through = (first[piece] == last[piece])[:, None, None, None]
        return states[piece] + jnp.where(through, entering, 0)

    def admitted(piece, state, ended):
        return jnp.where((ended == first[piece].astype(jnp.float32))[:, None, None, None], state, 0)

    found = []
    begin = jnp.zeros_like(states[0])  # the state that enters the sweep's first piece
    for piece in range(states.shape[0]):
        is_first = me == (0 if piece == 0 else size - 1)
        hops = [(i, i + 1) if piece == 0 else (i + 1, i) for i in range(size - 1)]
        entering = jnp.where(is_first, begin, 0)
        for _ in range(size - 1):
            ended = last[piece].astype(jnp.float32)[:, None]
            packed = jnp.concatenate(
                [leave(piece, entering).reshape(ended.shape[0], -1), ended], axis=-1
            )
            packed = lax.ppermute(packed, axis, hops)
            received = admitted(piece, packed[:, :-1].reshape(begin.shape), packed[:, -1])
            entering = jnp.where(is_first, begin, received)
        found.append(entering)
        if piece + 1 < states.shape[0]:
            begin = admitted(piece + 1, leave(piece, entering), last[piece].astype(jnp.float32))
    return jnp.stack(found)
