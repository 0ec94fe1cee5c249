"""Causal linear attention: a sum over the past instead of a softmax, held in a state of fixed size.

    out_t = sum_{s <= t} (f(q_t) . f(k_s)) v_s / sum_{s <= t} f(q_t) . f(k_s)        f(x) = elu(x) + 1

over the tokens s of t's own document. Everything of a document's past that a query needs is its
*state*, per head sum f(k)^T v next to sum f(k): [C, C + 1], float32. Within a device a sequence is
taken chunk by chunk; between devices states travel (zaya_jax/parallel/linear.py). A document's
tokens are contiguous, so a state that comes from the left counts exactly where the document that it
ended with goes on.

Letters: B batch, S sequence, H query heads, K key-value heads, G = H / K queries per group, C head
channels.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.attention import SAVED
from pallas_kernels.linear_attention import triton, xla
from pallas_kernels.linear_attention.reference import features
from pallas_kernels.linear_attention.shapes import CHUNK
from pallas_kernels.linear_attention.xla import read, summary

__all__ = [
    "CHUNK",
    "continue_linear_attention",
    "decode_linear_attention",
    "finish",
    "heads_first",
    "linear_attention",
    "prompt_state",
    "read",
    "summary",
    "sums",
]


def linear_attention(
    q: Float[Array, "B S H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    segments: Int[Array, "B S"] | None = None,
    *,
    chunk: int | None = None,
) -> Float[Array, "B S H C"]:
    """Linear attention of whole sequences on one device; memory grows with S times the chunk."""
    if chip.runs_kernels("linear_attention") and triton.suits(q, k, v):
        return triton.linear_attention(q, k, v, segments, chunk)
    return finish(*sums(*heads_first(q, k, v), segments, chunk), v.dtype)


def heads_first(q, k, v) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Features of q [B, K, G, S, C] and of k [B, K, S, C], and v [B, K, S, C]: the arguments of the
    functions below."""
    batch, seq, _, channels = q.shape
    q = features(q).reshape(batch, seq, k.shape[2], -1, channels).transpose(0, 2, 3, 1, 4)
    return q, features(k).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def finish(numerator, denominator, dtype) -> jax.Array:
    """The quotient, heads after the sequence again: [B, S, H, C]."""
    batch, num_kv, group, seq, channels = numerator.shape
    out = (numerator / denominator[..., None]).astype(dtype)
    return checkpoint_name(
        out.transpose(0, 3, 1, 2, 4).reshape(batch, seq, num_kv * group, channels), SAVED
    )


def sums(
    q: Float[Array, "B K G S C"],
    k: Float[Array, "B K S C"],
    v: Float[Array, "B K S C"],
    segments: Int[Array, "B S"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "B K G S C"], Float[Array, "B K G S"]]:
    """Numerator and denominator, float32, as if nothing came before; chunk by chunk.

    The backward pass computes a chunk's weights again; only the states between chunks are kept.
    """
    if chip.runs_kernels("linear_attention") and triton.suits(q, k, v):
        return triton.sums(q, k, v, segments, chunk)
    return xla.sums(q, k, v, segments, min(chunk or CHUNK, q.shape[3]))


def decode_linear_attention(
    q: Float[Array, "B 1 H C"],
    k: Float[Array, "B 1 K C"],
    v: Float[Array, "B 1 K C"],
    state: Float[Array, "B K C C1"],
) -> tuple[Float[Array, "B 1 H C"], Float[Array, "B K C C1"]]:
    """One new token per row: its output, and the state with it."""
    q, k, v = heads_first(q, k, v)
    state = state + summary(k, v)
    return finish(*read(q, state), v.dtype), state


def continue_linear_attention(
    q: Float[Array, "B S H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    state: Float[Array, "B K C C1"],
    counts: Int[Array, "B"],
) -> tuple[Float[Array, "B S H C"], Float[Array, "B K C C1"]]:
    """The next tokens of each row, of which the first `counts` are real: their output, and the state
    after them."""
    q, k, v = heads_first(q, k, v)
    alone, past = sums(q, k, v), read(q, state)
    real = jnp.arange(k.shape[2]) < counts[:, None]
    state = state + summary(jnp.where(real[:, None, :, None], k, 0), v)
    return finish(alone[0] + past[0], alone[1] + past[1], v.dtype), state


def prompt_state(k, v, visible=None) -> Float[Array, "B K C C1"]:
    """The state after a prompt, k and v [B, S, K, C]; `visible` is as for the attention of the
    prompt."""
    return summary(features(k).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), visible)
