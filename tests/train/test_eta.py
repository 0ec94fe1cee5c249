"""What is said of the time that a run still takes: compiling is not in it, a larger batch is."""

import io
import json
import math
import re
from pathlib import Path

import jax
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import cli, config, schedule
from zaya_jax.train import metrics
from zaya_jax.train.eta import STEPS, Remaining
from zaya_jax.train.metrics import duration

FIGURES = {"loss": 1.0, "lr": 1e-3, "step_seconds": 1.0, "tokens_per_second": 1.0}


def plan_of(*phases, steps=100, **keys):
    given = config.default()
    given.update_from_flattened_dict(
        {"data.seq_len": 10, "data.global_batch": 4, "data.micro_batch": 2, "run.num_steps": steps} | keys
    )
    given.schedule.phases = phases
    return schedule.make_plan(config.check(given))


def test_the_steps_that_compile_are_left_out():
    left = Remaining(plan_of(), 0, 100, 1000)
    assert left.after(0) == left.after(1) == math.inf
    left.step(1, 60.0)
    assert left.after(1) == math.inf
    left.step(2, 0.5)
    assert left.after(2) == pytest.approx(98 * 0.5)
    left.step(3, 30.0)  # a save
    left.step(4, 0.5)
    assert left.after(4) == pytest.approx(96 * 0.5) and left.after(100) == 0


def test_so_they_are_on_resume_and_where_the_batch_changes():
    ramp = config.Phase(tokens=40 * 20, ramp_from=2, ramp_tokens=20 * 20)
    plan = plan_of(ramp, steps=1000)
    grows = next(s.first_step for s in plan.segments if s.micro_batches == 2)
    left = Remaining(plan, 4, plan.total_steps, 1000)
    left.step(5, 60.0)
    for step in range(6, grows):
        left.step(
            step, 1.0 if step < grows - 1 else 60.0
        )  # an accelerator's step before waits for the compiler
    tokens = plan.total_tokens - plan.tokens_of_step(grows - 1)
    assert left.after(grows - 1) == pytest.approx(tokens / 20)
    left.step(grows, 60.0)
    assert left.after(grows) == pytest.approx((tokens - 40) / 20)


def test_evaluations_that_are_due_count_with_what_the_last_one_took():
    left = Remaining(plan_of(), 0, 100, 30)
    for step in (1, 2, 3):
        left.step(step, 0.0)
    left.evaluation(0, 500.0)
    assert left.after(3) == 0.0  # it compiled
    left.evaluation(0, 5.0)
    assert [left.after(step) for step in (3, 30, 60, 89, 90, 99)] == [20.0, 15.0, 10.0, 10.0, 5.0, 5.0]


def test_it_follows_a_run_that_becomes_slower():
    left = Remaining(plan_of(steps=1000), 0, 1000, 2000)
    for step in range(2, 600):
        left.step(step, 1.0 if step < 600 - STEPS else 3.0)
    assert left.after(600) == pytest.approx(1200)


def test_what_a_run_prints_is_of_the_steps_after_the_first(tmp_path, monkeypatch, capsys):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    given = tiny.get_config()
    given.update_from_flattened_dict({
        "model.hidden_size": 32, "model.num_hidden_layers": 1, "model.head_dim": 8, "model.moe_intermediate_size": 32,
        "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 32, "data.global_batch": 8,
        "eval.windows": 0, "log.sample_tokens": 4, "optim.name": "adamw", "run.num_steps": 9000, "log.every": 1,
        "data.path": str(Path(cli.__file__).parent / "optim"),
    })  # fmt: skip
    stop = iter([False] * 4 + [True] * 9)
    monkeypatch.setattr(pretrain.multihost.StopSignal, "after", lambda self, number: next(stop))
    monkeypatch.setattr(pretrain.multihost.StopSignal, "asked", "a test", raising=False)
    assert pretrain.train(config.check(given), tmp_path / "run") == cli.PREEMPTED
    said = dict(re.findall(r"step +(\d+)/9000 .* eta (\S+)", capsys.readouterr().out))
    took = [
        json.loads(line)["step_seconds"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert said["1"] == "?" and said["2"] == duration(took[1] * 8998)
    assert len(said) == 5 and said["3"] == duration((took[1] + took[2]) / 2 * 8997)


def test_the_bar_shows_the_same(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    console = metrics.Console(0, 10, 5, {1: math.inf, 2: 3723.0}.get)
    for step in (1, 2):
        console.step(step, FIGURES)
        console._bar.refresh()
    console.close()
    shown = metrics.sys.stderr.getvalue()
    assert "1/10 [00:00, eta ?]" in shown and "2/10 [00:00, eta 1h02m]" in shown and "<" not in shown
