"""The shard format: what is written is read again, bit for bit, by record and by place in the file."""

import numpy as np
import pytest
from array_record.python import array_record_module
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.tokens import CorruptRecord, Document, ShardWriter


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_shard_gives_back_its_documents(tmp_path, dtype):
    rng = np.random.default_rng(0)
    documents = []
    for i in range(80):
        size = int(rng.integers(1, 30_000)) if i % 30 else 1_200_000  # some are longer than a bundle may be
        mask = rng.random(size) < 0.5 if i % 3 == 0 else None
        documents.append(Document(rng.integers(0, np.iinfo(dtype).max, size).astype(dtype), mask))
    writer = ShardWriter(tmp_path / "shard", dtype)
    for document in documents:
        writer.add(document)
    entry = writer.close()
    path = tmp_path / entry["partial"]
    assert not (tmp_path / "shard").exists()  # naming it is the caller's last step
    crc, size = tokens_lib.checksum(path)
    assert (f"{crc:08x}", size) == (entry["crc32c"], entry["bytes"])

    raw = path.read_bytes()
    reader = array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
    bundles = []
    for i, (offset, size) in enumerate(zip(entry["index"]["offset"], entry["index"]["size"], strict=True)):
        offset, size = int(offset), int(size)
        record = tokens_lib.strip_blocks(raw[offset : offset + tokens_lib.raw_size(offset, size)], offset)
        assert record == reader.read([i])[0]
        bundles.append(tokens_lib.decode_bundle(record, "shard", i))
    together = {
        f: np.concatenate([getattr(b, f) for b in bundles]) for f in ("tokens", "targets", "starts", "learn")
    }
    np.testing.assert_array_equal(together["tokens"], np.concatenate([d.tokens for d in documents]))
    ends = np.cumsum([len(d.tokens) for d in documents])
    np.testing.assert_array_equal(np.flatnonzero(together["starts"]), np.append(0, ends[:-1]))
    mask = np.concatenate([np.ones(len(d.tokens), bool) if d.learn is None else d.learn for d in documents])
    expected = np.append(mask[1:] & ~together["starts"][1:], False)
    np.testing.assert_array_equal(together["learn"], expected)
    learnt = np.flatnonzero(expected)
    np.testing.assert_array_equal(together["targets"][learnt], together["tokens"][learnt + 1])
    lengths = tokens_lib.decode_lengths(reader.read([len(bundles)])[0], "shard", len(bundles))
    assert lengths.sum() == entry["tokens"] == len(together["tokens"])
    assert 1 < tokens_lib.storage_factor(entry["index"], np.dtype(dtype).itemsize) < 1.2


def test_ids_above_65536_need_and_get_four_bytes(tmp_path):
    writer = ShardWriter(tmp_path / "shard", np.uint32)
    writer.add(Document(np.array([262_144, 2**32 - 1, 5], np.uint32)))
    entry = writer.close()
    reader = array_record_module.ArrayRecordReader(str(tmp_path / entry["partial"]))
    assert tokens_lib.decode_bundle(reader.read([0])[0], "shard", 0).tokens.tolist() == [
        262_144,
        2**32 - 1,
        5,
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_flipped_bit_and_any_cut_is_found(data):
    tokens = np.arange(50, dtype=np.uint16)
    record = tokens_lib.encode_bundle(tokens, np.array([0, 9]), tokens > 20, (7, True))
    tokens_lib.decode_bundle(record, "s", 3)
    if data.draw(st.booleans()):
        broken = bytearray(record)
        broken[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        broken = record[: data.draw(st.integers(0, len(record) - 1))]
    with pytest.raises(CorruptRecord, match="corrupt record 3 of shard s"):
        tokens_lib.decode_bundle(bytes(broken), "s", 3)


@given(st.integers(0, 1 << 20), st.integers(1, 300_000))
def test_places_in_the_file_are_consistent(offset, size):
    raw = tokens_lib.raw_size(offset, size)
    assert len(tokens_lib.strip_blocks(bytes(raw), offset)) == size
    assert len(tokens_lib.strip_blocks(bytes(raw - 1), offset)) < size
