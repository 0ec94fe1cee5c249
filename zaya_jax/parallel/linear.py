"""Linear attention over devices that hold pieces of a sequence: LASP-2.

Each piece leaves a state of fixed size, [K, C, C + 1] per row in float32; a piece's queries need
the sum of the states of the earlier pieces that its first document reaches back to. Of 2 N pieces
device i holds i and 2 N - 1 - i, as the halves of its tokens (zig-zag, as in `context`). With X =
K C (C + 1) numbers per state, traffic does not depend on the length of the sequence: one all-gather
forward, 2 N B (X + 2) 4 bytes gathered (two numbers are the ids of a piece's first and last
document), and one backward, 2 N B X 4 bytes. The work within a device's own pieces does not depend
on a collective, so it is done while the states travel. It runs inside `jax.shard_map`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import SAVED
from pallas_kernels.linear_attention import finish, heads_first, read, summary, sums


def lasp2(
    q: Float[Array, "B S H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    segments: Int[Array, "B S"] | None = None,
    *,
    axis: str | tuple[str, ...],
    chunk: int | None = None,
) -> Float[Array, "B S H C"]:
    """Linear attention of this device's S tokens to those of all devices of `axis`; one all-gather
    each way."""
    batch, seq = q.shape[:2]

    def halves(x):  # both pieces become rows of the batch, [2 B, S / 2, ..]
        x = x.reshape(batch, 2, seq // 2, *x.shape[2:])
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    rows = [halves(x) for x in (q, k, v)]
    segments = halves(jnp.zeros((batch, seq), jnp.int32) if segments is None else segments)
    features_q, features_k, values = heads_first(*rows)
    states = summary(features_k, values, segments)
    entering = _gathered(
        states.reshape(2, batch, *states.shape[1:]),
        segments[:, 0].reshape(2, batch),
        segments[:, -1].reshape(2, batch),
        axis,
    )
    entering = entering.reshape(states.shape)
    numerator, denominator = sums(features_q, features_k, values, segments, chunk)
    of_past = read(features_q, entering, segments == segments[:, :1])
    out = finish(numerator + of_past[0], denominator + of_past[1], v.dtype)
    return out.reshape(2, batch, seq // 2, *out.shape[2:]).swapaxes(0, 1).reshape(q.shape)


def _ordered(x):
    """The result of an all-gather, [N, 2, ..], in the sequence's order: [2 N, ..]."""
    return jnp.concatenate([x[:, 0], x[::-1, 1]])


def _places(axis):
    """The places in that order of this device's pieces [2], and of all pieces [2 N]."""
    me, everywhere = lax.axis_index(axis), jnp.arange(lax.axis_size(axis) * 2)
    return jnp.stack([me, everywhere.size - 1 - me]), everywhere


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gathered(states, first, last, axis):
    """The state that enters each piece, from those that pieces leave, [2, B, K, C, C + 1];
    documents are [2, B]."""
    return _gathered_fwd(states, first, last, axis)[0]


def _gathered_fwd(states, first, last, axis):
    batch = first.shape[1]
    # exact below 2^24 documents per row
    documents = jnp.stack([first, last], axis=-1).astype(jnp.float32)
    packed = jnp.concatenate([states.reshape(2, batch, -1), documents], axis=-1)
    packed = _ordered(lax.all_gather(packed, axis))
    first_of, last_of = packed[..., -2], packed[..., -1]
    mine, places = _places(axis)
    before = places < mine[:, None]
    reaches = before[..., None] & (last_of == first.astype(jnp.float32)[:, None])
    after = places > mine[:, None]
    reached = after[..., None] & (first_of == last.astype(jnp.float32)[:, None])
    # Both are kept if a remat policy keeps attention, so that the backward pass does not gather
    # again.
    entering = checkpoint_name(_pick(reaches, packed[..., :-2]).reshape(states.shape), SAVED)
    return entering, checkpoint_name(reached, SAVED)


def _gathered_bwd(axis, reached, d_entering):
    batch = d_entering.shape[1]
    gathered = _ordered(lax.all_gather(d_entering.reshape(2, batch, -1), axis))
    return _pick(reached, gathered).reshape(d_entering.shape), None, None


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _pick(chosen, states):
    """Sums of the chosen [2, 2 N, B] of all states [2 N, B, X]: [2, B, X]."""
    return jnp.einsum(
        "pnb,nbx->pbx", chosen.astype(jnp.float32), states, precision=lax.Precision.HIGHEST
    )
