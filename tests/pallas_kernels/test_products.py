"""Sums over rows, and products of few, that a CPU computes in a way of its own, against NumPy's."""

import re

import jax
import numpy as np
import pytest

from pallas_kernels.products import cpu, sum_rows, times_rows


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
