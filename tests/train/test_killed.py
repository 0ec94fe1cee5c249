"""The program killed at any moment, or with a storage that fails: nothing lost, repeated, or half there."""

import json
import random
import signal
import time

import jax
import multiprocess_runs
import numpy as np
import pytest

from zaya_jax import cli
from zaya_jax.checkpoint import audit, partial
from zaya_jax.checkpoint.writing import steps_in

SMALL = {
    "model.hidden_size": 16, "model.num_hidden_layers": 2, "model.head_dim": 8, "model.moe_intermediate_size": 16,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 16, "data.global_batch": 8,
    "eval.every": 1000, "eval.windows": 2, "log.sample_tokens": 2, "log.every": 1, "checkpoint.every_steps": 1,
    "precision.compute": "float32", "optim.name": "adamw",
}  # fmt: skip


@pytest.fixture
def pretrain(tmp_path):
    """start(workdir, {config key: value}, processes) of the program."""
    return lambda workdir, keys, count=1: multiprocess_runs.pretrain(tmp_path, workdir, SMALL | keys, count)


def done(runner):
    with runner as run:
        results = run.wait()
    assert [r.code for r in results] == [cli.DONE] * len(results), results
    return results


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def last_state(workdir):
    return partial.read(workdir, "*")


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def complete_steps(workdir):
    """The steps that a reader sees, all of which must be whole."""
    root = workdir / "checkpoints"
    steps = sorted(int(p.name) for p in root.iterdir() if p.name.isdigit()) if root.is_dir() else []
    for step in steps:
        assert audit.verify(root / str(step)) == []
    return steps


@pytest.mark.parametrize(
    ("kills", "keys"),
    [
        (3, {}),
        pytest.param(100, {}, marks=pytest.mark.slow),
        pytest.param(20, {"checkpoint.local": "fast", "checkpoint.durable": "safe"}, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_times_a_run_ends_as_if_it_had_not_been(pretrain, tmp_path, kills, keys):
    length = {"run.num_steps": 12 * kills}
    done(pretrain(tmp_path / "whole", length | {"checkpoint.every_steps": 10_000}))
    keys = {name: str(tmp_path / value) for name, value in keys.items()} | length
    workdir, times, newest = tmp_path / "killed", random.Random(0), 0
    for kill in range(kills):
        with pretrain(workdir, keys) as run:
            if kill % 4:
                # Somewhere in its steps and saves.
                run.wait_for("ms |")
                latest = time.monotonic() + 60
                while kill == 1 and not steps_in(workdir / "checkpoints") and time.monotonic() < latest:
                    time.sleep(
                        0.05
                    )  # the first save compiles its copy: without one the test would show nothing
                time.sleep(times.uniform(0, 0.6))
            else:
                # While it looks for its newest checkpoint, restores it, compiles, or starts.
                time.sleep(times.uniform(1, 5))
            run.processes[0].kill()
            code = run.wait()[0].code
        assert code in (-signal.SIGKILL, cli.DONE)
        steps = complete_steps(workdir)
        assert max(steps, default=0) >= newest, "a complete checkpoint has gone"
        newest = max(steps, default=0)
    assert newest > 0
    done(pretrain(workdir, keys))
    assert losses(workdir) == losses(tmp_path / "whole")
    same(last_state(workdir), last_state(tmp_path / "whole"))
    hidden = {p.name for p in (workdir / "checkpoints").iterdir() if not p.name.isdigit()}
    assert hidden == {".run"}


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [(), ("local", "durable")])
def test_two_processes_killed_then_one_then_four(pretrain, tmp_path, tiers):
    keys = {"run.num_steps": 60, "precision.newton_schulz": "float32", "optim.name": "muon"}
    done(pretrain(tmp_path / "alone", keys | {"checkpoint.every_steps": 1000}, 2))
    workdir = tmp_path / "moved"
    keys |= {f"checkpoint.{tier}": str(tmp_path / tier) for tier in tiers}
    for count in (2, 1):
        with pretrain(workdir, keys, count) as run:
            run.wait_for("step  1/" if count == 2 else "ms |")
            time.sleep(2)
            latest = time.monotonic() + 30  # a busy machine takes longer to its first checkpoint
            while not list((workdir / "checkpoints").glob("[0-9]*")) and time.monotonic() < latest:
                time.sleep(0.1)
            for process in run.processes:
                process.kill()
            run.wait()
        assert complete_steps(workdir)
    done(pretrain(workdir, keys, 4))
    expected, got = losses(tmp_path / "alone"), losses(workdir)
    assert len(got) == 60
    np.testing.assert_allclose(got, expected, rtol=1e-4)


# A program that reads this first finds everything below FOLDER read-only as soon as there is a file FOLDER.read-only.
READ_ONLY = """
import errno, os, sys

FOLDER = {folder!r}
PATHS = {{"os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.link": 2}}

def refuse(event, args):
    if event == "open":
        writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) if isinstance(args[2], int) else 0
        paths = args[:1] if writes else ()
    else:
        paths = args[: PATHS.get(event, 0)]
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(FOLDER + "/"):
            if os.path.exists(FOLDER + ".read-only"):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fsdecode(path))

sys.addaudithook(refuse)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "read-only"])
def test_a_place_that_cannot_be_written_ends_the_run_with_its_own_code(pretrain, tmp_path, monkeypatch, how):
    workdir, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    keys = {"run.num_steps": 100_000, "checkpoint.every_steps": 5, "checkpoint.max_failures": 2}
    if how == "read-only":
        (tmp_path / "hook").mkdir()
        (tmp_path / "hook" / "sitecustomize.py").write_text(READ_ONLY.format(folder=str(workdir)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    with pretrain(workdir, keys) as run:
        run.wait_for("step     12/")
        if how == "gone":
            root.rename(workdir / "moved away")
            root.write_text("no folder any more")
        else:
            (tmp_path / "run.read-only").touch()
        (result,) = run.wait()
    assert result.code == cli.STORAGE
    assert result.out.count("is NOT saved") == 2 and "training goes on" in result.out
    assert result.err.count("\n") == 1 and "error: 2 saves failed in a row" in result.err
    if how == "gone":
        root.unlink()
        (workdir / "moved away").rename(root)
    else:
        assert "Read-only file system" in result.err
        (tmp_path / "run.read-only").unlink()
    steps = complete_steps(workdir)
    assert steps and steps[-1] >= 5
    done(pretrain(workdir, keys | {"run.num_steps": steps[-1] + 2}))
    assert len(losses(workdir)) == steps[-1] + 2


@pytest.mark.slow
def test_one_of_two_processes_killed_in_or_after_its_saves(pretrain, tmp_path):
    """Twenty times, with all tiers; after each the newest step is a run's that was left alone, bit for bit."""
    kills, times, newest = 20, random.Random(0), 0
    keys = {"run.num_steps": 15 * kills}
    done(pretrain(tmp_path / "whole", keys | {"checkpoint.keep": 1000}, 2))
    workdir, local = tmp_path / "killed", tmp_path / "local"
    tiers = {"checkpoint.local": local, "checkpoint.durable": tmp_path / "durable"}
    for kill in range(kills):
        with pretrain(workdir, keys | tiers, 2) as run:
            run.wait_for("ms |")
            seen = set(local.glob("*/process-*/*"))
            latest = time.monotonic() + 60
            while set(local.glob("*/process-*/*")) <= seen and time.monotonic() < latest:
                time.sleep(0.002)  # until a save has begun, of either process
            time.sleep(times.uniform(0, 0.05 if kill % 2 else 0.5))
            run.processes[times.randrange(2)].kill()
            codes = [result.code for result in run.wait()]
        assert -signal.SIGKILL in codes or codes == [cli.DONE] * 2
        steps = complete_steps(workdir)
        assert max(steps, default=0) >= newest, "a complete checkpoint has gone"
        newest = max(steps, default=0)
        if newest:
            same(partial.read(workdir, "*", newest), partial.read(tmp_path / "whole", "*", newest))
    assert newest > 0
    done(pretrain(workdir, keys | tiers, 2))
    assert losses(workdir) == losses(tmp_path / "whole")
    same(last_state(workdir), last_state(tmp_path / "whole"))
    for place in (workdir / "checkpoints", tmp_path / "durable"):
        assert not [p.name for p in place.iterdir() if p.name.startswith((".saving", ".deleting"))]
