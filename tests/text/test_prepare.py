"""Preparing: every input format, restarting after kill -9, and refusals in one line."""

import gzip

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import here, jsonl, texts_of, zstd

from zaya_jax.config import UserError
from zaya_jax.data import prepared_store
from zaya_jax.data.prepared_store import PreparedStore
from zaya_jax.text.prepare import Options

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
def test_chats_are_trimmed_and_counted(tmp_path):
    long = [CHAT[0], {"role": "assistant", "content": f"<think>{'r' * 500}</think>hello"}]
    several = [*long, *long]
    dropped = [CHAT[0], {"role": "assistant", "content": "a" * 500}]
    (tmp_path / "c.jsonl").write_bytes(
        jsonl({"messages": m} for m in (CHAT, CHAT, long, several, dropped))
    )
    manifest, _ = here(Options([str(tmp_path / "c.jsonl")], context=200), tmp_path / "out")
    assert manifest["trim"] == {"context": 200, "kept": 2, "trimmed": 1, "reduced": 1, "dropped": 1}
    learnt = {name: number for name, number in manifest["chats"].items() if name != "template"}
    assert learnt.pop("tokens learnt") > 5 * len("hello")
    assert learnt == {"answers learnt": 5, "answers rewritten": 0}
    store = PreparedStore(str(tmp_path / "out"))
    (((bundle, _, _),),) = store.read_spans([(0, store.num_tokens)])
    assert 0 < bundle.learn.sum() < len(bundle) - 4
    assert (np.diff(np.append(np.flatnonzero(bundle.starts), len(bundle))) <= 200).all()


@pytest.mark.usefixtures("in_process")
def test_input_or_directories_of_no_use_are_refused(tmp_path):
    (tmp_path / "t.txt").write_text("some text")
    options = Options([str(tmp_path / "t.txt")], held_out=0.0)
    here(options, tmp_path / "out")
    assert here(options, tmp_path / "out")[1]  # complete already
    with pytest.raises(UserError, match="not a preparation"):
        here(options, tmp_path)
    with pytest.raises(UserError, match="names no file"):
        here(Options([str(tmp_path / "no*")]), tmp_path / "new")
    (tmp_path / "empty.txt").write_text(" ")
    for refused in (
        Options([str(tmp_path / "empty.txt")]),
        Options([str(tmp_path / "t.txt")], held_out=1.0),
    ):
        with pytest.raises(UserError, match="no document for training"):
            here(refused, tmp_path / "new")
        assert not (tmp_path / "new").exists()
