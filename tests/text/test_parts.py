"""One preparation by many machines: whatever the parts, their order and their deaths, the bytes are
one machine's."""

import argparse
import gzip
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import contents, here, jsonl, run_here, texts_of
from refusals import check_error, check_refused
from waiting import until

from experiments.prepare_data import __main__ as prepare_data
from zaya_jax.data import prepared_store
from zaya_jax.text import prepare, prepare_task, shard_format, tokenizers
from zaya_jax.text.prepare import Options

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>hm</think>hello"},
]


@pytest.fixture(autouse=True)
def without_workers(in_process):
    """All of it here, but for the tests that start programs."""


@pytest.fixture
def source(tmp_path):
    """Files of every kind and odd names, large, small and empty, with two bad records and a
    picture."""
    root = tmp_path / "in put ä"
    (root / "unter ordner").mkdir(parents=True)
    rng = random.Random(3)
    texts = [f"text {i} ü " + "word " * rng.randint(0, 60) for i in range(400)]
    raw = jsonl({"text": t} for t in texts)
    (root / "a.jsonl").write_bytes(raw + b"{\n" + raw[: raw.index(b"\n", 5000) + 1])
    (root / "b.jsonl.gz").write_bytes(gzip.compress(raw[: raw.index(b"\n", 9000) + 1] + b"[1]\n"))
    table = pyarrow.table({"text": texts[:120]})
    pyarrow.parquet.write_table(table, root / "unter ordner" / "c.parquet", row_group_size=11)
    for i in range(5):
        (root / f"d{i}.txt").write_text(" ".join(texts[: 20 * i]))
    (root / "e.jsonl").write_bytes(jsonl({"messages": CHAT} for _ in range(9)) + b'{"text": " "}\n')
    (root / "empty.jsonl").write_bytes(b"")
    (root / "picture.txt").write_bytes(b"\xff\x00\xfe")
    return root


def options_for(source, **changed):
    return Options(
        **{"inputs": [str(source)], "part_bytes": 6000, "skip_bad": True, "context": 64, **changed}
    )


def part(options, out, index, count):
    return prepare.prepare(options, str(out), 1, lambda *_: None, (index, count))[1]


@pytest.fixture
def whole(tmp_path, source):
    """What one machine makes of it."""
    here(options_for(source), tmp_path / "whole")
    return contents(tmp_path / "whole")


# of 18 tasks and 11 files
@pytest.mark.parametrize(("count", "bpe"), [(1, 0), (2, 300), (3, 0), (7, 0), (64, 0)])
def test_parts_in_any_order_and_twice_are_what_one_machine_makes(tmp_path, source, count, bpe):
    out, options = tmp_path / "out put ö", options_for(source, train_bpe=bpe)
    here(options, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    order = [*range(count), random.Random(count).randrange(count)]
    random.Random(count).shuffle(order)
    part(options, out, 0, 5)  # of a machine that counts otherwise
    assert not any(part(options, out, index, count) for index in order)
    manifest, was_there = here(options, out)
    assert contents(out) == whole and not was_there
    assert prepared_store.verify(str(out)) == []
    assert manifest["counts"].keys() > {prepare_task.BAD, "empty texts", "kept"}
    assert here(options, out) == (manifest, True)
    assert part(options, out, 0, count)  # there already
    assert contents(out) == whole


class Killed(BaseException):
    """Ends everything at once, as kill -9 does: nothing cleans up behind it."""


def dying_at(patch, moment):
    """The nth thing done to the disk is the last; returns the counter."""
    count = [0]

    def dies(function):
        def dying(*args, **kwargs):
            count[0] += 1
            if count[0] == moment:
                raise Killed
            return function(*args, **kwargs)

        return dying

    patch.setattr(shard_format.ShardWriter, "discard", lambda self: self._file.close())
    for owner, name in (
        (shard_format.ShardWriter, "_write_bundle"),
        (shard_format.ShardWriter, "close"),
        (pathlib.Path, "replace"),
        (pathlib.Path, "rename"),
        (os, "fsync"),
        (shutil, "rmtree"),
    ):
        patch.setattr(owner, name, dies(getattr(owner, name)))
    return count


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_is_run_again(tmp_path, source, monkeypatch, step, alone):
    options = options_for(source, part_bytes=30_000)
    here(options, tmp_path / "whole")
    whole = contents(tmp_path / "whole")

    def everything(out):
        if alone:
            here(options, out)
            return
        part(options, out, 1, 2)
        part(options, out, 0, 2)
        here(options, out)

    with monkeypatch.context() as patch:
        moments = dying_at(patch, 0)
        everything(tmp_path / "counted")
    assert contents(tmp_path / "counted") == whole and moments[0] > 50
    last = range(moments[0] - 4, moments[0] + 1)  # the merge's tables, manifest and end
    for moment in sorted({*range(1, moments[0] + 1, step), *range(2, 7), *last}):
        out = tmp_path / f"killed {moment}"
        with monkeypatch.context() as patch:
            dying_at(patch, moment)
            with pytest.raises(Killed):
                everything(out)
        everything(out)
        assert contents(out) == whole, moment
        shutil.rmtree(out)


@pytest.mark.parametrize("moment", ["_save_or_check_plan", "_tokenizer", "gather"])
def test_one_that_comes_late_finds_that_all_is_done(tmp_path, source, whole, monkeypatch, moment):
    options, own = options_for(source), getattr(prepare, moment)

    def late(*arguments):
        monkeypatch.setattr(prepare, moment, own)
        here(options, tmp_path / "out")  # another process ends just now
        return own(*arguments)

    monkeypatch.setattr(prepare, moment, late)
    here(options, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def touched(path):
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"held_out": 0.5}, "held_out;"),
        ({"tokenizer": "other"}, "tokenizer;"),
        ({"part_bytes": 7000}, "part_bytes;"),
        (touched, r"input files \(.*b\.jsonl\.gz was"),
        (pathlib.Path.unlink, r"input files \(.*b\.jsonl\.gz was"),
        (lambda path: (path.parent / "aa.txt").write_text("x"), r"input files \(.*aa\.txt was"),
    ],
)
def test_other_options_and_other_input_are_refused_by_name(
    tmp_path, source, monkeypatch, change, named
):
    monkeypatch.chdir(tmp_path)
    options = other = options_for(source)
    part(options, "out", 0, 2)
    if isinstance(change, dict):
        tokenizers.train_bpe(["some text"], 263).save("other")
        other = options_for(source, **change)
    else:
        change(source / "b.jsonl.gz")
    refusals = (lambda: part(other, "out", 1, 2), lambda: here(other, "out"))
    for refused in refusals:
        check_refused(f"begun with other {named}", refused)
    if other != options:
        here(options, "out")
        for refused in refusals:
            check_refused("is complete, from other input or options", refused)


def test_input_that_changes_while_it_is_read_is_no_part(tmp_path, source, monkeypatch):
    def changing(job, todo, processes):
        touched(source / "a.jsonl")
        yield from run_here(job, todo, processes)

    monkeypatch.setattr(prepare_task, "run_processes", changing)
    check_refused(
        r"a\.jsonl has changed since the preparation began",
        lambda: part(options_for(source), tmp_path / "out", 0, 1),
    )
    assert not list((tmp_path / "out").glob("*.tokens"))


@pytest.mark.parametrize("which", range(3))  # plan, tokenizer, library
def test_a_record_made_by_something_else_is_named_and_made_again(tmp_path, source, whole, which):
    """As of a machine with another version of the library, or of a folder that was put together by
    hand."""
    options, out = options_for(source), tmp_path / "out"
    for index in range(3):
        part(options, out, index, 3)
    path = out / ".work" / "task-00004.json"
    record = json.loads(path.read_text())
    record["made"][which] = "other"
    path.write_text(json.dumps(record))
    sorted(out.glob("train-*.tokens"))[3].unlink()  # and a shard that is gone
    here(options, out)
    assert contents(out) == whole


@pytest.mark.parametrize("text", ["", "1", "3/3", "-1/2", "a/b"])
def test_a_part_that_is_none_is_refused(text):
    check_error(
        argparse.ArgumentTypeError, "must be I/N with 0 <= I < N", prepare_data.parse_part, text
    )
    assert prepare_data.parse_part("63/64") == (63, 64)


DATATROVE = pathlib.Path(__file__).parent / "datatrove"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_datatrove_writes_is_taken(tmp_path, kind):
    """Files that its 0.10.1 wrote: JsonlWriter and ParquetWriter with their defaults, of two
    ranks."""
    options = Options([str(DATATROVE / kind)])
    for index in range(2):
        part(options, tmp_path / "out", index, 2)
    manifest, _ = here(options, tmp_path / "out")
    wanted = [
        f"Document {i} of rank {rank}: größer als zuvor.\nSecond line."
        for rank in "01"
        for i in range(12)
    ]
    assert texts_of(tmp_path / "out") == sorted(wanted)
    assert not manifest["counts"]


def program(source, out, *more):
    return [
        sys.executable,
        "-m",
        "experiments.prepare_data",
        f"--input={source}",
        f"--out={out}",
        "--skip_bad",
        "--part_mib=1",
        *more,
    ]


def test_programs_of_several_processes_killed_in_earnest(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    line = jsonl([{"text": "word " * 5000}])
    for i in range(6):
        (source / f"{i}.jsonl").write_bytes(line * 75 + b"{\n")
    options = Options([str(source)], skip_bad=True, part_bytes=1 << 20)
    here(options, tmp_path / "whole")
    out = tmp_path / "out"
    strict = program(source, tmp_path / "strict", "--processes=2")
    strict.remove("--skip_bad")
    ended = subprocess.run(strict, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and "not a JSON object" in ended.stderr
    first = subprocess.Popen(
        program(source, out, "--part=0/2", "--processes=2"), start_new_session=True
    )
    twins = [
        subprocess.Popen(
            program(source, out, "--part=1/2", "--processes=1"), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    until(lambda: list((out / ".work").glob("*.partial-*")))
    assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    for twin in twins:  # the same part at once
        assert "part 1/2 is done" in twin.communicate(timeout=100)[0] and twin.returncode == 0
    done = subprocess.run(
        program(source, out, "--processes=1"), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "counted   6 bad records" in done.stdout
    assert contents(out) == contents(tmp_path / "whole")
    verify = [sys.executable, "-m", "experiments.prepare_data", f"--verify={out}"]
    assert "verified" in subprocess.run(verify, capture_output=True, text=True, timeout=100).stdout
    shard = next(out.glob("train-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    found = subprocess.run(verify, capture_output=True, text=True, timeout=100)
    assert found.returncode == 4 and shard.name in found.stdout
