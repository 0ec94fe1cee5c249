"""Preparing every format, and whatever a disk may hold: one bad record costs one record, and no input
ends in a traceback."""

import bz2
import collections
import gzip
import io
import itertools
import json
import random
import subprocess
import sys
import tarfile
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import arrow, jsonl, parquet, prepared, texts_of, write, zstd
from refusals import check_refused, refusal

from experiments.prepare_data import __main__ as prepare_data
from experiments.prepare_data import make
from zaya_jax.data import prepared_store
from zaya_jax.data.prepared_store import PreparedStore
from zaya_jax.text import inputs, memory, text_files, tokenizers
from zaya_jax.text.prepare import Options
from zaya_jax.text.prepare_task import BAD

BINARY = "files that are no text (binary)"


PACKED = {"": bytes, ".gz": lambda raw: gzip.compress(raw, 6, mtime=0), ".zst": zstd}


def left_out(*patterns, out, **options):
    manifest, _ = prepared(
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
    assert refusal(prepared, strict, tmp_path / "strict").startswith(examples[BAD][0])


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_of_a_file_that_is_cut_off_all_lines_before_are_read(tmp_path, packed):
    raw = jsonl({"text": f"{i} {random.Random(i).random()}"} for i in range(20_000))
    whole = PACKED[packed](raw)
    write(tmp_path, {f"a.jsonl{packed}": whole[: len(whole) // 2]})
    documents, counts, examples = left_out(tmp_path / "a.*", out=tmp_path / "out")
    assert 5_000 < documents < 15_000 and counts == {BAD: 1}
    assert f"{packed}, line {documents + 1:,}: unreadable from here on: " in examples[BAD][0]


ROWS = [f"{i} {random.Random(i).random()}" for i in range(1000)]
GROUPS = parquet({"text": ROWS}, row_group_size=100, write_page_checksum=True, compression="none")
ONE_GROUP = parquet({"text": ROWS})
LATIN = pyarrow.array([b"ok", b"caf\xe9", b"fine"]).view(pyarrow.string())


@pytest.mark.parametrize(
    ("content", "documents", "named"),
    [
        (GROUPS.replace(b"555 0.", b"554 0."), 900, "row group 5 is damaged"),
        (parquet({"text": LATIN}), 0, "row group 0 is damaged: 'utf-8'"),
        (bytes(1000), 0, "is not a Parquet file"),
        (ONE_GROUP[:-100] + bytes(92) + ONE_GROUP[-8:], 0, "is not a Parquet file"),
        (parquet({"n": ROWS}, row_group_size=100), 0, "has columns n, but expected a text"),
    ],
)
def test_damage_in_parquet_costs_what_cannot_be_read(tmp_path, content, documents, named):
    write(tmp_path, {"a.parquet": content, "u.txt": "sound"})
    found, counts, examples = left_out(tmp_path / "*.*", out=tmp_path / "out", part_bytes=300)
    assert found == documents + 1 and counts == {BAD: 1}  # whatever the number of its ranges
    assert named in examples[BAD][0]


def test_damage_in_a_footer_of_parquet_is_found(tmp_path, monkeypatch):
    path = write(tmp_path, {"a.parquet": GROUPS}) / "a.parquet"
    file = pyarrow.parquet.ParquetFile
    read, real = file.iter_batches, file(path).metadata

    def lacks_a_group(self, size, groups, columns):  # as where a bit of the footer is another
        return read(self, size, groups if groups != [4] else [], columns)

    monkeypatch.setattr(file, "iter_batches", lacks_a_group)
    whole = inputs.whole_file(str(path), "a")
    found = list(inputs.samples(whole, inputs.TextOrChat()))
    (bad,) = (sample for sample in found if isinstance(sample, inputs.BadInput))
    assert len(found) == 901 and "row group 4 is damaged: 100 rows are miss" in str(bad)
    other = types.SimpleNamespace(num_rows=999, row_group=real.row_group)
    monkeypatch.setattr(file, "metadata", other)
    (bad,) = inputs.samples(whole, inputs.TextOrChat())
    assert "its footer has two numbers of rows" in str(bad)


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


ONE_ROW = parquet({"text": ["a text"]})
FOOTER = 8 * (len(ONE_ROW) - 8 - int.from_bytes(ONE_ROW[-8:-4], "little"))  # its first bit


@pytest.mark.parametrize(
    ("name", "content", "first", "step"),
    [
        ("x.parquet", ONE_ROW, FOOTER, 3),
        ("x.arrow", arrow({"text": ["a text", "another"] * 20}), 0, 13),
    ],
)
def test_no_flipped_bit_ends_the_process(tmp_path, name, content, first, step):
    """To ask Arrow where a row group begins ended it by SIGABRT, to take what a batch points at by
    SIGSEGV: a worker "was killed"."""
    path = write(tmp_path, {name: content}) / name
    bits = map(str, (first, 8 * len(content), step))
    subprocess.run([sys.executable, "-c", FLIP, path, *bits], check=True)


def test_an_empty_file_is_counted_and_one_that_is_no_text_ends_the_preparation(tmp_path):
    root = tmp_path / "in"
    contents = {".git/hidden": b"\xff\xfe", "__init__.py": b"", "b.txt": "text"}
    write(root, contents | {"c.txt": b"one line\ncaf\xe9"})
    (root / "link.txt").symlink_to("nowhere")
    for name, reason in (("c.txt", ", line 2: not UTF-8"), ("link.txt", ": .*No such file")):
        options = Options([str(root / "b.txt"), str(root / name)])
        check_refused(f"{name}{reason}", prepared, options, tmp_path / f"strict {name}")
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


def test_what_is_no_text_is_never_learnt_and_is_counted_by_its_kind(tmp_path, caplog):
    write(tmp_path, {name: raw for name, (raw, _) in NOT_TEXT.items()})
    kinds = collections.Counter(f"files that are no text ({kind})" for _, kind in NOT_TEXT.values())
    said = refusal(prepared, Options([str(tmp_path / "*")]), tmp_path / "none")
    assert all(f"{count} {kind}" in said for kind, count in kinds.items())
    check_refused(
        r"none with text \(.*a\.csv \(table\); .*a\.jsonl\.bz2",
        memory.named_texts,
        str(tmp_path / "*"),
    )
    (tmp_path / "sound.txt").write_bytes(b"\xef\xbb\xbfsound")
    manifest, _ = prepared(Options([str(tmp_path / "*")], held_out=0.0), tmp_path / "out")
    assert manifest["counts"] == kinds
    assert sorted(itertools.chain(*manifest["examples"].values())) == sorted(
        f"{tmp_path / name} ({kind})" for name, (_, kind) in NOT_TEXT.items()
    )
    # A mark of byte order is no character of the text.
    assert texts_of(tmp_path / "out") == ["sound"]
    assert memory.named_texts(str(tmp_path / "*")) == [("sound.txt", "sound")]
    assert "left out 10 files or records that are no text, such as " in caplog.text


@pytest.mark.parametrize(("name", "sound"), [("a.jsonl.gz", 101), ("a.txt.gz", 2)])
@pytest.mark.parametrize(
    ("ending", "bad"), [(b"\0", 0), (bytes(10_240), 0), (bytes(9) + b"x", 1), (b"garbage", 1)]
)
def test_zeros_behind_compressed_data_are_its_padding_and_garbage_is_damage(
    tmp_path, name, sound, ending, bad
):
    line = jsonl([{"text": "sound"}])
    write(tmp_path, {name: gzip.compress(line * 50) * 2 + ending, "b.jsonl": line})
    documents, found, _ = left_out(tmp_path / "*.*", out=tmp_path / "out")
    assert found.get(BAD, 0) == bad and (bad or documents == sound)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_a_compressed_file_of_no_bytes_is_damaged(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    check_refused(
        f"cannot read .*{name}: the file is empty",
        lambda: prepared(Options([str(tmp_path / name)]), tmp_path / "out"),
    )


def test_a_text_too_long_to_encode_is_a_bad_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_TEXT", 1 << 20)
    sound = b"long" * (1 << 18)
    contents = {"sound.txt": sound, "long.txt.gz": gzip.compress(sound + b"x", 0)}
    write(tmp_path, contents | {"picture": bytes(1 << 20) + b"x"})
    documents, counts, examples = left_out(tmp_path / "*", out=tmp_path / "out")
    assert documents == 1 and counts == {BAD: 1, BINARY: 1}
    assert "long.txt.gz has more than 256 MiB, too many for one document" in examples[BAD][0]
    check_refused("has more than 256 MiB", memory.named_texts, str(tmp_path / "*.gz"))


def test_a_failure_says_how_to_go_on(tmp_path):
    good, bad = b'{"text": "sound"}\n' * 10, b"{\n"
    out = tmp_path / "new" / "out"
    (tmp_path / "b.jsonl").write_bytes(good * 9 + bad)
    options = Options([str(tmp_path / "b.jsonl")], part_bytes=400, held_out=0.0)
    check_refused(
        r"byte 1620: .*; finished parts stay, and .* --skip_bad added", prepared, options, out
    )
    assert not list(out.glob("*.partial-*"))
    done = {p: p.stat().st_mtime_ns for p in out.glob("*.tokens")}
    documents, counts, _ = left_out(tmp_path / "b.jsonl", out=out, part_bytes=400)
    assert documents == 90 and counts == {BAD: 1} and prepared_store.verify(str(out)) == []
    assert done and all(p.stat().st_mtime_ns == t for p, t in done.items())


@pytest.mark.parametrize("pattern", ["{}", "{}/**/*"])
def test_prepared_directories_are_no_text(tmp_path, pattern):
    source = write(tmp_path / "in", {"a.txt": "some text"})
    options, tok = Options([pattern.format(source)], held_out=0.0), tokenizers.load("bytes")
    assert [prepared(options, source / "out")[1] for _ in range(2)] == [False, True]  # not its own
    check_refused(r"out/manifest\.json, line 1: not a JSON", prepared, options, tmp_path / "other")
    says = r"none with text \(.*; .*train-00000\.tokens \(prepared tokens\)"
    check_refused(says, memory.split_texts, str(source / "out" / "[rst]*"), tok)


TEXTS = [f"text number {i} " + "x" * i for i in range(50)]
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>hm</think>hello"},
]


@pytest.mark.parametrize("part_bytes", [100, 1000, 1 << 20])
def test_every_format_gives_its_documents(tmp_path, part_bytes):
    raw = jsonl({"text": t} for t in TEXTS)
    contents = {
        "a.jsonl": raw,
        "b.jsonl.gz": gzip.compress(raw),
        "c.jsonl.zst": zstd(raw[:1000]) + zstd(raw[1000:]),
        "d.parquet": parquet({"text": TEXTS, "n": list(range(50))}, row_group_size=7),
        "e.txt": TEXTS[7],
        "f.md.gz": gzip.compress(TEXTS[8].encode()),
        "g.bin": b"\xff\xfe\x00",
    }
    source = write(tmp_path / "in", contents)
    prepared(Options([str(source)], part_bytes=part_bytes), tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(TEXTS * 4 + [TEXTS[7], TEXTS[8]])


def test_a_context_that_trims_nothing_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.setattr("sys.argv", ["", "--input=text.txt", "--out=out", "--context=64"])
    monkeypatch.chdir(tmp_path)
    assert prepare_data.main() == 0
    out = capsys.readouterr().out
    assert "note      --context=64 trims chats, and the input has none" in out


def test_chats_are_trimmed_and_counted(tmp_path, capsys):
    long = [CHAT[0], {"role": "assistant", "content": f"<think>{'r' * 500}</think>hello"}]
    several = [*long, *long]
    dropped = [CHAT[0], {"role": "assistant", "content": "a" * 500}]
    chats = jsonl({"messages": m} for m in (CHAT, CHAT, long, several, dropped))
    path = write(tmp_path, {"c.jsonl": chats}) / "c.jsonl"
    manifest, _ = prepared(Options([str(path)], context=200), tmp_path / "out")
    assert manifest["chats"]["context"] == 200
    make.print_summary(manifest, "out")
    assert "counted   1 trimmed" in capsys.readouterr().out
    assert manifest["counts"].pop("tokens learnt") > 5 * len("hello")
    fitted = {"kept": 2, "trimmed": 1, "reduced": 1, "dropped": 1}
    assert manifest["counts"] == fitted | {"answers learnt": 5, "answers rewritten": 0}
    assert PreparedStore(str(tmp_path / "out")).lengths(0).max() <= 200


def test_input_without_a_document_for_training_is_refused(tmp_path):
    write(tmp_path, {"t.txt": "some text", "empty.txt": " "})
    for refused in (
        Options([str(tmp_path / "empty.txt")]),
        Options([str(tmp_path / "t.txt")], held_out=1.0),
    ):
        check_refused("no document for training", prepared, refused, tmp_path / "new")
        assert not (tmp_path / "new").exists()
