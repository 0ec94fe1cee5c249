"""Prepared token shards: the format, a shard's writer, a directory's manifest and its index.

A shard is an ArrayRecord file (uncompressed, one record a chunk). Each record but the last is a *bundle*:
whole documents one after another, about 64 KiB of tokens, so that reading a batch costs one sequential read
for every few sequences. The last record has the length of each document piece of the shard, which packing
plans with. `index.bin` has one fixed-size entry a bundle (tokens, pieces, bytes and place in the file), so
that a reader opens no shard before it needs one and can read a bundle by byte range where ArrayRecord cannot
go. `manifest.json` is written last: without it there is no dataset.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import struct
from typing import Any

import google_crc32c
import numpy as np
from array_record.python import array_record_module

from zaya_jax.config import UserError
from zaya_jax.data.sources import Bundle, with_targets

FORMAT, VERSION = "zaya_jax tokens", 1
MANIFEST, INDEX, TOKENIZER = "manifest.json", "index.bin", "tokenizer"
SPLITS = ("train", "held_out")
BUNDLE_BYTES = 64 << 10
MAX_BUNDLE_BYTES = 1 << 20  # a document above this is continued in the next bundle
WRITER_OPTIONS = "group_size:1,uncompressed"
PAGE_BYTES = 4096

# Riegeli, ArrayRecord's container, puts a header of 24 bytes wherever the file offset is a multiple of 64
# KiB.
BLOCK_BYTES, BLOCK_HEADER_BYTES = 64 << 10, 24

_HEADER = struct.Struct(
    "<4sIIIqHH"
)  # magic, crc32c of the rest, tokens, starts, token after, bytes a token, flags
_BUNDLE_MAGIC, _LENGTHS_MAGIC = b"ZJB1", b"ZJL1"
_HAS_MASK, _LEARN_AFTER = 1, 2

INDEX_TYPE = np.dtype(
    [("tokens", "<u4"), ("pieces", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("shard", "<u4")]
)


class CorruptRecord(Exception):
    """A record whose bytes are not what was written; says which."""

    def __init__(self, shard: str, record: int, why: str) -> None:
        super().__init__(f"corrupt record {record} of shard {shard}: {why}")
        self.shard, self.record, self.why = shard, record, why

    def __reduce__(self):
        return CorruptRecord, (self.shard, self.record, self.why)


@dataclasses.dataclass
class Document:
    """Tokens of one document, begin and end included; `learn` marks those to be predicted (None: all)."""

    tokens: np.ndarray
    learn: np.ndarray | None = None


def encode_bundle(
    tokens: np.ndarray, starts: np.ndarray, learn: np.ndarray | None, after: tuple[int, bool] | None
) -> bytes:
    """The record of a bundle: `starts` are the places where documents begin, `after` the token that follows
    it.
    """
    flags = (_HAS_MASK if learn is not None else 0) | (_LEARN_AFTER if after is not None and after[1] else 0)
    parts = [starts.astype("<u4").tobytes()]
    if learn is not None:
        parts.append(np.packbits(learn).tobytes())
    parts.append(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes())
    next_token = -1 if after is None else after[0]
    head = _HEADER.pack(_BUNDLE_MAGIC, 0, len(tokens), len(starts), next_token, tokens.dtype.itemsize, flags)
    return _sealed(head, b"".join(parts))


def decode_bundle(record: bytes, shard: str, number: int) -> Bundle:
    """The bundle in a record; CorruptRecord where any bit of it is not as written."""
    _, count, num_starts, next_token, width, flags = _opened(record, _BUNDLE_MAGIC, shard, number)
    at = _HEADER.size
    mask_bytes = (count + 7) // 8 if flags & _HAS_MASK else 0
    if len(record) != at + 4 * num_starts + mask_bytes + count * width or width not in (2, 4):
        raise CorruptRecord(shard, number, f"{len(record)} bytes do not fit its header")
    places = np.frombuffer(record, "<u4", num_starts, at)
    at += 4 * num_starts
    learn = None
    if mask_bytes:
        learn = np.unpackbits(np.frombuffer(record, np.uint8, mask_bytes, at), count=count).view(bool)
    tokens = np.frombuffer(record, f"<u{width}", count, at + mask_bytes)
    starts = np.zeros(count, bool)
    starts[places] = True
    after = None if next_token < 0 else (next_token, bool(flags & _LEARN_AFTER))
    return with_targets(tokens, starts, learn, after)


def encode_lengths(lengths: np.ndarray) -> bytes:
    """The last record of a shard: the tokens of each document piece, bundle after bundle."""
    return _sealed(_HEADER.pack(_LENGTHS_MAGIC, 0, len(lengths), 0, 0, 4, 0), lengths.astype("<u4").tobytes())


def decode_lengths(record: bytes, shard: str, number: int) -> np.ndarray:
    """The piece lengths of a shard."""
    _, count, *_ = _opened(record, _LENGTHS_MAGIC, shard, number)
    if len(record) != _HEADER.size + 4 * count:
        raise CorruptRecord(shard, number, f"{len(record)} bytes do not fit its header")
    return np.frombuffer(record, "<u4", count, _HEADER.size).astype(np.int64)


def _sealed(head: bytes, body: bytes) -> bytes:
    crc = google_crc32c.value(head[8:] + body)
    return head[:4] + struct.pack("<I", crc) + head[8:] + body


def _opened(record: bytes, magic: bytes, shard: str, number: int) -> tuple[Any, ...]:
    if len(record) < _HEADER.size:
        raise CorruptRecord(shard, number, f"only {len(record)} bytes")
    found, crc, *rest = _HEADER.unpack_from(record)
    if found != magic:
        raise CorruptRecord(shard, number, f"begins with {found!r}, not {magic!r}")
    if google_crc32c.value(record[8:]) != crc:
        raise CorruptRecord(shard, number, "CRC32C differs")
    return (crc, *rest)


class ShardWriter:
    """Writes documents into the bundles of one shard, under a temporary name that `close` leaves to be
    changed.
    """

    def __init__(self, path: pathlib.Path, dtype: type) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        self._writer = array_record_module.ArrayRecordWriter(str(self._partial), WRITER_OPTIONS)
        self._pending: list[Document] = []
        self._pending_tokens = 0
        self._heads: list[bytes] = []  # of each record, to find it in the file again
        self._sizes: list[int] = []
        self._tokens: list[int] = []
        self._pieces: list[list[int]] = []
        self.num_documents = 0

    def add(self, document: Document) -> None:
        """Append one document."""
        self.num_documents += 1
        if (self._pending_tokens + len(document.tokens)) * self.dtype.itemsize > MAX_BUNDLE_BYTES:
            self._flush()
        self._pending.append(document)
        self._pending_tokens += len(document.tokens)
        if self._pending_tokens * self.dtype.itemsize >= BUNDLE_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Finish the shard and give it its name; returns its manifest entry, with the index entries under
        "index".
        """
        self._flush()
        lengths = np.array([n for pieces in self._pieces for n in pieces], np.int64)
        self._write(encode_lengths(lengths))
        self._writer.close()
        offsets = self._locate()
        crc, size = checksum(self._partial)
        with self._partial.open("rb") as file:
            os.fsync(file.fileno())
        index = np.zeros(len(self._tokens), INDEX_TYPE)
        index["tokens"], index["pieces"] = self._tokens, [len(p) for p in self._pieces]
        index["offset"], index["size"] = offsets[:-1], self._sizes[:-1]
        return {
            "file": self.path.name,
            "partial": self._partial.name, "bytes": size, "crc32c": f"{crc:08x}", "bundles": len(self._tokens),
            "tokens": int(sum(self._tokens)), "documents": self.num_documents,
            "lengths_offset": int(offsets[-1]), "lengths_size": self._sizes[-1], "index": index,
        }  # fmt: skip

    def _flush(self) -> None:
        if not self._pending:
            return
        masked = any(d.learn is not None for d in self._pending)
        tokens = np.concatenate([d.tokens for d in self._pending]).astype(self.dtype, copy=False)
        learn = None
        if masked:
            learn = np.concatenate(
                [np.ones(len(d.tokens), bool) if d.learn is None else d.learn for d in self._pending]
            )
        lengths = np.array([len(d.tokens) for d in self._pending], np.int64)
        starts = np.cumsum(lengths) - lengths
        limit = MAX_BUNDLE_BYTES // self.dtype.itemsize
        for begin in range(0, len(tokens), limit):
            end = min(begin + limit, len(tokens))
            here = starts[(starts >= begin) & (starts < end)] - begin
            after = None
            if end < len(tokens) and not (starts == end).any():
                after = int(tokens[end]), bool(learn is None or learn[end])
            record = encode_bundle(
                tokens[begin:end], here, None if learn is None else learn[begin:end], after
            )
            self._write(record)
            self._tokens.append(end - begin)
            cuts = np.unique(np.concatenate([[0], here, [end - begin]]))
            self._pieces.append(np.diff(cuts).tolist())
        self._pending, self._pending_tokens = [], 0

    def _write(self, record: bytes) -> None:
        self._writer.write(record)
        self._heads.append(record[:24])
        self._sizes.append(len(record))

    def _locate(self) -> np.ndarray:
        """Where each record's bytes begin in the file: its head (with a checksum in it) is looked for after
        the last.
        """
        offsets = np.zeros(len(self._sizes), np.int64)
        at = 0
        with self._partial.open("rb") as file:
            for i, (head, size) in enumerate(zip(self._heads, self._sizes, strict=True)):
                file.seek(at)
                window = file.read(1024)
                found = strip_blocks(window, at).find(head)
                assert found >= 0, (
                    f"record {i} of {self._partial} is not where ArrayRecord should have put it"
                )
                offsets[i] = at = raw_offset(at, found)
                file.seek(at)
                raw = file.read(raw_size(at, size))
                assert strip_blocks(raw, at)[:24] == head
                at += len(raw)
        return offsets


def strip_blocks(raw: bytes, offset: int) -> bytes:
    """File bytes from `offset` on without the container's block headers."""
    parts = []
    at = 0
    while at < len(raw):
        in_block = (offset + at) % BLOCK_BYTES
        if in_block < BLOCK_HEADER_BYTES:
            at += BLOCK_HEADER_BYTES - in_block
            in_block = BLOCK_HEADER_BYTES
        stop = at + BLOCK_BYTES - in_block
        parts.append(raw[at:stop])
        at = stop
    return b"".join(parts)


def raw_size(offset: int, size: int) -> int:
    """File bytes from `offset` on that hold `size` bytes of data."""
    return raw_offset(offset, size) - offset


def raw_offset(offset: int, skip: int) -> int:
    """The file offset just after `skip` data bytes, counted from file offset `offset`."""
    room = BLOCK_BYTES - BLOCK_HEADER_BYTES

    def data_before(file_offset: int) -> int:
        blocks, inside = divmod(file_offset, BLOCK_BYTES)
        return blocks * room + max(inside - BLOCK_HEADER_BYTES, 0)

    blocks, inside = divmod(data_before(offset) + skip, room)
    if inside == 0 and skip:
        return blocks * BLOCK_BYTES
    return blocks * BLOCK_BYTES + BLOCK_HEADER_BYTES + inside


def checksum(path: pathlib.Path) -> tuple[int, int]:
    """(CRC32C, bytes) of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
    return crc, size


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def check_manifest(content: bytes, where: str) -> dict[str, Any]:
    """The manifest in a file's bytes; UserError where it is not one that this version reads."""
    try:
        manifest = json.loads(content)
        if manifest["format"] != FORMAT:
            raise KeyError("format")
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{where} is not a manifest of prepared tokens; prepare the directory again"
        ) from None
    if manifest["version"] != VERSION:
        raise UserError(
            f"{where} has format version {manifest['version']}, this program reads {VERSION}; prepare "
            f"it again"
        )
    sealed = {k: v for k, v in manifest.items() if k != "sha256"}
    if manifest.get("sha256") != manifest_hash(sealed):
        raise UserError(
            f"{where} was changed after it was written (SHA-256 differs); restore it or prepare it again"
        )
    return manifest


def manifest_hash(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, whatever its layout as text."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def storage_factor(index: np.ndarray, token_bytes: int) -> float:
    """Sigma of the storage formula: pages that reading every bundle once touches, over the pages its tokens
    fill.
    """
    first = index["offset"].astype(np.int64) // PAGE_BYTES
    sizes = [raw_size(int(o), int(s)) for o, s in zip(index["offset"], index["size"], strict=True)]
    last = (index["offset"].astype(np.int64) + np.array(sizes, np.int64) - 1) // PAGE_BYTES
    ideal = index["tokens"].sum(dtype=np.int64) * token_bytes / PAGE_BYTES
    return float((last - first + 1).sum() / max(ideal, 1e-9))
