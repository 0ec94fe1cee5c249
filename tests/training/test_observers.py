"""What a run is followed by: a caller's observers, which may end it, and trackers, by stand-ins for
their packages, and the packages themselves where they are installed."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import types
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from refusals import check_error
from tensorboardX import event_file_writer
from tensorboardX.proto.event_pb2 import Event, SessionLog

import zaya_jax as zj
from zaya_jax import cli
from zaya_jax.training import trackers


class Norm:
    """The embedding's norm, every second step; ends the run at `last`."""

    every = 2

    def __init__(self, last=None):
        self.last, self.seen = last, []

    def after_step(self, number, state, figures):
        self.seen.append((number, figures["loss"]))
        if number == self.last:
            raise zj.EndRun("the embedding is large enough")
        rows = jnp.linalg.norm(state["params"]["embed"]["embedding"], axis=1)
        # The step has names of its own, which keep their values.
        return {"embedding": jnp.linalg.norm(rows), "rows": rows, "step": 99, "loss": np.nan}


def end_without_a_reason(*_):
    raise zj.EndRun


def once(number, done):
    """An observer that is called after this step alone."""
    return types.SimpleNamespace(every=number, after_step=done)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_runs.write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def train(corpus, workdir, *observers, num_steps=8):
    return tiny_runs.train(
        workdir, observers=observers, data__path=corpus, run__num_steps=num_steps
    )


def test_observers_see_their_steps_and_change_no_bit(corpus, tmp_path, caplog):
    norm = Norm()
    assert train(corpus, tmp_path / "seen", norm) == cli.DONE
    lines = {line["step"]: line for line in tiny_runs.lines(tmp_path / "seen")}
    assert [number for number, _ in norm.seen] == [2, 4, 6, 8]
    assert all(lines[number]["loss"] == loss for number, loss in norm.seen)
    assert {step for step, line in lines.items() if "embedding" in line} == {2, 4, 6, 8}
    assert lines[2]["embedding"] != lines[4]["embedding"] and len(lines[2]["rows"]) > 8

    # One that ends the run saves there, and what follows is the run that was never ended. It is
    # over even if a signal comes before, after which the same command would go on.
    assert (
        train(
            corpus,
            tmp_path / "ended",
            once(5, lambda *_: os.kill(os.getpid(), signal.SIGHUP)),
            Norm(last=6),
        )
        == cli.DONE
    )
    assert "the embedding is large enough: ends after step 6; saved" in caplog.text
    assert (tmp_path / "ended" / "checkpoints" / "6").is_dir()
    assert (tmp_path / "ended" / "report.html").exists()
    shutil.copytree(tmp_path / "ended", tmp_path / "on")
    assert train(corpus, tmp_path / "on", once(7, end_without_a_reason)) == cli.DONE
    assert "no reason given: ends after step 7; saved" in caplog.text
    # After the last step the run has its usual end.
    assert train(corpus, tmp_path / "on", Norm(last=8)) == cli.DONE
    assert "ends after step 8" not in caplog.text
    tiny_runs.same_state(tmp_path / "seen", tmp_path / "on")


def test_an_observer_that_fails_ends_the_run_with_its_error(corpus, tmp_path):
    class Broken(Norm):
        def after_step(self, number, state, figures):
            raise RuntimeError("mine")

    check_error(RuntimeError, "mine", lambda: train(corpus, tmp_path / "broken", Broken()))
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
    tiny_runs.write_corpus(tmp_path / "text")
    own, keys = [], {"data__path": str(tmp_path / "text"), "log__trackers": ("wandb", "trackio")}

    def fails_at_3(step, figures):
        own.append((step, figures["loss"]))
        assert step < 3, "no disk"

    train = functools.partial(tiny_runs.run_lib.train, tracker=fails_at_3)
    monkeypatch.setattr(tiny_runs.run_lib, "train", train)
    assert tiny_runs.train(tmp_path / "run", run__num_steps=4, **keys) == cli.DONE
    assert tiny_runs.train(tmp_path / "run", run__num_steps=6, **keys) == cli.DONE
    written = tiny_runs.lines(tmp_path / "run")
    logged = [figures for what, figures, *_ in wandb if what == "log"]
    assert [(x["step"], x["loss"]) for x in logged] == [(x["step"], x["loss"]) for x in written]
    assert all(isinstance(value, int | float) for x in logged for value in x.values())
    first, again = (x for x in wandb if x[0] == "init")
    assert first == again == ("init", first[1], "allow", 16)
    assert wandb[5] == wandb[-1] == ("end", cli.DONE)
    assert own == [(x["step"], x["loss"]) for x in written[:3]] + [(5, written[4]["loss"])]
    said = capsys.readouterr().out
    assert (
        said.count("warning: the tracker function failed") == 2
        and "AssertionError: no disk" in said
    )
    assert said.count("warning: the tracker trackio failed") == 2


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


def test_another_process_than_the_writer_has_none(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "is_writer", lambda: False)
    opened(tmp_path, "wandb").end(cli.DONE)
    assert not wandb and not list(tmp_path.iterdir())


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
        "import test_observers as t, pathlib; t.written_in_two_starts(pathlib.Path('run'),"
        f" '{name}')"
    )
    offline = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/ml",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    offline |= {
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
        assert (
            len(
                list(
                    tmp_path.glob(
                        f"run/wandb/offline-run-*-{(tmp_path / 'run/tracker.id').read_text()}"
                    )
                )
            )
            == 2
        )
    elif name == "trackio":
        with sqlite3.connect(tmp_path / "tr" / "zaya_jax.db") as base:
            found = base.execute(
                "select run_name, step, metrics from metrics order by id"
            ).fetchall()
        assert len({run for run, *_ in found}) == 1 and [step for _, step, _ in found] == [
            1,
            2,
            2,
            3,
        ]
        assert all(json.loads(figures)["loss"] == step for _, step, figures in found)
    else:
        client = package.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("zaya_jax").experiment_id])
        assert run.info.status == "FINISHED" and run.data.params["data.seq_len"] == "16"
        assert [x.step for x in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 2, 3]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::ResourceWarning"
)
def test_a_full_disk_ends_tensorboard_and_blocks_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def write():
        for step in range(1000):
            log(step, FIGURES)
            time.sleep(0.01)

    log, end = trackers._tensorboard(tmp_path, 0)
    monkeypatch.setattr(event_file_writer.EventsWriter, "write_event", full)
    check_error(OSError, "its thread has ended", write)
    end(0)
