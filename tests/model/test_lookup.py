"""The embedding's look-up: its gradient against a scatter-add, and that its order of summation is
fixed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.model.lookup import lookup, sum_by_index

V, D = 50, 6


@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,), (7,), (3, 64), (2, 2, 129)])
@pytest.mark.parametrize("words", [1, 3, V, 1000])
def test_values_and_gradient(shape, words):
    """One word for all, a few, and nearly all different; the first and the last row too."""
    random = np.random.default_rng(words)
    index = np.minimum(random.integers(0, words, shape), V - 1).astype(np.int32)
    index.reshape(-1)[-1:] = V - 1
    table, d = random.standard_normal((V, D)), random.standard_normal((*shape, D))
    rows, pull = jax.vjp(lookup, jnp.asarray(table, jnp.float32), index)
    np.testing.assert_array_equal(rows, table.astype(np.float32)[index])
    expected = np.zeros((V, D))
    np.add.at(expected, index, d)
    gradient = jax.jit(pull)(jnp.asarray(d, jnp.float32))[0]
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, expected, atol=2e-5)
    np.testing.assert_array_equal(gradient[np.setdiff1d(np.arange(V), index)], 0)


def test_the_order_of_summation_is_the_rows_own():
    """A word's sum does not depend on the places of other words, and a long sum does not lose small
    numbers."""
    random, summed = np.random.default_rng(0), jax.jit(sum_by_index, static_argnums=2)
    scale = 10.0 ** random.integers(-6, 6, (300, 1))
    mine = (scale * random.standard_normal((300, D))).astype(np.float32)

    def sum_among_others(seed):
        random = np.random.default_rng(seed)
        places = np.sort(random.permutation(2000)[:300])
        x = random.standard_normal((2000, D)).astype(np.float32)
        index = random.integers(0, V - 1, 2000).astype(np.int32)
        index[places], x[places] = V - 1, mine
        return summed(x, index, V)[V - 1]

    first, *others = map(sum_among_others, range(3))
    for sums in others:
        np.testing.assert_array_equal(sums, first)
    ones = sum_by_index(jnp.full((4096, 1), 1.001, jnp.bfloat16), jnp.zeros(4096, jnp.int32), 1)
    assert abs(float(ones[0, 0]) - 4096) <= 16
