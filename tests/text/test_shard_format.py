"""The shard format: reading gives the bits that were written, and nothing else passes for them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import check_error

from zaya_jax.text import shard_format
from zaya_jax.text.shard_format import CorruptRecord, RecordAddress, ShardWriter
from zaya_jax.text.token_block import Document, with_targets

ADDRESS = RecordAddress(2**63 + 5, 12, 3)


def write(path, documents, dtype=np.uint16):
    """(entry, the file's bytes) of a shard."""
    writer = ShardWriter(path, dtype, ADDRESS.corpus, 0, 6)
    for document in documents:
        writer.add(document)
    entry = writer.close()
    assert not path.exists()  # naming it is the caller's last step
    return entry, (path.parent / entry["partial"]).read_bytes()


def read(entry, raw):
    """(bundles, documents' lengths) in a shard's bytes."""
    offsets = shard_format.decode_numbers(
        raw[entry["places_at"] : entry["lengths_at"]],
        shard_format.OFFSETS,
        "s",
        entry["places_crc32c"],
    )
    offsets, crcs = np.split(offsets, [entry["bundles"] + 1])
    lengths = shard_format.decode_numbers(
        raw[entry["lengths_at"] :], shard_format.LENGTHS, "s", entry["lengths_crc32c"]
    )
    assert (offsets[0], offsets[-1]) == (0, entry["places_at"])
    bundles = [
        shard_format.decode_bundle(raw[a:b], "s", i, int(crcs[i]))
        for i, (a, b) in enumerate(itertools.pairwise(offsets))
    ]
    return bundles, lengths


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=40),
    bundle=st.integers(2, 64),
    masked=st.sampled_from([0, 2, 3]),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    seed=st.integers(0, 99),
)
def test_a_shard_gives_back_its_documents(tmp_path_factory, sizes, bundle, masked, dtype, seed):
    rng = np.random.default_rng(seed)
    documents = [
        Document(
            rng.integers(0, np.iinfo(dtype).max, n).astype(dtype),
            rng.random(n) < 0.5 if masked and i % masked == 0 else None,
        )
        for i, n in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_format, "BUNDLE_BYTES", bundle * np.dtype(dtype).itemsize)
        entry, raw = write(tmp_path_factory.mktemp("shard") / "x", documents, dtype)
    bundles, lengths = read(entry, raw)
    assert (entry["bytes"], entry["documents"]) == (len(raw), len(sizes))
    assert lengths.tolist() == sizes
    assert {len(b) for b in bundles[:-1]} <= {bundle} and len(bundles[-1]) <= bundle
    masks = [
        np.ones(len(d.tokens), bool) if d.predicted is None else d.predicted for d in documents
    ]
    expected = with_targets(
        np.concatenate([d.tokens for d in documents]),
        np.concatenate([np.arange(size) == 0 for size in sizes]),
        np.concatenate(masks),
    )
    for name in ("tokens", "targets", "starts", "learn"):
        found = np.concatenate([getattr(bundle, name) for bundle in bundles])
        np.testing.assert_array_equal(found, getattr(expected, name))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_flipped_bit_and_any_cut_is_found(data):
    tokens = np.arange(51, dtype=np.uint16)
    starts, learn = np.isin(tokens, (0, 9))[:-1], (tokens > 20)[1:]
    record = shard_format.encode_bundle(tokens, starts, learn, ADDRESS)
    shard_format.decode_bundle(record, "s", ADDRESS.number, shard_format.crc_of(record))
    if data.draw(st.booleans()):
        broken = bytearray(record)
        broken[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        broken = record[: data.draw(st.integers(0, len(record) - 1))]
    check_error(
        CorruptRecord,
        "corrupt record 3 of shard s",
        lambda: shard_format.decode_bundle(
            bytes(broken), "s", ADDRESS.number, shard_format.crc_of(record)
        ),
    )


@pytest.mark.parametrize("other", [{"corpus": 1}, {"shard": 13}, {"number": 4}, {}])
def test_a_whole_record_of_another_place_or_preparation_is_found(other):
    tokens, starts = np.arange(10, dtype=np.uint16), np.arange(9) == 0
    learnt = np.arange(9) > (-1 if other else 3)
    one = shard_format.encode_bundle(tokens, starts, np.ones(9, bool), ADDRESS)
    another = shard_format.encode_bundle(tokens, starts, learnt, ADDRESS._replace(**other))
    check_error(
        CorruptRecord,
        "not the one that was written here",
        lambda: shard_format.decode_bundle(another, "s", ADDRESS.number, shard_format.crc_of(one)),
    )
    table = shard_format.encode_numbers(shard_format.OFFSETS, np.arange(4), ADDRESS)
    check_error(
        CorruptRecord,
        "differs",
        lambda: shard_format.decode_numbers(
            table, shard_format.LENGTHS, "s", shard_format.crc_of(table)
        ),
    )
