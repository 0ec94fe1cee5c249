"""A run on a device that computes wrongly ends with its name, and goes on from when all were known
to be right."""

import pytest
from small_runs import same_end
from tiny_runs import lines

from zaya_jax import cli
from zaya_jax.cluster import events
from zaya_jax.guard import decisions

SHORT = {
    "mesh__data": 4,
    "run__num_steps": 12,
    "checkpoint__every_steps": 4,
    "checkpoint__keep": 9,
    "guard__replay_every": 5,
}


@pytest.mark.slow
def test_a_wrong_device_is_named_and_what_it_may_have_spoilt_is_given_up(run, tmp_path, capsys):
    flip = {"kind": "flip", "device": 2, "first": 8}
    assert run("run", bad=[flip], **SHORT) == cli.HARDWARE
    out = capsys.readouterr().out
    assert (
        "computes wrongly" in out
        and "Exclude it and repeat the command: it continues from step 4" in out
    )
    (made,) = decisions.read(tmp_path / "run")
    assert (made["kind"], made["step"], made["batches"], made["at"], made["clean"]) == (
        "corrupt",
        4,
        0,
        10,
        5,
    )
    assert (made["devices"], made["processes"], made["reproduces"]) == ([2], [0], True)
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
