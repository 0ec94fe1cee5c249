"""The spike test on made-up figures: it finds what goes up for good, and nothing else, wherever it
is stopped."""

import json

import numpy as np
import pytest
from refusals import check_refused, check_storage_error

from zaya_jax.config import Guard
from zaya_jax.guard import decisions
from zaya_jax.guard.spikes import SETTLE, Spike, Spikes


def curves(steps, seed=0, tails="normal", together=0.5):
    """Losses that fall by a power, with noise of such tails, each step's partly that of the one
    before; and norms."""
    chance, at = np.random.default_rng(seed), np.arange(steps)
    draws = {"normal": chance.standard_normal, "t3": lambda n: chance.standard_t(3, n)}
    noise = draws[tails](steps)
    for i in range(1, steps):
        noise[i] += together * noise[i - 1]
    loss = 2 + 8 * (at + 20.0) ** -0.3 + 0.03 * noise
    norm = 0.3 + 0.7 * np.exp(0.3 * draws[tails](steps)) * (1 + 2 * np.exp(-at / 200))
    return np.stack([loss, norm], 1)


def found(figures, phases=None, first=1, state=None, states=None):
    """The first spike; `states` takes the state after each step."""
    spikes, spike = Spikes(Guard(), state), None
    for step, (loss, norm) in enumerate(figures.tolist(), first):
        spike = spike or spikes.add(step, phases[step - 1] if phases else 0, loss, norm)
        if states is not None:
            states.append(json.loads(json.dumps(spikes.state())))
    return spike


@pytest.mark.parametrize("tails", ["normal", "t3"])
@pytest.mark.parametrize("together", [0.0, 0.5, 0.9])
def test_noise_with_heavy_tails_is_no_spike(tails, together):
    assert [found(curves(2000, seed, tails, together)) for seed in range(2)] == [None] * 2


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_stays_high_is_one_from_its_first_step(seed):
    figures = curves(600, seed)
    figures[400:, 0] += 0.8 * (1 - np.exp(-np.arange(1, 201) / 3))  # within some steps
    spike = found(figures)
    assert 401 <= spike.began <= 403
    assert (spike.step, spike.figure) == (spike.began + 9, "loss")
    assert f"from step {spike.began} on" in str(spike)
    figures = curves(600, seed)
    figures[300:, 1] *= 8
    assert found(figures)[:3] == (301, 310, "grad_norm")
    figures = curves(600, seed)
    figures[300:] = np.nan
    assert found(figures)[:3] == (301, 310, "loss")


def test_what_passes_by_itself_is_none():
    figures = curves(900)
    for first in range(100, 900, 40):
        figures[first : first + 9] += 3.0  # nine steps, of ten
    assert found(figures) is None
    figures[500:, 0] += np.arange(400) * 0.002  # as slow as this is no jump
    assert found(figures) is None


def steady(steps=600):
    return np.stack([2.0 + 0.01 * (np.arange(steps) % 3), np.ones(steps)], 1)


@pytest.mark.parametrize(("of_ten", "steps"), [(9, 12), (8, 14), (7, 16), (6, 26)])
@pytest.mark.parametrize("high", [10.0, np.nan])
def test_high_steps_with_lower_ones_between_are_a_spike_too(of_ten, steps, high):
    """As many more high ones as otherwise in a row: the tenth step's low one hid all others, for
    good."""
    figures, at = steady(), np.arange(600)
    figures[(at >= 200) & (at % 10 < of_ten), 0] = high
    spike = found(figures)
    assert (spike.began, spike.step, spike.high) == (201, 200 + steps, (steps + 10) // 2)
    assert f"in {spike.high} of {steps} steps, from step 201 on" in str(spike)


@pytest.mark.parametrize("good", range(600, 618, 4))
def test_high_steps_do_not_raise_the_level(good):
    """However long they take turns with others: a lasting rise after them is found, by the level
    before."""
    figures, at = steady(900), np.arange(900)
    figures[(at >= 200) & (at % 18 < 9), 0] = 10.0
    assert found(figures) is None  # no more than the others
    figures[good:, 0] = 10.0
    spike = found(figures)
    assert good - 18 < spike.began <= good + 1 and spike.step <= good + 10
    assert 2.0 <= spike.median <= 2.02


def test_warm_up_borders_of_phases_and_ramps_are_none():
    figures = curves(900)
    figures[:40] += np.linspace(5, 0, 40)[:, None]
    assert found(figures) is None
    figures[300:, 0] += 1.5  # other text
    assert found(figures) is not None
    assert found(figures, [0] * 300 + [1] * 600) is None
    ramp = curves(900)
    ramp[450:, 1] /= np.sqrt(2)  # twice the batch
    ramp[450:, 0] -= 0.01
    assert found(ramp) is None


@pytest.mark.parametrize(("high", "began"), [(SETTLE - 20, None), (SETTLE, SETTLE + 1)])
def test_nothing_is_said_before_it_is_settled(high, began):
    figures = curves(SETTLE + 40)
    figures[high:] += 5
    spike = found(figures)
    assert (spike and spike.began) == began


def jump():
    figures = curves(330, 5)
    figures[300:] += 2.0
    figures[200] = np.inf
    return figures, (1, 64, 65, 200, 201, 299, 305), 301


def turns():
    """High steps and others take turns without end, and the state does not grow by it."""
    figures, at = curves(430, 5), np.arange(430)
    figures[200:202, 0] = 9.0
    figures[(at >= 202) & (at % 2 == 1), 1] = np.inf
    figures[400:, 0] = 9.0
    return figures, (200, 201, 202, 203, 300, 401), 201


@pytest.mark.parametrize("case", [jump, turns])
def test_a_restart_anywhere_decides_the_same(case):
    figures, restarts, began = case()
    states: list = []
    spike = found(figures, states=states)
    assert spike.began == began
    for step in (*restarts, spike.step - 1):
        others: list = []
        assert found(figures[step:], None, step + 1, states[step - 1], others) == spike
        assert others == states[step:]
    assert max(len(json.dumps(state)) for state in states) < 10_000


def test_a_state_stays_what_it_is_while_steps_go_on():
    """A save writes it in a thread: a run killed in a spike went on from a checkpoint that knew
    later steps."""
    spikes = Spikes(Guard())
    for step, (loss, norm) in enumerate(curves(100).tolist(), 1):
        spikes.add(step, 0, loss, norm)
    spikes.add(101, 0, 9.0, 9.0)
    state = spikes.state()
    then = json.dumps(state)
    spikes.add(102, 0, 9.0, 9.0)
    spikes.add(103, 0, 2.0, 0.5)
    assert json.dumps(state) == then


FIRST = {"kind": "spike", "step": 100, "batches": 29, "at": 129}


@pytest.mark.parametrize(
    ("began", "saved", "decided", "step"),
    [
        (120, [60, 80, 100, 120, 125], [], 100),
        (120, [120], [], 7),  # where the run began
        (110, [60, 80, 100], [FIRST], 80),  # it comes again
        (110, [100], [FIRST], 100),
        (100 + SETTLE + 1, [80, 100], [FIRST], 100),  # another one
    ],
)
def test_a_run_goes_back_before_the_spike_and_further_if_it_comes_again(
    began, saved, decided, step
):
    made = decisions.after_spike(Spike(began, began + 9, "loss", 5.0, 2.0, 10), saved, decided, 7)
    assert (made["step"], made["batches"], made["at"]) == (step, began + 9 - step, began + 9)


@pytest.mark.parametrize(
    ("clean", "saved", "step"),
    # to when the devices were known to be right; from the begin where nothing is known, or the
    # oldest there is
    [(400, [300, 390, 410], 390), (400, [410, 450], 410), (0, [10, 20], 0)],
)
def test_after_a_wrong_device_a_run_goes_back_to_what_is_known_to_be_right(clean, saved, step):
    assert decisions.after_mismatch(500, clean, saved, 0)["step"] == step


def test_decisions_are_read_as_they_were_written(tmp_path):
    made = [FIRST]
    decisions.write(tmp_path, made)
    assert decisions.read(tmp_path) == made
    assert decisions.skipped_batches(made) == [[100, 29]]
    assert decisions.merge(made, [], tmp_path) == decisions.merge([], made, tmp_path) == made
    check_refused("different decisions", decisions.merge, made, [FIRST | {"step": 3}], tmp_path)
    for wrong in ({}, FIRST | {"step": -1}, FIRST | {"step": 999}, "text"):
        decisions.write(tmp_path, [FIRST, wrong])
        check_storage_error("cannot be read .*restore it", decisions.read, tmp_path)
