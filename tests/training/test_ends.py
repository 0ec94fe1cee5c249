"""However a run ends, its results up to then are on the disk: the figures of its last step, and a
report."""

import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import multiprocess_runs
import numpy as np
import pytest
import tiny_runs
from refusals import raising

from zaya_jax import cli, config
from zaya_jax import run as run_lib
from zaya_jax.checkpoint import folders, source
from zaya_jax.checkpoint import vault as vault_lib
from zaya_jax.checkpoint.run import store
from zaya_jax.cluster import leaving
from zaya_jax.data import pipeline
from zaya_jax.training import figures
from zaya_jax.training import step as steps
from zaya_jax.training.observers import EndRun


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(step, what) trains in this process, and does what before that step, and before each after
    it; the result is figures that replace the step's own."""
    made, checkpoints = steps.make_train_step, tmp_path / "run" / "checkpoints"
    monkeypatch.setattr(store, "RETRY_SECONDS", 0)

    def call(at=math.inf, what=None, **keys):
        numbers = itertools.count(1 + max(folders.numbered(checkpoints), default=0))

        def make(*args):
            step = made(*args)

            def counted(*args):
                changed = what() if next(numbers) >= at else None
                state, figures = step(*args)
                return state, figures | (changed or {})

            return counted

        monkeypatch.setattr(steps, "make_train_step", make)
        return tiny_runs.train(tmp_path / "run", **{"run__num_steps": 200} | keys)

    return call


def last_step(workdir):
    numbers = [line["step"] for line in tiny_runs.lines(workdir)]
    assert numbers == list(range(1, len(numbers) + 1))
    return numbers[-1]


def signalled(number):
    return lambda: os.kill(os.getpid(), number)


SKIPPED = {"skipped": jnp.float32(1.0)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_by_a_signal(run, tmp_path, number):
    if signal.getsignal(number) is signal.SIG_IGN:  # nohup's, which a run leaves as it is
        signal.signal(number, signal.SIG_DFL)
    assert run(7, signalled(number)) == cli.PREEMPTED
    assert last_step(tmp_path / "run") == source.SealedSource(tmp_path / "run").step == 7
    assert (tmp_path / "run" / "report.html").exists() == (number != signal.SIGTERM)


@pytest.mark.parametrize("error", [config.UserError("a bad word"), ZeroDivisionError("a bug")])
def test_an_error_in_the_middle(run, tmp_path, error):
    with pytest.raises(type(error)):
        run(7, raising(error))
    assert last_step(tmp_path / "run") == 6 and (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("place", "name"), [(figures.Writer, "_write_lines"), (pipeline.Stream, "close")]
)
def test_a_disk_that_hangs_holds_up_no_error(run, tmp_path, monkeypatch, place, name):
    monkeypatch.setattr(leaving, "PATIENCE", 0.2)
    whole, gone = getattr(place, name), []
    monkeypatch.setattr(place, name, lambda self: time.sleep(20) if gone else whole(self))

    def unmount():
        gone.append(True)
        raise config.StorageError("no shelf")

    begun = time.monotonic()
    with pytest.raises(config.StorageError):
        run(3, unmount)
    assert time.monotonic() - begun < 15


def test_unhealthy(run, tmp_path, capsys, monkeypatch):
    """As with skip_update=never, where nothing is skipped and the loss stays NaN."""
    monkeypatch.setattr(run_lib, "UNHEALTHY_AFTER", 6)
    assert run(10, lambda: {"loss": jnp.float32(np.nan)}) == cli.UNHEALTHY
    workdir = tmp_path / "run"
    assert last_step(workdir) == 16  # the sixth of them, and the step in flight
    assert (workdir / "report.html").exists()
    assert folders.steps_in(workdir / "checkpoints") == [4, 8, 12, 16]
    assert (
        "step 8's: a run in a new workdir begins with its weights by"
        f" --config.run.init_from={workdir}@8" in (capsys.readouterr().out)
    )
    # Started again it goes on from the newest; a sound step makes those in between go, and no
    # others.
    assert run(run__num_steps=18) == cli.DONE
    assert folders.steps_in(workdir / "checkpoints") == [8, 18]


def test_a_run_without_any_update_is_not_done(run, tmp_path, capsys):
    """Fewer than UNHEALTHY_AFTER; and its code is the same when it is asked again."""
    bad = SKIPPED | {"grad_norm": jnp.float32(np.nan)}
    for _ in range(2):
        assert run(1, lambda: bad, run__num_steps=4) == cli.UNHEALTHY
        assert "error: the last 4 updates were skipped, not finite, or" in capsys.readouterr().out


def test_updates_without_effect_count_over_a_start(run, tmp_path, capsys):
    """One of a finite gradient may be a spike's: it is said, and the run is done."""
    for at, num_steps, said in (
        (3, 4, "Without effect: the last 2 updates were skipped"),
        (5, 5, "Without effect: the last 3 updates were skipped"),
        (99, 6, ""),
    ):
        keys = {"run__num_steps": num_steps, "schedule__decay_fraction": 0.0}
        assert run(at, lambda: SKIPPED, **keys) == cli.DONE
        out = capsys.readouterr().out
        assert said in out and ("Without effect" in out) == bool(said)


@pytest.mark.parametrize("lost", ["all", "held out"])
def test_no_target_is_no_loss(run, tmp_path, monkeypatch, capsys, lost):
    """As where all bundles are damaged and `data.on_corrupt` is skip."""
    put = steps.put_batch

    def without_targets(mesh, batch, *args, **kwargs):
        if lost == "all" or kwargs:  # evaluation's
            batch = batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}
        return put(mesh, batch, *args, **kwargs)

    monkeypatch.setattr(steps, "put_batch", without_targets)
    code = run(run__num_steps=2, eval__every=1)
    assert code == (cli.UNHEALTHY if lost == "all" else cli.DONE)
    found = tiny_runs.lines(tmp_path / "run")
    assert len(found) == 2 and not any("eval/loss" in line for line in found)
    assert all(
        (line["target_tokens"] == 0) == np.isnan(line["loss"]) == (lost == "all") for line in found
    )
    assert "eval/loss" not in source.read_meta(tmp_path / "run", 2)["metrics"]
    assert "warning: no text of eval/loss could be read" in capsys.readouterr().out


def command(folder, num_steps):
    keys = tiny_runs.SMALL | {"run.num_steps": num_steps}
    options = [f"--config.{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "experiments.pretrain", f"--workdir={folder / 'run'}", *options]


@pytest.mark.slow
def test_a_second_signal_ends_at_once_without_a_word_too_many(tmp_path):
    # The first is seen after the step that it comes in; this one never ends.
    hang = (
        "import time, runpy, sys; from zaya_jax.cluster import multihost as m;"
        "m.StopSignal.after = lambda self, step: step > 5 and time.sleep(1000);"
        "sys.argv = sys.argv[1:]; runpy.run_module('experiments.pretrain', run_name='__main__')"
    )
    python, _, *program = command(tmp_path, 1_000_000)
    process = subprocess.Popen(
        [python, "-c", hang, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XLA_FLAGS": multiprocess_runs.flags(1)},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step       5/"):
            break
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "error: interrupted by SIGTERM; nothing more was saved\n"
    assert last_step(tmp_path / "run") == 5


def test_no_free_byte_is_one_line_and_the_same_command_works_later(tmp_path):
    """A limit on the size of files stands for the disk: whatever is written fails."""
    environ = os.environ | {"XLA_FLAGS": multiprocess_runs.flags(1)}
    full = ["bash", "-c", 'ulimit -f 0; exec "$@"', "_", *command(tmp_path, 3)]
    done = subprocess.run(full, env=environ, timeout=120, capture_output=True, text=True)
    assert done.returncode == cli.STORAGE and done.stderr.startswith("error: File too large"), done
    assert done.stderr.count("\n") == 1
    assert tiny_runs.train(tmp_path / "run", run__num_steps=3) == cli.DONE
    assert last_step(tmp_path / "run") == 3


def test_a_stop_does_not_wait_for_an_evaluation(run, tmp_path, monkeypatch, capsys):
    """The step has none, which is said; later ones have the figures of a run without a stop."""
    keys = {"eval__every": 4, "run__num_steps": 6}
    with monkeypatch.context() as patch:
        patch.setattr(steps, "make_eval_step", raising(AssertionError("it evaluates")))
        assert run(4, signalled(signal.SIGTERM), **keys) == cli.PREEMPTED
    assert "after step 4; saved, without its evaluation." in capsys.readouterr().out
    assert run(**keys) == cli.DONE
    stopped = tiny_runs.by_step(tmp_path / "run", "eval/loss")
    shutil.rmtree(tmp_path / "run")
    assert run(**keys) == cli.DONE
    whole = tiny_runs.by_step(tmp_path / "run", "eval/loss")
    assert stopped == {6: whole[6]} and set(whole) == {4, 6}


def test_a_sample_that_fails_costs_a_finished_run_nothing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lib, "write_sample", raising(RuntimeError("no room for it")))
    assert run(run__num_steps=2) == cli.DONE
    assert "warning: no sample (no room for it)" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").exists()


def test_done_without_a_durable_copy_is_not_done(run, tmp_path, monkeypatch, capsys):
    keys = {"run__num_steps": 4, "checkpoint__durable": str(tmp_path / "safe")}
    with monkeypatch.context() as patch:
        patch.setattr(vault_lib.Vault, "complete", raising(config.StorageError("no room there")))
        ends = types.SimpleNamespace(every=2, after_step=raising(EndRun("enough")))
        assert run(observers=[ends], **keys) == cli.STORAGE
        assert "enough: ends after step 2; saved" in capsys.readouterr().out
        for folder in ("run", "safe"):
            shutil.rmtree(tmp_path / folder)
        for _ in range(2):  # the second time it is complete but for that
            assert run(**keys) == cli.STORAGE
            out = capsys.readouterr().out
            assert "its copy is NOT: no room there" in out
            assert "safe has no complete copy of step 4 (no room" in out
    safe = vault_lib.Vault(str(tmp_path / "safe"))
    assert safe.steps() == [] and last_step(tmp_path / "run") == 4
    assert run(**keys) == cli.DONE
    assert safe.steps() == [4] and "no complete copy" not in capsys.readouterr().out
