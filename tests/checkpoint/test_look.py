"""What people see of checkpoints: the tables, the picture, and the commands around them."""

import datetime
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zaya_jax import config
from zaya_jax.checkpoint import layout, look, seal, store, times, writing
from zaya_jax.config import Checkpoint
from zaya_jax.train.workdir import open_workdir


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's folder with steps 4 and 9, of eight devices."""
    folder = open_workdir(tmp_path_factory.mktemp("look") / "run", config.check(config.default()))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    cut = NamedSharding(mesh, PartitionSpec(("data", "expert"), None))
    whole = NamedSharding(mesh, PartitionSpec())
    checkpoints = store.Store(folder, Checkpoint())
    for step in (4, 9):
        state = {
            "params": {
                "w": jax.device_put(jnp.ones((32, 1000)), cut),
                "b": jax.device_put(jnp.ones(7), whole),
            },
            "optimizer": {"w": jax.device_put(jnp.ones((32, 1000), jnp.bfloat16), cut)},
        }
        meta = {"step": step, "tokens": 1000 * step, "version": "1", "metrics": {"eval/loss": step / 3}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "PART_BYTES", 1000)  # otherwise parts as small lie in one chunk
            checkpoints.save(step, state, meta)
    checkpoints.close()
    return folder


def run(*arguments):
    command = [sys.executable, "-m", "experiments.checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_inspect_shows_steps_and_arrays(workdir):
    (workdir / "checkpoints" / ".saving-12").mkdir(exist_ok=True)
    done = run("inspect", "--workdir", workdir, "--step", 4, "--html")
    assert done.returncode == 0, done.stderr
    text = re.sub(" +", " ", done.stdout)
    assert re.search(r"4 4,000 19\d kB 3 24 1 1.3333 20\S+ \S+ 1 0.\d+ s 0.\d+ s 0.\d+ s 0.\d+ s\n", text)
    assert "\n9 9,000 " in text and "Not complete: .saving-12" in text
    assert "params.w 32 x 1000 float32 128 kB 4 x 1000 8 data x expert, -\n" in text
    assert "params.b 7 float32 28 B 7 1 whole\n" in text
    assert "optimizer.w 32 x 1000 bfloat16 64 kB 4 x 1000 8 data x expert, -\n= optimizer 64 kB\n" in text
    page = (workdir / "checkpoints.html").read_text()
    assert "Where the time goes" in page and str(workdir / "checkpoints.html") in done.stdout
    (workdir / "checkpoints" / ".saving-12").rmdir()


def test_verify_names_what_is_damaged(workdir):
    done = run("verify", "--workdir", workdir)
    assert done.returncode == 0 and re.fullmatch(r"(step \d: 19\d kB, whole\n){2}", done.stdout)
    folder = workdir / "checkpoints" / "9"
    victims = [folder / "state" / "params.w" / "c.3.0", folder / "meta" / "data.json", folder / "more"]
    contents = [victim.read_bytes() if victim.exists() else None for victim in victims]
    victims[0].write_bytes(contents[0][:-4])
    victims[1].write_bytes(contents[1].replace(b"9", b"8", 1))
    victims[2].write_text("?")
    done = run("verify", "--workdir", workdir)
    assert done.returncode == 4 and "1 of 2 checkpoints damaged" in done.stderr
    size = len(contents[0])
    assert (
        f"step 9: state/params.w/c.3.0 (array params.w) is truncated: {size - 4} bytes instead of {size}\n"
        in done.stdout
    )
    assert "step 9: meta/data.json is changed: crc32c" in done.stdout and "step 4: 19" in done.stdout
    assert "step 9: more is not part of the checkpoint" in done.stdout
    assert run("verify", "--workdir", workdir, "--step", 4).returncode == 0
    for victim, content in zip(victims, contents, strict=True):
        victim.write_bytes(content) if content is not None else victim.unlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "--workdir", "nowhere"), "has no config.json"),
        (("verify", "--workdir", "nowhere"), "--workdir=nowhere has no checkpoint"),
        (("verify", "--workdir", "RUN", "--step", "5"), "no checkpoint of step 5; it has 4, 9"),
        (("inspect", "--workdir", "RUN", "--step", "5"), "no checkpoint of step 5; it has 4, 9"),
        (("reshard", "--from", "RUN"), "the following arguments are required: --to"),
    ],
)
def test_bad_input_is_one_line(workdir, arguments, words):
    done = run(*[workdir if a == "RUN" else a for a in arguments])
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(f"error: .*{re.escape(words)}.*\n", done.stderr), done.stderr


def test_damage_in_what_it_reads_is_said(workdir):
    meta = workdir / "checkpoints" / "9" / layout.META
    content = meta.read_bytes()
    meta.write_bytes(content[:20])
    done = run("inspect", "--workdir", workdir)
    assert done.returncode == 4 and "verify --workdir=" in done.stderr
    meta.write_bytes(content)


def test_steps_in_one_text(tmp_path):
    arrays = [
        layout.Array("balance.bias", (2, 5), "float32", (2, 5)),
        layout.Array("params.w", (8,), "bfloat16", (4,)),
    ]
    lay = {
        "balance.bias": {"axes": ["None", "None"], "mesh": {"data/0": 2, "data/1": 2}},
        "params.w": {"axes": ["data/1"], "mesh": {"data/0": 2, "data/1": 2}},
    }
    sizes = {}
    for step in (3, 10):
        meta = {"step": step, "tokens": 1000 * step, "version": "1.2", "processes": 2, "layout": lay}
        folder = tmp_path / "checkpoints" / str(step)
        files = layout.frame(tuple(arrays), meta | ({"metrics": {"eval/loss": 2.5}} if step == 10 else {}))
        files |= {array.file(i): b"x" * 44 for array in arrays for i in [(0,) * len(array.shape)]}
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        sums = writing.write_files(folder, files)
        sizes[step] = f"{sum(entry[0] for entry in sums.values()) / 1e3:.3g} kB"
        (folder / layout.MARKER).write_bytes(seal.Seal(sums).content())
        when = datetime.datetime(2026, 11, 21, 5, 0, step).timestamp()
        os.utime(folder / layout.MARKER, (when, when))
    (tmp_path / "checkpoints" / ".deleting-1").mkdir()
    with (tmp_path / times.TIMES).open("w") as file:
        for process, seconds in enumerate((1.0, 3.0, 1.5)):
            stages = {"copy": 0.01, "serialise": 0.02, "write": seconds, "commit": 0.2}
            line = {"kind": "save", "step": 10, "process": process, "stages": stages, "bytes": 7, "time": 5.0}
            file.write(json.dumps(line) + "\n")
    assert look.steps_text(tmp_path).splitlines() == [
        "step  tokens  size     arrays  files  processes  held-out  saved at             version  copy             "
        "serialise        write            commit",
        f"3     3,000   {sizes[3]}  2       8      2                    2026-11-21 05:00:03  1.2",
        f"10    10,000  {sizes[10]}  2       8      2          2.5000    2026-11-21 05:00:10  1.2      "
        "0.010 s (0.010)  0.020 s (0.020)  3.000 s (1.500)  0.200 s (0.200)",
        "Stages: seconds of the slowest process (median).",
        "Not complete: .deleting-1 (being written or deleted, or left by a run that was killed).",
    ]
    assert look.arrays_text(tmp_path, 10).splitlines() == [
        "step 10, by 2 process(es), version 1.2",
        "array         shape  type      size  chunk  chunks  on the mesh",
        "balance.bias  2 x 5  float32   40 B  2 x 5       1  whole",
        "= balance                      40 B",
        "params.w      8      bfloat16  16 B  4           1  data (2 of 4)",
        "= params                       16 B",
    ]


def test_a_step_that_the_run_deletes_meanwhile_is_none(workdir, monkeypatch):
    monkeypatch.setattr(writing, "steps_in", lambda root: [2, 4, 9])
    assert [seen.step for seen in look.see_all(workdir)] == [4, 9]


def test_where_an_array_lay():
    lay = {
        "axes": ["('data/0', 'data/1')", "data/2", "None"],
        "mesh": {"data/0": 2, "data/1": 3, "data/2": 2},
    }
    assert look.mesh_text(lay) == "data (6 of 12), data (2 of 12), -"
    lay = {"axes": ["('data/0', 'expert/0')"], "mesh": {"data/0": 2, "expert/0": 3}}
    assert look.mesh_text(lay) == "data x expert"
    assert look.mesh_text({"axes": ["None"], "mesh": {"data": 1}}) == "whole" and look.mesh_text(None) == ""
