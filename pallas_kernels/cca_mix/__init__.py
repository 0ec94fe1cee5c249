"""How CCA mixes queries and keys over a few tokens: two causal convolutions, a path around them, norm and rotation.

The first convolution has taps for each channel, the second for each head: a matrix product in either direction.
Letters: B batch, S sequence, G = H + K query and key-value heads, C channels of a head; the taps look back T0 and T1
tokens, T in all. An array over the sequence may also hold the T tokens before it, or the last few of them.

An implementation (`xla`, `cpu`; `reference` is the definition) has

    convolve(x, before, by_channel, by_head, segments, dtype)                        → y
    convolve_gradients(the same, d_y)                                                → gradients of the first four
    queries_and_keys(by_head, mixed, bias, temperature, rope, num_kv, mean_q)        → q, k
"""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.cca_mix import cpu, xla

IMPLEMENTATIONS = {"xla": xla, "cpu": cpu}


def by_head(packed: Float[Array, "B S P"], channels: int) -> Float[Array, "G B S C"]:
    """Packed columns with heads first, as the convolutions' products and attention's want them."""
    return packed.reshape(*packed.shape[:2], packed.shape[2] // channels, channels).transpose(2, 0, 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def convolve(
    x: Float[Array, "G B S C"],
    before: Float[Array, "G B T C"] | None,
    by_channel: Float[Array, "T0+1 G C"],
    by_head: Float[Array, "T1+1 G C C"],
    segments: Int[Array, "B T+S"] | None,
    dtype: Any,
) -> Float[Array, "G B S C"]:
    """Both convolutions without biases, in `dtype`, as is what passes between them.

    The last tap is the token itself. `before` are the tokens ahead of the first one, None for zeros. A token takes
    nothing from those of other `segments`; None is one segment.
    """
    return chip.choose(IMPLEMENTATIONS).convolve(x, before, by_channel, by_head, segments, dtype)


def _convolve_fwd(*args):
    return convolve(*args), args[:5]


def _convolve_bwd(dtype, saved, d_out):
    return *chip.choose(IMPLEMENTATIONS).convolve_gradients(*saved, dtype, d_out), None


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
    """Bias and means added to what the convolutions gave; normalised by head in float32, keys scaled, rotated.

    `mean_q` is each group's mean query where it lies on several devices. The backward pass repeats all of it.
    """
    choice = chip.choose(IMPLEMENTATIONS)
    return choice.queries_and_keys(by_head, mixed, bias, temperature, rope, num_kv, mean_q)
