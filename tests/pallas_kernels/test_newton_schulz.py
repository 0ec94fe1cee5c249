"""The iteration against its definition by singular values, with each chip's algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.newton_schulz import orthogonalize, reference

POLYNOMIALS = ((3.4445, -4.7750, 2.0315),) * 5


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shape", [(3, 24, 10), (10, 24), (2, 2, 8, 8)], ids=str)
def test_polynomials_of_singular_values(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    found = jax.jit(lambda x: orthogonalize(x, POLYNOMIALS, jnp.float32))(x)
    np.testing.assert_allclose(found, reference.orthogonalize(x, POLYNOMIALS), atol=3e-5)
    rough = jax.jit(lambda x: orthogonalize(x, POLYNOMIALS))(x)
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_allclose(rough.astype(jnp.float32), found, atol=0.05)
    assert not orthogonalize(jnp.zeros(shape), POLYNOMIALS).any()
