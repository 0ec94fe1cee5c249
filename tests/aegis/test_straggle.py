"""A slow process is named, and no other, however noisy the steps are."""

from pathlib import Path

import numpy as np
import pytest

from zaya_jax.aegis.straggle import WINDOW, Stragglers

STEPS = 1000


def owns(rng, count, noise):
    """Seconds of own work of even processes: [steps, processes]."""
    table = 0.2 * rng.lognormal(0, 0.1, (STEPS, count))
    match noise:
        case "wide":
            table = 0.2 * rng.lognormal(0, 0.4, (STEPS, count))
        case "heavy tails":
            table = 0.2 * (1 + 0.1 * rng.pareto(1.5, (STEPS, count)))
        case "garbage in one":
            table[:: STEPS // 100, 1] += 0.5
        case "drifting together":  # all alike, as with longer sequences
            table *= np.linspace(1, 3, STEPS)[:, None]
        case "bursts":  # a few steps in a row, here and there
            for start in rng.integers(0, STEPS, 20):
                table[start : start + 8, rng.integers(count)] *= 3
    return table


def watched(table, whole=0.4):
    watch = Stragglers(table.shape[1])
    found = []
    for step, row in enumerate(table):
        for process, own in enumerate(row):
            watch.add(process, step, whole, own)
        found += watch.poll()
    return found


@pytest.mark.parametrize("count", [2, 4, 64])
@pytest.mark.parametrize(
    "noise", ["lognormal", "wide", "heavy tails", "garbage in one", "drifting together", "bursts"]
)
def test_nobody_is_named_over_a_thousand_even_steps(noise, count):
    for seed in range(4 if count == 4 else 1):
        assert watched(owns(np.random.default_rng(seed), count, noise)) == []


def test_nobody_is_named_over_a_thousand_recorded_steps():
    """A tiny model on four processes of a machine of two cores, on which other programs ran: whole
    and own seconds of each. Process 0 does most by itself: it writes the figures.
    """
    table = np.loadtxt(Path(__file__).with_name("laps.csv"), delimiter=",")
    watch, slowed, found, named = Stragglers(4), Stragglers(4), [], []
    for step, row in zip(table[:, 0].astype(int), table[:, 1:].reshape(-1, 4, 2), strict=True):
        for process, (whole, own) in enumerate(row):
            watch.add(process, step, whole, own)
            slowed.add(process, step, whole, own + 0.3 * whole * (process == 2))
        found += watch.poll()
        named += slowed.poll()
    assert len(table) > 1000 and found == []
    assert [slow.process for slow in named] == [2]


@pytest.mark.parametrize("count", [2, 4, 64])
@pytest.mark.parametrize("noise", ["lognormal", "heavy tails", "garbage in one"])
def test_who_is_slow_is_named_once_and_soon(noise, count):
    for seed in range(2 if count == 4 else 1):
        table = owns(np.random.default_rng(seed), count, noise)
        table[300:, count - 1] *= 1.5
        (found,) = watched(table)
        assert found.process == count - 1 and 1.3 < found.ratio < 1.7 and found.costs > 0.1
        assert found.steps[1] <= 300 + 3 * WINDOW


def test_who_is_slow_but_costs_nothing_is_not_named():
    table = owns(np.random.default_rng(0), 4, "lognormal")
    table[:, 2] *= 2
    assert watched(table, whole=20.0) == []


def test_who_is_slow_is_named_soon_where_the_others_have_next_to_nothing_to_do():
    """Their own work is some 10 ms, ten times that in one step and a tenth in another: so are
    the ratios."""
    rng = np.random.default_rng(0)
    table = 0.01 * rng.lognormal(0, 1.6, (STEPS, 1)) * rng.lognormal(0, 0.2, (STEPS, 4))
    table[:, 1] += 0.1
    (found,) = watched(table)
    assert found.process == 1 and found.steps[1] < 2 * WINDOW
