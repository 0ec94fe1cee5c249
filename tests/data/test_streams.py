"""Streams over prepared shards: the same batches from any number of processes, resumed anywhere, nothing
lost.

Every combination of order (small sources by windows, large ones by lanes), packing and mixture is held to it.
"""

import collections
import itertools

import numpy as np
import pytest

from zaya_jax import config as config_lib
from zaya_jax.config import UserError
from zaya_jax.data import order, pipeline, storage, tokenizers

TOK = tokenizers.load("bytes")
ORDERS = ("windows", "lanes")
PACKINGS = ("concat", "first_fit", "best_fit")


@pytest.fixture
def directories(prepare_text):
    return [str(prepare_text("web", 400)), str(prepare_text("code", 150, seed=1))]


def set_order(monkeypatch, kind):
    monkeypatch.setattr(pipeline, "WINDOW_TOKENS", 0 if kind == "lanes" else 1 << 40)
    monkeypatch.setattr(order, "UNIT_ROWS", 8)


def joined(config, count, steps, state=None):
    """The global batches of `steps` steps, put together from `count` processes, and the state after them."""
    streams = [pipeline.train_stream(config, TOK, (i, count)) for i in range(count)]
    if state is not None:
        for stream in streams:
            stream.set_state(state)
    parts = [[next(stream) for _ in range(steps)] for stream in streams]
    states = [stream.get_state() for stream in streams]
    assert all(s == states[0] for s in states)
    return [{k: np.concatenate([p[t][k] for p in parts]) for k in parts[0][t]} for t in range(steps)], states[
        0
    ]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(("kind", "packing"), list(itertools.product(ORDERS, PACKINGS)))
def test_any_number_of_processes_gives_the_same_stream(monkeypatch, make_config, directories, kind, packing):
    set_order(monkeypatch, kind)
    mixture = tuple(f"{d}={w}" for d, w in zip(directories, (0.7, 0.3), strict=True))
    config = make_config(mixture=mixture, packing=packing, seq_len=128)
    whole, _ = joined(config, 1, 60)
    for count in (2, 4, 8):
        assert_same(joined(config, count, 6)[0], whole[:6])
    # stopped in the middle of an epoch, continued by another number of processes, and stopped again
    _, state = joined(config, 4, 23)
    some, state = joined(config, 2, 17, state)
    rest, _ = joined(config, 8, 20, state)
    assert_same(some + rest, whole[23:])


def documents(batches):
    """How often each document piece (as text) occurs, and all learnt targets."""
    found, learnt = collections.Counter(), 0
    for batch in batches:
        learnt += int(batch["loss_mask"].sum())
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for s in range(1, segments.max() + 1):
                found[bytes(tokens[segments == s].astype(np.uint16))] += 1
    return found, learnt


@pytest.mark.parametrize(("kind", "packing"), list(itertools.product(ORDERS, PACKINGS)))
def test_an_epoch_holds_every_token_once(monkeypatch, make_config, prepare_text, kind, packing):
    set_order(monkeypatch, kind)
    directory = str(prepare_text("web", 300))
    config = make_config(path=directory, packing=packing, seq_len=256, global_batch=1)
    monkeypatch.setattr(order, "LANES_PER_SLOT", 1)
    stream = pipeline.train_stream(config, TOK)
    source = stream.batches.eras[0].sources[0]
    layout = source.store
    everything = [layout.read([b])[b] for b in range(len(layout.lengths))]
    total, learn = sum(map(len, everything)), sum(int(b.learn.sum()) for b in everything)
    tokens, learnt, steps = 0, 0, 0
    seen = collections.Counter()
    while tokens < total:
        batch = next(stream)
        tokens += int((batch["segment_ids"] > 0).sum())
        learnt += int(batch["loss_mask"].sum())
        seen.update(batch["tokens"][batch["segment_ids"] > 0].tolist())
        steps += 1
    if kind == "windows" or packing != "concat":
        assert tokens == total and learnt == learn
        assert seen == collections.Counter(np.concatenate([b.tokens for b in everything]).tolist())
    else:  # the tape runs on into the next epoch within a row
        assert tokens - total < 256


def test_lanes_are_read_once_whatever_the_processes(monkeypatch, make_config, prepare_text):
    set_order(monkeypatch, "lanes")
    config = make_config(path=str(prepare_text("web", 2000)), seq_len=128)
    for count in (1, 4):
        records = 0
        for i in range(count):
            stream = pipeline.train_stream(config, TOK, (i, count))
            for _ in range(100):
                next(stream)
            stream.close()
            records += stream.batches.counters()["records"]
        bundles = 100 * 8 * 128 / stream.batches.stores[0].lengths.mean()
        lanes = 8 * stream.batches.eras[0].sources[0].turns
        assert records < 1.1 * bundles + 2 * lanes


def test_packing_is_efficient_and_keeps_documents_whole(monkeypatch, make_config, prepare_text):
    directory = str(prepare_text("web", 600, longest=400))
    config = make_config(path=directory, packing="best_fit", seq_len=512)
    batches, _ = joined(config, 1, 20)
    share = np.mean([(b["segment_ids"] > 0).mean() for b in batches])
    assert share > 0.97
    for batch in batches:
        starts = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
        assert (batch["tokens"][starts] == TOK.bos_id).all()


def test_phases_change_context_batch_and_mixture(make_config, directories):
    web, code = directories
    raw = config_lib.default()
    raw.model.vocab_size, raw.data.global_batch, raw.data.micro_batch, raw.data.seq_len = 264, 8, 2, 64
    phase = {"tokens": 64 * 8 * 10, "mixture": (f"{web}=1",), "ramp_from": 2, "ramp_tokens": 64 * 8 * 4}
    raw.schedule.phases = (
        phase,
        {"tokens": 128 * 8 * 10, "seq_len": 128, "mixture": (f"{web}=0.5", f"{code}=0.5")},
    )
    config = config_lib.check(raw)
    whole, _ = joined(config, 1, 40)
    shapes = [b["tokens"].shape for b in whole]
    assert list(dict.fromkeys(shapes)) == [(2, 64), (4, 64), (8, 64), (8, 128)]
    _, state = joined(config, 2, 17)
    assert_same(joined(config, 1, 23, state)[0], whole[17:])
    first = {name for b in whole if b["tokens"].shape[1] == 64 for name in names(b)}
    second = [name for b in whole if b["tokens"].shape[1] == 128 for name in names(b)]
    assert first == {"web"} and set(second) == {"web", "code"}


def names(batch):
    for tokens in batch["tokens"]:
        text = TOK.decode(tokens)
        yield from (n for n in ("web", "code") if any(text[i:].startswith(n) for i in range(len(text))))


def test_workers_change_nothing_but_speed(make_config, directories):
    config = make_config(path=directories[0])
    assert config.data.workers == 0
    batches = pipeline.train_stream(config, TOK).batches
    import pickle

    again = pickle.loads(pickle.dumps(batches))
    assert_same([again[i] for i in (5, 3, 40)], [batches[i] for i in (5, 3, 40)])


def test_crossing_documents_is_a_switch(make_config, directories):
    config = make_config(path=directories[0], cross_documents=True)
    batch = next(pipeline.train_stream(config, TOK))
    assert (batch["segment_ids"] == 1).all()
    assert (batch["positions"] == np.arange(64)).all()
    apart = next(pipeline.train_stream(make_config(path=directories[0]), TOK))
    np.testing.assert_array_equal(batch["loss_mask"], apart["loss_mask"])


def test_metrics_say_how_long_was_waited(make_config, directories):
    stream = pipeline.train_stream(make_config(path=directories[0]), TOK)
    next(stream)
    metrics = stream.metrics()
    assert 0 <= metrics["data/wait_fraction"] <= 1
    assert metrics["data/efficiency"] == 1 and metrics["data/retries"] == metrics["data/corrupt"] == 0


def test_the_tokenizer_must_be_the_one_of_the_shards(make_config, directories, tmp_path):
    other = tokenizers.train_bpe(["some text " * 50], 265)
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        pipeline.train_stream(make_config(path=directories[0], vocab_size=300), other)
    assert storage.is_prepared(directories[0])
