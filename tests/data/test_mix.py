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


def test_counts_agree_with_counting():
    mixture = Mixture(STRETCHES)
    seen = np.zeros(3, int)
    for step in range(80):
        for slot, source in enumerate(mixture.sources(step)):
            for k in range(3):
                assert mixture.ranks(step, k)[slot] == seen[k]
            seen[source] += 1


@pytest.mark.parametrize("turns", [1, 2, 8])
def test_lane_counts_agree_with_counting(turns):
    mixture = Mixture(STRETCHES)
    seen = np.zeros((3, 16, turns), int)
    for step in range(100):
        sources = mixture.sources(step)
        slots = np.arange(len(sources))
        for k in range(3):
            np.testing.assert_array_equal(
                mixture.lane_counts(step, k, slots, turns), seen[k, slots, step % turns]
            )
        seen[sources, slots, step % turns] += 1


def test_batches_of_any_size_work():
    for batch in (1, 3, 4096, mix.TABLE_SIZES[0]):
        mixture = Mixture([Stretch(0, batch, (0.9, 0.1))])
        counts = mixture.lane_counts(7, 0, np.arange(batch), 8)
        assert counts.shape == (batch,) and (counts >= 0).all() and (counts <= 7).all()


def test_bad_mixtures_are_one_clear_line():
    assert mix.parse(("/a=b=0.5", "c=2")) == {"/a=b": 0.5, "c": 2.0}
    for bad in (("a",), ("=1",), ("a=x",), ("a=-1",), ("a=1", "a=2"), ("a=inf",)):
        with pytest.raises(UserError, match="path=weight"):
            mix.parse(bad)
    with pytest.raises(UserError, match="any weight"):
        mix.parse(("a=0",))
    with pytest.raises(UserError, match="resolution"):
        Mixture([Stretch(0, 4, (1.0, 1e-6))])
