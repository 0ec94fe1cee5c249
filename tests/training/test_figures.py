"""A run's figures: its lines when it goes on, where it is, the time that it still takes, the
profile of its steps, and what its report reads of it."""

import itertools
import json
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
from refusals import check_refused

from zaya_jax import cli
from zaya_jax.cluster import beats
from zaya_jax.pytorch import exchange
from zaya_jax.report import curves, read
from zaya_jax.report.run_page import run_document
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small folder of text, so that a run starts at once."""
    return tiny_runs.write_corpus(tmp_path_factory.mktemp("corpus"), 60)


@pytest.fixture
def run(corpus):
    """Runs the program in this process, on as many devices as mesh.data says."""

    def call(workdir, **keys):
        keys = {
            "data__path": corpus,
            "eval__every": 2,
            "eval__windows": 4,
            "checkpoint__every_steps": 2,
        } | keys
        return tiny_runs.train(workdir, keys.get("mesh__data", 1), **keys)

    return call


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run(whole, run__num_steps=5, schedule__decay_fraction=0.0) == cli.DONE
    assert run(halves, run__num_steps=3, schedule__decay_fraction=0.0) == cli.DONE
    # as a run killed after step 4, before its checkpoint, leaves it
    with (halves / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"step": 4, "loss": 0.0}) + "\n" + '{"step": 5, "lo')
    assert run(halves, run__num_steps=5, schedule__decay_fraction=0.0) == cli.DONE
    tiny_runs.same_state(whole, halves)
    a, b = tiny_runs.lines(whole), tiny_runs.lines(halves)
    assert [x["step"] for x in b] == [1, 2, 3, 4, 5]
    assert [x["loss"] for x in a] == [x["loss"] for x in b]
    assert a[-1]["eval/loss"] == b[-1]["eval/loss"]
    of_metrics = (
        Path(__file__).parents[2].joinpath("docs", "metrics.md").read_text(encoding="utf-8")
    )
    listed = set(re.findall(r"^\| `([^`]+)` \|", of_metrics, re.M))
    written = {
        name.partition("/")[0] if "_norm/" in name else name for line in a + b for name in line
    }
    assert written <= listed, f"not in docs/metrics.md: {written - listed}"
    assert {"eval/loss", "load", "data/wait_fraction"} <= written
    capsys.readouterr()
    assert run(halves, run__num_steps=5, schedule__decay_fraction=0.0) == cli.DONE
    assert "is complete" in capsys.readouterr().out
    assert len(tiny_runs.lines(halves)) == 5
    assert (halves / "report.html").stat().st_size > 1000
    assert list(halves.glob("events.out.*"))


class Asked(dict):
    """A dict that remembers the missing keys that it was asked for."""

    def __init__(self, content, missed):
        super().__init__(content)
        self.missed = missed

    def __contains__(self, key):
        if not super().__contains__(key):
            self.missed.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        return super().get(key, default) if key in self else default


def test_every_key_that_the_report_reads_is_one_that_a_run_wrote(run, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "peak_flops", lambda *_: 1e12)  # a CPU's is not known, so no MFU
    assert run(tmp_path / "run", run__num_steps=12, log__every=1) == cli.DONE
    found, missed = read.read_workdir(tmp_path / "run"), set()
    found.series, found.vectors = Asked(found.series, missed), Asked(found.vectors, missed)
    found.config, found.environment = Asked(found.config, missed), Asked(found.environment, missed)
    asked = set()
    setting = found.setting
    monkeypatch.setattr(read.Workdir, "setting", lambda _, key: (asked.add(key), setting(key))[1])
    source = run_document(found).html()
    assert not missed
    assert asked and all(setting(key) is not None for key in asked), asked
    assert all(
        f"<figcaption>{title}<" in source
        for title in ("Loss", "Copy", "Whole save", "Gradient norm by group")
    )
    written = [*found.series, *found.vectors]
    assert [
        key
        for key in curves.TITLES
        if not any(f"{name}/".startswith(f"{key}/") for name in written)
    ] == []


@pytest.mark.slow
def test_a_dense_model_trains_and_samples_but_has_no_form_in_the_port(run, tmp_path):
    """tests/parallel has its numbers on meshes."""
    dense = {"model__model_type": "dense", "model__num_experts": 1, "model__intermediate_size": 32}
    dense["log__sample_tokens"] = 2
    assert run(tmp_path / "run", run__num_steps=2, **dense) == cli.DONE
    record = tiny_runs.lines(tmp_path / "run")[0]
    assert "load_entropy" not in record and record["grad_norm/mlp"] > 0
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")
    assert "Expert load" not in (tmp_path / "run" / "report.html").read_text()
    check_refused(
        r"model_type='dense'; only 'zaya' has a form",
        exchange.to_hf,
        tmp_path / "run",
        tmp_path / "out",
    )
