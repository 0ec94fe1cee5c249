"""Causal grouped-query attention: never an [S, S] array; its gradient needs only the output and its
log-sum-exp.

Letters: B batch, S sequence, H query heads, K key-value heads, G = H / K queries per group, C head
channels.

An implementation (`xla`, `cpu`, `triton`; `reference` is the definition) has

    forward(q, k, v, q_segments, k_segments, window, offset, *, scale, block)    → out, lse
    backward(saved, d_out, d_lse, *, scale, block, dtype)                        → dq, dk and dv in `dtype`
    visited(q_len, k_len, starts, windows)                                       → the share of blocks that it computes

with `window` and `offset` as arrays, or None if tracing shows that there is none; with `block` None
it chooses. dq may also be in float32.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from numpy import typing as npt

from pallas_kernels import chip
from pallas_kernels.attention import cpu, triton, xla
from pallas_kernels.attention.decode import decode_attention, in_window
from pallas_kernels.attention.reference import MASKED, NO_WINDOW

__all__ = [
    "MASKED",
    "NO_WINDOW",
    "SAVED",
    "attention",
    "attention_gradients",
    "decode_attention",
    "in_window",
    "softmax_scale",
    "visited",
]

IMPLEMENTATIONS = {"xla": xla, "cpu": cpu, "triton": triton}
SAVED = "attention"  # the name under which a remat policy finds the output and its log-sum-exp


class Saved(NamedTuple):
    """The values that the forward pass keeps for the backward one, in any implementation."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None
    window: jax.Array | None
    offset: jax.Array | None
    out: jax.Array
    lse: jax.Array


def attention(
    q: Float[Array, "B Sq H C"],
    k: Float[Array, "B Sk K C"],
    v: Float[Array, "B Sk K C"],
    q_segments: Int[Array, "B Sq"] | None = None,
    k_segments: Int[Array, "B Sk"] | None = None,
    window: int | Int[Array, ""] | None = None,
    offset: int | Int[Array, ""] = 0,
    *,
    scale: float,
    block: int | None = None,
) -> tuple[Float[Array, "B Sq H C"], Float[Array, "B Sq H"]]:
    """Attention output and the log-sum-exp of each query's scores (float32), both differentiable.

    A query at i attends to keys at j with 0 <= i - j < window and the same segment; `offset` is the
    index of the first query minus that of the first key, 0 for a sequence that attends to itself. A
    query without any key gives 0 and a log-sum-exp of -1e30.
    """
    return _attention(q, k, v, q_segments, k_segments, *_bounds(window, offset), scale, block)


def attention_gradients(
    qkv: tuple[Float[Array, "B Sq H C"], Float[Array, "B Sk K C"], Float[Array, "B Sk K C"]],
    whole: tuple[Float[Array, "B Sq H C"], Float[Array, "B Sq H"], Float[Array, "B Sq H C"]],
    q_segments: Int[Array, "B Sq"] | None = None,
    k_segments: Int[Array, "B Sk"] | None = None,
    window: int | Int[Array, ""] | None = None,
    offset: int | Int[Array, ""] = 0,
    *,
    scale: float,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contributions of a part of the keys to dq, dk and dv (float32).

    `whole` belongs to all keys: output, log-sum-exp, and the output's gradient.
    """
    out, lse, d_out = whole
    saved = Saved(*qkv, q_segments, k_segments, *_bounds(window, offset), out, lse)
    backward = chip.choose("attention", IMPLEMENTATIONS).backward
    return backward(saved, d_out, None, scale=scale, block=block, dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _attention(q, k, v, q_segments, k_segments, window, offset, scale, block):
    forward = chip.choose("attention", IMPLEMENTATIONS).forward
    return forward(q, k, v, q_segments, k_segments, window, offset, scale=scale, block=block)


def _attention_fwd(*args):
    out, lse = (checkpoint_name(x, SAVED) for x in _attention(*args))
    return (out, lse), Saved(*(*args[:7], out, lse))


def _attention_bwd(scale, block, saved, cotangents):
    backward = chip.choose("attention", IMPLEMENTATIONS).backward
    dq, dk, dv = backward(saved, *cotangents, scale=scale, block=block, dtype=saved.k.dtype)
    return dq.astype(saved.q.dtype), dk, dv, None, None, None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _bounds(window, offset) -> tuple[jax.Array | None, jax.Array | None]:
    # None is known while tracing: a model without windows has none in its program, and a sequence
    # that attends to itself has no offset.
    known = isinstance(offset, int) and offset == 0
    if isinstance(window, int):
        window = min(window, NO_WINDOW)  # a position is added to it in int32
    window = None if window is None else jnp.asarray(window, jnp.int32)
    return window, None if known or offset is None else jnp.asarray(offset, jnp.int32)


def visited(q_len: int, k_len: int, starts: npt.ArrayLike, windows: Sequence[int | None]) -> float:
    """The share of all pairs of blocks that is computed, the mean over queries that begin at these
    starts, and over layers with these windows: for `loops.expected_share`."""
    return chip.choose("attention", IMPLEMENTATIONS).visited(q_len, k_len, starts, windows)


def softmax_scale(channels: int) -> float:
    """1 / sqrt(C)."""
    return 1.0 / math.sqrt(channels)
