"""Reading and joining the residual stream, for XLA, which fuses the arithmetic as it finds it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.products import dot, full_precision


class Joining(NamedTuple):
    """The scales and biases of a join, float32."""

    y_scale: Float[Array, "D"]
    y_bias: Float[Array, "D"]
    h_scale: Float[Array, "D"]
    h_bias: Float[Array, "D"]


@functools.partial(jax.checkpoint, static_argnums=2)
def rms_norm(x: Float[Array, "*N D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "*N D"]:
    """x / rms(x) * scale."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def read(h, scale, eps, dtype) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_norm`."""
    return rms_norm(h, scale, eps).astype(dtype), h


def join(y, h, how, gate=None) -> jax.Array:
    """See `pallas_kernels.residual_norm`."""
    return _join(y if gate is None else _gated(y, gate), h, *how)


def join_and_read(y, h, how, scale, kernel, eps, dtype, kernel_dtype) -> tuple:
    """See `pallas_kernels.residual_norm`."""
    h = join(y, h, how)
    x = rms_norm(h, scale, eps)
    return (
        h,
        x.astype(dtype),
        dot(x, kernel, kernel_dtype, jnp.float32, full_precision(kernel_dtype)),
    )


@jax.checkpoint  # y is kept as it comes, not in float32
def _gated(y, gate):
    return y.astype(jnp.float32) * gate[..., None]


@jax.custom_vjp
def _join(y, h, y_scale, y_bias, h_scale, h_bias):
    return (y.astype(jnp.float32) + y_bias) * y_scale + (h + h_bias) * h_scale


def _join_fwd(*args):
    return _join(*args), args


def _join_bwd(saved, d):
    """All four vectors' gradients from three sums over tokens: of d, d y and d h."""
    y, h, *how = saved
    tokens = tuple(range(d.ndim - 1))
    sums = [x.sum(tokens) for x in (d, d * y.astype(jnp.float32), d * h)]
    return (d * how[0]).astype(y.dtype), d * how[2], *vectors(sums, Joining(*how))


_join.defvjp(_join_fwd, _join_bwd)


def vectors(sums: list[jax.Array], how: Joining) -> Joining:
    """The gradients of a join's scales and biases, from sums over tokens of d, d y and d h."""
    total, by_y, by_h = sums
    return Joining(
        by_y + how.y_bias * total,
        how.y_scale * total,
        by_h + how.h_bias * total,
        how.h_scale * total,
    )
