"""A run's figures: its lines when it goes on, where it is, the time that it still takes, and the
profile of its steps."""

import itertools
import json
import re
import time
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_runs
from refusals import check_refused

from zaya_jax import cli
from zaya_jax.cluster import beats
from zaya_jax.training import figures
from zaya_jax.training.pace import Pace


def line(step, size=20):
    return json.dumps({"step": step, "loss": 1.0, "load": "x" * size}).encode() + b"\n"


def cut(path, content, step):
    path.write_bytes(content)
    dropped = figures.truncate_after(path, step)
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
        assert cut(path, whole + b"\0" * 50 + b"\n\0\n" + line(10)[5:], step) == b"".join(
            good[:step]
        )
    assert (
        cut(path, b"", 3) == b""
        and cut(path, b"no line", 3) == b""
        and cut(path, b"\n\n[1]\n7\n", 3) == b""
    )


def test_a_writer_goes_on_after_the_cut_and_says_what_was_dropped(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:9])
    writer = figures.Writer(tmp_path, 1)
    assert (
        f"its last {len(line(2)) + 9} bytes, from after step 1, are dropped"
        in capsys.readouterr().out
    )
    writer.write(2, {"loss": 2.0})
    writer.close()
    assert path.read_bytes() == line(1) + b'{"step": 2, "loss": 2.0}\n'
    path.write_bytes(line(0) + line(1))  # a run that begins again records its step 0 again
    figures.Writer(tmp_path, 0).close()
    assert path.read_bytes() == b""


@pytest.fixture
def reports(monkeypatch):
    """All reports of the run: places, and laps."""
    places, laps = [], []
    monkeypatch.setattr(beats, "at", lambda *place: places.append(place))
    monkeypatch.setattr(beats, "lap", lambda *lap: laps.append(beats.Lap(*lap)))
    return places, laps


def test_a_run_says_each_place_that_it_comes_to(reports, tmp_path, capsys):
    keys = {"eval__every": 2, "checkpoint__every_steps": 3, "run__num_steps": 6}
    corpus = tiny_runs.write_corpus(tmp_path / "text")
    assert tiny_runs.train(tmp_path / "run", data__path=corpus, **keys) == cli.DONE
    etas = dict(re.findall(r"step +(\d)/6 .* eta (\S+)", capsys.readouterr().out))
    assert etas["1"] == "?" and etas["6"] == "0s" and len(etas) == 6
    places, laps = reports
    sections = {
        n: [s for s, _ in itertools.groupby(p[0] for p in places if p[1] == n)] for n in range(1, 7)
    }
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
    assert [lap.step for lap in laps] == [2, 3, 4, 5, 6]  # the first compiles
    assert all(lap.whole >= lap.own + lap.data and min(lap[1:]) > 0 for lap in laps), laps


def test_own_time_is_what_is_left_of_a_step_without_waiting(reports, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    pace = Pace(SimpleNamespace(platform="gpu"))
    for step in (1, 2):
        for seconds, done in (
            (1, partial(pace.begin, "step", step, "program")),  # from the end of the step before
            (2, pace.mark_dispatch),
            (4, partial(pace.at, "step", step, "wait")),
            (8, partial(pace.mark, "figures")),
            (16, partial(pace.begin, "evaluate", step, "evaluation")),
            (32, partial(pace.at, "evaluate", step, "wait")),
            (64, pace.lap),
        ):
            clock += seconds
            done()
    places, laps = reports
    assert ("step", 2, "dispatch") in places  # an accelerator's call is short
    # Fetching took 2, the call 4, figures 16; waiting is not its own, evaluation not the step's.
    assert laps == [beats.Lap(2, 2 + 4 + 8 + 16, 4 + 16, 2)]


# ################################################################################################
# The profile
# ##################################################################################################


def test_a_profile_has_the_steps_and_scopes_that_were_asked_for(tmp_path, capsys):
    tiny_runs.write_corpus(tmp_path / "text")
    # the end comes first
    keys = {"data__path": str(tmp_path / "text"), "run__num_steps": 3, "log__profile": "2:9"}
    assert tiny_runs.train(tmp_path / "run", **keys) == cli.DONE
    (trace,) = (tmp_path / "run" / "plugins" / "profile").glob("*/*.xplane.pb")
    found = trace.read_bytes()
    assert b"/experts/" in found and b"/optimizer/" in found and b"step_num" in found
    assert capsys.readouterr().out.count("profile written: ") == 1


@pytest.mark.parametrize("wrong", ["0", "5:0", "first", "3:", "-1", "1:2:3"])
def test_a_wrong_wish_is_refused(wrong):
    check_refused(
        r"config\.log\.profile=.* is not STEP or STEP:STEPS", tiny_runs.settings, log__profile=wrong
    )
