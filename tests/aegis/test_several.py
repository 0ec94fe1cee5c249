"""Several processes go back together, and find the one whose device computes wrongly."""

import json

import multiprocess_runs
import pytest
from small_runs import SMALL, same_end
from tiny_runs import lines

from tools import faults
from zaya_jax import cli
from zaya_jax.aegis import decisions, events


@pytest.fixture
def pretrain(tmp_path):
    """start(workdir, faults, {config key: value}) of the program, as two processes of two devices."""

    def call(workdir, bad, keys):
        path = tmp_path / f"{workdir}.json"
        path.write_text(json.dumps(bad))
        return multiprocess_runs.pretrain(
            tmp_path, tmp_path / workdir, SMALL | {"mesh.data": 4} | keys, 2, 2, {faults.VARIABLE: str(path)}
        )

    return call


def codes(runner):
    with runner as run:
        return [result.code for result in run.wait()]


@pytest.mark.slow
def test_two_processes_go_back_together(pretrain, tmp_path):
    keys = {
        "run.num_steps": 90, "checkpoint.every_steps": 15, "checkpoint.every_minutes": 0.02,
        "checkpoint.local": str(tmp_path / "fast"), "checkpoint.durable": str(tmp_path / "safe"),
    }  # fmt: skip
    noise = [{"kind": "data", "first": 73, "last": 77}]
    assert codes(pretrain("run", noise, keys)) == [cli.DONE] * 2
    (made,) = decisions.read(tmp_path / "run")
    assert made["step"] <= 72 and made["at"] == 77 and made["began"] == 73
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 91))
    assert sorted(int(p.name) for p in (tmp_path / "safe").iterdir() if p.name.isdigit()) == sorted(
        int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()
    )


@pytest.mark.slow
def test_the_process_of_a_wrong_device_is_named(pretrain, tmp_path):
    keys = {"run.num_steps": 12, "checkpoint.every_steps": 4, "guard.replay_every": 5}
    assert codes(pretrain("run", [{"kind": "flip", "device": 2, "first": 8}], keys)) == [cli.HARDWARE] * 2
    (made,) = decisions.read(tmp_path / "run")
    assert made["processes"] == [1] and made["step"] == 4 and len(made["hosts"]) == 1
    (event,) = [event for event in events.read(tmp_path / "run") if event.kind == "corrupt"]
    assert event.process == 1 and event.node == made["hosts"][0]
    assert codes(pretrain("run", [], keys)) == [cli.DONE] * 2
    assert codes(pretrain("sound", [], keys)) == [cli.DONE] * 2
    decisions.write(tmp_path / "sound", [made])
    same_end(tmp_path / "run", tmp_path / "sound")
