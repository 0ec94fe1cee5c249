"""CCA's mixing of queries and keys over a few tokens: two causal convolutions, a path around them,
norm and rotation.

The first convolution has taps for each channel, the second for each head: a matrix product in
either direction. Letters: B batch, S sequence, G = H + K query and key-value heads, C channels of a
head; the taps look back T0 and T1 tokens, T in all. An array over the sequence may also hold the T
tokens before it, or the last few of them.

`mix` is all of it. On a GPU `triton` does it if it supports the arguments; otherwise it has two
parts, for which an implementation (`xla`, `cpu`; `reference` is the definition) has

    convolve(x, before, by_channel, by_head, segments, dtype)                        → y
    convolve_gradients(the same, d_y)                                                → gradients of the first four
    queries_and_keys(by_head, mixed, bias, temperature, rope, num_kv, mean_q)        → q, k
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.cca_mix import cpu, triton, xla

PARTS = {"xla": xla, "cpu": cpu}


def mix(
    columns: Float[Array, "B S P+V"],
    before: Float[Array, "B T P"] | None,
    by_channel: Float[Array, "T0+1 G C"],
    by_head: Float[Array, "T1+1 G C C"],
    bias: Float[Array, "G C"],
    temperature: Float[Array, "K"],
    rope: list[tuple[Any, jax.Array]],
    segments: Int[Array, "B T+S"] | None,
    mean_q: Float[Array, "B S K C"] | None,
    dtype: Any,
) -> tuple[Float[Array, "B S H C"], Float[Array, "B S K C"], Float[Array, "B S V"]]:
    """Queries and keys from the first P = (H + K) C columns, and the columns after them unchanged.

    Arguments are those of `convolve` and `queries_and_keys`.
    """
    arrays = columns, before, by_channel, by_head, bias, temperature, rope, segments, mean_q, dtype
    if chip.runs_kernels("cca_mix") and triton.suits(*arrays):
        return triton.mix(*arrays)
    packed, rest = jnp.split(columns, (by_channel[0].size,), axis=-1)
    heads_first, before = (
        None if x is None else _heads_first(x, by_channel.shape[2]) for x in (packed, before)
    )
    mixed = convolve(heads_first, before, by_channel, by_head, segments, dtype)
    q, k = queries_and_keys(heads_first, mixed, bias, temperature, rope, temperature.size, mean_q)
    return q, k, rest


def _heads_first(packed, channels):
    """[G, B, S, C], as the convolutions' products and attention's want them."""
    return packed.reshape(*packed.shape[:2], packed.shape[2] // channels, channels).transpose(
        2, 0, 1, 3
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def convolve(
    x: Float[Array, "G B S C"],
    before: Float[Array, "G B T C"] | None,
    by_channel: Float[Array, "T0+1 G C"],
    by_head: Float[Array, "T1+1 G C C"],
    segments: Int[Array, "B T+S"] | None,
    dtype: Any,
) -> Float[Array, "G B S C"]:
    """Both convolutions without biases, in `dtype`, with the value between them in `dtype` too.

    The last tap is the token itself. `before` are the tokens ahead of the first one, None for
    zeros. A token takes nothing from those of other `segments`; None is one segment.
    """
    return chip.choose("cca_mix", PARTS).convolve(x, before, by_channel, by_head, segments, dtype)


def _convolve_fwd(*args):
    return convolve(*args), args[:5]


def _convolve_bwd(dtype, saved, d_out):
    return *chip.choose("cca_mix", PARTS).convolve_gradients(*saved, dtype, d_out), None


convolve.defvjp(_convolve_fwd, _convolve_bwd)


@functools.partial(jax.checkpoint, static_argnums=5)
def queries_and_keys(
    by_head: Float[Array, "G B S C"],
    mixed: Float[Array, "G B S C"],
    bias: Float[Array, "G C"],
    temperature: Float[Array, "K"],
    rope: list[tuple[Any, jax.Array]],
    num_kv: int,
    mean_q: Float[Array, "B S K C"] | None,
) -> tuple[Float[Array, "B S H C"], Float[Array, "B S K C"]]:
    """Adds bias and means to the convolutions' results; normalises by head in float32, scales keys,
    rotates.

    `mean_q` is each group's mean query if its queries are on several devices. The backward pass
    repeats all of it.
    """
    choice = chip.choose("cca_mix", PARTS)
    return choice.queries_and_keys(by_head, mixed, bias, temperature, rope, num_kv, mean_q)
