"""Preparing every format, and whatever a disk may hold: one bad record costs one record, and no input
ends in a traceback."""

import bz2
import collections
import gzip
import io
import itertools
import json
import random
import shutil
import subprocess
import sys
import tarfile
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import here, jsonl, texts_of, zstd
from refusals import check_refused, refusal

from experiments.prepare_data import __main__ as prepare_data
from experiments.prepare_data import make
from zaya_jax.data import prepared_store
from zaya_jax.data.prepared_store import PreparedStore
from zaya_jax.text import memory, text_files, tokenizers
from zaya_jax.text.prepare import Options
from zaya_jax.text.prepare_task import BAD

BINARY = "files that are no text (binary)"


def parquet(columns, **options):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
    return file.getvalue()


PACKED = {"": bytes, ".gz": lambda raw: gzip.compress(raw, 6, mtime=0), ".zst": zstd}


def left_out(*patterns, out, **options):
    manifest, _ = here(
        Options([str(p) for p in patterns], skip_bad=True, held_out=0.0, **options), out
    )
    return manifest["totals"]["train"]["documents"], manifest["counts"], manifest["examples"]


BAD_LINES = {
    b'{"text": ': "not a JSON object of its own (Expecting value: line 1 column ",
    b'{"text": "\\ud800"}': "not Unicode: character 1 is U+D800",
    b'{"text": "caf\xe9"}': "'utf-8' codec can't decode byte",
    b'[{"text": "t"}]': "a JSON array; make a line of each element: jq",
    b'{"a":' * 5000: "not a JSON object of its own (maximum recursion depth",
    b'{"text": "t", "n": ' + b"7" * 5000 + b"}": "not a JSON object of its own (Exceeds the limit",
    b'{"text": ["t"]}': "fields text (list), but expected a text under 'text'",
    b'{"body": "t"}': "fields body (str), but expected a text under 'text'",
    b"3": "a JSON int, but expected",
    b'{"messages": [{"role": "user", "content": "?"}]}': "without an answer",
    b'{"messages": [{"role": "assistant", "content": "!", "reasoning": {"a": 1}}]}': (
        "reasoning are text"
    ),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("part_bytes", [300, 1 << 20])
def test_a_bad_record_costs_one_record_and_its_line_is_named(tmp_path, part_bytes, packed):
    lines = [json.dumps({"text": f"text {i}", "x": float("nan")}).encode() for i in range(100)]
    places = random.Random(0).sample(range(100), len(BAD_LINES))
    for place, bad in zip(places, BAD_LINES, strict=True):
        lines[place] = bad
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(PACKED[packed](b"\n".join(lines)))
    documents, counts, examples = left_out(path, out=tmp_path / "out", part_bytes=part_bytes)
    assert documents == 100 - len(BAD_LINES) and counts == {BAD: len(BAD_LINES)}
    expected = sorted(
        (place + 1, why) for place, why in zip(places, BAD_LINES.values(), strict=True)
    )
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
    for found, (line, why) in zip(examples[BAD], expected, strict=True):
        named = (
            f"line {line}"
            if packed or starts[line - 1] < part_bytes
            else f"byte {starts[line - 1]}"
        )
        assert found.startswith(f"{path}, {named}: ") and why in found and found.isprintable()
    strict = Options([str(path)], part_bytes=part_bytes)
    assert refusal(here, strict, tmp_path / "strict").startswith(examples[BAD][0])


@pytest.mark.usefixtures("in_process")
def test_damage_costs_what_cannot_be_read(tmp_path, monkeypatch):
    raw = b"".join(
        json.dumps({"text": f"{i} {random.Random(i).random()}"}).encode() + b"\n"
        for i in range(20_000)
    )
    for name, damaged in (("a.jsonl.gz", gzip.compress(raw)), ("b.jsonl.zst", zstd(raw))):
        (tmp_path / name).write_bytes(damaged[: len(damaged) // 2])
        documents, counts, examples = left_out(tmp_path / name, out=tmp_path / f"out-{name}")
        assert 5_000 < documents < 15_000 and counts == {BAD: 1}
        assert f"{name}, line {documents + 1:,}: unreadable from here on: " in examples[BAD][0]
    rows = [f"{i} {random.Random(i).random()}" for i in range(1000)]
    damaged = bytearray(
        parquet({"text": rows}, row_group_size=100, write_page_checksum=True, compression="none")
    )
    damaged[damaged.index(b"555 0.")] ^= 1
    (tmp_path / "c.parquet").write_bytes(damaged)
    documents, counts, examples = left_out(tmp_path / "c.parquet", out=tmp_path / "out-c")
    assert documents == 900 and counts == {BAD: 1}
    assert "c.parquet, row group 5 is damaged" in examples[BAD][0]
    own = pyarrow.parquet.ParquetFile.iter_batches
    with monkeypatch.context() as patch:  # as where a bit of the footer is another
        patch.setattr(
            pyarrow.parquet.ParquetFile,
            "iter_batches",
            lambda file, size, groups, columns: own(
                file, size, groups if groups != [4] else [], columns
            ),
        )
        documents, _, examples = left_out(tmp_path / "c.parquet", out=tmp_path / "out-f")
    assert documents == 800 and "row group 4 is damaged: 100 rows are miss" in examples[BAD][0]
    real = pyarrow.parquet.ParquetFile(tmp_path / "c.parquet").metadata
    with monkeypatch.context() as patch:
        other = types.SimpleNamespace(num_rows=999, row_group=real.row_group)
        patch.setattr(pyarrow.parquet.ParquetFile, "metadata", other)
        options = Options([str(tmp_path / "c.parquet")])
        check_refused("its footer has two numbers of rows", here, options, tmp_path / "g")
    (tmp_path / "e.parquet").write_bytes(bytes(1000))
    (tmp_path / "f.parquet").write_bytes(parquet({"n": rows}, row_group_size=100))
    cut = parquet({"text": rows})
    (tmp_path / "h.parquet").write_bytes(cut[:-100] + bytes(92) + cut[-8:])
    (tmp_path / "u.txt").write_text("sound")
    documents, counts, _ = left_out(tmp_path / "[efhu].*", out=tmp_path / "out-e", part_bytes=300)
    assert documents == 1 and counts == {BAD: 3}  # whatever the number of their ranges
    table = pyarrow.table(
        {"text": pyarrow.array([b"ok", b"caf\xe9", b"fine"]).view(pyarrow.string())}
    )
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    documents, _, examples = left_out(tmp_path / "[du].*", out=tmp_path / "out-d")
    assert documents == 1 and "d.parquet, row group 0 is damaged: 'utf-8'" in examples[BAD][0]


FLIP = """
import sys
from zaya_jax.text import inputs

path, *bits = sys.argv[1:]
raw = open(path, "rb").read()
for bit in range(*map(int, bits)):
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    open(path, "wb").write(damaged)
    list(inputs.samples(inputs.whole_file(path, "x"), inputs.TextOrChat()))
"""


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_no_flipped_bit_ends_the_process(tmp_path, form):
    """To ask Arrow where a row group begins ended it by SIGABRT, to take what a batch points at by
    SIGSEGV: a worker "was killed"."""
    raw = parquet({"text": ["a text"]})
    bits = 8 * (len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")), 8 * len(raw), 3  # the footer
    if form == "arrow":
        table = pyarrow.table({"text": ["a text", "another"] * 20})
        with pyarrow.ipc.new_stream(file := io.BytesIO(), table.schema) as writer:
            writer.write_table(table)
        raw = file.getvalue()
        bits = 0, 8 * len(raw), 13
    (tmp_path / f"x.{form}").write_bytes(raw)
    command = [sys.executable, "-c", FLIP, tmp_path / f"x.{form}", *map(str, bits)]
    subprocess.run(command, check=True)


@pytest.mark.usefixtures("in_process")
def test_an_empty_file_is_counted_and_one_that_is_no_text_ends_the_preparation(tmp_path):
    root = tmp_path / "in"
    (root / ".git").mkdir(parents=True)
    (root / ".git" / "object").write_bytes(b"\xff\xfe")  # hidden
    (root / "__init__.py").write_bytes(b"")
    (root / "b.txt").write_text("text")
    (root / "c.txt").write_bytes("one line\ncaf\xe9".encode("latin-1"))
    (root / "link.txt").symlink_to("nowhere")
    for name, reason in (("c.txt", ", line 2: not UTF-8"), ("link.txt", ": .*No such file")):
        options = Options([str(root / "b.txt"), str(root / name)])
        check_refused(f"{name}{reason}", here, options, tmp_path / f"strict {name}")
    documents, counts, examples = left_out(root, out=tmp_path / "out")
    assert documents == 1 and counts == {BAD: 2, "empty texts": 1}
    assert "c.txt" in examples[BAD][0] and "link.txt" in examples[BAD][1]


def archive(mode):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        tar.add(__file__, "x.txt")
    return file.getvalue()


NOT_TEXT = {
    "a.tar": (archive("w"), "archive"),
    "a.tar.gz": (archive("w:gz"), "archive"),
    "a.tgz": (archive("w:gz"), "archive"),
    "renamed.txt": (archive("w"), "binary"),
    "inside.txt.gz": (archive("w:gz"), "binary"),
    "tail.txt": (b"text " * 20_000 + b"\0", "binary"),
    "utf16.txt": ("text".encode("utf-16"), "binary"),
    "a.jsonl.bz2": (bz2.compress(b'{"text": "t"}'), "otherwise compressed"),
    "a.csv": (b"text,label\nsound,1\n", "table"),
    "a.tsv.gz": (gzip.compress(b"text\tlabel\n"), "table"),
}


@pytest.mark.usefixtures("in_process")
def test_what_is_no_text_is_never_learnt_and_is_counted_by_its_kind(tmp_path, caplog):
    for name, (raw, _) in NOT_TEXT.items():
        (tmp_path / name).write_bytes(raw)
    kinds = collections.Counter(f"files that are no text ({kind})" for _, kind in NOT_TEXT.values())
    said = refusal(here, Options([str(tmp_path / "*")]), tmp_path / "none")
    assert all(f"{count} {kind}" in said for kind, count in kinds.items())
    check_refused(
        r"none with text \(.*a\.csv \(table\); .*a\.jsonl\.bz2",
        memory.named_texts,
        str(tmp_path / "*"),
    )
    (tmp_path / "sound.txt").write_bytes(b"\xef\xbb\xbfsound")
    manifest, _ = here(Options([str(tmp_path / "*")], held_out=0.0), tmp_path / "out")
    assert manifest["counts"] == kinds
    assert sorted(itertools.chain(*manifest["examples"].values())) == sorted(
        f"{tmp_path / name} ({kind})" for name, (_, kind) in NOT_TEXT.items()
    )
    # A mark of byte order is no character of the text.
    assert texts_of(tmp_path / "out") == ["sound"]
    assert memory.named_texts(str(tmp_path / "*")) == [("sound.txt", "sound")]
    assert "left out 10 files or records that are no text, such as " in caplog.text


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_zeros_behind_compressed_data_are_its_padding_and_garbage_is_damage(tmp_path, name):
    line = json.dumps({"text": "sound"}).encode() + b"\n"
    whole = gzip.compress(line * 50) + gzip.compress(line * 50)
    for padding, bad in (b"\0", 0), (bytes(10_240), 0), (bytes(9) + b"x", 1), (b"garbage", 1):
        (tmp_path / name).write_bytes(whole + padding)
        (tmp_path / "b.jsonl").write_bytes(line)
        out = tmp_path / f"out{len(padding)}"
        documents, found, _ = left_out(tmp_path / name, tmp_path / "b.jsonl", out=out)
        assert found.get(BAD, 0) == bad and (bad or documents == (101 if "jsonl" in name else 2))
        shutil.rmtree(out)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_a_compressed_file_of_no_bytes_is_damaged(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    check_refused(
        f"cannot read .*{name}: the file is empty",
        lambda: here(Options([str(tmp_path / name)]), tmp_path / "out"),
    )


@pytest.mark.usefixtures("in_process")
def test_a_text_too_long_to_encode_is_a_bad_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_TEXT", 1 << 20)
    (tmp_path / "long.txt.gz").write_bytes(gzip.compress(b"long" * (1 << 18) + b"x", 0))
    (tmp_path / "picture").write_bytes(b"\0" * (1 << 20) + b"x")
    (tmp_path / "sound.txt").write_bytes(b"long" * (1 << 18))
    documents, counts, examples = left_out(tmp_path / "*", out=tmp_path / "out")
    assert documents == 1 and counts == {BAD: 1, BINARY: 1}
    assert "long.txt.gz has more than 256 MiB, too many for one document" in examples[BAD][0]
    check_refused("has more than 256 MiB", memory.named_texts, str(tmp_path / "*.gz"))


@pytest.mark.usefixtures("in_process")
def test_a_failure_says_how_to_go_on(tmp_path):
    good, bad = b'{"text": "sound"}\n' * 10, b"{\n"
    out = tmp_path / "new" / "out"
    (tmp_path / "b.jsonl").write_bytes(good * 9 + bad)
    options = Options([str(tmp_path / "b.jsonl")], part_bytes=400, held_out=0.0)
    check_refused(
        r"byte 1620: .*; finished parts stay, and .* --skip_bad added", here, options, out
    )
    assert not list(out.glob("*.partial-*"))
    check_refused(
        r"begun with other held_out; .* remove this one",
        lambda: here(Options([str(tmp_path / "b.jsonl")], part_bytes=400), out),
    )
    done = {p: p.stat().st_mtime_ns for p in out.glob("*.tokens")}
    documents, counts, _ = left_out(tmp_path / "b.jsonl", out=out, part_bytes=400)
    assert documents == 90 and counts == {BAD: 1} and prepared_store.verify(str(out)) == []
    assert done and all(p.stat().st_mtime_ns == t for p, t in done.items())


@pytest.mark.usefixtures("in_process")
def test_prepared_directories_are_no_text(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("some text")
    options = Options([str(source)], held_out=0.0)
    for pattern in (str(source), str(source / "**" / "*")):  # its own directory is not read
        here(Options([pattern], held_out=0.0), source / "out")
        assert here(Options([pattern], held_out=0.0), source / "out")[1]
        shutil.rmtree(source / "out")
    here(options, source / "out")
    tok = tokenizers.load("bytes")
    check_refused(r"out/manifest\.json, line 1: not a JSON", here, options, tmp_path / "other")
    says = r"none with text \(.*; .*train-00000\.tokens \(prepared tokens\)"
    check_refused(says, memory.split_texts, str(source / "out" / "[rst]*"), tok)
    check_refused("'' holds no text file", memory.split_texts, "", tok)


TEXTS = [f"text number {i} " + "x" * i for i in range(50)]
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>hm</think>hello"},
]


@pytest.mark.parametrize("part_bytes", [100, 1000, 1 << 20])
@pytest.mark.usefixtures("in_process")
def test_every_format_gives_its_documents(tmp_path, part_bytes):
    source = tmp_path / "in"
    source.mkdir()
    raw = jsonl({"text": t} for t in TEXTS)
    (source / "a.jsonl").write_bytes(raw)
    (source / "b.jsonl.gz").write_bytes(gzip.compress(raw))
    (source / "c.jsonl.zst").write_bytes(zstd(raw[:1000]) + zstd(raw[1000:]))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS, "n": list(range(50))}), source / "d.parquet", row_group_size=7
    )
    (source / "e.txt").write_text(TEXTS[7])
    (source / "f.md.gz").write_bytes(gzip.compress(TEXTS[8].encode()))
    (source / "g.bin").write_bytes(b"\xff\xfe\x00")
    manifest, _ = here(Options([str(source)], part_bytes=part_bytes), tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(TEXTS * 4 + [TEXTS[7], TEXTS[8]])
    assert sum(t["documents"] for t in manifest["totals"].values()) == 202
    assert prepared_store.verify(str(tmp_path / "out")) == []


@pytest.mark.usefixtures("in_process")
def test_a_context_that_trims_nothing_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.setattr("sys.argv", ["", "--input=text.txt", "--out=out", "--context=64"])
    monkeypatch.chdir(tmp_path)
    assert prepare_data.main() == 0
    out = capsys.readouterr().out
    assert "note      --context=64 trims chats, and the input has none" in out


@pytest.mark.usefixtures("in_process")
def test_chats_are_trimmed_and_counted(tmp_path, capsys):
    long = [CHAT[0], {"role": "assistant", "content": f"<think>{'r' * 500}</think>hello"}]
    several = [*long, *long]
    dropped = [CHAT[0], {"role": "assistant", "content": "a" * 500}]
    (tmp_path / "c.jsonl").write_bytes(
        jsonl({"messages": m} for m in (CHAT, CHAT, long, several, dropped))
    )
    manifest, _ = here(Options([str(tmp_path / "c.jsonl")], context=200), tmp_path / "out")
    assert manifest["chats"]["context"] == 200
    make.print_summary(manifest, "out")
    assert "counted   1 trimmed" in capsys.readouterr().out
    assert manifest["counts"].pop("tokens learnt") > 5 * len("hello")
    fitted = {"kept": 2, "trimmed": 1, "reduced": 1, "dropped": 1}
    assert manifest["counts"] == fitted | {"answers learnt": 5, "answers rewritten": 0}
    store = PreparedStore(str(tmp_path / "out"))
    (((bundle, _, _),),) = store.read_spans([(0, store.num_tokens)])
    assert 0 < bundle.learn.sum() < len(bundle) - 4
    assert (np.diff(np.append(np.flatnonzero(bundle.starts), len(bundle))) <= 200).all()


@pytest.mark.usefixtures("in_process")
def test_input_without_a_document_for_training_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text(" ")
    for refused in (
        Options([str(tmp_path / "empty.txt")]),
        Options([str(tmp_path / "t.txt")], held_out=1.0),
    ):
        check_refused("no document for training", here, refused, tmp_path / "new")
        assert not (tmp_path / "new").exists()
