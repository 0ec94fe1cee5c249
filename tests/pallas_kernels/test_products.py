"""Sums over rows that a CPU computes in a way of its own, against NumPy's."""

import re

import jax
import numpy as np
import pytest

from pallas_kernels.products import sum_rows


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("spec", ["nd,nf->df", "gnd,gnf->gdf", "nd,ngf->gdf"])
@pytest.mark.parametrize(("d", "f"), [(3, 8), (8, 3)])
def test_sums_of_outer_products(spec, d, f):
    specs, dims = re.split(",|->", spec), {"n": 16, "g": 2, "d": d, "f": f}
    x, y = (jax.random.normal(jax.random.key(i), [dims[c] for c in specs[i]]) for i in range(2))
    found = jax.jit(lambda x, y: sum_rows(*specs, x, y))(x, y)
    np.testing.assert_allclose(found, np.einsum(spec, x, y), rtol=1e-5, atol=1e-5)
