"""Mixtures: shares, balance of every batch, and counts that agree with counting."""

import numpy as np
import pytest

from zaya_jax.config import UserError
from zaya_jax.data import mix
from zaya_jax.data.mix import Mixture, Stretch

STRETCHES = [
    Stretch(0, 4, (0.7, 0.2, 0.1)),
    Stretch(13, 8, (0.7, 0.2, 0.1)),
    Stretch(40, 16, (0.1, 0.0, 0.9)),
]


def test_shares_follow_the_weights_in_every_batch_and_over_all():
    mixture = Mixture([Stretch(0, 20, (0.5, 0.3, 0.2))])
    counts = np.array([np.bincount(mixture.sources(t), minlength=3) for t in range(300)])
    assert (np.abs(counts - [10, 6, 4]) <= 1).all()
    np.testing.assert_allclose(counts.mean(0) / 20, [0.5, 0.3, 0.2], atol=1e-3)


def test_the_most_rows_of_a_batch_are_those_counted():
    mixture = Mixture(STRETCHES)
    counts = np.array([np.bincount(mixture.sources(t), minlength=3) for t in range(6000)])
    for k in range(3):
        most, share = mixture.batch_row_counts(k)
        assert most == counts[:, k].max() and abs(share - most) <= 1


@pytest.mark.parametrize("batch", [1, 3, 4096, mix.TABLE_SIZE, 3 * mix.TABLE_SIZE])
def test_batches_of_any_size_work(batch):
    mixture = Mixture([Stretch(0, batch, (0.9, 0.1))])
    seen = 0
    for step in range(5):
        chosen = mixture.sources(step) == 0
        np.testing.assert_array_equal(
            mixture.row_numbers(step, 0)[chosen], seen + np.arange(chosen.sum())
        )
        seen += chosen.sum()
    assert mixture.batch_row_counts(0)[0] >= 0.9 * batch - 1 and Mixture(
        [Stretch(0, batch, (1, 0))]
    ).batch_row_counts(1) == (0, 0)


def test_bad_mixtures_are_one_clear_line():
    assert mix.parse_mixture(("/a=b=0.5", "c=2")) == {"/a=b": 0.5, "c": 2.0}
    for bad in (("a",), ("=1",), ("a=x",), ("a=-1",), ("a=1", "a=2"), ("a=inf",)):
        with pytest.raises(UserError, match="path=weight"):
            mix.parse_mixture(bad)
    with pytest.raises(UserError, match="any weight"):
        mix.parse_mixture(("a=0",))
    with pytest.raises(UserError, match="resolution"):
        Mixture([Stretch(0, 4, (1.0, 1e-6))])
