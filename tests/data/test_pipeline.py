"""The stream of batches: its promises, packing, exactness over processes, resuming, mixtures,
phases; and its way to the device."""

import time

import numpy as np
import pytest
from data_helpers import make_config, side_by_side
from refusals import check_refused

from zaya_jax import functions
from zaya_jax.data import pack, pipeline, stores, windows
from zaya_jax.text import tokenizers
from zaya_jax.text.shard_format import SPLITS
from zaya_jax.text.token_block import TokenBlock

TOK = tokenizers.load("bytes")


def take(stream, count):
    return [next(stream) for _ in range(count)]


def check_batch(batch):
    """What every batch promises, whatever made it."""
    assert {k: v.dtype for k, v in batch.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "segment_ids": np.int32,
        "positions": np.int32,
        "loss_mask": np.float32,
    }
    real = batch["segment_ids"] > 0
    assert (batch["tokens"][~real] == TOK.pad_id).all() and not batch["loss_mask"][~real].any()
    same = batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
    assert (np.diff(batch["positions"], axis=1)[same & real[:, 1:]] == 1).all()
    assert (batch["positions"][:, 1:][~same] == 0).all() and (batch["positions"][:, 0] == 0).all()
    learn = (batch["loss_mask"] > 0)[:, :-1] & same
    assert (batch["targets"][:, :-1][learn] == batch["tokens"][:, 1:][learn]).all()
    assert (batch["targets"][batch["loss_mask"] == 0] == functions.IGNORED).all()
    # a begin token opens a segment, and no target is a begin token
    inside = batch["tokens"][:, 1:] == TOK.bos_id
    assert not same[inside].any()
    assert not (batch["targets"][batch["loss_mask"] > 0] == TOK.bos_id).any()


def test_batches_hold_their_promises(corpus):
    for batch in take(pipeline.train_stream(make_config(path=str(corpus)), TOK), 20):
        check_batch(batch)


def test_seed_decides_the_order(corpus):
    a, b = (
        next(pipeline.train_stream(make_config(path=str(corpus), run_seed=s), TOK)) for s in (0, 1)
    )
    assert (a["tokens"] != b["tokens"]).any()


def test_evaluation_is_fixed_and_split_by_rows(corpus):
    config = make_config(path=str(corpus), windows=5, global_batch=4, seq_len=32)
    whole = windows.eval_batches(config, TOK, damaged=set())
    np.testing.assert_equal(windows.eval_batches(config, TOK, damaged=set()), whole)
    parts = [windows.eval_batches(config, TOK, (i, 4), damaged=set()) for i in range(4)]
    joined = [side_by_side(several) for several in zip(*parts, strict=True)]
    np.testing.assert_equal(joined, whole)
    assert sum((b["segment_ids"][:, 0] > 0).sum() for b in whole) == 5
    for batch in whole:
        check_batch(batch)


def test_held_out_text_is_never_trained_on(corpus):
    train, held_out = (stores.open_store(make_config(), str(corpus), TOK, s) for s in SPLITS)
    assert TOK.decode(held_out.block.tokens)[:12] not in TOK.decode(train.block.tokens)


def test_bad_configs_are_refused(corpus):
    check_refused(
        "264 ids", lambda: pipeline.train_stream(make_config(path=str(corpus), vocab_size=256), TOK)
    )
    check_refused(
        "3 processes",
        lambda: next(pipeline.train_stream(make_config(path=str(corpus)), TOK, (0, 3))),
    )


def test_order_and_fill_are_those_of_the_named_rule():
    assert pack.pack_documents(np.array([5, 4, 5, 6]), 10) == [
        [(14, 20), (5, 9)],
        [(0, 5), (9, 14)],
    ]


@pytest.mark.parametrize("cross_documents", [False, True])
def test_a_segment_ends_at_what_could_not_be_read(cross_documents):
    """A segment's tokens lie together: linear attention's states count on it."""
    rows = pack.BatchBuilder(2, 8, pad_id=9)
    for row, flags in enumerate([[1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1]]):
        real, tokens = np.array(flags, bool), np.arange(1, len(flags) + 1)
        rows.append_span(row, TokenBlock(tokens, tokens, tokens == 0, real, real))
    batch = rows.build(cross_documents)
    np.testing.assert_array_equal(
        batch["segment_ids"], [[1, 1, 1, 0, 0, 2, 2, 2], [0, 0, 1, 1, 0, 2, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch["tokens"], [[1, 2, 3, 9, 9, 6, 7, 8], [9, 9, 3, 4, 9, 6, 9, 9]]
    )


def sent(config, put=lambda batch, _: batch):
    """A config's stream whose batches are sent by a thread."""
    stream = pipeline.train_stream(config, TOK)
    stream.send_with(put)
    return stream


def test_waiting_is_measured(corpus):
    def slow(batch, _):
        time.sleep(0.02)
        return batch

    ahead = sent(make_config(path=str(corpus)), slow)
    take(ahead, 10)
    assert ahead.metrics()["data/wait_fraction"] > 0.5
    for _ in range(10):
        time.sleep(0.05)  # a step that is slower than the data never waits
        next(ahead)
    assert ahead.metrics()["data/wait_fraction"] < 0.1
    ahead.close()


def test_efficiency_is_of_the_batches_given_out(corpus, monkeypatch):
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


def test_the_state_is_that_of_the_last_batch_given_out_also_after_an_error(corpus):
    config, failing = make_config(path=str(corpus)), [4, 4]

    def put(batch, number):
        if number in failing:
            failing.remove(number)
            raise OSError(f"no device for {number}")
        return batch

    ahead, plain = sent(config, put), pipeline.train_stream(config, TOK)
    whole = take(plain, 6)
    np.testing.assert_equal(take(ahead, 3), whole[:3])
    for _ in range(2):
        with pytest.raises(OSError, match="no device for 4"):
            next(ahead)
    np.testing.assert_equal([next(ahead)], whole[3:4])
    time.sleep(0.1)  # the thread is well ahead by now
    state = ahead.get_state()
    assert state["step"] == 4
    ahead.close()  # which loses nothing
    np.testing.assert_equal(take(ahead, 2), whole[4:6])
    ahead.set_state(state)
    np.testing.assert_equal(take(ahead, 2), whole[4:6])
    ahead.close()
