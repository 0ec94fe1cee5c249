"""When an update is left out."""

import jax
import numpy as np
import pytest

from zaya_jax.optim import skip


def run(rule, norms, deviations=6.0):
    step = jax.jit(lambda norm, state: skip.decide(rule, norm, state, deviations))
    state, kept = skip.init(), []
    for norm in norms:
        keep, state = step(np.float32(norm), state)
        kept.append(bool(keep))
    return kept, state


def noisy(count, mean=1.0):
    return mean * (1 + 0.1 * np.random.default_rng(0).standard_normal(count))


@pytest.mark.parametrize(
    ("rule", "expected"), [("never", [True] * 3), ("nonfinite", [False] * 2 + [True])]
)
def test_not_finite(rule, expected):
    assert run(rule, [np.nan, np.inf, 1e30])[0] == expected


def test_spike():
    kept, state = run("spike", [*noisy(200), 10.0, 1.0, np.nan, 1.5, 1.8])
    assert all(kept[:200]) and kept[200:] == [False, True, False, True, False]
    assert 0.9 < float(state.mean) < 1.1 and 0.05 < float(state.variance) ** 0.5 < 0.2
    assert run("spike", [*noisy(200), 1.8], deviations=20.0)[0][-1]


def test_nothing_is_a_spike_at_first_nor_a_small_change_of_a_steady_norm():
    assert all(run("spike", [100.0, 50.0, 1.0, 30.0])[0])
    assert all(run("spike", [1.0] * 100 + [1.2])[0])


def test_a_lasting_rise_is_accepted():
    kept, _ = run("spike", [*noisy(200), *noisy(100, mean=5.0)])
    assert not kept[200] and all(kept[-40:])
