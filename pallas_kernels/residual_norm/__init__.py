"""How a block reads the residual stream and joins it: RMSNorm, and a sum with scales and biases. All in float32.

Both are cheap arithmetic on a wide array: the backward pass repeats it instead of reading back what it gave. One
implementation, XLA's, serves all chips.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@functools.partial(jax.checkpoint, static_argnums=2)
def rms_norm(x: Float[Array, "*N D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "*N D"]:
    """x / rms(x) * scale."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


@jax.custom_vjp
def join(
    y: Float[Array, "*N D"],
    h: Float[Array, "*N D"],
    y_scale: Float[Array, "D"],
    y_bias: Float[Array, "D"],
    h_scale: Float[Array, "D"],
    h_bias: Float[Array, "D"],
) -> Float[Array, "*N D"]:
    """(y + y_bias) y_scale + (h + h_bias) h_scale."""
    return (y.astype(jnp.float32) + y_bias) * y_scale + (h + h_bias) * h_scale


def _join_fwd(*args):
    return join(*args), args


def _join_bwd(saved, d):
    """All four vectors' gradients from three sums over tokens: of d, d y and d h."""
    y, h, y_scale, y_bias, h_scale, h_bias = saved
    tokens = tuple(range(d.ndim - 1))
    total, by_y, by_h = (x.sum(tokens) for x in (d, d * y.astype(jnp.float32), d * h))
    vectors = (by_y + y_bias * total, y_scale * total, by_h + h_bias * total, h_scale * total)
    return (d * y_scale).astype(y.dtype), d * h_scale, *vectors


join.defvjp(_join_fwd, _join_bwd)
