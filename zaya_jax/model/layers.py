"""The small parts that the blocks share: a weight's declaration, linear maps, RMSNorm, residual scaling, RoPE.

A weight is declared once: shape, initialiser and logical axes stand in one `weight(...)` call; its dtype is always
float32. `axes` names what each dimension means; which mesh axis that becomes is decided elsewhere.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from zaya_jax.model.matmul import apart, dot, sum_tokens


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], init: float | str
) -> nnx.Param:
    """A float32 parameter: `init` is "zeros", "ones", or the standard deviation of a normal distribution."""
    if init == "zeros":
        value = jnp.zeros(shape, jnp.float32)
    elif init == "ones":
        value = jnp.ones(shape, jnp.float32)
    else:
        value = float(init) * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, axes=axes)


class Linear(nnx.Module):
    """x W (+ b), multiplied in `dtype`."""

    def __init__(
        self, rngs, d_in: int, d_out: int, axes: tuple[str | None, str | None], std: float, bias: bool
    ):
        self.kernel = weight(rngs, (d_in, d_out), axes, std)
        if bias:
            self.bias = weight(rngs, (d_out,), axes[1:], "zeros")

    def __call__(self, x: jax.Array, dtype, out_dtype=None, precision=None) -> jax.Array:
        out_dtype = out_dtype or dtype
        y = dot(x, self.kernel[...], dtype, out_dtype, precision)
        return y + self.bias[...].astype(out_dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 whatever comes in."""

    def __init__(self, rngs, dim: int, axis: str, eps: float):
        self.scale = weight(rngs, (dim,), (axis,), "ones")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return _rms_norm(x, self.scale[...], self.eps)


class Join(nnx.Module):
    """How a block's output y joins the residual stream h, in float32: (y + b_y) a_y + (h + b_h) a_h."""

    def __init__(self, rngs, dim: int):
        self.y_scale = weight(rngs, (dim,), ("embed",), "ones")
        self.y_bias = weight(rngs, (dim,), ("embed",), "zeros")
        self.h_scale = weight(rngs, (dim,), ("embed",), "ones")
        self.h_bias = weight(rngs, (dim,), ("embed",), "zeros")

    def __call__(self, y: Float[Array, "B S D"], h: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        return _join(y, h, self.y_scale[...], self.y_bias[...], self.h_scale[...], self.h_bias[...])


# Cheap arithmetic on the wide stream: the backward pass repeats it instead of reading back what it gave.
@functools.partial(jax.checkpoint, static_argnums=2)
def _rms_norm(x, scale, eps):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


@jax.custom_vjp
def _join(y, h, y_scale, y_bias, h_scale, h_bias):
    return (y.astype(jnp.float32) + y_bias) * y_scale + (h + h_bias) * h_scale


def _join_fwd(*args):
    return _join(*args), args


def _join_bwd(saved, d):
    """All four vectors' gradients from three sums over tokens: of d, d y and d h."""
    y, h, y_scale, y_bias, h_scale, h_bias = saved
    d = apart(d)  # as `sum_tokens` asks
    total, by_y, by_h = (sum_tokens(x) for x in (d, d * y.astype(jnp.float32), d * h))
    vectors = (by_y + y_bias * total, y_scale * total, by_h + h_bias * total, h_scale * total)
    return (d * y_scale).astype(y.dtype), d * h_scale, *vectors


_join.defvjp(_join_fwd, _join_bwd)


def rope_table(positions: Int[Array, "B S"], base: float, rotary_dim: int) -> Float[Array, "B S half2"]:
    """cos and sin (side by side) of each position's angles, float32; `rotary_dim` channels turn in pairs."""
    inverse = 1.0 / base ** (jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def apply_rope(x: jax.Array, table: jax.Array) -> jax.Array:
    """Rotates channel i with channel i + rotary_dim / 2; the channels past rotary_dim pass through."""
    rotary_dim = table.shape[-1]
    cos, sin = jnp.split(table, 2, axis=-1)
    first, second, rest = jnp.split(x, (rotary_dim // 2, rotary_dim), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rotate(rope: list[tuple[Any, jax.Array]], x: jax.Array, heads: int = 2) -> jax.Array:
    """x [B, S, H, C], or with its heads at another place, rotated by the table of the layer's kind.

    Kinds that turn other numbers of channels are told apart by data. An empty list is no rotation.
    """
    if not rope:
        return x
    out = apply_rope(x, jnp.expand_dims(rope[0][1], heads))
    for selected, table in rope[1:]:
        out = jnp.where(selected, apply_rope(x, jnp.expand_dims(table, heads)), out)
    return out
