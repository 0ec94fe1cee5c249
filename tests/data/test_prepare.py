"""Preparing: every input format, restarting after kill -9, and what is refused in one line."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_helpers import here, jsonl, texts_of

from experiments import prepare_data
from zaya_jax.config import UserError
from zaya_jax.data import prepare, prepare_engines, prepare_task, storage, tokenizers
from zaya_jax.data.prepare import Options
from zaya_jax.data.storage import Prepared

TEXTS = [f"text number {i} " + "x" * i for i in range(50)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>hm</think>hello"}]


def run(*arguments, **options):
    command = [sys.executable, "-m", "experiments.prepare_data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("part_bytes", [100, 1000, 1 << 20])
@pytest.mark.usefixtures("in_process")
def test_every_format_gives_its_documents(tmp_path, part_bytes):
    source = tmp_path / "in"
    source.mkdir()
    raw = jsonl({"text": t} for t in TEXTS)
    (source / "a.jsonl").write_bytes(raw)
    (source / "b.jsonl.gz").write_bytes(gzip.compress(raw))
    (source / "c.jsonl.zst").write_bytes(zstandard.compress(raw[:1000]) + zstandard.compress(raw[1000:]))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS, "n": list(range(50))}), source / "d.parquet", row_group_size=7
    )
    (source / "e.txt").write_text(TEXTS[7])
    (source / "f.md.gz").write_bytes(gzip.compress(TEXTS[8].encode()))
    (source / "g.bin").write_bytes(b"\xff\xfe\x00")
    manifest, _ = here(Options([str(source)], part_bytes=part_bytes), tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(TEXTS * 4 + [TEXTS[7], TEXTS[8]])
    assert sum(t["documents"] for t in manifest["totals"].values()) == 202
    assert storage.verify(str(tmp_path / "out")) == []
    names = [
        json.loads(line)["name"] for line in (tmp_path / "out" / "sources.jsonl").read_text().splitlines()
    ]
    assert names == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.txt", "f.md.gz", "g.bin"]


@pytest.mark.usefixtures("in_process")
def test_chats_are_trimmed_and_counted(tmp_path):
    long = [CHAT[0], {"role": "assistant", "content": f"<think>{'r' * 500}</think>hello"}]
    several = [*long, *long]
    dropped = [CHAT[0], {"role": "assistant", "content": "a" * 500}]
    (tmp_path / "c.jsonl").write_bytes(jsonl({"messages": m} for m in (CHAT, CHAT, long, several, dropped)))
    manifest, _ = here(Options([str(tmp_path / "c.jsonl")], context=200), tmp_path / "out")
    assert manifest["trim"] == {"context": 200, "kept": 2, "trimmed": 1, "reduced": 1, "dropped": 1}
    store = Prepared(str(tmp_path / "out"))
    (((bundle, _, _),),) = store.parts([(0, store.num_tokens)])
    assert 0 < bundle.learn.sum() < len(bundle) - 4
    assert (np.diff(np.append(np.flatnonzero(bundle.starts), len(bundle))) <= 200).all()


@pytest.mark.usefixtures("in_process")
def test_a_vocabulary_of_gemmas_size_takes_four_bytes(tmp_path):
    tok = tokenizers.train_bpe(TEXTS, 270)
    model = json.loads(tok._content)
    model["model"]["vocab"].update({f"filler{i}": i for i in range(270, 262_200)})
    model["model"]["vocab"]["Zz"] = 262_200
    model["model"]["merges"].append(["Z", "z"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    (tmp_path / "t.txt").write_text("ab Zz" * 20)
    (tmp_path / "u.txt").write_text("Zz")
    manifest, _ = here(
        Options([str(tmp_path / "*.txt")], tokenizer=str(tmp_path / "tokenizer.json"), held_out=0.0),
        tmp_path / "out",
    )
    assert manifest["token_bytes"] == 4 and manifest["tokenizer"]["vocab_size"] == 262_201
    assert texts_of(tmp_path / "out") == ["Zz", "ab Zz" * 20]
    (((bundle, _, _),),) = Prepared(str(tmp_path / "out")).parts([(0, 3)])
    assert bundle.tokens.max() == 262_200


@pytest.mark.usefixtures("in_process")
def test_a_bpe_can_be_trained_on_the_input(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl({"body": t} for t in TEXTS))
    manifest, _ = here(
        Options([str(tmp_path / "a.jsonl")], train_bpe=290, text_field="body"), tmp_path / "out"
    )
    assert manifest["tokenizer"]["vocab_size"] == 290
    assert texts_of(tmp_path / "out") == sorted(TEXTS)


@pytest.mark.usefixtures("in_process")
def test_input_that_is_wrong_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": \n')
    (tmp_path / "b.jsonl").write_bytes(b'{"body": "other field"}\n')
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(jsonl({"text": t} for t in TEXTS))[:-5])
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(jsonl({"text": t} for t in TEXTS))[:-9])
    (tmp_path / "e.jsonl").write_bytes(jsonl([{"messages": [{"role": "user", "content": "?"}]}]))
    (tmp_path / "f.parquet").write_bytes(b"PAR1 no")
    wanted = {
        "a.jsonl": "line 2: not a JSON object", "b.jsonl": r"neither a text under 'text'",
        "c.jsonl.zst": "truncated", "d.jsonl.gz": "line 51: cannot be read", "e.jsonl": "without an answer",
        "f.parquet": "not a Parquet file",
    }  # fmt: skip
    for name, message in wanted.items():
        with pytest.raises(UserError, match=message) as error:
            here(Options([str(tmp_path / name)]), tmp_path / f"out-{name}")
        assert name in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "f.parquet").unlink()
    (tmp_path / "ok.txt").write_text("fine text")
    manifest, _ = here(Options([str(tmp_path / "*.*")], skip_bad=True, held_out=0.0), tmp_path / "skipping")
    left_out = manifest["left_out"]
    assert left_out["bad"] == 5 and any("a.jsonl, line 2" in line for line in left_out["bad_examples"])
    assert "fine text" in texts_of(tmp_path / "skipping")


@pytest.mark.usefixtures("in_process")
def test_other_input_or_options_are_refused(tmp_path):
    (tmp_path / "t.txt").write_text("some text")
    options = Options([str(tmp_path / "t.txt")], held_out=0.0)
    here(options, tmp_path / "out")
    assert here(options, tmp_path / "out")[1]  # complete already
    with pytest.raises(UserError, match="other input or options"):
        here(Options([str(tmp_path / "t.txt")], held_out=0.5), tmp_path / "out")
    with pytest.raises(UserError, match="not a preparation"):
        here(options, tmp_path)
    with pytest.raises(UserError, match="names no file"):
        here(Options([str(tmp_path / "no*")]), tmp_path / "new")
    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(UserError, match="no document for training"):
        here(Options([str(tmp_path / "empty.txt")]), tmp_path / "new")


@pytest.mark.usefixtures("in_process")
def test_an_unfinished_task_leaves_nothing_visible_and_a_finished_one_stays(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_bytes(jsonl({"text": t} for t in TEXTS))
    options = Options([str(source)], part_bytes=500)
    expected, _ = here(options, tmp_path / "whole")
    out = tmp_path / "out"
    calls = []

    def killed(job, tasks, processes, tell):
        for n in (0, 2):
            prepare_task.run(tasks[n], job, lambda *_: None)
        task = prepare_task._Writing(tasks[1], job, tokenizers.load(job.directory / "tokenizer"))
        list(task.add(tasks[1].stretches[0]))  # never committed, nor removed
        for writer in task._writers.values():
            writer._file.close()
        assert list(job.directory.glob(".work/train-00001.*.partial-*"))
        calls.append({p.name: p.stat().st_mtime_ns for p in job.directory.glob("*.tokens")})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_engines, "run_processes", killed)
        patch.setattr(prepare, "gather", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            here(options, out)
    assert set(calls[0]) <= {"train-00000.tokens", "train-00002.tokens"} | {
        "held_out-00000.tokens", "held_out-00002.tokens"
    }  # fmt: skip
    with pytest.raises(UserError, match="not finished"):
        storage.is_prepared(str(out))
    manifest, complete = here(options, out)
    assert not complete
    assert not list(out.glob("*.partial-*")) and not (out / ".work").exists()
    for name, time_ns in calls[0].items():
        assert (out / name).stat().st_mtime_ns == time_ns
    assert manifest == expected and texts_of(out) == sorted(TEXTS)
    assert (out / "shards.bin").read_bytes() == (tmp_path / "whole" / "shards.bin").read_bytes()


@pytest.mark.slow
def test_killed_for_good_and_continued(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for i in range(40):
        (source / f"{i}.jsonl").write_bytes(jsonl({"text": f"{i} {j} " + "word " * 2000} for j in range(150)))
    command = (f"--input={source}", f"--out={tmp_path / 'out'}", "--part_mib=4", "--processes=2")
    for tasks_done in (1, 4):  # each time in the middle of the tasks that follow
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.prepare_data", *command], start_new_session=True
        )
        while len(list((tmp_path / "out" / ".work").glob("task-*.json"))) < tasks_done:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "out" / "manifest.json").exists()
    time.sleep(1)  # orphaned workers see that their parent is gone
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.tokens")}
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    checked = run(f"--verify={tmp_path / 'out'}")
    assert checked.returncode == 0 and "verified" in checked.stdout
    assert len(texts_of(tmp_path / "out")) == 40 * 150
    victim = next(iter(before or (tmp_path / "out").glob("train-*")))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content)
    checked = run(f"--verify={tmp_path / 'out'}")
    assert checked.returncode == 4 and victim.name in checked.stdout


def test_a_bare_verify_means_the_directory_of_out(monkeypatch):
    def parsed(*argv):
        monkeypatch.setattr(sys, "argv", ["prepare_data", *argv])
        return prepare_data.parse().verify

    assert parsed("--verify", "--out=a") == parsed("--out", "a", "--verify") == "a"
    assert parsed("--verify", "a") == parsed("--verify=a") == "a"
    with pytest.raises(UserError, match=r"--verify=DIR, or --verify --out=DIR"):
        parsed("--verify")
