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


def test_values_never_change():
    """A resumed run depends on these numbers staying as they are."""
    assert shuffle.permute(np.arange(8), 10, shuffle.key(42, 3)).tolist() == [6, 3, 9, 4, 5, 1, 2, 8]
    np.testing.assert_array_equal(shuffle.keys((42,), np.array([3])), [shuffle.key(42, 3)])
