"""The keys of optimizer, balancing and schedule refuse what cannot be, by name."""

import pytest

from zaya_jax import config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "optim.momentum",
            1.0,
            r"config.optim.momentum=1.0 is out of range; it must be at least 0 and at most 0.99999",
        ),
        ("optim.lr", float("nan"), "config.optim.lr=nan is out of range; it must be at least 0"),
        ("optim.newton_schulz_steps", 0, "at least 1 and at most 99"),
        ("optim.newton_schulz", "polar", "did you mean polar_express"),
        ("precision.momentum", "float16", "not one of bfloat16, float32"),
        ("schedule.decay", "sqrt", "did you mean 1-sqrt"),
        ("schedule.warmup_fraction", 1.5, "at most 1"),
        ("run.skip_update", "spikes", "did you mean spike"),
        ("balance.dead_after", 0, "at least 1"),
    ],
)
def test_out_of_range(key, value, message):
    given = config.default()
    group, name = key.split(".")
    given[group][name] = value
    with pytest.raises(config.UserError, match=message):
        config.check(given)


def test_phases_are_checked_key_by_key_and_survive_the_record():
    given = config.default()
    given.schedule.phases = (
        {"name": "a", "tokens": 10, "mixture": ("x=1", "y=0.5")},
        {"tokens": 5, "seq_len": 128},
    )
    checked = config.check(given)
    assert checked.schedule.phases[0].mixture == ("x=1", "y=0.5")
    assert config.check(config.to_dict(checked)) == checked
    given.schedule.phases = ({"tokns": 10},)
    with pytest.raises(config.UserError, match=r"schedule.phases\[0\].tokns"):
        config.check(given)
