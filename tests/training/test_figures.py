"""A run's figures: its lines when it goes on, where it is, the time that it still takes, the
profile of its steps, and what its report reads of it; its observers, which may end it, and
trackers, by stand-ins for their packages and the packages themselves where they are installed."""

import dataclasses
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import multiprocess_runs
import numpy as np
import pytest
import tiny_runs
from refusals import check_error, check_refused, raising
from tensorboardX import event_file_writer
from tensorboardX.proto.event_pb2 import Event, SessionLog

import zaya_jax as zj
from zaya_jax import cli
from zaya_jax.cluster import beats
from zaya_jax.pytorch import exchange
from zaya_jax.report import curves, read
from zaya_jax.report.run_page import run_document
from zaya_jax.training import figures, trackers
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
    for end in (b"", b'{"step": 10, "lo', b"\0" * 500, b"\0" * 50 + b"\n\0\n" + line(10)[5:]):
        for step in range(12):
            assert cut(path, whole + end, step) == b"".join(good[:step])
    for no_lines in (b"", b"no line", b"\n\n[1]\n7\n"):
        assert cut(path, no_lines, 3) == b""


def test_a_writer_goes_on_after_the_cut_and_says_what_was_dropped(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:9])
    writer = figures.Writer(tmp_path, 1)
    dropped = f"its last {len(line(2)) + 9} bytes, from after step 1, are dropped"
    assert dropped in capsys.readouterr().out
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


def test_a_line_counts_the_damage_that_other_processes_read():
    now = {"loss": 1.0, "lr": 1e-3, "step_seconds": 0.1, "tokens_per_second": 9.0}
    assert "damaged" not in figures.describe(5, 9, now | {"data/corrupt": 0}, 1.0)
    assert " | damaged 3 | eta 1s" in figures.describe(5, 9, now | {"data/corrupt": 3}, 1.0)


def test_a_run_says_each_place_that_it_comes_to(reports, tmp_path, capsys):
    keys = {"eval__every": 2, "checkpoint__every_steps": 3, "run__num_steps": 6}
    assert tiny_runs.train(tmp_path / "run", **keys) == cli.DONE
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


def test_a_profile_has_the_steps_and_scopes_that_were_asked_for(tmp_path):
    # In a process of its own: where a compiler of an absent GPU is loaded, JAX's profiler crashes.
    keys = tiny_runs.SMALL | {"run.num_steps": 3, "log.profile": "2:9"}  # the end comes first
    done = subprocess.run(
        [sys.executable, "-m", "experiments.pretrain", f"--workdir={tmp_path / 'run'}"]
        + [f"--config.{key}={value}" for key, value in keys.items()],
        env=os.environ | {"XLA_FLAGS": multiprocess_runs.flags(1)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == cli.DONE and done.stdout.count("profile written: ") == 1, done
    (trace,) = (tmp_path / "run" / "plugins" / "profile").glob("*/*.xplane.pb")
    found = trace.read_bytes()
    assert b"/experts/" in found and b"/optimizer/" in found and b"step_num" in found


@pytest.mark.parametrize("wrong", ["0", "5:0", "first", "3:", "-1", "1:2:3"])
def test_a_wrong_wish_is_refused(wrong):
    says = r"config\.log\.profile=.* is not STEP or STEP:STEPS"
    check_refused(says, tiny_runs.settings, log__profile=wrong)


def run(workdir, **keys):
    """A start that evaluates and saves at every second step."""
    often = {"eval__every": 2, "eval__windows": 4, "checkpoint__every_steps": 2}
    return tiny_runs.train(workdir, **often, **keys)


def test_a_complete_run_has_the_figures_of_the_page_and_is_not_trained_again(tmp_path, capsys):
    workdir = tmp_path / "run"
    assert run(workdir, run__num_steps=3) == cli.DONE
    lines = tiny_runs.lines(workdir)
    page = Path(__file__).parents[2].joinpath("docs", "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+)` \|", page, re.M))
    names = {name for line in lines for name in line}
    written = {name.partition("/")[0] if "_norm/" in name else name for name in names}
    assert written <= listed, f"not in docs/metrics.md: {written - listed}"
    assert {"eval/loss", "load", "data/wait_fraction"} <= written
    capsys.readouterr()
    assert run(workdir, run__num_steps=3) == cli.DONE
    assert "is complete" in capsys.readouterr().out and tiny_runs.lines(workdir) == lines
    assert (workdir / "report.html").stat().st_size > 1000
    assert list(workdir.glob("events.out.*"))


def test_the_report_draws_the_figures_that_a_run_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "peak_flops", lambda *_: 1e12)  # a CPU's is not known, so no MFU
    assert run(tmp_path / "run", run__num_steps=12, log__every=1) == cli.DONE
    found = read.read_workdir(tmp_path / "run")
    source = run_document(found).html()
    for title in ("Loss", "Seconds of a save", "Gradient norm by group"):
        assert f"<figcaption>{title}<" in source
    written = [f"{name}/" for name in (*found.series, *found.vectors)]
    for key in curves.TITLES:
        assert any(name.startswith(f"{key}/") for name in written), key


@pytest.mark.slow
def test_a_dense_model_trains_and_samples_but_has_no_form_in_the_port(tmp_path):
    """tests/parallel has its numbers on meshes."""
    dense = {"model__model_type": "dense", "model__num_experts": 1, "model__intermediate_size": 32}
    dense |= {"log__sample_tokens": 2}
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


class Norm:
    """The embedding's norm, every second step; ends the run at `last`."""

    every = 2

    def __init__(self, last=None):
        self.last, self.seen = last, {}

    def after_step(self, number, state, figures):
        self.seen[number] = figures["loss"]
        if number == self.last:
            raise zj.EndRun("the embedding is large enough")
        rows = jnp.linalg.norm(state["params"]["embed"]["embedding"], axis=1)
        # The step has names of its own, which keep their values.
        return {"embedding": jnp.linalg.norm(rows), "rows": rows, "step": 99, "loss": np.nan}


def end_without_a_reason(*_):
    raise zj.EndRun


def once(number, done):
    """An observer that is called after this step alone."""
    return SimpleNamespace(every=number, after_step=done)


def train(workdir, *observers):
    return tiny_runs.train(workdir, observers=observers, run__num_steps=8)


def test_observers_see_their_steps_and_change_no_bit(tmp_path, caplog):
    norm = Norm()
    assert train(tmp_path / "seen", norm) == cli.DONE
    losses, embedding, rows = (
        tiny_runs.by_step(tmp_path / "seen", figure) for figure in ("loss", "embedding", "rows")
    )
    assert norm.seen == {number: losses[number] for number in (2, 4, 6, 8)}
    assert list(embedding) == [2, 4, 6, 8] and embedding[2] != embedding[4] and len(rows[2]) > 8

    # One that ends the run saves there, and what follows is the run that was never ended. It is
    # over even if a signal comes before, after which the same command would go on.
    signalled = once(5, lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    ended = tmp_path / "ended"
    assert train(ended, signalled, Norm(last=6)) == cli.DONE
    assert "the embedding is large enough: ends after step 6; saved" in caplog.text
    assert (ended / "checkpoints" / "6").is_dir() and (ended / "report.html").exists()
    assert train(ended, once(7, end_without_a_reason)) == cli.DONE
    assert "no reason given: ends after step 7; saved" in caplog.text
    # After the last step the run has its usual end.
    assert train(ended, Norm(last=8)) == cli.DONE
    assert "ends after step 8" not in caplog.text
    tiny_runs.same_state(tmp_path / "seen", ended)


def test_an_observer_that_fails_ends_the_run_with_its_error(tmp_path):
    check_error(ZeroDivisionError, "", train, tmp_path / "broken", once(2, lambda *_: 1 / 0))
    assert [line["step"] for line in tiny_runs.lines(tmp_path / "broken")][-1] == 2


# ################################################################################################
# Trackers
# ##################################################################################################


FIGURES = {"loss": 2.5, "grad_norm/experts": 0.5}


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package; everything that it was told."""
    told = []

    def init(**given):
        told.append(("init", given["id"], given["resume"], given["config"]["data.seq_len"]))
        return SimpleNamespace(
            log=lambda figures: told.append(("log", figures)),
            define_metric=lambda *_, **__: None,
            mark_preempting=lambda: told.append(("preempting",)),
            finish=lambda exit_code: told.append(("end", exit_code)),
        )

    module = ModuleType("wandb")
    module.init, module.Settings = init, dict
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


@pytest.mark.parametrize(("reached", "dropped_from"), [(0, 0), (3, 4)])
def test_tensorboard_drops_the_steps_that_come_again(reached, dropped_from, tmp_path):
    log, end = trackers._tensorboard(tmp_path, reached)
    log(reached + 1, FIGURES)
    end(0)
    content, found = next(tmp_path.glob("events.out.*")).read_bytes(), []
    while content:  # records of TFRecord: length, its checksum, the event, its checksum
        size = int.from_bytes(content[:8], "little")
        found.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    (start,) = [event.step for event in found if event.session_log.status == SessionLog.START]
    assert start == dropped_from  # also of a run that was killed before it had saved anything
    assert [event.step for event in found if event.HasField("summary")] == [reached + 1] * len(
        FIGURES
    )


def test_a_run_and_its_continuation_are_one_run_of_a_tracker(wandb, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)  # as where it is not installed
    own = []

    def fails_at_3(step, figures):
        own.append((step, figures["loss"]))
        assert step < 3, "no disk"

    for num_steps in (4, 6):
        keys = {"log__trackers": ("wandb", "trackio"), "run__num_steps": num_steps}
        assert tiny_runs.train(tmp_path / "run", tracker=fails_at_3, **keys) == cli.DONE
    written = tiny_runs.lines(tmp_path / "run")
    logged = [figures for what, figures, *_ in wandb if what == "log"]
    assert [(x["step"], x["loss"]) for x in logged] == [(x["step"], x["loss"]) for x in written]
    assert all(isinstance(value, int | float) for x in logged for value in x.values())
    assert {"load_entropy/mean", "dead_experts/least"} <= logged[0].keys()
    first, again = (x for x in wandb if x[0] == "init")
    assert first == again == ("init", first[1], "allow", 16)
    assert wandb[5] == wandb[-1] == ("end", cli.DONE)
    assert own == [(written[i]["step"], written[i]["loss"]) for i in (0, 1, 2, 4)]
    said = capsys.readouterr().out
    for name in ("function", "trackio"):
        assert said.count(f"warning: the tracker {name} failed") == 2
    assert "AssertionError: no disk" in said


def opened(folder, *names, function=None):
    settings = tiny_runs.settings()
    log = dataclasses.replace(settings.log, trackers=names)
    return trackers.Trackers(dataclasses.replace(settings, log=log), folder, 0, function)


def test_the_end_tells_whether_a_run_goes_on_and_comes_once(wandb, tmp_path):
    for code in (cli.PREEMPTED, cli.UNHEALTHY):
        found = opened(tmp_path, "wandb")
        found.end(code)
        found.end()
    assert [x for x in wandb if x[0] != "init"] == [
        ("preempting",),
        ("end", cli.PREEMPTED),
        ("end", cli.UNHEALTHY),
    ]


def test_a_tracker_that_hangs_holds_up_no_step_and_its_end_is_waited_for_only_so_long(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trackers, "PATIENCE", 0.1)
    monkeypatch.setattr(trackers, "_tensorboard", lambda *_: (lambda *_: None, lambda code: None))
    release = threading.Event()
    found = opened(tmp_path, function=lambda step, figures: release.wait())
    for step in range(trackers.MAX_QUEUED_STEPS + 5):
        found.write(step, FIGURES)
    found.end(cli.DONE)
    release.set()
    assert "the tracker function did not take all figures within 0 s" in capsys.readouterr().out


def written_in_two_starts(folder, name):
    """Steps 1 and 2, a stop, and steps 2 and 3."""
    for steps, code in (((1, 2), cli.PREEMPTED), ((2, 3), cli.DONE)):
        found = opened(folder, name)
        for step in steps:
            found.write(step, FIGURES | {"loss": float(step)})
        found.end(code)


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_packages_themselves_have_the_run_once(name, tmp_path, monkeypatch):
    package = pytest.importorskip(name)
    code = (
        f"import test_figures as t, pathlib; t.written_in_two_starts(pathlib.Path('run'), '{name}')"
    )
    offline = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/ml",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "tr"),
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    for variable, value in offline.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "run").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert b"warning: the tracker" not in done.stdout and not done.returncode, done
    if name == "wandb":
        runs = f"run/wandb/offline-run-*-{(tmp_path / 'run/tracker.id').read_text()}"
        assert len([*tmp_path.glob(runs)]) == 2
    elif name == "trackio":
        with sqlite3.connect(tmp_path / "tr" / "zaya_jax.db") as base:
            query = "select run_name, step, metrics from metrics order by id"
            names, steps, figures = zip(*base.execute(query).fetchall(), strict=True)
        assert len({*names}) == 1 and steps == (1, 2, 2, 3)
        assert [json.loads(line)["loss"] for line in figures] == [1, 2, 2, 3]
    else:
        client = package.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("zaya_jax").experiment_id])
        assert run.info.status == "FINISHED" and run.data.params["data.seq_len"] == "16"
        assert [x.step for x in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 2, 3]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::ResourceWarning"
)
def test_a_full_disk_ends_tensorboard_and_blocks_nothing(tmp_path, monkeypatch):
    def write():
        for step in range(1000):
            log(step, FIGURES)
            time.sleep(0.01)

    log, end = trackers._tensorboard(tmp_path, 0)
    full = raising(OSError(28, "No space left on device"))
    monkeypatch.setattr(event_file_writer.EventsWriter, "write_event", full)
    check_error(OSError, "its thread has ended", write)
    end(0)
