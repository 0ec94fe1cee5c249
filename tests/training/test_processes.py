"""The training program as real processes: several have the same losses, one writer, one last step and
one exit code; killed at any moment nothing is lost, repeated, or half there."""

import random
import re
import signal
import time

import pytest
import tiny_runs
import waiting
from multiprocess_runs import pretrain
from refusals import check_refused

from zaya_jax import cli, config
from zaya_jax.checkpoint.folders import numbered, steps_in
from zaya_jax.checkpoint.source import read_meta
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.cluster import beats, multihost
from zaya_jax.training import workdir

SMALL = tiny_runs.SMALL | {
    "eval.every": 2,
    "checkpoint.every_steps": 2,
    "run.num_steps": 3,
    "precision.newton_schulz": "float32",
    "optim.name": "muon",
}


def done(runner):
    """The results of a run, all of whose processes must have ended well."""
    with runner as run:
        results = run.wait()
    assert [result.code for result in results] == [cli.DONE] * len(results), results
    return results


def same_training(a, b):
    """The same figures, of the first step closer than of those after it."""
    first, theirs = tiny_runs.lines(a)[0], tiny_runs.lines(b)[0]
    assert first["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for figure in ("loss", "eval/loss"):
        ours, theirs = (tiny_runs.by_step(workdir, figure) for workdir in (a, b))
        assert ours and ours == pytest.approx(theirs, rel=1e-5)


def test_two_processes_train_as_one_does(tmp_path):
    # compiles in half the time of Muon, which the slow tests have
    adamw = SMALL | {"optim.name": "adamw"}
    # The one also saves by the clock of its first process, after the same steps in both.
    (tmp_path / "beats").write_bytes(bytes(2 * beats.SIZE))
    watched = {beats.VARIABLE: str(tmp_path / "beats")}
    results = done(
        pretrain(tmp_path / "two", 2, 1, adamw | {"checkpoint.every_minutes": 1e-4}, **watched)
    )
    assert tiny_runs.train(tmp_path / "one", **adamw) == cli.DONE
    same_training(tmp_path / "two", tmp_path / "one")
    for index in (0, 1):  # where they were, as they reported it
        last = beats.read(tmp_path / "beats", index)
        assert last and (last.section, last.step) == ("end", 3)
        # the first compiled
        assert [one.step for one in last.laps] == [2, 3], last
    assert results[0].out.count("step 3/3") == 1 and "done: 3 steps" in results[0].out
    assert results[1].out == ""
    logs = [tmp_path / "two" / "logs" / f"process-0000{i}.log" for i in (0, 1)]
    assert all("step 3/3" in log.read_text() and "of 2, pid" in log.read_text() for log in logs)
    names = [
        sorted(path.name.split(".tfevents")[0] for path in (tmp_path / workdir).iterdir())
        for workdir in ("one", "two")
    ]
    assert names[0] == names[1] and names[0].count("events.out") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [
        (4, 1, {"mesh.context": 2, "optim.name": "adamw"}),  # two processes read the same rows
        (2, 2, {"mesh.fsdp": True}),
        (2, 2, {"mesh.context": 2, "mesh.across": True, "optim.name": "adamw"}),
    ],
)
def test_however_the_mesh_lies_on_the_processes(tmp_path, count, devices, mesh):
    keys = SMALL | {"model.num_attention_heads": 4} | mesh
    done(pretrain(tmp_path / "many", count, devices, keys))
    alone = {key: value for key, value in keys.items() if not key.startswith("mesh")}
    done(pretrain(tmp_path / "one", 1, 1, alone))
    same_training(tmp_path / "many", tmp_path / "one")


@pytest.mark.slow
def test_a_signal_to_one_stops_all_and_another_number_goes_on(tmp_path):
    workdir = tmp_path / "run"
    endless = SMALL | {"run.num_steps": 100_000, "checkpoint.every_steps": 100_000}
    with pretrain(workdir, 2, 1, endless) as run:
        run.wait_for("step      3/")
        run.processes[1].send_signal(signal.SIGTERM)
        results = run.wait()
    assert [result.code for result in results] == [cli.PREEMPTED] * 2, results
    match = re.search(r"stopped by SIGTERM to process 1 after step (\d+); saved", results[0].out)
    assert match, results[0].out
    step = int(match[1])
    assert match[0] in (workdir / "logs" / "process-00001.log").read_text()
    assert numbered(workdir / "checkpoints") == [step]
    assert read_meta(workdir, step)["step"] == step == tiny_runs.lines(workdir)[-1]["step"]
    for count, devices in ((1, 1), (4, 1)):
        step += 2
        done(pretrain(workdir, count, devices, SMALL | {"run.num_steps": step}))
    assert [line["step"] for line in tiny_runs.lines(workdir)] == list(range(1, step + 1))
    again = done(pretrain(workdir, 2, 1, SMALL | {"run.num_steps": step}))
    assert "is complete" in again[0].out and again[1].out == ""


@pytest.mark.parametrize(
    ("run", "files", "words"),
    [
        ({"seed": 1}, {}, "config.run.seed=0 here, but 1 in process 0"),
        ({}, {"hardware.figures": 1}, "content of.hardware.figures=.* here, but 1 in process 0"),
        ({}, {"model": {"layer": "Mine 1"}}, "content of.model.layer=None here, but 'Mine 1' in"),
        ({}, {}, "a file system that all nodes share"),
    ],
)
def test_another_command_file_or_folder_than_the_first_is_refused(
    tmp_path, monkeypatch, run, files, words
):
    facts = workdir.shared_facts(config.Config(run=config.Run(**run)))
    facts["content of"] |= files
    monkeypatch.setattr(
        multihost, "broadcast_from_zero", lambda name, function: [str(tmp_path / "run"), facts]
    )
    check_refused(words, workdir.open_workdir, tmp_path / "run", config.Config())
    assert not (tmp_path / "run").exists()


def complete_steps(workdir):
    """The steps that a reader sees; all must be whole."""
    root = workdir / "checkpoints"
    steps = numbered(root)
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
    tmp_path, kills, places, processes
):
    """After each kill the newest step is whole; one of several processes is killed."""
    length = tiny_runs.SMALL | {"run.num_steps": 12 * (max(kills) + 1)}
    durable = {name: str(tmp_path / value) for name, value in places.items()}
    keys = length | {"checkpoint.every_steps": 1} | durable

    def whole(workdir, keys):
        if processes > 1:
            done(pretrain(workdir, processes, 1, keys))
        else:
            assert tiny_runs.train(workdir, **keys) == cli.DONE

    whole(tmp_path / "whole", length | {"checkpoint.every_steps": 10_000})
    workdir, times, newest = tmp_path / "killed", random.Random(0), 0
    for kill in kills:
        with pretrain(workdir, processes, 1, keys) as run:
            if kill % 4:
                # Somewhere in its steps and saves.
                run.wait_for("ms |")
                if kill == 1:  # its first save compiles: without one the test would show nothing
                    waiting.until(lambda: steps_in(workdir / "checkpoints"))
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
    tiny_runs.same_run(workdir, tmp_path / "whole")
    every_step = range(1, length["run.num_steps"] + 1)
    assert [line["step"] for line in tiny_runs.lines(workdir)] == list(every_step)
    for place in [workdir / "checkpoints", *([tmp_path / "safe"] if places else [])]:
        assert not [p.name for p in place.iterdir() if p.name.startswith((".saving", ".deleting"))]
