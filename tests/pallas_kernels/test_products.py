"""Sums over rows, products of few, and Newton–Schulz, that a CPU computes in a way of its own, against
NumPy's and against singular values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.newton_schulz import orthogonalize, reference
from pallas_kernels.products import cpu, sum_rows, times_rows
from zaya_jax.optim import muon


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("spec", ["nd,nf->df", "gnd,gnf->gdf", "nd,ngf->gdf"])
@pytest.mark.parametrize(("d", "f"), [(3, 8), (8, 3)])
def test_sums_of_outer_products(spec, d, f):
    specs, dims = re.split(",|->", spec), {"n": 16, "g": 2, "d": d, "f": f}
    x, y = (jax.random.normal(jax.random.key(i), [dims[c] for c in specs[i]]) for i in range(2))
    found = jax.jit(lambda x, y: sum_rows(*specs, x, y))(x, y)
    np.testing.assert_allclose(found, np.einsum(spec, x, y), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("rows", "columns"), [(1, 96), (2, 96), (63, 96), (64, 96), (5, 33)])
def test_rows_times_rows(rows, columns, monkeypatch):
    """In strips of eight of them, where they are few and a multiple of that."""
    monkeypatch.setattr(cpu, "STRIP", 8 * 12 * 4)
    x, w = (jax.random.normal(jax.random.key(i), (n, 12)) for i, n in enumerate((rows, columns)))
    # a function of its own, traced with these strips
    found = jax.jit(lambda x, w: times_rows(x, w))(x, w)
    np.testing.assert_allclose(found, np.einsum("nd,vd->nv", x, w), rtol=1e-5, atol=1e-5)


SHAPES = [(24, 40), (3, 24, 10), (2, 2, 8, 8), (2, 3, 16, 24)]
FIRST, *OTHERS = muon.COEFFICIENTS


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("name", "shape"), [(FIRST, shape) for shape in SHAPES] + [(n, SHAPES[1]) for n in OTHERS]
)
def test_polynomials_of_singular_values(shape, name):
    polynomials = muon.coefficients(name, 5)
    x = jax.random.normal(jax.random.key(0), shape)
    found = jax.jit(lambda x: orthogonalize(x, polynomials, jnp.float32))(x)
    np.testing.assert_allclose(found, reference.orthogonalize(x, polynomials), atol=3e-5)
    rough = jax.jit(lambda x: orthogonalize(x, polynomials))(x)
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_allclose(rough.astype(jnp.float32), found, atol=0.05)
    assert np.linalg.norm(rough.astype(jnp.float32) - found) < 0.03 * np.linalg.norm(found)
    assert not orthogonalize(jnp.zeros(shape), polynomials).any()
