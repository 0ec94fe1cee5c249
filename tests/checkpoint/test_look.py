"""What people see of checkpoints: the tables, the picture, and the commands around them."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zaya_jax import config
from zaya_jax.checkpoint import layout, look, monitor, store
from zaya_jax.config import Checkpoint, UserError
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
    assert re.search(r"4 4,000 19\d kB 3 24 1 1.3333 20\S+ \S+ 0.\d+ s 0.\d+ s 0.\d+ s 0.\d+ s\n", text)
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


def times(folder, processes, saves):
    with (folder / store.TIMES).open("w") as file:
        for save in range(1, saves + 1):
            for process in range(processes):
                slow = 9.0 if process == processes - 1 else 1.0
                stages = {"copy": 0.1, "serialise": 0.2, "write": slow, "commit": 0.3}
                line = {
                    "kind": "save",
                    "step": save,
                    "process": process,
                    "stages": stages,
                    "bytes": 10,
                    "time": save,
                }
                file.write(json.dumps(line) + "\n")
        for process in range(processes):
            stages = {"verify": 0.5, "read": 2.0, "place": 1.0}
            line = {"kind": "load", "step": 1, "process": process, "stages": stages, "bytes": 10, "time": 99}
            file.write(json.dumps(line) + "\n")
        file.write('{"kind": "save", "step": 3')  # killed while writing


@pytest.mark.parametrize(("processes", "saves"), [(1, 1), (8, 3), (300, 500)])
def test_the_picture_of_many_and_of_few(tmp_path, processes, saves):
    times(tmp_path, processes, saves)
    lines = look.read_times(tmp_path)
    assert len(lines) == processes * (saves + 1)
    found = look.last_saves(lines)
    assert list(found) == list(range(1, saves + 1)) and all(len(x) == processes for x in found.values())
    names, steps, cells = monitor._rows(found, "write")
    assert (
        len(names) <= monitor.ROWS
        and len(cells) == len(names)
        and {len(row) for row in cells} == {len(steps)}
    )
    assert cells[-1] == [9.0] * len(steps) and (processes == 1 or cells[0] == [1.0] * len(steps))
    page = monitor.render(tmp_path)
    assert page.count("<figure") == 4 + (saves > 1) and "The last load" in page
    assert ("slowest of 5 processes" in page) == (processes == 300)
    assert len(page) < 400_000


def test_a_step_saved_twice_counts_once(tmp_path):
    times(tmp_path, 2, 2)
    again = {"kind": "save", "step": 2, "process": 0, "stages": {"write": 5.0}, "bytes": 1, "time": 50}
    with (tmp_path / store.TIMES).open("a") as file:
        file.write("\n" + json.dumps(again) + "\n")
    assert look.last_saves(look.read_times(tmp_path))[2] == [again]
    with pytest.raises(UserError, match="no checkpoint and no times"):
        monitor.render(tmp_path / "nothing")


def test_where_an_array_lay():
    lay = {
        "axes": ["('data/0', 'data/1')", "data/2", "None"],
        "mesh": {"data/0": 2, "data/1": 3, "data/2": 2},
    }
    assert look.mesh_text(lay) == "data (6 of 12), data (2 of 12), -"
    lay = {"axes": ["('data/0', 'expert/0')"], "mesh": {"data/0": 2, "expert/0": 3}}
    assert look.mesh_text(lay) == "data x expert"
    assert look.mesh_text({"axes": ["None"], "mesh": {"data": 1}}) == "whole" and look.mesh_text(None) == ""
