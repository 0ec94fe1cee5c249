"""The iteration against its definition by singular values, with each chip's algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import slow

from pallas_kernels import chip
from pallas_kernels.newton_schulz import orthogonalize, reference, triton

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


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        slow("gfx942", (2, 192, 64)),
        ("NVIDIA H200", (128, 256)),
        slow("gfx942", (1, 2, 256, 128)),
        ("gfx942", (1, 320, 384)),
    ],
    ids=str,
)
def test_the_kernels_give_what_the_definition_gives(kind, shape):
    """Interpreted: one tile and several, tall and wide, tiles of 64 and of 128."""
    x = jax.random.normal(jax.random.key(0), shape)
    with chip.making(chip.Chip("cpu", kind)):
        assert "pallas_call" in str(jax.make_jaxpr(lambda x: orthogonalize(x, POLYNOMIALS))(x))
        exact, low = (
            jax.jit(lambda x, t=t: orthogonalize(x, POLYNOMIALS, t))
            for t in (jnp.float32, jnp.bfloat16)
        )
        found, rough = exact(x), low(x)
        assert not low(jnp.zeros(shape)).any()
    np.testing.assert_allclose(found, reference.orthogonalize(x, POLYNOMIALS), atol=3e-5)
    np.testing.assert_allclose(rough.astype(jnp.float32), found, atol=0.05)


def test_half_of_a_symmetric_product_is_all_of_it():
    x = jax.random.normal(jax.random.key(1), (2, 384, 128))
    with chip.making(chip.Chip("cpu", "gfx942")):
        whole = triton.symmetric(x)
    np.testing.assert_allclose(
        whole, jnp.einsum("nik,njk->nij", x, x, precision="highest"), atol=1e-4
    )
    np.testing.assert_array_equal(np.tril(whole, -64), np.tril(jnp.swapaxes(whole, 1, 2), -64))


def test_matrices_that_fill_no_tile_are_for_xla():
    with chip.making(chip.Chip("cpu", "gfx942")):
        traced = jax.make_jaxpr(lambda x: orthogonalize(x, POLYNOMIALS))(jnp.ones((3, 24, 10)))
    assert "pallas_call" not in str(traced)
