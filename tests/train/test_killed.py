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
            while not complete_steps(workdir) and time.monotonic() < latest:
                time.sleep(0.1)
            for process in run.processes:
                process.kill()
            run.wait()
        assert complete_steps(workdir)
    done(pretrain(workdir, keys, 4))
    expected, got = losses(tmp_path / "alone"), losses(workdir)
    assert len(got) == 60
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_a_place_that_cannot_be_written_ends_the_run_with_its_own_code(pretrain, tmp_path):
    workdir = tmp_path / "run"
    keys = {"run.num_steps": 100_000, "checkpoint.every_steps": 5, "checkpoint.max_failures": 2}
    with pretrain(workdir, keys) as run:
        run.wait_for("step     12/")
        root = workdir / "checkpoints"
        root.rename(workdir / "moved away")
        root.write_text("no folder any more")
        (result,) = run.wait()
    assert result.code == cli.STORAGE
    assert result.out.count("is NOT saved") == 2 and "training goes on" in result.out
    assert result.err.count("\n") == 1 and "error: 2 saves failed in a row" in result.err
    root.unlink()
    (workdir / "moved away").rename(root)
    steps = complete_steps(workdir)
    assert steps and steps[-1] >= 5
    done(pretrain(workdir, keys | {"run.num_steps": steps[-1] + 2}))


def test_saves_by_the_clock_and_by_tokens(pretrain, tmp_path):
    keys = {
        "run.num_steps": 50, "checkpoint.every_steps": 100_000, "checkpoint.every_minutes": 0.002,
        "checkpoint.keep": 1, "checkpoint.keep_tokens": 128 * 20,
    }  # fmt: skip
    done(pretrain(tmp_path / "run", keys))
    steps = complete_steps(tmp_path / "run")
    assert steps[-1] == 50 and 2 <= len(steps) <= 3  # the first after each 20 steps, and the last
    assert all(step >= 20 for step in steps)


def test_a_run_begins_with_another_s_weights(pretrain, tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    done(pretrain(small, {"run.num_steps": 30}))
    grow = {"run.num_steps": 3, "run.init_from": f"{small}@30", "model.num_hidden_layers": 3}
    with pretrain(large, grow) as run:
        (result,) = run.wait()
    assert result.code == cli.BAD_INPUT and "--config.run.init_grow=True" in result.err
    (result,) = done(pretrain(tmp_path / "larger", grow | {"run.init_grow": True}))
    assert "taken in part: " in result.out
    assert losses(tmp_path / "larger")[0] < losses(small)[0] - 0.5
    taken = partial.read(small, "params.embed.*")
    assert taken["params"]["embed"]["embedding"].shape == (264, 16)
