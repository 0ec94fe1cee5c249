"""However a run ends, what it knew by then is on the disk: the figures of its last step, and a report."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import multiprocess_runs
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import cli, config
from zaya_jax.checkpoint import audit, remote, store, writing
from zaya_jax.cluster import leaving
from zaya_jax.train import metrics
from zaya_jax.train import step as steps

SMALL = {
    "model.hidden_size": 16, "model.num_hidden_layers": 2, "model.head_dim": 8, "model.moe_intermediate_size": 16,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 16, "data.global_batch": 8,
    "eval.every": 1000, "eval.windows": 2, "log.sample_tokens": 2, "log.every": 1, "checkpoint.every_steps": 4,
    "precision.compute": "float32", "optim.name": "adamw", "mesh.data": 1, "checkpoint.keep": 2,
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(step, what) trains in this process, and before it computes that step does what."""
    corpus, devices, made = tmp_path / "corpus", jax.devices()[:1], steps.make_train_step
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"some words, file {i}\n" * 40)
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    monkeypatch.setattr(store, "RETRY_SECONDS", 0)

    def call(at, what, reached=0, **keys):
        count = reached

        def make(*args):
            step = made(*args)

            def counted(*args):
                nonlocal count
                count += 1
                given = what() if count >= at else None
                state, figures = step(*args)
                return state, figures | (given or {})

            return counted

        monkeypatch.setattr(steps, "make_train_step", make)
        settings = tiny.get_config()
        keys = {k.replace("__", "."): v for k, v in keys.items()}
        settings.update_from_flattened_dict(
            SMALL | {"data.path": str(corpus), "run.num_steps": 200, "checkpoint.every_steps": 4} | keys
        )
        return pretrain.train(config.check(settings), tmp_path / "run")

    yield call
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def last_step(workdir):
    numbers = [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    return numbers[-1]


def raising(error):
    def call():
        raise error

    return call


def raising_always(error):
    return lambda *args: raising(error)()


def bad(**figures):
    return lambda: {"skipped": jnp.float32(1.0)} | {name: jnp.float32(x) for name, x in figures.items()}


def test_done(run, tmp_path):
    assert run(99, None, run__num_steps=3) == cli.DONE
    assert last_step(tmp_path / "run") == 3 and (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_by_a_signal(run, tmp_path, number):
    asked = []
    assert run(7, lambda: asked or asked.append(os.kill(os.getpid(), number))) == cli.PREEMPTED
    assert last_step(tmp_path / "run") == store.latest_step(tmp_path / "run") == 7
    assert (tmp_path / "run" / "report.html").exists() == (number != signal.SIGTERM)


@pytest.mark.parametrize(
    "error", [config.UserError("a bad word"), config.StorageError("no shelf"), ZeroDivisionError("a bug")]
)
def test_an_error_in_the_middle(run, tmp_path, error):
    with pytest.raises(type(error)):
        run(7, raising(error))
    assert last_step(tmp_path / "run") == 6 and (tmp_path / "run" / "report.html").exists()


def test_an_error_while_it_saves(run, tmp_path, monkeypatch):
    write = writing.write_file

    def full(path, buffers):
        if "/.saving-12/" in str(path) or "/.saving-8/" in str(path):
            raise OSError(28, "No space left on device", str(path))
        write(path, buffers)

    monkeypatch.setattr(writing, "write_file", full)
    with pytest.raises(config.StorageError, match="2 saves failed in a row"):
        run(99, None, checkpoint__max_failures=2, checkpoint__max_wait=60.0)
    assert last_step(tmp_path / "run") == 16 and (tmp_path / "run" / "report.html").exists()


def test_a_place_that_cannot_be_written_ends_the_run_and_once_it_is_back_the_run_goes_on(
    run, tmp_path, capsys
):
    """In this process; tests/train/test_killed.py has it as a program's end."""
    root, away = tmp_path / "run" / "checkpoints", tmp_path / "moved away"

    def go():
        latest = time.monotonic() + 60
        while not away.exists() and 8 not in writing.steps_in(root) and time.monotonic() < latest:
            time.sleep(0.01)  # it is saved beside the steps
        if not away.exists():
            root.rename(away)
            root.write_text("no folder any more")

    with pytest.raises(config.StorageError, match="2 saves failed in a row"):
        run(10, go, checkpoint__max_failures=2, checkpoint__max_wait=60.0)
    out = capsys.readouterr().out
    assert out.count("is NOT saved") == 2 and "training goes on" in out
    root.unlink()
    away.rename(root)
    assert writing.steps_in(root) == [4, 8] and audit.verify(root / "8") == []
    assert run(99, None, run__num_steps=10) == cli.DONE
    assert last_step(tmp_path / "run") == 10


def test_saves_by_the_clock_and_by_tokens(run, tmp_path):
    keys = {
        "run__num_steps": 25, "checkpoint__every_steps": 100_000, "checkpoint__every_minutes": 0.002,
        "checkpoint__keep": 1, "checkpoint__keep_tokens": 128 * 10,
    }  # fmt: skip
    assert run(1, lambda: time.sleep(0.03), **keys) == cli.DONE
    root = tmp_path / "run" / "checkpoints"
    steps = writing.steps_in(root)
    assert all(audit.verify(root / str(step)) == [] for step in steps)
    assert steps[-1] == 25 and 2 <= len(steps) <= 3  # the first after each 10 steps, and the last
    assert all(step >= 10 for step in steps)


def test_a_disk_that_hangs_holds_up_no_error(run, tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "PATIENCE", 0.2)
    monkeypatch.setattr(metrics.Writer, "_write_lines", lambda self: time.sleep(20))
    begun = time.monotonic()
    with pytest.raises(config.StorageError):
        run(3, raising(config.StorageError("no shelf")))
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    "figures", [{"loss": float("nan")}, pytest.param({}, marks=pytest.mark.slow)], ids=["never", "skipped"]
)
def test_unhealthy(run, tmp_path, capsys, figures):
    """Also with skip_update=never, where nothing is skipped and the loss stays what it is: not a number."""
    what = bad(**figures)
    if figures:
        what = lambda: {name: jnp.float32(x) for name, x in figures.items()}  # noqa: E731
    assert run(10, what) == cli.UNHEALTHY
    workdir = tmp_path / "run"
    assert last_step(workdir) == 60  # the 50th of them, and the step in flight
    assert (workdir / "report.html").exists()
    steps = writing.steps_in(workdir / "checkpoints")
    assert steps == [4, 8, *range(12, 61, 4)]
    assert (
        f"step 8's: a run in a new workdir begins with its weights by --config.run.init_from={workdir}@8"
        in (capsys.readouterr().out)
    )
    # Started again it goes on from the newest; a sound step makes those in between go, and no others.
    assert run(60, dict, reached=60, run__num_steps=62) == cli.DONE
    assert writing.steps_in(workdir / "checkpoints") == [8, 62]


KEYS = {k: v for k, v in SMALL.items() if k != "mesh.data"} | {"run.num_steps": 30}


def command(folder, **keys):
    multiprocess_runs.pretrain(folder, folder / "never run", {})  # which makes the corpus
    return [
        sys.executable, "-m", "experiments.pretrain", f"--workdir={folder / 'run'}",
        *[f"--config.{k}={v}" for k, v in (KEYS | {"data.path": folder / "corpus"} | keys).items()],
    ]  # fmt: skip


@pytest.mark.slow
def test_nobody_reads_what_it_prints(tmp_path):
    """As with `| head -1`; a terminal that goes; and with no output at all."""
    program = command(tmp_path)
    environ = os.environ | {"XLA_FLAGS": multiprocess_runs.flags(1)}
    reading, writing_end = os.pipe()
    process = subprocess.Popen(program, stdout=writing_end, stderr=writing_end, env=environ)
    os.close(writing_end)
    os.read(reading, 1)
    os.close(reading)
    assert process.wait(120) == cli.DONE
    assert last_step(tmp_path / "run") == store.latest_step(tmp_path / "run") == 30
    assert "done: 30 steps" in (tmp_path / "run" / "logs" / "process-00000.log").read_text()
    closed = [p.replace("num_steps=30", "num_steps=35") for p in program]
    done = subprocess.run(["bash", "-c", 'exec "$@" >&- 2>&- <&-', "_", *closed], env=environ, timeout=120)
    assert done.returncode == cli.DONE and last_step(tmp_path / "run") == 35
    with open("/dev/full", "w") as full:  # a complete run has nothing to do, and its code says so
        done = subprocess.run(
            closed, env=environ, timeout=120, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (cli.DONE, "")


def test_a_second_signal_ends_at_once_without_a_word_too_many(tmp_path):
    program = command(tmp_path, **{"run.num_steps": 1_000_000, "checkpoint.every_steps": 1_000_000})
    environ = os.environ | {"XLA_FLAGS": multiprocess_runs.flags(1)}
    # The first is seen after the step that it comes in; this one never ends.
    hang = (
        "import time, runpy, sys; from zaya_jax.cluster import multihost as m;"
        "m.StopSignal.after = lambda self, step: step > 5 and time.sleep(1000);"
        "sys.argv = sys.argv[1:]; runpy.run_module('experiments.pretrain', run_name='__main__')"
    )
    process = subprocess.Popen(
        [program[0], "-c", hang, "experiments.pretrain", *program[3:]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
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


def test_an_interrupt_before_the_first_step_is_one_line_at_most(tmp_path):
    """While it imports it just ends; later, wherever it is, it says so and ends."""
    program = command(tmp_path, **{"run.num_steps": 1_000_000})
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}

    def interrupted(soon):
        process = subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        while not (soon or (tmp_path / "run" / "config.json").exists()):
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        return process.returncode, err

    assert interrupted(soon=True) == (-signal.SIGINT, "")
    assert interrupted(soon=False) == (130, "error: interrupted by SIGINT; nothing more was saved\n")


def test_no_free_byte_is_one_line_and_the_same_command_works_later(tmp_path):
    """A limit on the size of files stands for the disk: whatever is written fails."""
    program = command(tmp_path, **{"run.num_steps": 3})
    environ = os.environ | {"XLA_FLAGS": multiprocess_runs.flags(1)}
    full = ["bash", "-c", 'ulimit -f 0; exec "$@"', "_", *program]
    done = subprocess.run(full, env=environ, timeout=120, capture_output=True, text=True)
    assert done.returncode == cli.STORAGE and done.stderr.startswith("error: File too large"), done
    assert done.stderr.count("\n") == 1
    done = subprocess.run(program, env=environ, timeout=120, capture_output=True, text=True)
    assert done.returncode == cli.DONE and last_step(tmp_path / "run") == 3, done


@pytest.mark.slow
def test_another_process_s_end_costs_no_lines(tmp_path):
    keys = KEYS | {"run.num_steps": 1_000_000, "checkpoint.every_steps": 1_000_000}
    with multiprocess_runs.pretrain(tmp_path, tmp_path / "run", keys, 2) as run:
        run.wait_for("step      20/")
        for number in (signal.SIGTERM, signal.SIGINT):
            run.processes[1].send_signal(number)
        results = run.wait()
    # Which of two pending signals a process sees first is the system's choice.
    assert results[0].code == results[1].code and results[0].code in (130, 143)
    assert "error: process 1 on" in results[0].err and "Traceback" not in results[1].err
    shown = [line.split()[1] for line in results[0].out.splitlines() if line.startswith("step ")]
    assert last_step(tmp_path / "run") == int(shown[-1].split("/")[0])


def test_a_stop_does_not_wait_for_an_evaluation(run, tmp_path, monkeypatch, capsys):
    """It comes first thing when the run goes on, of the same weights: the figure is that of a run without a stop."""
    asked, evaluated, made = [], [], steps.make_eval_step

    def make(*args):
        program = made(*args)
        return lambda *a: evaluated.append(len(asked)) or program(*a)

    monkeypatch.setattr(steps, "make_eval_step", make)
    stop = lambda: asked or asked.append(os.kill(os.getpid(), signal.SIGTERM))  # noqa: E731
    assert run(4, stop, eval__every=4, run__num_steps=6) == cli.PREEMPTED
    assert evaluated == []
    assert "The same command goes on, first with the evaluation of step 4." in capsys.readouterr().out
    assert run(99, None, reached=4, eval__every=4, run__num_steps=6) == cli.DONE
    assert "step 4 | held-out" in capsys.readouterr().out
    found = figures_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert run(99, None, eval__every=4, run__num_steps=6) == cli.DONE
    assert found == figures_of(tmp_path / "run") and set(found) == {4, 6}


def figures_of(workdir):
    """Held-out losses by step."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}


@pytest.mark.parametrize("what", ["write_sample", pytest.param("write_report", marks=pytest.mark.slow)])
def test_a_signal_after_the_last_save_ends_the_run(run, tmp_path, monkeypatch, capsys, what):
    held = threading.Event()

    def long(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        held.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, what, long)
        assert run(99, None, run__num_steps=2) == cli.DONE
    out = capsys.readouterr().out
    assert "SIGTERM came before sample and report were made: the same command makes the report" in out
    assert leaving.some_left()
    held.set()
    assert store.latest_step(tmp_path / "run") == 2
    assert run(99, None, run__num_steps=2) == cli.DONE
    assert (tmp_path / "run" / "report.html").exists()


def test_an_error_at_the_end_is_not_lost():
    with pytest.raises(ZeroDivisionError):
        leaving.unless(lambda: False, raising(ZeroDivisionError()))


def test_done_without_a_durable_copy_is_not_done(run, tmp_path, monkeypatch, capsys):
    keys = {"run__num_steps": 4, "checkpoint__durable": str(tmp_path / "safe")}
    with monkeypatch.context() as patch:
        patch.setattr(remote.Vault, "complete", raising_always(config.StorageError("no room there")))
        for _ in range(2):  # the second time it is complete but for that
            assert run(99, None, **keys) == cli.STORAGE
            out = capsys.readouterr().out
            assert "its copy is NOT: no room there" in out and "safe has no whole copy of step 4;" in out
    assert remote.Vault(str(tmp_path / "safe")).steps() == [] and last_step(tmp_path / "run") == 4
    assert run(99, None, **keys) == cli.DONE
    assert (
        remote.Vault(str(tmp_path / "safe")).steps() == [4] and "no whole copy" not in capsys.readouterr().out
    )
    (tmp_path / "run").rename(tmp_path / "first")
    with pytest.raises(config.UserError, match=r"safe holds step 4 of another run than .*optim\.lr=0\.003"):
        run(99, None, **keys, optim__lr=0.5)
