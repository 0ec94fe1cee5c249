"""The format of prepared token shards: a shard's writer and decoder, a directory's manifest and
table of shards.

    manifest.json                               written last: without it there is no dataset
    shards.bin                                  one entry per shard
    train-00000.tokens, held_out-00000.tokens   shards: bundles, then two tables

The shards of a split, one after another, are its *tape*: whole documents, each between a begin and
an end token. A shard's file is *bundles* of one size (64 KiB of tokens, the last one shorter), so
that a token's position on the tape says which bundle holds it, and one read brings it. A bundle has
the positions where documents begin, the loss mask if there is one, the token that follows, and a
checksum over all of it and over its address: corpus, shard and number. Two more records follow the
bundles: the offset of each bundle with its checksum, and the length of each document, for packing.
Their checksums are in shards.bin, whose own is in the manifest. So a reader knows that a bundle is
the one that was written there, not only that it agrees with itself.
"""

import array
import hashlib
import json
import os
import pathlib
import secrets
import struct
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from zaya_jax.config import UserError
from zaya_jax.text.token_block import Document, TokenBlock, all_true

FORMAT, VERSION = "zaya_jax tokens", 3
MANIFEST, SHARDS, TOKENIZER = "manifest.json", "shards.bin", "tokenizer"
WORK = ".work"  # a folder of the preparation's own, until the manifest is there
SPLITS = ("train", "held_out")
SUFFIX = ".tokens"
BUNDLE_BYTES = 64 << 10  # of tokens: one read for every few sequences
PAGE_BYTES = 4096

SHARD_TYPE = np.dtype(
    [
        ("task", "<u4"),
        ("split", "<u4"),
        ("bundles", "<u4"),
        ("bytes", "<u8"),
        ("tokens", "<u8"),
        ("documents", "<u8"),
        ("pages", "<u8"),
        ("places_at", "<u8"),  # where the table of bundles begins in the file
        ("lengths_at", "<u8"),  # and that of documents
        ("places_crc32c", "<u4"),
        ("lengths_crc32c", "<u4"),
    ]
)

# magic, crc32c of the rest, corpus, shard, number, tokens (or entries), starts, bytes per token,
# whether there is a mask
_HEADER = struct.Struct("<4sIQIIIIHH")
# the kinds of records: a bundle, the table of bundles, the table of documents
BUNDLE, OFFSETS, LENGTHS = b"ZJB3", b"ZJP3", b"ZJL3"


class RecordAddress(NamedTuple):
    """Where a record belongs; part of what its checksum covers, so that none can stand in for
    another."""

    corpus: int  # `corpus_id` of the preparation
    shard: int  # `shard_id`
    number: int  # of the bundle in its shard; 0 for the two tables


class CorruptRecord(Exception):
    """A record whose bytes differ from the ones written."""

    def __init__(self, shard: str, record: str, why: str) -> None:
        super().__init__(f"corrupt {record} of shard {shard}: {why}")


def shard_id(split: int, task: int) -> int:
    """One number for a task's shard of a split (by its index in SPLITS)."""
    return 2 * task + split


def shard_name(split: int, task: int) -> str:
    """The file of a task's shard of a split."""
    return f"{SPLITS[split]}-{task:05d}{SUFFIX}"


def corpus_id(facts: Any) -> int:
    """A number for a preparation, of everything that its content depends on."""
    return int.from_bytes(bytes.fromhex(json_sha256(facts)[:16]), "little")


def encode_bundle(
    tokens: np.ndarray, starts: np.ndarray, learn: np.ndarray, address: RecordAddress
) -> bytes:
    """The record of a bundle. `tokens` has one more than the bundle: the token that follows. Of each
    token of the bundle, `starts` says whether a document begins there, and `learn` whether the next
    token is to be predicted.
    """
    positions = np.flatnonzero(starts).astype("<u4")
    mask = b""
    if not np.array_equal(learn, _learn_all(starts)):
        mask = np.packbits(learn).tobytes()
    counts = len(starts), len(positions), tokens.dtype.itemsize, bool(mask)
    body = (
        positions.tobytes()
        + mask
        + tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes()
    )
    return _encode_record(BUNDLE, address, counts, body)


def decode_bundle(record: bytes, shard: str, number: int, crc: int) -> TokenBlock:
    """The bundle in a record; CorruptRecord where it is not the one that was written there, bit for
    bit."""
    count, num_starts, width, has_mask = _check_record(
        record, BUNDLE, shard, f"record {number}", crc
    )
    offset = _HEADER.size
    starts = np.zeros(count, bool)
    starts[np.frombuffer(record, "<u4", num_starts, offset)] = True
    offset += 4 * num_starts
    learn = _learn_all(starts)
    if has_mask:
        bits = np.frombuffer(record, np.uint8, (count + 7) // 8, offset)
        learn = np.unpackbits(bits, count=count).view(bool)
        offset += len(bits)
    tokens = np.frombuffer(record, f"<u{width}", count + 1, offset)
    return TokenBlock(tokens[:-1], tokens[1:], starts, learn, all_true(count))


def _learn_all(starts: np.ndarray) -> np.ndarray:
    """The `learn` of a bundle of texts: every next token is predicted, unless it begins a document."""
    return np.append(~starts[1:], True)


def encode_numbers(magic: bytes, numbers: np.ndarray, address: RecordAddress) -> bytes:
    """One of the two tables: the offset of each bundle, the end of the last, and the checksum of
    each; or documents' lengths.
    """
    counts = len(numbers), 0, 8, 0
    return _encode_record(magic, address, counts, numbers.astype("<u8").tobytes())


def decode_numbers(record: bytes, magic: bytes, shard: str, crc: int) -> np.ndarray:
    """The numbers in a table; CorruptRecord where it is not the one that was written there, bit for
    bit."""
    what = "table of bundles" if magic == OFFSETS else "table of documents"
    count, *_ = _check_record(record, magic, shard, what, crc)
    return np.frombuffer(record, "<u8", count, _HEADER.size).astype(np.int64)


def numbers_size(count: int) -> int:
    """Bytes of a table of this many numbers."""
    return _HEADER.size + 8 * count


def _encode_record(
    magic: bytes, address: RecordAddress, counts: tuple[int, ...], body: bytes
) -> bytes:
    head = _HEADER.pack(magic, 0, *address, *counts)
    crc = google_crc32c.extend(google_crc32c.value(head[8:]), body)
    return b"".join([magic, struct.pack("<I", crc), head[8:], body])


def crc_of(record: bytes) -> int:
    """The checksum that a record says it has."""
    return int.from_bytes(record[4:8], "little")


def _check_record(
    record: bytes, magic: bytes, shard: str, what: str, expected: int
) -> tuple[int, ...]:
    """The counts in the header of a record, whose checksum, in the shard's tables, covers its
    address as well."""
    if len(record) < _HEADER.size:
        raise CorruptRecord(shard, what, f"only {len(record)} bytes")
    kind, crc, _, _, _, *counts = _HEADER.unpack_from(record)
    if kind != magic or google_crc32c.value(record[8:]) != crc:
        raise CorruptRecord(shard, what, "CRC32C differs")
    if crc != expected:
        raise CorruptRecord(
            shard,
            what,
            f"it is whole, but not the one that was written here ({crc:08x} for {expected:08x})",
        )
    return tuple(counts)


class ShardWriter:
    """Writes documents into the bundles of one shard, under a temporary name; the caller renames
    the file."""

    def __init__(self, path: pathlib.Path, dtype: type, corpus: int, split: int, task: int) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._split, self._task = split, task
        self._address = RecordAddress(corpus, shard_id(split, task), 0)
        self._size = BUNDLE_BYTES // self.dtype.itemsize  # tokens a bundle
        self._partial = partial_path(path)
        self._file = self._partial.open("wb")
        # tokens, whether a document begins there, whether it is to be predicted from the one before
        self._pending: list[tuple[np.ndarray, ...]] = []
        self._pending_tokens = 0  # at most a bundle's
        self._offsets = array.array("Q", [0])
        self._crcs = array.array("Q")
        self._lengths = array.array("Q")
        self._pages = 0

    def add(self, document: Document) -> None:
        """Append one document."""
        tokens = document.tokens.astype(self.dtype, copy=False)
        starts = np.zeros(len(tokens), bool)
        starts[0] = True
        predicted = document.predicted
        if predicted is None:
            predicted = np.ones(len(tokens), bool)
        self._lengths.append(len(tokens))
        self._pending.append((tokens, starts, predicted & ~starts))
        self._pending_tokens += len(tokens)
        # one more than it holds, so that what follows it is known
        if self._pending_tokens > self._size:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Finish the file; its entry, with the name it has until then under "partial"."""
        self._flush(last=True)
        offsets = np.frombuffer(self._offsets + self._crcs, np.uint64)
        lengths = np.frombuffer(self._lengths, np.uint64)
        bundle_table = encode_numbers(OFFSETS, offsets, self._address)
        document_table = encode_numbers(LENGTHS, lengths, self._address)
        self._file.write(bundle_table + document_table)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        bundles_end = self._offsets[-1]
        return {
            "file": self.path.name,
            "partial": self._partial.name,
            "split": self._split,
            "task": self._task,
            "bundles": len(self._offsets) - 1,
            "bytes": bundles_end + len(bundle_table) + len(document_table),
            "tokens": sum(self._lengths),
            "documents": len(self._lengths),
            "pages": self._pages,
            "places_at": bundles_end,
            "lengths_at": bundles_end + len(bundle_table),
            "places_crc32c": crc_of(bundle_table),
            "lengths_crc32c": crc_of(document_table),
        }

    def discard(self) -> None:
        """Close the file, and remove it unless it has its final name."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _flush(self, last: bool = False) -> None:
        """Write all full pending bundles, at last the rest too."""
        if last:  # no token follows: any stands for it
            self._pending.append((np.zeros(1, self.dtype), np.zeros(1, bool), np.zeros(1, bool)))
        tokens, starts, predicted = (
            np.concatenate(arrays) for arrays in zip(*self._pending, strict=True)
        )
        begin = 0
        least = 1 if last else self._size
        while begin + least < len(tokens):
            end = min(begin + self._size, len(tokens) - 1)
            self._write_bundle(
                tokens[begin : end + 1], starts[begin:end], predicted[begin + 1 : end + 1]
            )
            begin = end
        self._pending = [(tokens[begin:], starts[begin:], predicted[begin:])]
        self._pending_tokens = len(tokens) - begin

    def _write_bundle(self, tokens: np.ndarray, starts: np.ndarray, learn: np.ndarray) -> None:
        address = self._address._replace(number=len(self._offsets) - 1)
        record = encode_bundle(tokens, starts, learn, address)
        begin, end = self._offsets[-1], self._offsets[-1] + len(record)
        self._file.write(record)
        self._offsets.append(end)
        self._crcs.append(crc_of(record))
        self._pages += (end - 1) // PAGE_BYTES - begin // PAGE_BYTES + 1


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """The path at which a file is written before it has its name."""
    # The random part, because pods on two nodes have the same process ids.
    return path.with_name(f"{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")


def check_manifest(text: bytes, where: str) -> dict[str, Any]:
    """The manifest in a file's bytes; UserError where it is not one that this version reads."""
    try:
        manifest = json.loads(text)
        readable = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
    except (ValueError, KeyError, TypeError, RecursionError):
        readable = False
    if not readable:
        raise UserError(
            f"{where} is not a manifest of {FORMAT} of version {VERSION}; prepare the text again,"
            " into another directory"
        )
    content_hash = manifest.pop("sha256", None)
    if content_hash != json_sha256(manifest):
        raise UserError(
            f"{where} was changed after it was written (SHA-256 differs); restore it, or prepare the"
            " text again, into another directory"
        )
    return manifest | {"sha256": content_hash}


def json_sha256(value: Any) -> str:
    """SHA-256 of a value as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
