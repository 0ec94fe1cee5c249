"""What is kept and said of a run's steps: its lines when it goes on, where it is, and the time that it still takes."""

import itertools
import json
import math
import re
import time
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_runs

from zaya_jax import cli, config, schedule
from zaya_jax.cluster import beats
from zaya_jax.training import metrics
from zaya_jax.training.metrics import STEPS, Remaining
from zaya_jax.training.pace import Pace

FIGURES = {"loss": 1.0, "lr": 1e-3, "step_seconds": 1.0, "tokens_per_second": 1.0}


def line(step, size=20):
    return json.dumps({"step": step, "loss": 1.0, "load": "x" * size}).encode() + b"\n"


def cut(path, content, step):
    path.write_bytes(content)
    dropped = metrics.keep_until(path, step)
    left = path.read_bytes()
    assert content.startswith(left) and dropped == len(content) - len(left)
    return left


def test_it_is_cut_after_the_restored_step(tmp_path):
    path, good = tmp_path / "metrics.jsonl", [line(i, i) for i in range(1, 10)]
    whole = b"".join(good)
    for step in range(12):
        assert cut(path, whole, step) == b"".join(good[:step])
        assert cut(path, whole + b'{"step": 10, "lo', step) == b"".join(good[:step])
        assert cut(path, whole + b"\0" * 500, step) == b"".join(good[:step])
        assert cut(path, whole + b"\0" * 50 + b"\n\0\n" + line(10)[5:], step) == b"".join(good[:step])
    assert cut(path, b"", 3) == b"" and cut(path, b"no line", 3) == b"" and cut(path, b"\n\n[1]\n7\n", 3) == b""
    odd = b'[]\n{"step": "7"}\n{"step": true}\n{"step": null}\n\xff\n{}\n' + b"[" * 9999 + b"\n"
    # Between good lines they stay, as they always did not to the reader's harm; at the end they go.
    assert cut(path, whole + odd, 9) == whole
    assert cut(path, whole + odd + line(10) + odd + line(11), 10) == whole + odd + line(10)
    assert cut(path, odd + line(1), 0) == b""


def test_a_writer_goes_on_after_the_cut_and_says_what_was_dropped(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:9])
    writer = metrics.Writer(tmp_path, 1)
    assert f"its last {len(line(2)) + 9} bytes, from after step 1, are dropped" in capsys.readouterr().out
    writer.write(2, {"loss": 2.0})
    writer.close()
    writer.close()
    assert path.read_bytes() == line(1) + b'{"step": 2, "loss": 2.0}\n'
    path.unlink()
    path.mkdir()
    with pytest.raises(config.UserError, match=r"metrics\.jsonl cannot be written"):
        metrics.Writer(tmp_path, 1)


def plan_of(*phases, steps=100, **keys):
    given = config.default()
    given.update_from_flattened_dict(
        {"data.seq_len": 10, "data.global_batch": 4, "data.micro_batch": 2, "run.num_steps": steps} | keys
    )
    given.schedule.phases = phases
    return schedule.make_plan(config.check(given))


def test_the_steps_that_compile_are_left_out():
    left = Remaining(plan_of(), 0, 100)
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
    left = Remaining(plan, 4, plan.total_steps)
    left.step(5, 60.0)
    for step in range(6, grows):
        left.step(step, 1.0 if step < grows - 1 else 60.0)  # an accelerator's step before waits for the compiler
    tokens = plan.total_tokens - plan.tokens_of_step(grows - 1)
    assert left.after(grows - 1) == pytest.approx(tokens / 20)
    left.step(grows, 60.0)
    assert left.after(grows) == pytest.approx((tokens - 40) / 20)


def test_it_follows_a_run_that_becomes_slower():
    left = Remaining(plan_of(steps=1000), 0, 1000)
    for step in range(2, 600):
        left.step(step, 1.0 if step < 600 - STEPS else 3.0)
    assert left.after(600) == pytest.approx(1200)


@pytest.fixture
def said(monkeypatch):
    """Everything that is said: places, and laps."""
    places, laps = [], []
    monkeypatch.setattr(beats, "at", lambda *place: places.append(place))
    monkeypatch.setattr(beats, "lap", lambda *lap: laps.append(beats.Lap(*lap)))
    return places, laps


def test_a_run_says_each_place_that_it_comes_to(said, tmp_path, capsys):
    keys = {"eval__every": 2, "checkpoint__every_steps": 3, "run__num_steps": 6}
    corpus = tiny_runs.write_corpus(tmp_path / "text")
    assert tiny_runs.train(tmp_path / "run", data__path=corpus, **keys) == cli.DONE
    etas = dict(re.findall(r"step +(\d)/6 .* eta (\S+)", capsys.readouterr().out))
    assert etas["1"] == "?" and etas["6"] == "0s" and len(etas) == 6
    places, laps = said
    sections = {n: [s for s, _ in itertools.groupby(p[0] for p in places if p[1] == n)] for n in range(1, 7)}
    assert sections == {
        1: ["compile", "step"],
        2: ["step", "compile", "evaluate"],
        3: ["step", "save"],
        4: ["step", "evaluate"],
        5: ["step"],
        6: ["step", "evaluate", "save", "end"],
    }
    marks = [mark for mark, _ in itertools.groupby(m for section, n, m in places if n == 5)]
    assert marks == ["fetch", "wait", "figures"]  # a CPU computes in the call
    assert [lap.step for lap in laps] == [3, 4, 5, 6]
    assert all(lap.whole >= lap.own + lap.data and min(lap[1:]) > 0 for lap in laps), laps


def test_own_time_is_what_is_left_of_a_step_without_waiting(said, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    pace = Pace(SimpleNamespace(platform="gpu"))
    for step in (1, 2):
        for seconds, done in (
            (1, partial(pace.fetch, step, "program")),  # from the end of the step before
            (2, pace.dispatch),
            (4, pace.called),
            (8, partial(pace.mark, "figures")),
            (16, partial(pace.evaluate, step, "evaluation")),
            (32, pace.evaluating),
            (64, pace.lap),
        ):
            clock += seconds
            done()
    places, laps = said
    assert ("step", 2, "dispatch") in places  # an accelerator's call is short
    # Fetching took 2, the call 4, figures 16; waiting is not its own, evaluation not the step's.
    assert laps == [beats.Lap(2, 2 + 4 + 8 + 16, 4 + 16, 2)]
