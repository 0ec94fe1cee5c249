"""A fork's data: it goes on where the parent's stood, with the same batches or others, or says that it begins anew."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.config import Phase
from zaya_jax.data import order, pipeline, tokenizers
from zaya_jax.data.sources import with_targets

TOK = tokenizers.load("bytes")
LENGTHS = {"a": 2400, "b": 1000, "c": 7000}  # tokens, each of its own number


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    """Sources a, b and c, whose rows can be told apart; `c` in bundles, so that its rows come in blocks."""
    made, first = {}, 1
    for name, size in LENGTHS.items():
        starts = np.zeros(size, bool)
        starts[::10] = True
        ids = first + np.arange(size, dtype=np.uint32)
        made[name] = order.Memory(name, with_targets(ids, starts), f"content of {name}")
        first += size
    made["c"].bundle_tokens = 40
    monkeypatch.setattr(pipeline, "open_stores", lambda _, path, __: (made[path], None))


def config(*phases, seed=0, fork=None, **data):
    raw = config_lib.default()
    raw.run.seed, raw.model.vocab_size, raw.run.num_steps = seed, 1 << 20, 40
    for name, value in ({"seq_len": 10, "global_batch": 8, "mixture": ("a=0.6", "b=0.4")} | data).items():
        raw.data[name] = value
    raw.schedule.phases = phases
    made = config_lib.check(raw)
    if fork:
        run = dataclasses.replace(made.run, fork="x@1", fork_step=fork[0], fork_tokens=fork[1])
        made = dataclasses.replace(made, run=run)
    return made


def stream(settings):
    # Two rounds an epoch, so that these small sources have blocks.
    return pipeline.Stream(pipeline.Batches(settings, TOK, rounds=1))


def stopped(settings, steps):
    """A run's batches, and what its checkpoint has of the data."""
    one = stream(settings)
    batches = [next(one) for _ in range(steps)]
    state = json.loads(json.dumps(one.get_state()))
    one.close()
    return batches, state


def forked(settings, state):
    """A fork's stream, and what it says."""
    one = stream(settings)
    return one, one.set_state(json.loads(json.dumps(pipeline.forked(state))))


def take(one, count):
    batches = [next(one) for _ in range(count)]
    one.close()
    return batches


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])


def rows(batches, *names):
    """How often each row of these sources came."""
    bounds = np.cumsum([1, *LENGTHS.values()])
    first = np.concatenate([batch["tokens"][:, 0] for batch in batches])
    return {
        name: collections.Counter(first[(low <= first) & (first < high)].tolist())
        for name, low, high in zip(LENGTHS, bounds, bounds[1:], strict=False)
        if name in names
    }


PHASES = (
    Phase("one", 650, mixture=("a=0.5", "c=0.5")),
    Phase("the same again", 400, mixture=("a=0.5", "c=0.5")),
    Phase("longer", 800, seq_len=20, ramp_from=2, ramp_tokens=300, micro_batch=2, global_batch=8),
    Phase("back", 1600, mixture=("b=0.3", "a=0.7"), packing="best_fit"),
)


@pytest.mark.parametrize("phases", [(), PHASES])
def test_one_that_changes_nothing_has_the_parent_s_batches(phases):
    plan = schedule.make_plan(config(*phases))
    whole = take(stream(config(*phases)), plan.total_steps)
    borders = [segment.first_step for segment in plan.segments[1:]] or [20]
    for step in sorted({1, *(b - 1 for b in borders), *(b - 2 for b in borders), plan.total_steps - 1} - {0}):
        _, state = stopped(config(*phases), step)
        tokens = plan.tokens_of_step(step)
        one, note = forked(config(*phases, fork=(step, tokens)), state)
        assert note == "note: the data goes on where it stood"
        got = take(one, 1)
        # Stopped there, it goes on as itself, and so does a fork of it.
        state = json.loads(json.dumps(one.get_state()))
        again = stream(config(*phases, fork=(step, tokens)))
        assert again.set_state(state) == ""
        if step + 1 < plan.total_steps:
            second, note = forked(config(*phases, fork=(step + 1, plan.tokens_of_step(step + 1))), state)
            assert note == "note: the data goes on where it stood"
            same(take(second, 1), whole[step + 1 : step + 2])
            got += take(again, plan.total_steps - step - 1)
        same(got, whole[step:])


@pytest.mark.parametrize("batch", [3, 8, 24, 200])
@pytest.mark.parametrize("name", ["a", "c"])
def test_other_batches_go_on_in_the_same_epoch(name, batch):
    """Of a source in memory, and of one whose rows come in blocks: each row once an epoch, over both runs."""
    settings = {"mixture": (f"{name}=1",)}
    before, state = stopped(config(**settings), 5)
    one, note = forked(config(**settings, global_batch=batch, fork=(5, 400)), state)
    if batch == 200:
        assert f"batches have up to 200 rows of {name}, whose order was made for 8" in note
        return
    assert (one.batches.source(one.batches.eras[0], 0).order.block_rows > 1) == (name == "c")
    assert note == "note: the data goes on where it stood"
    num_rows = LENGTHS[name] // 10
    steps = -(-(num_rows - 40) // batch)
    counts = rows(before + take(one, steps), name)[name]
    assert len(counts) == num_rows
    assert sum(counts.values()) - num_rows < batch and max(counts.values()) <= 2


def test_other_weights_and_sources_go_on_source_by_source():
    before, state = stopped(config(), 10)
    one, note = forked(config(mixture=("c=0.2", "b=0.5", "a=0.3"), fork=(10, 800)), state)
    assert note == "note: the data goes on where it stood; 1 of its sources are new"
    came, then = rows(before, "a", "b"), rows(take(one, 10), "a", "b", "c")
    for name in "ab":
        assert came[name] and then[name] and not came[name].keys() & then[name].keys()  # within one epoch
    assert max(then["c"].values()) == 1


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"mixture": ("c=1",)}, "none of the sources was that run's"),
        ({"seed": 1}, "run.seed was 0, now it is 1"),
        ({"seq_len": 20}, "rows were of 10 tokens (concat), now they are of 20 (concat)"),
        ({"packing": "best_fit"}, "rows were of 10 tokens (concat), now they are of 10 (best_fit)"),
        ({"global_batch": 200}, "batches have up to 81 rows of b, whose order was made for 4"),
    ],
)
def test_what_begins_anew_says_why_and_is_another_order(keys, why):
    _, state = stopped(config(), 3)
    one, note = forked(config(**keys, fork=(3, 240)), state)
    assert note == f"note: the data begins anew, in another order: {why}"
    plain = take(stream(config(**keys)), 1)
    assert not np.array_equal(take(one, 1)[0]["tokens"], plain[0]["tokens"])
    state = json.loads(json.dumps(one.get_state()))
    again = stream(config(**keys, fork=(3, 240)))
    assert again.set_state(state) == "" and again._step == 4
    again.close()


def test_a_checkpoint_of_before_says_so():
    _, state = stopped(config(), 3)
    del state["eras"]
    assert "older version's" in forked(config(fork=(3, 240)), state)[1]


def test_a_fork_s_data_is_held_by_its_fingerprint():
    _, state = stopped(config(), 3)
    one, _ = forked(config(fork=(3, 240)), state)
    next(one)
    state = json.loads(json.dumps(one.get_state()))
    one.close()
    state["past"][0]["given"]["content of a"] += 1
    with pytest.raises(config_lib.UserError, match="the data is not what this run began with"):
        stream(config(fork=(3, 240))).set_state(state)
