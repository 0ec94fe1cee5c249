"""What people see of checkpoints: the tables, the file of times behind them, and the commands that
print them."""

import functools
import json
import math
import os
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import put
from saved_trees import save_tree

from experiments.checkpoint import __main__ as checkpoint
from zaya_jax import config
from zaya_jax.checkpoint import folders, layout
from zaya_jax.checkpoint.run import look, store, timings
from zaya_jax.config import Checkpoint
from zaya_jax.training.workdir import open_workdir


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's folder with steps 4 and 9, of eight devices."""
    folder = open_workdir(tmp_path_factory.mktemp("look") / "run", config.check(config.default()))
    checkpoints = store.Store(folder, Checkpoint())
    for step in (4, 9):
        w, b = put(jnp.ones((32, 1000)), ("data", "expert"), None), put(jnp.ones(7))
        state = {"params": {"w": w, "b": b}, "optimizer": {"w": w.astype(jnp.bfloat16)}}
        meta = {
            "step": step,
            "tokens": 1000 * step,
            "version": "1",
            "metrics": {"eval/loss": step / 3},
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "PART_BYTES", 1000)  # otherwise parts as small lie in one chunk
            save_tree(checkpoints, step, state, meta)
    checkpoints.close()
    return folder


@pytest.fixture
def run(called):
    return functools.partial(called, checkpoint)


def test_inspect_shows_steps_and_arrays(run, workdir):
    (workdir / "checkpoints" / ".saving-12").mkdir()
    code, out, _ = run("inspect", f"--workdir={workdir}", "--step=4", "--html")
    (workdir / "checkpoints" / ".saving-12").rmdir()
    text = re.sub("[ |]+", " ", out).replace(" \n", "\n")
    assert code == 0
    assert re.search(r"4 4,000 19\d(\.\d)? kB 1 1.3333 20\S+ \S+( [\d.]+ (m|µ)?s){5}\n", text)
    assert "\n 9 9,000 " in text and "was killed): .saving-12." in text
    assert "params.w 32 x 1000 float32 128 kB 4 x 1000 8\n" in text
    assert "params.b 7 float32 28 B 7 1\n" in text
    assert "optimizer.w 32 x 1000 bfloat16 64 kB 4 x 1000 8\n = optimizer 64 kB\n" in text
    assert "Where the time goes" in (workdir / "checkpoints.html").read_text()
    assert str(workdir / "checkpoints.html") in out


def test_damage_is_a_line_and_its_exit_code(run, workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "9"
    os.truncate(step / "state" / "params.b" / "c.0", 10)
    code, out, err = run("verify", f"--workdir={tmp_path}/run")
    assert (code, err) == (4, "error: 1 of 2 checkpoints damaged\n")
    what = r"step 9: state/params.b/c.0 \(array params.b\) is truncated: 10 bytes instead of 32"
    assert re.fullmatch(rf"step 4: \S+ kB, whole\n{what}\n", out), out
    os.truncate(step / layout.META, 10)
    code, out, err = run("inspect", f"--workdir={tmp_path}/run")
    assert (
        code == 4
        and "DAMAGED, `verify` says where: 9." in out
        and f"{layout.META} is truncated" in err
    )


def test_a_step_that_the_run_deletes_meanwhile_is_none(workdir, monkeypatch):
    numbered, first = folders.numbered, [[2, 4, 9]]
    monkeypatch.setattr(folders, "numbered", lambda root: first.pop() if first else numbered(root))
    seen, damaged = look.summarise_all(workdir)
    assert [one.step for one in seen] == [4, 9] and not damaged


# ################################################################################################
# The file of times
# ##################################################################################################


def line(**changes):
    usual = {
        "kind": "save",
        "step": 3,
        "process": 0,
        "stages": {"write": 1.0},
        "bytes": 10,
        "time": 5.0,
    }
    return usual | changes


def write(folder, *lines):
    with (folder / timings.TIMES).open("a") as file:
        file.writelines(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)


def test_lines_of_one_event_are_put_together(tmp_path):
    assert timings.read_timings(tmp_path) == {}
    stages, quick = {"copy": 0.5, "write": 2.0}, {"write": 1.0, "commit": 8.5}
    write(
        tmp_path,
        line(),
        line(process=2, stages=stages, bytes=30),
        line(kind="load", step=1),
        line(step=1),
    )
    write(
        tmp_path,
        line(step=4, stages=quick),
        line(step=4, process=1, stages={"write": 9.0, "commit": 8.5}),
    )
    write(tmp_path, "12\n", '{"kind": "save", "step": 6}\n', line(step=5, process=1, stages=quick))
    found = timings.read_timings(tmp_path)
    assert list(found) == ["save", "load"] and list(found["save"]) == [1, 3, 4, 5]
    save = found["save"][3]
    assert save.processes == 3
    assert save.sizes == {0: 10, 2: 30}
    np.testing.assert_array_equal(save.by_process("write"), [1.0, math.nan, 2.0])
    np.testing.assert_array_equal(found["save"][1].by_process("copy"), [math.nan])
    assert save.slowest("write") == 2.0 and math.isnan(found["save"][1].slowest("copy"))
    assert found["save"][4].total() == 9.5, "process 0's, whose commit waits for all"
    assert found["save"][5].total() == 9.5, "process 0's line is lost: what another tells"
    # Saved again, it counts once; lines cut short cost no other.
    write(tmp_path, line(process=1), line(stages={"write": 7.0}, time=9.0), line(process=2))
    write(
        tmp_path,
        '{"kind": "save", "step": 4, "pro',
        line(step=7),
        "\n",
        json.dumps(line(step=8))[:-3],
    )
    saves = timings.read_timings(tmp_path)["save"]
    assert list(saves) == [1, 3, 4, 5, 7]
    assert (saves[3].processes, saves[3].time, saves[3].slowest("write")) == (1, 9.0, 7.0)
