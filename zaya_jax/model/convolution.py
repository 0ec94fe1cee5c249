"""A causal convolution with a kernel for each head, one matrix product in either direction.

Letters: B batch, S sequence, G heads, C channels of a head, T taps before the current token.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zaya_jax.model.matmul import apart, sum_rows, written


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def convolve(
    x: Float[Array, "B S G C"],
    before: Float[Array, "B T G C"] | None,
    kernel: Float[Array, "T1 G C C"],
    within: Sequence[Bool[Array, "B S"] | None],
    dtype,
) -> Float[Array, "B S G C"]:
    """Sum over taps of the token `taps - 1 - i` back times kernel[i], products in `dtype`, given in float32.

    `before` are the tokens ahead of the first one, None for zeros. within[d] says of each token whether the one d
    back counts, None that it does.
    """
    batch, seq, heads, channels = x.shape
    last = kernel.shape[0] - 1
    x = _heads_first(x.astype(dtype))
    start = jnp.zeros((heads, batch, last, channels), dtype)
    padded = jnp.concatenate([start if before is None else _heads_first(before.astype(dtype)), x], axis=2)
    taps = [_masked(padded[:, :, last - d :][:, :, :seq], within[d]) for d in range(last, -1, -1)]
    weights = kernel.astype(dtype).transpose(1, 0, 2, 3).reshape(heads, -1, channels)
    out = jnp.einsum("gni,gio->gno", _side_by_side(taps), weights, preferred_element_type=jnp.float32)
    return _tokens_first(out, batch)


def _convolve_fwd(x, before, kernel, within, dtype):
    return convolve(x, before, kernel, within, dtype), (x, before, kernel, within)


def _convolve_bwd(dtype, saved, d_out):
    """The same the other way round: a token's gradient is a convolution of those of the tokens after it."""
    x, before, kernel, within = saved
    last, batch = kernel.shape[0] - 1, x.shape[0]
    d_out = _heads_first(d_out.astype(dtype))
    weights = kernel.astype(dtype).transpose(1, 2, 0, 3).reshape(*kernel.shape[1:3], -1)
    # What each tap passes on, with `last` tokens before the first one and as many after the last.
    passed = [
        jnp.pad(_masked(d_out, within[d]), ((0, 0), (0, 0), (last - d, d), (0, 0))) for d in range(last, -1, -1)
    ]

    def gradients(x, later):
        later = _side_by_side(later)
        dx = jnp.einsum("gno,gio->gni", later, weights, preferred_element_type=x.dtype)
        dw = sum_rows("gni", "gno", "gio", _side_by_side([_heads_first(x.astype(dtype))]), later)
        dw = dw.reshape(*kernel.shape[1:3], last + 1, -1).transpose(2, 0, 1, 3)
        return _tokens_first(dx, batch), dw

    dx, dw = gradients(x, [p[:, :, last:] for p in passed])
    if before is None:
        return dx, None, dw.astype(kernel.dtype), None
    d_before, more = gradients(before, [p[:, :, :last] for p in passed])
    return dx, d_before, (dw + more).astype(kernel.dtype), None


convolve.defvjp(_convolve_fwd, _convolve_bwd)


def _masked(x, within):
    return x if within is None else jnp.where(within[..., None], x, 0)


def _heads_first(x):
    """[B, S, G, C] to [G, B, S, C]: a CPU has no bfloat16 product with a batch dimension in the middle."""
    return written(apart(x).transpose(2, 0, 1, 3))


def _side_by_side(taps):
    heads, batch, seq, _ = taps[0].shape
    return jnp.concatenate(taps, axis=-1).reshape(heads, batch * seq, -1)


def _tokens_first(rows, batch):
    """[G, B S, C] to [B, S, G, C]."""
    heads, num, channels = rows.shape
    return rows.reshape(heads, batch, num // batch, channels).transpose(1, 2, 0, 3)
