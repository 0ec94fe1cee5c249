"""Inputs that the search of tools/fuzz found, and their kin: refused in a line, or named as damage,
nothing changed."""

import json
import math

import pytest
from damage import copied, damage
from harness import Accepted, call, folder
from places import make_places, make_run

from zaya_jax import generation
from zaya_jax.text import prepare_task

STORAGE = ["storage", "--data=prepared", "--out=new", "--seconds=0.1", "--rows=2", "--seq_len=16"]
PREPARE = ["--input=texts", "--out=new/a"]
SHAPE = "checkpoints/2/state/params.layers.attn_join.h_bias/zarr.json"


@pytest.fixture(scope="module")
def sandbox(golden_dir):
    """Places of every kind, a prepared directory, a run's folder and a model directory."""

    def run_here(job, todo, processes):  # worker processes take a second to start
        for task in todo:
            yield task, prepare_task.run(task, job)

    with folder() as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_task, "run_processes", run_here)
        patch.setattr(generation, "stream", accepted)
        make_places(here)
        assert call("prepare_data", ["--input=texts", "--out=prepared"], here).code == 0
        make_run(here / "run")
        copied(golden_dir / "base", here / "model")
        yield here


def accepted(*args, **keys):
    raise Accepted


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
        *(
            ("checkpoint", options)
            for options in (
                ["export_params", "--out=/dev/null", "--workdir=run"],
                ["verify", "--workdir=file:///dev/null/x"],
                ["reshard", "--from=run", "--to=file:///dev/null/x"],
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60],
)
def test_it_is_refused_in_a_line_and_nothing_is_changed(sandbox, program, options):
    unreachable = options[:1] == ["verify"]  # an address that cannot be listed: the storage's error
    assert call(program, options, sandbox).check().code == (4 if unreachable else 2)


INSPECT = ["inspect", "--workdir=run", "--html"]
NOISE = b"\xff"


@pytest.mark.parametrize(
    ("options", "file", "content", "says"),
    [
        *(
            (INSPECT, f"run/{SHAPE}", {"length": length}, "step 2 of run is damaged: state/params")
            for length in (math.nan, "x", -1)
        ),
        *(
            (command, f"run/{file}", NOISE, "")
            for command in (INSPECT, ["--workdir=run", "--num_tokens=3"])
            for file in (
                "config.json",
                "checkpoints/2/checksums.json",
                "checkpoints/2/meta/data.json",
            )
        ),
        (["from_hf", "--model=model", "--workdir=new"], "model/config.json", NOISE, ""),
    ],
)
def test_damage_is_named_in_a_line(sandbox, options, file, content, says):
    with folder() as elsewhere:
        here = copied(sandbox, elsewhere / "here")
        if isinstance(content, dict):
            found = json.loads((here / file).read_bytes())
            (here / file).write_text(
                json.dumps({**found, "shape": [content["length"], *found["shape"][1:]]})
            )
        else:
            damage(here, file, "content", content)
        program = "generate" if options[0].startswith("--") else "checkpoint"
        ended = call(program, options, here).check((2, 4))
        assert says in ended.err and not (here / "new").exists()


def test_a_sound_one_is_accepted(sandbox):
    with folder() as elsewhere:
        here = copied(sandbox, elsewhere / "here")
        assert call("generate", ["--model=run", "--num_tokens=3"], here).check().code == 0
        assert call("checkpoint", ["verify", "--workdir=run"], here).check().code == 0
