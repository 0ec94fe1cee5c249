"""A run whose data is corrupt for a while goes back before that, leaves it out, and ends with the same bits however it
is killed on the way.
"""

import json
import signal

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import cli, config
from zaya_jax.aegis import decisions, events, faults
from zaya_jax.checkpoint import partial, stale, writing
from zaya_jax.checkpoint.store import read_meta

DEVICES = jax.devices()[:1]
SMALL = {
    "model.hidden_size": 16, "model.num_hidden_layers": 2, "model.head_dim": 8, "model.moe_intermediate_size": 16,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 16, "data.global_batch": 8, "mesh.data": 1,
    "eval.every": 1000, "eval.windows": 0, "log.sample_tokens": 0, "log.every": 50, "checkpoint.every_steps": 10,
    "precision.compute": "float32", "optim.name": "adamw", "run.num_steps": 90, "guard.spike_steps": 5,
    "schedule.warmup_fraction": 0.1,
}  # fmt: skip


class Killed(Exception):
    """In place of a process that is no more."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program in this process on a corpus in which some batches are noise."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"{i}.txt").write_text("".join(f"line {j} of file {i}, {i * j % 97}\n" for j in range(40)))
    monkeypatch.setattr(jax, "devices", lambda *args: DEVICES)
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults.json"))

    def call(workdir, bad=(73, 77), **keys):
        noise = [{"kind": "data", "first": bad[0], "last": bad[1]}] if bad else []
        (tmp_path / "faults.json").write_text(json.dumps(noise))
        settings = tiny.get_config()
        given = {name.replace("__", "."): value for name, value in keys.items()}
        settings.update_from_flattened_dict(SMALL | {"data.path": str(corpus)} | given)
        return pretrain.train(config.check(settings), tmp_path / workdir)

    yield call
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def same_end(a, b):
    for x, y in zip(
        jax.tree.leaves(partial.read(a, "*")), jax.tree.leaves(partial.read(b, "*")), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    figures = [[(line["step"], line["loss"], line.get("data/left_out")) for line in lines(w)] for w in (a, b)]
    assert figures[0] == figures[1]
    assert decisions.read(a) == decisions.read(b)


MOMENTS = {  # where a process may be killed: before or after it has called a function
    "decided": (decisions, "of_spike", True),
    "written": (decisions, "add", True),
    "begins again": (stale, "drop", False),
    "half set aside": (writing, "numbered", True),
    "set aside": (stale, "drop", True),
}


def test_it_goes_back_before_the_spike_and_leaves_its_batches_out(run, tmp_path, capsys):
    assert run("run") == cli.DONE
    out = capsys.readouterr().out
    assert "in 5 steps in a row, from step 73 on" in out
    assert "back to step 70, and on without the 7 batches since" in out
    (made,) = decisions.read(tmp_path / "run")
    assert {key: made[key] for key in ("kind", "step", "batches", "at", "began")} == {
        "kind": "spike", "step": 70, "batches": 7, "at": 77, "began": 73,
    }  # fmt: skip
    (event,) = [event for event in events.read(tmp_path / "run") if event.kind == "spike"]
    assert (event.step, event.done) == (77, "back to step 70, 7 batches left out") and "row" in event.seen
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(1, 91))
    assert [(line["step"], line["data/left_out"]) for line in found if "data/left_out" in line] == [(71, 7)]
    assert max(line["loss"] for line in found[70:]) < 3  # none of the noise
    meta = read_meta(tmp_path / "run", 90)
    assert meta["data"]["left_out"] == [[70, 7]] and meta["decisions"] == [made]
    assert "left_out" not in read_meta(tmp_path / "run", 70)["data"]


@pytest.mark.parametrize(
    "moment", ["written", *(pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS if m != "written")]
)
def test_killed_at_any_moment_it_ends_with_the_same_bits(run, tmp_path, monkeypatch, moment):
    # Two checkpoints are inside the spike; where it is slow, there are copies of them.
    keys = {"checkpoint__every_steps": 15, "checkpoint__every_minutes": 0.0}
    copies = lambda name: {} if moment == "written" else {"checkpoint__durable": str(tmp_path / name)}  # noqa: E731
    assert run("whole", **keys, **copies("safe")) == cli.DONE
    module, name, after = MOMENTS[moment]
    function = getattr(module, name)

    def killed(*args):
        result = function(*args) if after else None
        if moment == "half set aside" and not list((tmp_path / "killed" / "checkpoints").glob(".stale-*")):
            return result
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        with pytest.raises(Killed):
            run("killed", **keys, **copies("safe too"))
    assert run("killed", **keys, **copies("safe too")) == cli.DONE
    same_end(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_a_kill_after_it_went_back_changes_nothing_either(run, tmp_path, monkeypatch):
    assert run("whole") == cli.DONE
    see = pretrain.Guard.see

    def killed(self, step, *args):
        if step == 84:
            raise Killed
        see(self, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain.Guard, "see", killed)
        with pytest.raises(Killed):
            run("killed")
    assert run("killed") == cli.DONE
    same_end(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_without_a_checkpoint_before_it_the_run_begins_anew(run, tmp_path, capsys):
    assert run("run", checkpoint__every_steps=1000) == cli.DONE
    assert "back to step 0, and on without the 77 batches since" in capsys.readouterr().out
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 91))


def test_after_as_many_times_as_allowed_it_ends(run, tmp_path, capsys):
    assert run("run", guard__rollbacks=0) == cli.UNHEALTHY
    out = capsys.readouterr().out
    assert (
        "error: " in out and "config.guard.rollbacks=0" in out and f"init_from={tmp_path / 'run'}@70" in out
    )
    assert run("run", guard__rollbacks=0) == cli.UNHEALTHY  # and again, wherever it goes on
    assert events.read(tmp_path / "run")[-1].done == "ended: it went back 0 times before"
