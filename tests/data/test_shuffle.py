"""The keyed permutation."""

import numpy as np
import pytest

from zaya_jax.data import shuffle


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_is_a_permutation(size):
    for key in (0, 1, 2**63):
        assert sorted(shuffle.permute(np.arange(size), size, key)) == list(range(size))


def test_keys_give_other_orders_and_mix_well():
    one, two = (shuffle.permute(np.arange(1000), 1000, shuffle.key(0, e)) for e in (0, 1))
    assert (one == two).mean() < 0.01
    assert abs(np.corrcoef(np.arange(1000), one)[0, 1]) < 0.15
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.15


@pytest.mark.parametrize("size", [5, 9, 16, 33])
def test_small_permutations_are_even(size):
    """With four rounds one value was last in 1.3 times as many of them as another."""
    orders = np.array([shuffle.permute(np.arange(size), size, shuffle.key(9, k)) for k in range(4000)])
    counts = np.array([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    spread = np.sqrt(4000 / size * (1 - 1 / size))
    assert np.abs(counts - 4000 / size).max() < 5 * spread


def test_values_never_change():
    """A resumed run depends on these numbers staying as they are."""
    assert shuffle.permute(np.arange(8), 10, shuffle.key(42, 3)).tolist() == [6, 8, 0, 2, 1, 4, 5, 7]
    np.testing.assert_array_equal(shuffle.keys((42,), np.array([3])), [shuffle.key(42, 3)])
