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

import pytest
from data_helpers import contents, damage, jsonl, parquet, prepared, run_in_process, texts_of, write
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


@pytest.fixture
def source(tmp_path):
    """Files of every kind and odd names, large, small and empty, with two bad records and a
    picture."""
    rng = random.Random(3)
    texts = [f"text {i} ü " + "word " * rng.randint(0, 60) for i in range(400)]
    raw = jsonl({"text": t} for t in texts)
    contents = {
        "a.jsonl": raw + b"{\n" + raw[: raw.index(b"\n", 5000) + 1],
        "b.jsonl.gz": gzip.compress(raw[: raw.index(b"\n", 9000) + 1] + b"[1]\n"),
        "unter ordner/c.parquet": parquet({"text": texts[:120]}, row_group_size=11),
        **{f"d{i}.txt": " ".join(texts[: 20 * i]) for i in range(5)},
        "e.jsonl": jsonl({"messages": CHAT} for _ in range(9)) + b'{"text": " "}\n',
        "empty.jsonl": b"",
        "picture.txt": b"\xff\x00\xfe",
    }
    return write(tmp_path / "in put ä", contents)


def options_for(source, **changed):
    return Options(
        **{"inputs": [str(source)], "part_bytes": 6000, "skip_bad": True, "context": 64, **changed}
    )


def part(options, out, index, count):
    return prepare.prepare(options, str(out), 1, lambda *_: None, (index, count))[1]


@pytest.fixture
def whole(tmp_path, source):
    """What one machine makes of it."""
    prepared(options_for(source), tmp_path / "whole")
    return contents(tmp_path / "whole")


# of 18 tasks and 11 files
@pytest.mark.parametrize(("count", "bpe"), [(1, 0), (2, 300), (3, 0), (7, 0), (64, 0)])
def test_parts_in_any_order_and_twice_are_what_one_machine_makes(tmp_path, source, count, bpe):
    out, options = tmp_path / "out put ö", options_for(source, train_bpe=bpe)
    prepared(options, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    order = [*range(count), random.Random(count).randrange(count)]
    random.Random(count).shuffle(order)
    part(options, out, 0, 5)  # of a machine that counts otherwise
    assert not any(part(options, out, index, count) for index in order)
    manifest, was_there = prepared(options, out)
    assert contents(out) == whole and not was_there
    assert prepared_store.verify(str(out)) == []
    assert manifest["counts"].keys() > {prepare_task.BAD, "empty texts", "kept"}
    assert prepared(options, out) == (manifest, True)
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

    def everything(out):
        if not alone:
            part(options, out, 1, 2)
            part(options, out, 0, 2)
        prepared(options, out)

    with monkeypatch.context() as patch:
        moments = dying_at(patch, 0)
        everything(tmp_path / "counted")
    whole = contents(tmp_path / "counted")
    assert moments[0] > 50
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
        prepared(options, tmp_path / "out")  # another process ends just now
        return own(*arguments)

    monkeypatch.setattr(prepare, moment, late)
    prepared(options, tmp_path / "out")
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
    refusals = (lambda: part(other, "out", 1, 2), lambda: prepared(other, "out"))
    for refused in refusals:
        check_refused(f"begun with other {named}.* remove this one to begin anew", refused)
    if other != options:
        prepared(options, "out")
        for refused in refusals:
            check_refused("is complete, from other input or options", refused)


def test_input_that_changes_while_it_is_read_is_no_part(tmp_path, source, monkeypatch):
    def changing(job, todo, processes):
        touched(source / "a.jsonl")
        yield from run_in_process(job, todo, processes)

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
    part(options, out, 0, 1)
    path = out / ".work" / "task-00004.json"
    record = json.loads(path.read_text())
    record["made"][which] = "other"
    damage(out / record["shards"][0]["file"], 100)
    path.write_text(json.dumps(record))
    sorted(out.glob("train-*.tokens"))[3].unlink()  # and a shard that is gone
    prepared(options, out)
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
    manifest, _ = prepared(Options([str(DATATROVE / kind)]), tmp_path / "out")
    wanted = [
        f"Document {i} of rank {rank}: größer als zuvor.\nSecond line."
        for rank in "01"
        for i in range(12)
    ]
    assert texts_of(tmp_path / "out") == sorted(wanted)
    assert not manifest["counts"]


def started(*options):
    """The program, with its output in a pipe, in a group of processes that can be killed."""
    command = [sys.executable, "-m", "experiments.prepare_data", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def check_ends(program, code, says):
    """A program that was started ends with this code, and prints these words."""
    assert says in program.communicate(timeout=100)[0] and program.returncode == code


def test_programs_of_several_processes_killed_in_earnest(tmp_path):
    bad = jsonl([{"text": "word " * 5000}]) * 75 + b"{\n"
    source = write(tmp_path / "in", {f"{i}.jsonl": bad for i in range(6)})
    prepared(Options([str(source)], skip_bad=True, part_bytes=1 << 20), tmp_path / "whole")
    out, strict = tmp_path / "out", (f"--input={source}", "--part_mib=1")
    check_ends(started(*strict, f"--out={tmp_path / 'strict'}", "--processes=2"), 2, "")
    options = (*strict, f"--out={out}", "--skip_bad")
    first = started(*options, "--part=0/2", "--processes=2")
    twins = [started(*options, "--part=1/2", "--processes=1") for _ in range(2)]
    until(lambda: list((out / ".work").glob("*.partial-*")))
    assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    for twin in twins:  # the same part at once
        check_ends(twin, 0, "part 1/2 is done")
    check_ends(started(*options, "--processes=1"), 0, "counted   6 bad records")
    assert contents(out) == contents(tmp_path / "whole")
    check_ends(started(f"--verify={out}"), 0, "verified")
    shard = next(out.glob("train-*"))
    damage(shard, shard.stat().st_size // 2)
    check_ends(started(f"--verify={out}"), 4, shard.name)
