"""The definition of how a block reads the residual stream and joins it; gradients are JAX's own."""

import jax
import jax.numpy as jnp


def read(h, scale, eps, dtype) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_norm`."""
    h = h.astype(jnp.float32)
    return (h / jnp.sqrt((h * h).mean(-1, keepdims=True) + eps) * scale).astype(dtype), h


def join(y, h, how, gate=None) -> jax.Array:
    """See `pallas_kernels.residual_norm`."""
    y = y.astype(jnp.float32) * (1.0 if gate is None else gate[..., None])
    return (y + how.y_bias) * how.y_scale + (h + how.h_bias) * how.h_scale


def join_and_read(y, h, how, scale, kernel, eps, dtype, kernel_dtype) -> tuple:
    """See `pallas_kernels.residual_norm`."""
    h = join(y, h, how)
    x = read(h, scale, eps, jnp.float32)[0]
    product = jnp.einsum(
        "...d,dr->...r",
        x.astype(kernel_dtype),
        kernel.astype(kernel_dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return h, x.astype(dtype), product
