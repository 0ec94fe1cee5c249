"""Inputs that a search with generated options, keys and damage found, and their kin: refused in a
line, or named as damage, nothing changed."""

import hashlib
import json
import math
import os
import shutil
import stat

import pytest
from data_helpers import run_in_process

from tools import reference
from zaya_jax import cli, generation
from zaya_jax.hardware import host
from zaya_jax.text import prepare_task

STORAGE = ["storage", "--data=prepared", "--out=new", "--seconds=0.1", "--rows=2", "--seq_len=16"]
PREPARE = ["--input=texts", "--out=new/a"]
SHAPE = "checkpoints/0/state/params.layers.attn_join.h_bias/zarr.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory, golden_dir):
    """Texts, files that are none, a prepared directory, a model directory and a run's folder."""
    folder = tmp_path_factory.mktemp("made")
    text = "".join(f"line {i}, {i * i % 97}\n" for i in range(400))
    (folder / "text.txt").write_text(text)
    (folder / "noise.bin").write_bytes(bytes(i * i % 251 for i in range(3000)))
    (folder / "json.json").write_text('{"a": [1, 2]}')
    (folder / "texts").mkdir()
    for i in range(12):
        (folder / "texts" / f"{i}.txt").write_text(f"{i}\n{text}")
    shutil.copytree(golden_dir / "base", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(prepare_task, "run_processes", run_in_process)
        for program, options in (
            ("prepare_data", ["--input=texts", "--out=prepared"]),
            ("checkpoint", ["from_hf", "--model=model", "--workdir=run"]),
        ):
            patch.setattr("sys.argv", [program, *options])
            assert cli.exit_code(reference.program(program).main) == 0
    shutil.copytree(folder / "prepared" / "tokenizer", folder / "run" / "tokenizer")
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy of it, in which a program is called."""
    monkeypatch.setattr(prepare_task, "run_processes", run_in_process)
    monkeypatch.setattr(generation, "stream", lambda *_, **__: pytest.fail("accepted"))
    monkeypatch.setattr(host, "keep_memory", lambda: None)
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "here"))
    return tmp_path / "here"


def tree(folder):
    """Everything below a folder: mode and content."""
    return {
        path: (path.stat().st_mode, path.is_file() and hashlib.sha256(path.read_bytes()).digest())
        for path in folder.rglob("*")
    }


@pytest.fixture
def ended(here, called):
    """Calls a program: its exit code and its errors, which are two lines at most. After a refusal
    everything is as it was, and /dev/null a device (root can replace it)."""

    def call(program, options):
        before = tree(here)
        code, _, errors = called(reference.program(program), *options)
        lines = errors.splitlines()
        assert (
            len(lines) <= 2
            and "Traceback" not in errors
            and stat.S_ISCHR(os.stat(os.devnull).st_mode)
        )
        if code == cli.BAD_INPUT:
            assert lines[-1].startswith("error: ") and len(lines[-1]) < 2000
            assert tree(here) == before
        return code, errors

    return call


@pytest.mark.parametrize(
    ("program", "options"),
    [
        *(
            ("prepare_data", options)
            for options in (
                PREPARE[:1],
                PREPARE[1:],
                ["--input=nowhere", "--out=new/a"],
                ["--input=noise.bin", "--out=new"],
                ["--input=texts", "--out=text.txt"],
                ["--input=texts", "--out=texts"],
                [*PREPARE, "--tokenizer=json.json"],
                [*PREPARE, "--train_bpe=9"],
                ["--input=texts", "--out=nothing://host/x"],
                [*PREPARE, "--part_mib=0"],
                [*PREPARE, "--train_bpe=300", "--tokenizer=bytes"],
                [*PREPARE, "--processes=0"],
                ["--input=texts", "--out=prepared", "--context=9"],
                ["--input=text.txt", "--out=prepared"],
                ["--verify=texts"],
                ["--verify=nowhere"],
                ["--verify=prepared", "--input=texts"],
                *([*PREPARE, f"--held_out={x}"] for x in ("nan", "0.51")),
            )
        ),
        *(
            ("characterize", options)
            for options in (
                [],
                ["nothing"],
                ["storage"],
                ["storage", "--data=prepared"],
                [*STORAGE, "--data=texts"],
                [*STORAGE, "--out=text.txt"],
                [*STORAGE, "--seconds=nan"],
                [*STORAGE, "--seconds=-1"],
            )
        ),
        *(("checkpoint", options) for options in (["verify", "--workdir=file:///dev/null/x"],)),
        *(
            ("supervise", ["--", *options])
            for options in (
                [],
                ["--workdir"],
                # a variable that is not set
                ["--workdir=", "--config=new"],
                ["--workdir", "--config=new"],
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60],
)
def test_it_is_refused_in_a_line_and_nothing_is_changed(ended, program, options):
    unreachable = options[:1] == ["verify"]  # an address that cannot be listed: the storage's error
    assert ended(program, options)[0] == (4 if unreachable else 2)


INSPECT = ["inspect", "--workdir=run", "--html"]
GENERATE = ["--model=run", "--num_tokens=3", "--prompt=ab"]


@pytest.mark.parametrize(
    ("options", "file", "length", "says"),
    [
        *(
            (INSPECT, f"run/{SHAPE}", length, "run/checkpoints/0 is damaged: ")
            for length in (math.nan, "x", -1)
        ),
        *(
            (command, f"run/{file}", None, "")
            for command in (INSPECT, GENERATE)
            for file in ("checkpoints/0/checksums.json", "checkpoints/0/meta/data.json")
        ),
        (["from_hf", "--model=model", "--workdir=new"], "model/config.json", None, ""),
    ],
)
def test_damage_is_named_in_a_line(ended, here, options, file, length, says):
    """A length in an array's shape, or noise."""
    if length is None:
        (here / file).write_bytes(b"\xff")
    else:
        found = json.loads((here / file).read_bytes())
        (here / file).write_text(json.dumps({**found, "shape": [length, *found["shape"][1:]]}))
    code, errors = ended("generate" if options is GENERATE else "checkpoint", options)
    assert code in (2, 4) and says in errors and not (here / "new").exists()


def test_a_sound_one_is_accepted(ended):
    with pytest.raises(pytest.fail.Exception, match="accepted"):
        ended("generate", GENERATE)
    assert ended("checkpoint", ["verify", "--workdir=run"])[0] == 0
