"""The Newton–Schulz iteration: odd polynomials of a matrix that push its singular values towards 1.

    X = x / max(|x|_F, eps);   then for each (a, b, c): G = X X^T,  X <- a X + (b G + c G G) X

An implementation (`xla`, `cpu`; `reference` is the definition) has

    iterate(x, polynomials, dtype)    → x after all polynomials, of matrices [..., a, b] with a <= b in `dtype`

There is no gradient: Muon's direction is not differentiated.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import chip
from pallas_kernels.newton_schulz import cpu, xla

IMPLEMENTATIONS = {"xla": xla, "cpu": cpu}


def orthogonalize(
    x: Float[Array, "*N A B"],
    polynomials: tuple[tuple[float, float, float], ...],
    dtype: Any = jnp.bfloat16,
    eps: float = 1e-7,
) -> Float[Array, "*N A B"]:
    """Pushes the singular values of each matrix towards 1, in `dtype`; zero stays zero.

    Leading dims are batch dims of every product and are nowhere reshaped: sharded over them, it
    runs without a collective.
    """
    tall = x.shape[-2] > x.shape[-1]
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), (-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, eps)).astype(dtype)
    if tall:
        x = jnp.swapaxes(x, -1, -2)
    x = chip.choose("newton_schulz", IMPLEMENTATIONS).iterate(x, polynomials, dtype)
    return jnp.swapaxes(x, -1, -2) if tall else x
