"""Sums and transpositions that a CPU computes in a way of its own, against JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.model.matmul import heads_first, sum_tokens


@pytest.mark.parametrize("batch", [3, 8], ids=["no eighths", "eighths"])
@pytest.mark.parametrize("axis", [0, 1])
def test_sum_over_all_axes_between(axis, batch):
    x = jax.random.normal(jax.random.key(0), (5, batch, 7, 4))
    expected = x.sum(tuple(range(axis, 3)))
    np.testing.assert_allclose(jax.jit(sum_tokens, static_argnums=1)(x, axis), expected, rtol=1e-6, atol=1e-5)


def test_heads_first_and_its_gradient():
    x, d = jax.random.normal(jax.random.key(0), (2, 3, 5, 4)), jnp.arange(120.0).reshape(5, 2, 3, 4)
    out, pull = jax.vjp(heads_first, x)
    np.testing.assert_array_equal(out, x.transpose(2, 0, 1, 3))
    np.testing.assert_array_equal(pull(d)[0], d.transpose(1, 2, 0, 3))
