"""The format of prepared token shards: a shard's writer and decoder, a directory's manifest and
table of shards.

The shards of a split, one after another, are its *tape*: whole documents, each between a begin and
an end token. A shard's file is a row of *bundles* of one size (64 KiB of tokens, the last one
shorter), so that a token's place on the tape says which bundle holds it, and one read brings it. A
bundle has the places where documents begin, the loss mask if there is one, the token that follows,
and a checksum over all of it and over where it belongs: corpus, shard and number. Behind the
bundles lie two more records: where each bundle begins with its checksum, and the length of each
document, for packing. Their checksums are in shards.bin, whose own is in the manifest: so a bundle
is the one that was written, not only one that agrees with itself.

    manifest.json   written last: without it there is no dataset      shards.bin      one entry per shard
    train-00000.tokens, held_out-00000.tokens, ...
"""

import array
import dataclasses
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
from zaya_jax.text.sources import Bundle, with_targets

FORMAT, VERSION = "zaya_jax tokens", 2
MANIFEST, SHARDS, TOKENIZER = "manifest.json", "shards.bin", "tokenizer"
SPLITS = ("train", "held_out")
SUFFIX = ".tokens"
BUNDLE_BYTES = 64 << 10  # of tokens: one read for every few sequences
PAGE_BYTES = 4096

SHARD_TYPE = np.dtype(
    [
        ("task", "<u4"),
        ("split", "<u4"),
        ("bundles", "<u4"),
        ("crc32c", "<u4"),
        ("bytes", "<u8"),
        ("tokens", "<u8"),
        ("documents", "<u8"),
        ("pages", "<u8"),
        ("places_at", "<u8"),
        ("lengths_at", "<u8"),
        ("places_crc32c", "<u4"),
        ("lengths_crc32c", "<u4"),
    ]
)

# magic, crc32c of the rest, corpus, shard, number, tokens (or entries), starts, token after, bytes
# per token, flags
_HEADER = struct.Struct("<4sIQIIIIqHH")
BUNDLE, PLACES, LENGTHS = b"ZJB2", b"ZJP2", b"ZJL2"
_HAS_MASK, _LEARN_AFTER = 1, 2


class Place(NamedTuple):
    """Where a record belongs; part of what its checksum covers, so that none can stand in for
    another."""

    corpus: int  # `corpus_id` of the preparation
    shard: int  # `shard_id`
    number: int  # of the bundle in its shard; 0 for the two records behind them


class CorruptRecord(Exception):
    """A record whose bytes differ from the ones written."""

    def __init__(self, shard: str, record: str, why: str) -> None:
        super().__init__(f"corrupt {record} of shard {shard}: {why}")


@dataclasses.dataclass
class Document:
    """Tokens of one document, begin and end included; `learn` marks those to be predicted (None:
    all)."""

    tokens: np.ndarray
    learn: np.ndarray | None = None
    answers: int = 0  # of a chat: those that are learnt,
    rewritten: int = 0  # and those that its template does not write as the model did


def shard_id(split: int, task: int) -> int:
    """One number for a task's shard of a split (by its place in SPLITS)."""
    return 2 * task + split


def shard_name(split: int, task: int) -> str:
    """The file of a task's shard of a split."""
    return f"{SPLITS[split]}-{task:05d}{SUFFIX}"


def corpus_id(facts: Any) -> int:
    """A number for a preparation, of everything that its content depends on."""
    return int.from_bytes(bytes.fromhex(manifest_hash(facts)[:16]), "little")


def encode_bundle(
    tokens: np.ndarray,
    starts: np.ndarray,
    learn: np.ndarray | None,
    after: tuple[int, bool] | None,
    place: Place,
) -> bytes:
    """The record of a bundle: `starts` are the places where documents begin, `after` the token that
    follows it in its last document, and whether that is to be learnt.
    """
    flags = (_HAS_MASK if learn is not None else 0) | (
        _LEARN_AFTER if after is not None and after[1] else 0
    )
    parts = [starts.astype("<u4").tobytes()]
    if learn is not None:
        parts.append(np.packbits(learn).tobytes())
    parts.append(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes())
    next_token = -1 if after is None else after[0]
    counts = len(tokens), len(starts), next_token, tokens.dtype.itemsize, flags
    return _sealed(BUNDLE, place, counts, b"".join(parts))


def decode_bundle(record: bytes, shard: str, number: int, crc: int) -> Bundle:
    """The bundle in a record; CorruptRecord where it is not the one that was written there, bit for
    bit."""
    count, num_starts, next_token, width, flags = _opened(
        record, BUNDLE, shard, f"record {number}", crc
    )
    at = _HEADER.size
    mask_bytes = (count + 7) // 8 if flags & _HAS_MASK else 0
    places = np.frombuffer(record, "<u4", num_starts, at)
    at += 4 * num_starts
    learn = None
    if mask_bytes:
        learn = np.unpackbits(np.frombuffer(record, np.uint8, mask_bytes, at), count=count).view(
            bool
        )
    tokens = np.frombuffer(record, f"<u{width}", count, at + mask_bytes)
    starts = np.zeros(count, bool)
    starts[places] = True
    after = None if next_token < 0 else (next_token, bool(flags & _LEARN_AFTER))
    return with_targets(tokens, starts, learn, after)


def encode_numbers(magic: bytes, numbers: np.ndarray, place: Place) -> bytes:
    """One of the two records behind the bundles: where each begins, where the last ends, and the
    checksum of each; or documents' lengths.
    """
    return _sealed(magic, place, (len(numbers), 0, 0, 8, 0), numbers.astype("<u8").tobytes())


def decode_numbers(record: bytes, magic: bytes, shard: str, crc: int) -> np.ndarray:
    """The numbers in such a record; CorruptRecord where it is not the one that was written there,
    bit for bit."""
    what = "table of bundles" if magic == PLACES else "table of documents"
    count, *_ = _opened(record, magic, shard, what, crc)
    return np.frombuffer(record, "<u8", count, _HEADER.size).astype(np.int64)


def numbers_size(count: int) -> int:
    """Bytes of a record of this many numbers."""
    return _HEADER.size + 8 * count


def _sealed(magic: bytes, place: Place, counts: tuple[int, ...], body: bytes) -> bytes:
    head = _HEADER.pack(magic, 0, *place, *counts)
    crc = google_crc32c.extend(google_crc32c.value(head[8:]), body)
    return b"".join([magic, struct.pack("<I", crc), head[8:], body])


def crc_of(record: bytes) -> int:
    """The checksum that a record says it has."""
    return int.from_bytes(record[4:8], "little")


def _opened(record: bytes, magic: bytes, shard: str, what: str, expected: int) -> tuple[int, ...]:
    """The counts in the header of a record, whose checksum, in the shard's tables, covers its place
    as well."""
    if len(record) < _HEADER.size:
        raise CorruptRecord(shard, what, f"only {len(record)} bytes")
    found, crc, _, _, _, *counts = _HEADER.unpack_from(record)
    if found != magic or google_crc32c.value(record[8:]) != crc:
        raise CorruptRecord(shard, what, "CRC32C differs")
    if crc != expected:
        raise CorruptRecord(
            shard,
            what,
            f"it is whole, but not the one that was written here ({crc:08x} for {expected:08x})",
        )
    return tuple(counts)


class ShardWriter:
    """Writes documents into the bundles of one shard, under a temporary name; giving it its own is
    the caller's."""

    def __init__(self, path: pathlib.Path, dtype: type, corpus: int, split: int, task: int) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._split, self._task = split, task
        self._place = Place(corpus, shard_id(split, task), 0)
        self._size = BUNDLE_BYTES // self.dtype.itemsize  # tokens a bundle
        self._partial = partial_path(path)
        self._file = self._partial.open("wb")
        self._crc = 0
        # tokens, whether a document begins there, whether to learn
        self._pending: list[tuple[np.ndarray, ...]] = []
        self._pending_tokens = 0  # at most a bundle's
        self._offsets, self._crcs, self._lengths = (
            array.array("Q", [0]),
            array.array("Q"),
            array.array("Q"),
        )
        self._tokens = self._pages = 0

    def add(self, document: Document) -> None:
        """Append one document."""
        tokens = document.tokens.astype(self.dtype, copy=False)
        starts = np.zeros(len(tokens), bool)
        starts[0] = True
        learn = np.ones(len(tokens), bool) if document.learn is None else document.learn
        self._lengths.append(len(tokens))
        self._pending.append((tokens, starts, learn))
        self._pending_tokens += len(tokens)
        # one more than it holds, so that what follows it is known
        if self._pending_tokens > self._size:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Finish the file; its entry, with the name it has until then under "partial"."""
        self._flush(last=True)
        places_at = self._offsets[-1]
        numbers = ((PLACES, self._offsets + self._crcs), (LENGTHS, self._lengths))
        records = [
            encode_numbers(magic, np.frombuffer(held, np.uint64), self._place)
            for magic, held in numbers
        ]
        for record in records:
            self._write(record)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths_at = places_at + len(records[0])
        return {
            "file": self.path.name,
            "partial": self._partial.name,
            "split": self._split,
            "task": self._task,
            "bundles": len(self._offsets) - 1,
            "crc32c": self._crc,
            "bytes": lengths_at + len(records[1]),
            "tokens": self._tokens,
            "documents": len(self._lengths),
            "pages": self._pages,
            "places_at": places_at,
            "lengths_at": lengths_at,
            "places_crc32c": crc_of(records[0]),
            "lengths_crc32c": crc_of(records[1]),
        }

    def discard(self) -> None:
        """Close the file, and remove it where it has no name of its own by now."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _flush(self, last: bool = False) -> None:
        """Write all full pending bundles, at last the rest too."""
        if not self._pending:
            return
        tokens, starts, learn = (
            np.concatenate(parts) for parts in zip(*self._pending, strict=True)
        )
        begin, whole = 0, len(tokens)
        while begin < whole if last else begin + self._size < whole:
            end = min(begin + self._size, whole)
            after = None
            if end < whole and not starts[end]:
                after = int(tokens[end]), bool(learn[end])
            masked = None if learn[begin:end].all() else learn[begin:end]
            self._write_bundle(tokens[begin:end], np.flatnonzero(starts[begin:end]), masked, after)
            begin = end
        self._pending = [(tokens[begin:], starts[begin:], learn[begin:])]
        self._pending_tokens = whole - begin

    def _write_bundle(self, tokens, starts, learn, after) -> None:
        place = self._place._replace(number=len(self._offsets) - 1)
        record = encode_bundle(tokens, starts, learn, after, place)
        begin, end = self._offsets[-1], self._offsets[-1] + len(record)
        self._write(record)
        self._offsets.append(end)
        self._crcs.append(crc_of(record))
        self._pages += (end - 1) // PAGE_BYTES - begin // PAGE_BYTES + 1
        self._tokens += len(tokens)

    def _write(self, record: bytes) -> None:
        self._file.write(record)
        self._crc = google_crc32c.extend(self._crc, record)


def write_atomically(
    path: pathlib.Path, content: bytes, folder: pathlib.Path | None = None
) -> None:
    """Write a file so that it is there whole or not at all; until then it has another name there,
    or in `folder`."""
    partial = partial_path((folder or path.parent) / path.name)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Where a file is written before it has its name: pods on two nodes have the same process
    ids."""
    return path.with_name(f"{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")


def check_manifest(content: bytes, where: str) -> dict[str, Any]:
    """The manifest in a file's bytes; UserError where it is not one that this version reads."""
    try:
        manifest = json.loads(content)
        readable = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
    except (ValueError, KeyError, TypeError, RecursionError):
        readable = False
    if not readable:
        raise UserError(
            f"{where} is not a manifest of {FORMAT} of version {VERSION}; prepare the directory"
            " again"
        )
    sealed = {k: v for k, v in manifest.items() if k != "sha256"}
    if manifest.get("sha256") != manifest_hash(sealed):
        raise UserError(
            f"{where} was changed after it was written (SHA-256 differs); restore it or prepare it"
            " again"
        )
    return manifest


def manifest_hash(manifest: Any) -> str:
    """SHA-256 of a manifest's content, whatever its layout as text."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
