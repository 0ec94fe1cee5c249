"""Batches that a run left out when it went back, at any step."""

import json
import random

import numpy as np
import pytest
from data_helpers import in_memory, make_config
from refusals import check_refused

from zaya_jax import schedule
from zaya_jax.config import Phase
from zaya_jax.data import pipeline
from zaya_jax.text import tokenizers

TOK = tokenizers.load("bytes")
LENGTHS = {"a": 2400, "b": 1000, "c": 7000}  # tokens, each of its own number


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    """Sources a, b and c, whose rows differ; `c` in bundles, so that its rows come in blocks."""
    made, first = {}, 1
    for name, size in LENGTHS.items():
        made[name] = in_memory([10] * (size // 10), first)
        first += size
    made["c"].bundle_tokens = 40
    monkeypatch.setattr(pipeline, "open_store", lambda _, path, __: made[path])


def config(*phases, mixture=("a=0.6", "b=0.4")):
    return make_config(vocab_size=1 << 20, phases=phases, seq_len=10, mixture=mixture)


def stream(settings):
    # Two rounds an epoch, so that these small sources have blocks.
    return pipeline.Stream(pipeline.Batches(settings, TOK, rounds=1))


def take(one, count):
    batches = [next(one) for _ in range(count)]
    one.close()
    return batches


def state_after(settings, steps):
    """What a run's checkpoint has of the data."""
    one = stream(settings)
    take(one, steps)
    return json.loads(json.dumps(one.get_state()))


PHASES = (
    Phase("one", 650, mixture=("a=0.5", "c=0.5")),
    Phase("the same again", 400, mixture=("a=0.5", "c=0.5")),
    Phase("longer", 800, seq_len=20, ramp_from=2, ramp_tokens=300, micro_batch=2, global_batch=8),
    Phase("back", 1600, mixture=("b=0.3", "a=0.7"), packing="best_fit"),
)
RAMPS = (  # one era: a ramp, then another mixture
    Phase("ramp", 800, mixture=("a=0.5", "c=0.5"), ramp_from=2, ramp_tokens=500, micro_batch=2),
    Phase("another mixture", 500, mixture=("a=0.2", "c=0.7", "b=0.1")),
    Phase("the first again", 2000, mixture=("a=0.5", "c=0.5")),
)


def after(settings, ranges, begin, count):
    """Some batches of a run that left these out."""
    one = stream(settings)
    one.set_state(state_after(settings, begin))
    one.skip_batches(ranges)
    return take(one, count)


def test_what_would_have_come_later_comes_now():
    alone = config(mixture=("c=1",))
    whole = take(stream(alone), 30)
    np.testing.assert_equal(after(alone, [[7, 5]], 0, 20), [*whole[:7], *whole[12:25]])
    np.testing.assert_equal(
        after(alone, [[7, 5], [9, 2]], 4, 16), [*whole[4:7], *whole[12:14], *whole[16:27]]
    )
    # at step 12 it had come to the 17th
    np.testing.assert_equal(after(alone, [[7, 5], [6, 6]], 6, 10), whole[17:27])


@pytest.mark.parametrize("another", [{"left_out": [[3, 2]]}, {"order": 0}])
def test_a_state_of_another_order_is_refused(another):
    state = state_after(config(), 6) | another
    check_refused("a different data order", stream(config()).set_state, state)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phases", [(), RAMPS, PHASES])
def test_no_row_comes_again_and_none_is_passed_over_that_was_not_read(phases, seed):
    """Each source gives the rows of an era in their order, whatever a run that goes back again and
    again has read."""
    chance, settings = random.Random(seed), config(*phases)
    plan = schedule.make_plan(settings)
    batches, ranges, at = pipeline.Batches(settings, TOK, rounds=1), [], 0
    given = {}  # rows that each source gave in each era
    highest = 0
    for _ in range(5):
        reached = min(chance.randint(max(at, highest) + 1, at + 14), plan.last_step)
        if reached <= max(at, highest):
            break
        for step in range(at, reached):
            era = batches._era_of(step)
            mine = era.mixture.sources(step)
            assert len(mine) == plan.step(step + 1).sequences
            weights = era.mixture.stretch_of(step)[1].weights
            for k in set(mine.tolist()):
                assert weights[k]
                came = era.mixture.row_numbers(step, k)[mine == k]
                begin = given.get((era.number, k), 0)
                np.testing.assert_array_equal(came, begin + np.arange(len(came)))
                given[era.number, k] = begin + len(came)
        at = chance.randint(max(reached - 12, 0), reached - 1)
        ranges.append([at, reached - at])
        highest = max(highest, at)
        batches.skip_batches(ranges)
    assert ranges


@pytest.mark.parametrize("phases", [(), RAMPS, PHASES])
def test_a_state_of_any_step_goes_on_with_what_was_left_out(phases):
    settings, ranges = config(*phases), [[5, 4], [3, 9]]
    plan = schedule.make_plan(settings)
    whole = after(settings, ranges, 0, plan.last_step)
    once = stream(settings)
    once.skip_batches(ranges)
    for step in range(plan.last_step):
        state = json.loads(json.dumps(once.get_state()))
        assert state.get("passed_over", []) == (ranges if step > 3 else [])
        if step <= 3:  # before it went back, checkpoints are unchanged
            assert state == state_after(settings, step)
        again = stream(settings)
        assert again.set_state(state) == ""
        assert again.get_state() == once.get_state()
        again.skip_batches(ranges)  # as the run knows of it that wrote the decision down
        if step % 4 == 0:
            np.testing.assert_equal(
                take(again, min(5, plan.last_step - step)), whole[step : step + 5]
            )
        next(once)
        if step == 4:
            once.close()  # batches fetched ahead come again, and the same
            assert once.set_state(state := once.get_state()) == "" and once.get_state() == state
    once.close()
