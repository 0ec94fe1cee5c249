"""The program killed at any moment, or with a storage that fails: nothing lost, repeated, or half
there."""

import random
import signal
import time

import multiprocess_runs
import pytest
import tiny_runs

from zaya_jax import cli
from zaya_jax.checkpoint.folders import steps_in
from zaya_jax.checkpoint.vault import Vault

SMALL = tiny_runs.SMALL | {"checkpoint.every_steps": 1}


@pytest.fixture
def pretrain(tmp_path):
    """start(workdir, {config key: value}, processes) of the program."""
    return lambda workdir, keys, count=1: multiprocess_runs.pretrain(
        tmp_path, workdir, SMALL | keys, count
    )


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


COPIES = {"checkpoint.durable": "safe"}


@pytest.mark.parametrize(
    ("kills", "places", "processes"),
    [
        ((1,), {}, 1),
        pytest.param(range(100), {}, 1, marks=pytest.mark.slow),
        pytest.param(range(20), COPIES, 1, marks=pytest.mark.slow),
        pytest.param(range(20), COPIES, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_times_a_run_ends_as_if_it_had_not_been(
    pretrain, tmp_path, kills, places, processes
):
    """After each kill the newest step is whole; one of several processes is killed."""
    length = {"run.num_steps": 12 * (max(kills) + 1)}
    data = {"data.path": multiprocess_runs.write_corpus(tmp_path / "corpus")}
    keys = length | {name: str(tmp_path / value) for name, value in places.items()}

    def whole(workdir, keys):
        if processes > 1:
            done(pretrain(workdir, keys, processes))
        else:
            assert tiny_runs.train(workdir, **SMALL | keys | data) == cli.DONE

    whole(tmp_path / "whole", length | {"checkpoint.every_steps": 10_000})
    workdir, times, newest = tmp_path / "killed", random.Random(0), 0
    for kill in kills:
        with pretrain(workdir, keys, processes) as run:
            if kill % 4:
                # Somewhere in its steps and saves.
                run.wait_for("ms |")
                latest = time.monotonic() + 60
                while (
                    kill == 1
                    and not steps_in(workdir / "checkpoints")
                    and time.monotonic() < latest
                ):
                    # the first save compiles its copy: without one the test would show nothing
                    time.sleep(0.05)
                time.sleep(times.uniform(0, 0.6))
            else:
                # While it looks for its newest checkpoint, restores it, compiles, or starts.
                time.sleep(times.uniform(1, 5))
            run.processes[times.randrange(processes)].kill()
            codes = [result.code for result in run.wait()]
        assert -signal.SIGKILL in codes or codes == [cli.DONE] * processes
        steps = complete_steps(workdir)
        assert max(steps, default=0) >= newest, "a complete checkpoint has gone"
        newest = max(steps, default=0)
    assert newest > 0
    whole(workdir, keys)
    assert losses(workdir) == losses(tmp_path / "whole")
    tiny_runs.same_state(workdir, tmp_path / "whole")
    for place in [workdir / "checkpoints", *([tmp_path / "safe"] if places else [])]:
        assert not [p.name for p in place.iterdir() if p.name.startswith((".saving", ".deleting"))]
