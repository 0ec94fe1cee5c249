"""pretrain under generated keys: from a config file, from the command line, one bad key or several
good ones."""

import functools
import json
import math
import shutil

import jax
import pytest
from harness import EXAMPLES, Accepted, Ended, call, call_process, folder, search
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from places import make_places
from values import any_value, good, keys, some_keys

from zaya_jax import cli, config
from zaya_jax.config import fields
from zaya_jax.training import notes
from zaya_jax.training import state as states

SMALL = {
    "model.vocab_size": 264,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 1,
    "model.head_dim": 8,
    "model.moe_intermediate_size": 32,
    "model.num_experts": 4,
    "model.router_hidden_size": 8,
    "data.seq_len": 32,
    "data.global_batch": 8,
    "eval.windows": 4,
    "log.sample_tokens": 4,
    "optim.name": "adamw",
    "run.num_steps": 2,
    "data.path": "texts",
    "name": "small",
}
# As a config file does it that builds its values by itself: no types are checked on the way.
FILE = """
from ml_collections import ConfigDict
from zaya_jax import config
nan, inf = float("nan"), float("inf")
def get_config():
    c = config.default().to_dict()
    for key, value in {values}.items():
        *groups, name = key.split(".")
        at = c
        for group in groups:
            at = at[group]
        at[name] = value
    return ConfigDict(c)
"""


@pytest.fixture(scope="module")
def sandbox():
    with folder() as here:
        make_places(here)
        yield here


@pytest.fixture(autouse=True)
def until_it_would_compile(monkeypatch):
    """If nothing is wrong the program ends before its first step, without a state."""
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr(notes, "describe_run", accepted)
    init = states.init
    traced = lambda: isinstance(jax.numpy.zeros(()), jax.core.Tracer)  # noqa: E731
    monkeypatch.setattr(states, "init", lambda *args: init(*args) if traced() else None)


@pytest.fixture
def until_it_would_trace(monkeypatch):
    """Where nothing is wrong with the keys by themselves: tracing the model takes a second."""
    monkeypatch.setattr(states, "abstract", accepted)


def accepted(*args):
    raise Accepted


def write(path, values):
    path.write_text(FILE.replace("{values}", repr({**SMALL, **values})), encoding="utf-8")


def check(sandbox, values, options=(), devices=1, workdir="run"):
    """Starts pretrain with a config file of some keys, and leaves the sandbox as it was."""
    some = jax.devices()[:devices]
    with folder() as elsewhere, pytest.MonkeyPatch.context() as patch:
        write(elsewhere / "config.py", values)
        patch.setattr(jax, "devices", lambda *args: some)
        there = [] if workdir is None else [f"--workdir={elsewhere}/{workdir}"]
        ended = call("pretrain", [f"--config={elsewhere}/config.py", *there, *options], sandbox)
        ended.check()
        if ended.code == cli.BAD_INPUT:
            assert [path.name for path in elsewhere.iterdir() if path.name != "__pycache__"] == [
                "config.py"
            ]
    shutil.rmtree(sandbox / "runs", ignore_errors=True)
    return ended


def test_what_is_sound_is_accepted_and_what_is_not_is_found(sandbox):
    assert check(sandbox, {}).code == check(sandbox, {}, workdir=None).code == cli.DONE
    assert check(sandbox, {"optim.lr": -1.0}).code == cli.BAD_INPUT
    changed = Ended("x", cli.BAD_INPUT, "", "error: x", ["left"])
    for bad in (
        changed,
        Ended("", 1, "", "", []),
        Ended("", 0, "", "a\nb\nc", []),
        Ended("", 2, "", "x", []),
    ):
        with pytest.raises(AssertionError):
            bad.check()


def test_every_key_is_fuzzed(sandbox):
    found = {path for path, _ in fields.leaves(config.Config)}
    assert found == keys().keys() and {"model.vocab_size", "schedule.phases", "name"} < found


DEVICES = st.sampled_from([1, 2, 4])


@search
@given(data=st.data(), devices=DEVICES)
def test_any_keys_end_in_a_line(until_it_would_trace, sandbox, data, devices):
    check(sandbox, data.draw(some_keys(sandbox)), devices=devices)


@search
@given(data=st.data(), devices=DEVICES)
def test_keys_that_are_good_by_themselves_end_in_a_line(
    until_it_would_trace, sandbox, data, devices
):
    check(sandbox, data.draw(some_keys(sandbox, good, 5)), devices=devices)


@search
@given(data=st.data())
def test_any_command_line_ends_in_a_line(until_it_would_trace, sandbox, data):
    check(sandbox, {}, data.draw(command_line(sandbox)), workdir=None)


@functools.cache
def command_line(sandbox):
    """Options with any value, the config's keys among them; some that no program has."""
    word = st.one_of(
        any_of(sandbox).map(str), st.sampled_from(["", "=", "1,2", "(1, 2)", "[", "None", "nan"])
    )
    names = st.sampled_from(
        [
            *(f"config.{key}" for key in sorted(keys())),
            "workdir",
            "describe",
            "config.",
            "x",
            "config.model",
            "config.data.mixture[0]",
            "config.schedule.phases[0].tokens",
        ]
    )
    one = st.builds(lambda name, value: f"--{name}={value}", names, word)
    return st.lists(one, min_size=1, max_size=3)


@functools.cache
def any_of(sandbox):
    return st.one_of([any_value(field, sandbox) for field in keys().values()])


@settings(search, max_examples=min(EXAMPLES, 25))
@given(data=st.data())
def test_real_runs_end_in_a_line(sandbox, data):
    """3 is for a loss that is not finite: that the run's figures must show."""
    values = data.draw(some_keys(sandbox, good, 4))
    # 65,536 experts on eight devices of one machine fill its memory, which no program survives;
    # 16,384 heads, and a sample of 72,000 tokens, take hours.
    sized = [
        key
        for key in values
        if key.startswith(("model.", "data.", "eval.", "log.")) and key != "data.seed"
    ]
    assume(all(values[key] <= 1000 for key in sized if isinstance(values[key], int)))
    with folder() as elsewhere:
        write(elsewhere / "config.py", {**values, "run.num_steps": 2})
        options = [f"--config={elsewhere}/config.py", f"--workdir={elsewhere}/run"]
        ended = call_process("pretrain", options, sandbox).check((0, 2, 3, 4, 75))
        if ended.code == cli.UNHEALTHY:
            last = json.loads((elsewhere / "run" / "metrics.jsonl").read_text().splitlines()[-1])
            assert not math.isfinite(last["loss"] + last.get("eval/loss", 0.0)), ended
