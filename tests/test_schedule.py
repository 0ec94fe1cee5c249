"""Learning rate, phases and ramps as pure functions of the tokens seen."""

import dataclasses
import hashlib
import itertools
import math
import re
import struct

import pytest
from refusals import check_error, check_refused, refusal

from zaya_jax import schedule
from zaya_jax.config import Config, Data, Model, Phase, Run, Schedule, check, to_dict
from zaya_jax.parallel.spread import NO_SPREAD
from zaya_jax.training import notes, recipe

ROWS = Data(seq_len=128, global_batch=8)


def config(*phases, data=ROWS, run=None, **options):
    return Config(
        model=Model(max_position_embeddings=131_072),
        data=data,
        run=run or Run(),
        schedule=Schedule(phases=phases, **options),
    )


def rates_of(*phases, **options):
    """The learning rate as a function of the tokens seen, without a warm-up."""
    plan = schedule.make_plan(config(*phases, warmup_fraction=0.0, **options))
    return lambda tokens: schedule.learning_rate(plan, tokens, plan.segments[0])


RECIPE = config(
    Phase("web", 8 * 10**12, 4096, 1e4, 4096, 1024, 256 * 4, 10**11, ("web=0.8", "code=0.2")),
    Phase("code", 4 * 10**12, 4096, 1e4, 4096, 1024, mixture=("web=0.4", "code=0.4", "math=0.2")),
    Phase("mid", 12 * 10**11, 32_768, 1e6, 512, 128),
    Phase("sft", 66 * 10**10, 131_072, 5e6, 128, 128),
)


RECIPE_IN_SMALL = (
    Phase("a", 10 * 1024 - 5),
    Phase("b", 9 * 2048, seq_len=256, global_batch=8),
    Phase("c", 5000, micro_batch=4, ramp_from=4, ramp_tokens=2500),
)


# The last seven steps are without a rate of their own.
OWN_RATES = (
    Phase("a", 9 * 1024 - 5, lr=6e-4, lr_end=2e-4, schedule="cosine"),
    dataclasses.replace(RECIPE_IN_SMALL[1], lr=2e-4),
    Phase("c", 9 * 1024),
)


@pytest.mark.parametrize(
    ("decay", "expected"), [("linear", "df5543ed9b8f35f5"), ("1-sqrt", "79b33901e764dc2d")]
)
def test_rates_have_the_bits_that_earlier_versions_gave(decay, expected):
    """A run that is continued with another version computes the same."""
    options = dict(warmup_fraction=0.07, decay_fraction=0.9, final_lr_fraction=0.13)
    plan = schedule.make_plan(config(decay=decay, **options))
    rates = struct.pack("<1000d", *(plan.step(number).lr for number in range(1, 1001)))
    assert hashlib.sha256(rates).hexdigest()[:16] == expected


@pytest.mark.parametrize(
    ("decay", "half"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))]
)
def test_decay_shapes(decay, half):
    total = 12 * 10**12
    options = dict(decay_fraction=0.5, decay=decay, final_lr_fraction=0.2)
    rate = rates_of(Phase(tokens=total), **options)
    assert rate(0) == rate(total // 2) == 1e-3
    assert rate(3 * total // 4) == pytest.approx((0.2 + 0.8 * half) * 1e-3)
    assert rate(total) == pytest.approx(0.2e-3)
    steps = [rate(tokens) for tokens in range(total // 2, total, total // 100)]
    assert all(a > b for a, b in itertools.pairwise(steps))


FOUR_RATES = (
    Phase("cosine", 40_000, lr=6e-4, lr_end=2e-4, schedule="cosine", ramp_from=2, ramp_tokens=9000),
    Phase("constant", 20_000, seq_len=256, lr=2e-4),
    Phase("run's", 10_000),
    Phase("up", 10_000, lr=1e-4, lr_end=5e-4),
)


def test_a_phase_has_a_rate_of_its_own_after_the_run_s_warm_up():
    """It begins at lr and ends at lr_end whatever the batches; the run's schedule fills the others."""
    given = config(*FOUR_RATES, warmup_fraction=0.05, decay_fraction=0.25)
    plan = schedule.make_plan(given)
    rates: dict[str, list[float]] = {}
    for number in range(1, plan.last_step + 1):
        step = plan.step(number)
        rates.setdefault(step.phase.name, []).append(step.lr)
    warmup = plan.tokens_at_end * 0.05
    assert rates["cosine"][0] == pytest.approx(6e-4 * plan.tokens_of_step(1) / warmup)
    assert max(rates["cosine"]) == pytest.approx(6e-4, rel=1e-2)
    middle = next(s for s in plan.segments if s.sequences == 8)
    assert schedule.learning_rate(plan, (warmup + 40_000) / 2, middle) == pytest.approx(4e-4)
    assert [found[-1] for found in rates.values()] == [2e-4, 2e-4, rates["run's"][-1], 5e-4]
    assert set(rates["constant"]) == {2e-4}
    shared = [dataclasses.replace(p, lr=0.0, lr_end=None, schedule="") for p in FOUR_RATES]
    without = schedule.make_plan(config(*shared, warmup_fraction=0.05, decay_fraction=0.25))
    third = next(s for s in without.segments if s.phase_index == 2)
    numbers = range(third.first_step, third.first_step + third.num_steps)
    assert rates["run's"] == [without.step(n).lr for n in numbers]
    assert rates["up"] == sorted(rates["up"])


def test_borders_at_which_the_learning_rate_jumps_are_named():
    def table(*phases):
        return notes.phase_table(recipe.make_recipe(config(*phases, decay_fraction=0.25)))

    jumps = re.findall("jumps from (.*) to (.*) where phase (.*) begins", table(*FOUR_RATES))
    assert [jump[0] for jump in jumps][:1] == ["0.0002"] and jumps[1][1] == "0.0001"
    assert [jump[2] for jump in jumps] == ['"run\'s"', "'up'"]
    for phases in (FOUR_RATES[:2], RECIPE.schedule.phases):
        assert "it has no jump" in table(*phases) and "jumps" not in table(*phases)


@pytest.mark.parametrize("options", [{}, {"decay_steps": 7}])
@pytest.mark.parametrize("phases", [(), RECIPE_IN_SMALL, OWN_RATES])
def test_a_fork_s_steps_are_the_parent_s_where_nothing_differs(phases, options):
    run = Run(num_steps=20)
    whole = schedule.make_plan(config(*phases, run=run, **options))
    for begun in range(1, whole.last_step):
        seen = whole.tokens_of_step(begun)
        forked = dataclasses.replace(run, fork="x", fork_step=begun, fork_tokens=seen)
        plan = schedule.make_plan(config(*phases, run=forked, **options))
        numbers = range(begun + 1, whole.last_step + 1)
        assert [plan.step(n) for n in numbers] == [whole.step(n) for n in numbers]
        assert (plan.steps_before, plan.last_step) == (begun, whole.last_step)
        assert plan.tokens_at_end == whole.tokens_at_end


def test_a_fork_with_other_batches_counts_the_tokens_that_were_seen():
    given = config(
        run=Run(num_steps=10, fork="x", fork_step=6, fork_tokens=6 * 1024),
        data=Data(seq_len=128, global_batch=16),
        warmup_fraction=0.0,
        decay_steps=4,
    )
    plan = schedule.make_plan(given)
    left = [plan.step(number) for number in range(7, 11)]
    assert [step.tokens_after for step in left] == [6 * 1024 + n * 2048 for n in range(1, 5)]
    assert [step.lr for step in left] == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3, 0])
    check_error(ValueError, "outside the run's steps 6 to 10", plan.tokens_of_step, 5)


def test_single_tokens_count_at_12_trillion():
    total = 12 * 10**12
    rate = rates_of(Phase(tokens=total), decay_fraction=1.0)
    assert 0 < rate(total // 2) - rate(total // 2 + 1) < 2e-3 / total


def test_recipe():
    plan = schedule.make_plan(RECIPE)
    assert {s.micro_batches for s in plan.segments} == {1, 2, 4}
    first = [plan.step(s.first_step) for s in plan.segments]
    assert [s.sequences for s in first] == [1024, 2048, 4096, 4096, 512, 128]
    assert [s.phase.name for s in first] == ["web", "web", "web", "code", "mid", "sft"]
    assert [s.sequences * s.phase.seq_len for s in first[2:]] == [2**24] * 4
    # A border is reached with the first step that passes it.
    for before, after in itertools.pairwise(plan.segments):
        assert before.first_step + before.num_steps == after.first_step
        assert plan.tokens_of_step(after.first_step - 1) == after.tokens_before
    borders = [10**11 // 2, 10**11, 8 * 10**12, 12 * 10**12]
    for border, segment in zip(borders, plan.segments[1:], strict=False):
        assert 0 <= segment.tokens_before - border < 2 * 2**24
    assert 0 <= plan.tokens_at_end - 1386 * 10**10 < 4 * 2**24


def test_a_ramp_changes_batches_alone():
    """Neither the phases' borders nor the learning rate at a token count move, bar the rounding to
    whole steps."""
    ramp = dict(ramp_from=2, ramp_tokens=40_000, micro_batch=2)
    phases = Phase(tokens=200_000, **ramp), Phase(tokens=50_000, micro_batch=2)
    with_ramp = schedule.make_plan(config(*phases))
    without = schedule.make_plan(config(Phase(tokens=200_000), Phase(tokens=50_000)))
    assert [s.micro_batches for s in with_ramp.segments] == [1, 2, 4, 4]
    assert [s.micro_batches for s in without.segments] == [1, 1]
    assert with_ramp.segments[-1].tokens_before == pytest.approx(200_000, abs=1024)
    for tokens in range(0, 250_000, 10_000):
        rates = [schedule.learning_rate(p, tokens, p.segments[0]) for p in (with_ramp, without)]
        assert rates[0] == pytest.approx(rates[1], rel=0.05)
    sizes = [with_ramp.step(n).sequences for n in range(1, with_ramp.last_step + 1)]
    assert sizes == sorted(sizes) and set(sizes) == {2, 4, 8}


@pytest.mark.parametrize(
    ("micro_batch", "counts"), [(0, (1, 1, 1)), (4, (1, 1, 2)), (1, (2, 4, 8))]
)
def test_a_step_of_a_ramp_that_is_smaller_than_a_micro_batch_is_one(micro_batch, counts):
    phase = Phase(
        tokens=10**6, ramp_from=2, ramp_tokens=10**5, micro_batch=micro_batch, global_batch=8
    )
    plan = schedule.make_plan(config(phase))
    assert [s.sequences for s in plan.segments] == [2, 4, 8]
    assert tuple(s.micro_batches for s in plan.segments) == counts


@pytest.mark.parametrize(
    "phases", [(), (Phase(tokens=10**6),), (Phase(tokens=10**6, micro_batch=64),)]
)
def test_a_micro_batch_is_at_most_a_batch(phases):
    """Larger ones take the batch, also in evaluation and in the run's messages."""
    given = config(*phases, data=Data(seq_len=128, global_batch=8, micro_batch=16))
    (segment,) = schedule.make_plan(check(to_dict(given))).segments
    assert (segment.sequences, segment.micro_batches, segment.phase.micro_batch) == (8, 1, 8)
    assert schedule.phase_config(given, segment.phase).data.micro_batch == 8
    many = dataclasses.replace(given, eval=dataclasses.replace(given.eval, windows=100))
    assert recipe.eval_rows(many, segment.phase, NO_SPREAD) == 8


def test_what_model_and_data_see():
    plan = schedule.make_plan(RECIPE)
    seen = schedule.phase_config(RECIPE, plan.step(plan.last_step).phase)
    assert (seen.data.seq_len, seen.data.global_batch, seen.data.micro_batch) == (131_072, 128, 128)
    assert seen.model.rope_parameters.hybrid.rope_theta == 5e6
    assert seen.model.rope_parameters.hybrid_sliding.rope_theta == 1e4


@pytest.mark.parametrize(
    ("phase", "message", "mended"),
    [
        (dict(seq_len=2**20), "above model.max_position_embeddings", dict(seq_len=131_072)),
        (dict(ramp_from=2), "give both", dict(ramp_tokens=10, micro_batch=2)),
        (
            dict(ramp_from=2, ramp_tokens=20, micro_batch=2),
            "within the phase",
            dict(ramp_tokens=10),
        ),
        (
            dict(ramp_from=3, ramp_tokens=5, micro_batch=2),
            "steps of 3 sequences, no multiple",
            "micro_batch",
        ),
        (dict(global_batch=9, micro_batch=2), "steps of 9 sequences, no multiple", "micro_batch"),
    ],
)
def test_an_impossible_phase_is_refused_with_a_way_out_that_works(phase, message, mended):
    phase = dict(tokens=10) | phase
    said = refusal(schedule.make_plan, config(Phase(**phase)))
    assert message in said
    if mended == "micro_batch":
        advised = re.search(
            r"give a config\.schedule\.phases\[0\]\.micro_batch that divides (\d+)", said
        )
        mended = dict(micro_batch=int(advised[1]))
    schedule.make_plan(config(Phase(**phase | mended)))


@pytest.mark.parametrize("odd", [dict(lr_end=0.0), dict(lr=1e-3, schedule="cosine")])
def test_a_rate_without_its_ends_is_refused(odd):
    given = to_dict(config(Phase(tokens=10**6, **odd)))
    check_refused(r"phases\[0\] has lr=.* give lr for a constant rate", check, given)
    check(to_dict(config(Phase(tokens=10**6, lr=1e-3, lr_end=0.0))))


def test_a_decay_in_steps_needs_a_last_phase_without_a_rate_of_its_own():
    given = to_dict(config(*FOUR_RATES, decay_steps=9))
    check_refused(r"decay_steps=9 .* schedule\.phases\[3\]\.lr gives", check, given)
    check(to_dict(config(*FOUR_RATES[:3], decay_steps=5)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            Data(seq_len=2**20, global_batch=1),
            r"^config\.data\.seq_len=1048576 is above model\.max_position_embeddings=131072",
        ),
        (
            Data(global_batch=9, micro_batch=2),
            r"^config\.data .* config\.data\.micro_batch=2; give a .* that divides 9",
        ),
    ],
)
def test_without_phases_the_data_s_keys_are_named(data, message):
    check_refused(message, schedule.make_plan, config(data=data))
