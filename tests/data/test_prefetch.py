"""Prefetching to the device: same batches, honest state, errors raised where the step can see
them."""

import time

import numpy as np
import pytest

from zaya_jax.data import pipeline
from zaya_jax.text import tokenizers

TOK = tokenizers.load("bytes")


def sent(config, put=lambda batch, _: batch):
    """A config's stream whose batches are sent by a thread."""
    stream = pipeline.train_stream(config, TOK)
    stream.send_with(put)
    return stream


def test_the_state_is_that_of_the_last_batch_given_out(make_config, corpus):
    config = make_config(path=str(corpus))
    whole = [next(s) for s in [pipeline.train_stream(config, TOK)] for _ in range(9)]
    ahead = sent(config)
    for _ in range(3):
        next(ahead)
    time.sleep(0.1)  # the thread is well ahead by now
    state = ahead.get_state()
    assert state["step"] == 3
    np.testing.assert_array_equal(next(ahead)["tokens"], whole[3]["tokens"])
    ahead.close()
    # closing loses nothing
    np.testing.assert_array_equal(next(ahead)["tokens"], whole[4]["tokens"])
    ahead.set_state(state)
    np.testing.assert_array_equal(next(ahead)["tokens"], whole[3]["tokens"])
    ahead.close()


def test_waiting_is_measured(make_config, corpus):
    def slow(batch, _):
        time.sleep(0.02)
        return batch

    ahead = sent(make_config(path=str(corpus)), slow)
    for _ in range(10):
        next(ahead)
    assert ahead.metrics()["data/wait_fraction"] > 0.5
    for _ in range(10):
        time.sleep(0.05)  # a step that is slower than the data never waits
        next(ahead)
    assert ahead.metrics()["data/wait_fraction"] < 0.1
    ahead.close()


def test_efficiency_is_of_the_batches_given_out(make_config, corpus, monkeypatch):
    """Not of those fetched ahead."""
    monkeypatch.setattr(
        pipeline.Batches, "__getitem__", lambda _, step: {"segment_ids": np.arange(8) < 8 - step}
    )
    ahead = sent(make_config(path=str(corpus)))
    next(ahead), next(ahead)
    assert ahead.metrics()["data/efficiency"] == pytest.approx((8 + 7) / 16)
    next(ahead)
    assert ahead.metrics()["data/efficiency"] == pytest.approx(6 / 8)
    ahead.close()


def test_an_error_reaches_the_step_and_the_batch_comes_again(make_config, corpus):
    config, failing = make_config(path=str(corpus)), [4, 4]

    def put(batch, number):
        if number in failing:
            failing.remove(number)
            raise OSError(f"no device for {number}")
        return batch

    ahead, plain = sent(config, put), pipeline.train_stream(config, TOK)
    whole = [next(plain) for _ in range(5)]
    for batch in whole[:3]:
        np.testing.assert_array_equal(next(ahead)["tokens"], batch["tokens"])
    for _ in range(2):
        with pytest.raises(OSError, match="no device for 4"):
            next(ahead)
    assert ahead.get_state()["step"] == 3
    for batch in whole[3:]:
        np.testing.assert_array_equal(next(ahead)["tokens"], batch["tokens"])
    ahead.close()
