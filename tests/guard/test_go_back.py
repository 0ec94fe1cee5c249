"""A run whose data is corrupt for a while goes back before that, leaves it out, and ends with the
same bits however it is killed on the way.
"""

import socket
from unittest.mock import ANY

import pytest
from tiny_runs import lines, same_run

from zaya_jax import cli
from zaya_jax.checkpoint import folders
from zaya_jax.checkpoint.source import read_meta
from zaya_jax.cluster import events
from zaya_jax.guard import decisions
from zaya_jax.guard.guard import Guard


class Killed(Exception):
    """In place of a process that is no more."""


def same_end(a, b):
    """The same state, figures and decisions."""
    same_run(a, b)
    assert decisions.read(a) == decisions.read(b)


# some batches are noise
LONG = {"run__num_steps": 90, "bad": [{"kind": "data", "first": 73, "last": 77}]}
MOMENTS = {
    # where a process may be killed: before or after it has called a function, where that is so
    "decided": (decisions, "after_spike", True, None),
    "written": (decisions, "write", True, None),
    "begins again": (folders, "rename_stale", False, None),
    "half set aside": (
        folders,
        "numbered",
        True,
        lambda place, args: list(place.glob("checkpoints/.stale-*")),
    ),
    "set aside": (folders, "rename_stale", True, None),
    "went back": (Guard, "record_step", False, lambda place, args: args[1] == 84),
}


def test_it_goes_back_before_the_noise_and_on_without_it(run, tmp_path, capsys):
    # that of step 75 is inside the spike
    assert run("whole", **LONG, checkpoint__every_steps=15) == cli.DONE
    out, workdir = capsys.readouterr().out, tmp_path / "whole"
    assert "in 5 steps in a row, from step 73 on" in out
    assert "back to step 60, skipping the 17 batches that followed it" in out
    assert "-*: step 75, of a past that was given up" in out
    (made,) = decisions.read(workdir)
    assert made == {"kind": "spike", "step": 60, "batches": 17, "at": 77, "began": 73, "seen": ANY}
    (event,) = [event for event in events.read(workdir) if event.kind == "spike"]
    assert (event.step, event.done) == (77, "back to step 60, 17 batches left out")
    assert "row" in event.seen
    found = lines(workdir)
    assert [line["step"] for line in found] == list(range(1, 91))
    assert max(line["loss"] for line in found[60:]) < 3  # without the noise
    meta = read_meta(workdir, 90)
    assert meta["data"]["passed_over"] == [[60, 17]] and meta["decisions"] == [made]
    meta = read_meta(workdir, 60)
    assert "passed_over" not in meta["data"] and "decisions" not in meta


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_it_ends_with_the_same_bits(run, tmp_path, monkeypatch, moment):
    keys = {"checkpoint__every_steps": 15}

    def copies(name):
        return {} if moment == "written" else {"checkpoint__durable": str(tmp_path / name)}

    assert run("whole", **LONG, **keys, **copies("safe")) == cli.DONE
    owner, name, after, when = MOMENTS[moment]
    function = getattr(owner, name)

    def killed(*args):
        result = function(*args) if after else None
        if not when or when(tmp_path / "killed", args):
            raise Killed
        return result if after else function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            run("killed", **LONG, **keys, **copies("safe too"))
    assert run("killed", **LONG, **keys, **copies("safe too")) == cli.DONE
    same_end(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_after_as_many_times_as_allowed_it_ends(run, tmp_path, capsys):
    assert run("run", **LONG, guard__rollbacks=0) == cli.UNHEALTHY
    out = capsys.readouterr().out
    assert (
        "error: " in out
        and "config.guard.rollbacks=0" in out
        and f"init_from={tmp_path / 'run'}@70" in out
    )
    assert run("run", **LONG, guard__rollbacks=0) == cli.UNHEALTHY  # and again, wherever it goes on
    assert events.read(tmp_path / "run")[-1].done == "ended: it went back 0 times before"


# ################################################################################################
# A device that computes wrongly
# ##################################################################################################


SHORT = {
    "mesh__data": 4,
    "run__num_steps": 12,
    "checkpoint__every_steps": 4,
    "checkpoint__keep": 9,
    "guard__replay_every": 5,
}


@pytest.mark.slow
def test_a_wrong_device_is_named_and_what_it_may_have_spoilt_is_given_up(run, tmp_path, capsys):
    assert run("run", bad=[{"kind": "flip", "device": 2, "first": 8}], **SHORT) == cli.HARDWARE
    out = capsys.readouterr().out
    assert (
        "computes wrongly" in out
        and "Exclude it and repeat the command: it continues from step 4" in out
    )
    (made,) = decisions.read(tmp_path / "run")
    assert made == {
        "kind": "corrupt",
        "step": 4,
        "batches": 0,
        "at": 10,
        "clean": 5,
        "seen": ANY,
        "reproduces": True,
        "devices": [2],
        "processes": [0],
        "hosts": [socket.gethostname()],
    }
    (event,) = [event for event in events.read(tmp_path / "run") if event.kind == "corrupt"]
    assert event.group == "critical" and event.step == 10 and event.process == 0 and event.node
    assert event.done == "back to step 4" and event.facts["devices"] == [2]

    # After that it ends with the bits of a run on sound devices.
    assert run("run", bad=[], **SHORT) == cli.DONE
    assert "step 8, of a past that was given up" in capsys.readouterr().out
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 13))
    assert run("sound", bad=[], **SHORT) == cli.DONE
    assert [line["loss"] for line in lines(tmp_path / "run")] == [
        line["loss"] for line in lines(tmp_path / "sound")
    ]
    assert decisions.read(tmp_path / "sound") == []
    (tmp_path / "sound" / "aegis").mkdir()
    decisions.write(tmp_path / "sound", [made])
    same_end(tmp_path / "run", tmp_path / "sound")


@pytest.mark.slow
def test_what_is_not_finite_is_looked_into_at_once(run, tmp_path, capsys):
    once = {"kind": "nonfinite", "device": 3, "first": 7}
    assert run("run", bad=[once], **SHORT | {"guard__replay_every": 1000}) == cli.HARDWARE
    (made,) = decisions.read(tmp_path / "run")
    # known a step later, and never checked before
    assert (made["at"], made["devices"], made["step"]) == (8, [3], 0)
    # Data that is not finite everywhere, say a loss that overflows, is no device's fault.
    every = [{"kind": "nonfinite", "device": device, "first": 7, "last": 9} for device in range(4)]
    assert run("all", bad=every, **SHORT | {"guard__replay_every": 1000}) == cli.DONE
