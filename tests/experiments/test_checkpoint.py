"""The exchange from the command line, training on from an import, and the page of checkpoint
times."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from made_run import checked
from saved_trees import save_tree

from experiments import generate
from experiments.checkpoint import __main__ as checkpoint
from experiments.checkpoint import page as checkpoint_page
from zaya_jax.checkpoint import layout, partial, source
from zaya_jax.checkpoint.run import store, timings
from zaya_jax.pytorch import exchange


@pytest.fixture(scope="module")
def imported(tmp_path_factory, golden_dir):
    folder = tmp_path_factory.mktemp("imported") / "run"
    exchange.from_hf(golden_dir / "base", folder)
    return folder


def tree(folder):
    return sorted(
        (
            str(path.relative_to(folder)),
            path.lstat().st_mtime_ns,
            path.is_file() and path.read_bytes(),
        )
        for path in folder.rglob("*")
    )


REFUSED = {
    "": "required: COMMAND",
    "from_hf --model=/nowhere --workdir=NEW": "/nowhere is not a folder",
    "from_hf --model=GOLDEN/base --workdir=GOLDEN": "is not empty",
    "from_hf --model=GOLDEN/base --workdir=/proc/nowhere/x": "error: --workdir=/proc/nowhere/x cannot be written",
    "from_hf --model=RUN --workdir=NEW": "",
    "to_hf --model=TMP --out=NEW": "has no checkpoint",
    "to_hf --model=RUN --out=NEW --dtype=int8": "invalid choice: 'int8'",
    **{
        f"to_hf --model=RUN --out=NEW --shard_gb={bad}": "--shard_gb"
        for bad in ("nan", "inf", "-1")
    },
    **{
        f"to_hf --model=RUN --out=NEW --adapters --{option}": "--adapters leaves out"
        for option in ("dtype=bfloat16", "shard_gb=1", "quantize=fp8")
    },
    "to_hf --model=RUN@7 --out=NEW": "no checkpoint of step 7",
    "to_hf --model=RUN --out=RUN": "is not empty",
    "to_hf --model=RUN --out=RUN/config.json/x": "cannot be written",
    "inspect --workdir=RUN --step=9": "no checkpoint of step 9",
    "inspect --workdir=TMP": "has no checkpoint",
    "verify --workdir=RUN --step=9": "no checkpoint of step 9; it has 0",
    "verify --workdir=TMP": "has no checkpoint",
    "verify --workdir=nothing://host/x": "nothing://host/x is no folder and no URL",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused_leaves_everything_as_it_was(
    called, imported, golden_dir, tmp_path, command
):
    folders = [imported, tmp_path]
    before = [tree(folder) for folder in folders]
    says = REFUSED[command]
    for name, place in {
        "RUN": imported,
        "GOLDEN": golden_dir,
        "NEW": tmp_path / "a" / "b",
        "TMP": tmp_path,
    }.items():
        command, says = command.replace(name, str(place)), says.replace(name, str(place))
    code, _, err = called(checkpoint, *command.split())
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and says in err, err
    assert [tree(folder) for folder in folders] == before


def test_a_damaged_source_leaves_no_folder_of_the_target(called, imported, tmp_path):
    shutil.copytree(imported, tmp_path / "run")
    chunks = (tmp_path / "run" / "checkpoints" / "0").rglob("c.*")
    os.truncate(max(chunks, key=os.path.getsize), 10)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for target in ("a/b", "empty"):
        code, _, err = called(
            checkpoint, "to_hf", f"--model={tmp_path}/run", f"--out={tmp_path}/{target}"
        )
        assert code == 4 and "is damaged" in err
        assert sorted(tmp_path.rglob("*")) == before


LISTS = {
    "gone": lambda folder, marker: marker.unlink(),
    "another byte": lambda folder, marker: marker.write_bytes(marker.read_bytes()[:-2] + b"?}"),
    "an empty step": lambda folder, marker: (shutil.rmtree(folder), folder.mkdir()),
    "a file": lambda folder, marker: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("how", LISTS)
def test_no_program_takes_an_older_step_where_the_newest_lost_its_list(
    called, imported, tmp_path, how
):
    """A wrong model was exported with exit code 0."""
    workdir = tmp_path / "run"
    shutil.copytree(imported, workdir)
    checkpoints = store.Store(workdir)
    meta = source.read_meta(workdir, 0) | {"step": 5}
    save_tree(checkpoints, 5, partial.read(workdir, "*"), meta)
    checkpoints.close()
    newest = workdir / "checkpoints" / "5"
    LISTS[how](newest, newest / layout.SEAL_FILE)
    before = tree(tmp_path)
    looked = called(checkpoint, "inspect", f"--workdir={workdir}")
    assert "DAMAGED, `verify` says where: 5." in looked[1]
    exported = called(checkpoint, "to_hf", f"--model={workdir}", f"--out={tmp_path}/out")
    for code, _, err in (looked, exported, called(generate, f"--model={workdir}")):
        assert code == 4 and err.count("\n") == 1, err
        assert "checkpoints/5 is damaged" in err and f"{workdir}@STEP is another" in err
    assert tree(tmp_path) == before
    assert called(checkpoint, "to_hf", f"--model={workdir}@0", f"--out={tmp_path}/out")[0] == 0


ADDRESS = "s3://bucket/x"
PROGRAMS = [
    "pretrain --workdir=ADDRESS",
    "pretrain --config.name=ADDRESS",
    "prepare_data --input=stdlib --out=ADDRESS",
    "plan --out=ADDRESS",
    "compile --out=ADDRESS",
    "characterize collectives --out=ADDRESS",
    "generate --model=ADDRESS",
    "report ADDRESS",
    "evaluate --model=. --out=ADDRESS",
    "evaluate --model=ADDRESS --out=out",
    "supervise -- --workdir=ADDRESS",
    "supervise report --workdir=ADDRESS",
    "checkpoint inspect --workdir=ADDRESS",
    "checkpoint from_hf --model=ADDRESS --workdir=out",
    "checkpoint from_hf --model=. --workdir=ADDRESS",
    "checkpoint to_hf --model=. --out=ADDRESS",
]
IN_FORKS = """
import os, runpy, sys
import jax
from zaya_jax.run import train
for command in sys.argv[1:]:
    if not os.fork():
        name, *sys.argv[1:] = command.split()
        sys.argv[0] = name
        try:
            runpy.run_module(f"experiments.{name}", run_name="__main__")
        except SystemExit as end:
            os._exit(end.code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_an_address_in_the_place_of_a_folder_is_refused_by_every_program(tmp_path):
    """It trained into a local folder called `s3:` and uploaded nothing."""
    commands = [command.replace("ADDRESS", ADDRESS) for command in PROGRAMS]
    done = subprocess.run(
        [sys.executable, "-c", IN_FORKS, *commands],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    errors = done.stderr.splitlines()
    assert len(errors) == len(PROGRAMS), done.stderr
    for command, code, line in zip(PROGRAMS, done.stdout.split(), errors, strict=True):
        assert code == "2" and line.startswith("error: ") and f"{ADDRESS}" in line, (
            command,
            code,
            line,
        )
        assert "is an address" in line or "--config.name" in command, (command, line)
    assert "--workdir=" in errors[0]
    assert not any(tmp_path.iterdir())


def make(folder, processes, saves):
    """Times whose last process is slow; the middle save took all of them long."""
    folder.mkdir(exist_ok=True)
    for save in range(1, saves + 1):
        slow = 60.0 if saves > 4 and save == saves // 2 else 1.0
        parts = []
        for write in [*[slow] * (processes - 1), 9 * slow]:
            stages = {"copy": 0.1, "serialise": 0.2, "write": write, "commit": 0.3}
            parts.append((stages, 10e9))
        timings.record(folder, "save", 10 * save, save, parts)
    load = {"verify": 0.5, "read": 2.0, "place": 1.0}
    timings.record(folder, "load", 10, 999, [(load, 10e9)] * processes)
    with (folder / timings.TIMES).open("a") as file:
        file.write('{"kind": "save", "step": 3')  # killed while writing
    return folder


def drawn(workdir):
    """The page, and the titles of its pictures."""
    page = checkpoint_page.checkpoints_document(workdir).html()
    checked(page)
    return page, re.findall("<figcaption>(.*?)</figcaption>", page)


def test_page_of_eight_processes(tmp_path):
    page, captions = drawn(make(tmp_path / "run", 8, 12))
    assert captions == [
        "Copy",
        "Whole save",
        *checkpoint_page.TITLES.values(),
        "Step 10 by process",
    ]
    assert "The longest, 9 min, is beyond the colours." in page
    assert "80 GB onto all processes" in page and "slowest of" not in page


@pytest.mark.parametrize(("processes", "saves"), [(1, 1), (1, 2), (2, 3), (300, 50), (3, 2000)])
def test_page_of_few_and_of_many(tmp_path, processes, saves):
    page, captions = drawn(make(tmp_path / "run", processes, saves))
    assert len(captions) == 5 + 2 * (saves > 1) and len(page) < 400_000
    assert ("Each row is the slowest of 5 processes." in page) == (processes == 300)
    assert ("Each column is the slowest of 5 processes." in page) == (processes == 300)
    assert ("Each column is the slowest of several saves." in page) == (saves == 2000)
