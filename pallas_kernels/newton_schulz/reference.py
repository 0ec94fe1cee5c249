"""The definition: the polynomials applied to the singular values."""

import jax
import jax.numpy as jnp


def orthogonalize(x, polynomials, eps=1e-7) -> jax.Array:
    """The result of `pallas_kernels.newton_schulz.orthogonalize` in float32."""
    u, s, v = jnp.linalg.svd(x, full_matrices=False)
    s = s / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1))[..., None], eps)
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v
