"""The program killed at any moment, or with a storage that fails: nothing lost, repeated, or half there."""

import random
import signal
import time

import multiprocess_runs
import pytest
import tiny_runs

from zaya_jax import cli
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.checkpoint.writing import steps_in

SMALL = tiny_runs.SMALL | {"checkpoint.every_steps": 1}


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
    lines = tiny_runs.lines(workdir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def complete_steps(workdir):
    """The steps that a reader sees; all must be whole."""
    root = workdir / "checkpoints"
    steps = sorted(int(p.name) for p in root.iterdir() if p.name.isdigit()) if root.is_dir() else []
    for step in steps:
        assert Vault(root).verify(step) == []
    return steps


@pytest.mark.parametrize(
    ("kills", "keys"),
    [
        ((1,), {}),
        pytest.param(range(100), {}, marks=pytest.mark.slow),
        pytest.param(range(20), {"checkpoint.local": "fast", "checkpoint.durable": "safe"}, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_times_a_run_ends_as_if_it_had_not_been(pretrain, tmp_path, kills, keys):
    length = {"run.num_steps": 12 * (max(kills) + 1)}
    done(pretrain(tmp_path / "whole", length | {"checkpoint.every_steps": 10_000}))
    keys = {name: str(tmp_path / value) for name, value in keys.items()} | length
    workdir, times, newest = tmp_path / "killed", random.Random(0), 0
    for kill in kills:
        with pretrain(workdir, keys) as run:
            if kill % 4:
                # Somewhere in its steps and saves.
                run.wait_for("ms |")
                latest = time.monotonic() + 60
                while kill == 1 and not steps_in(workdir / "checkpoints") and time.monotonic() < latest:
                    time.sleep(0.05)  # the first save compiles its copy: without one the test would show nothing
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
    tiny_runs.same_state(workdir, tmp_path / "whole")
    hidden = {p.name for p in (workdir / "checkpoints").iterdir() if not p.name.isdigit()}
    assert hidden == {".run"}


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
            whole = tmp_path / "whole" / "checkpoints" / str(newest)
            tiny_runs.same_state(workdir / "checkpoints" / str(newest), whole)
    assert newest > 0
    done(pretrain(workdir, keys | tiers, 2))
    assert losses(workdir) == losses(tmp_path / "whole")
    tiny_runs.same_state(workdir, tmp_path / "whole")
    for place in (workdir / "checkpoints", tmp_path / "durable"):
        assert not [p.name for p in place.iterdir() if p.name.startswith((".saving", ".deleting"))]
