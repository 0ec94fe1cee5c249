"""Input files of a preparation: text, JSONL and Parquet, plain or compressed, as a stream of named samples.

Large uncompressed JSONL files are shared out by byte ranges and Parquet files by row groups, so that one big
file keeps all processes busy. A sample's name is its file and place, and its hash decides whether it is held
out.
"""

import dataclasses
import glob
import gzip
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from zaya_jax.config import UserError
from zaya_jax.data import sources

Sample = tuple[str, str | list[dict[str, Any]]]  # name; a text, or the messages of a chat
CHAT_FIELDS = ("messages", "conversations", "conversation")
COMPRESSION = (".gz", ".zst")


class BadInput(UserError):
    """An input file that cannot be read as what its name says."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of one input file: bytes of JSONL, row groups of Parquet, or all of it."""

    path: str
    name: str  # relative, the same on any machine
    kind: str  # text, jsonl, parquet
    start: int
    stop: int
    cost: int  # bytes, for progress


def find(patterns: list[str]) -> list[str]:
    """The files that globs, directories and paths name, sorted; UserError where one of them names nothing."""
    found: set[str] = set()
    for pattern in patterns:
        if pattern == "stdlib":
            found.update(str(path) for _, path in sources.list_files("stdlib"))
            continue
        path = pathlib.Path(pattern)
        if path.is_dir():
            here = [str(p) for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))]
        else:
            here = [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
        if not here:
            raise UserError(f"--input={pattern} names no file; give paths, directories or globs (quoted)")
        found.update(here)
    return sorted(found)


def split(paths: list[str], part_bytes: int) -> list[list[Part]]:
    """Tasks of about `part_bytes` of input each: parts of large files, or several small files together."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
    parts = [part for path in paths for part in _parts(path, root, part_bytes)]
    tasks: list[list[Part]] = []
    size = part_bytes
    for part in parts:
        if size + part.cost > part_bytes and size > 0:
            tasks.append([])
            size = 0
        tasks[-1].append(part)
        size += part.cost
    return tasks


def samples(part: Part, text_field: str) -> Iterator[Sample]:
    """The samples of a part of an input file, each with its name."""
    try:
        if part.kind == "text":
            with _open(part.path) as file:
                text = _decode(file.read())
            if text is not None and text.strip():
                yield part.name, text
        elif part.kind == "jsonl":
            yield from _jsonl(part, text_field)
        else:
            yield from _parquet(part, text_field)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read {part.path}: {error}") from None


def _parts(path: str, root: str, part_bytes: int) -> Iterator[Part]:
    name = pathlib.Path(os.path.relpath(os.path.abspath(path), root)).as_posix()
    size = os.path.getsize(path)
    kind = _kind(path)
    if kind == "parquet":
        import pyarrow.parquet

        try:
            meta = pyarrow.parquet.read_metadata(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise BadInput(f"{path} is not a Parquet file: {' '.join(str(error).split())[:200]}") from None
        groups = meta.num_row_groups
        each = max(1, groups * part_bytes // max(size, 1))
        for start in range(0, groups, each):
            stop = min(start + each, groups)
            yield Part(path, name, kind, start, stop, size * (stop - start) // groups)
    elif kind == "jsonl" and not path.endswith(COMPRESSION):
        for start in range(0, max(size, 1), part_bytes):
            stop = min(start + part_bytes, size)
            yield Part(path, name, kind, start, stop, stop - start)
    else:
        yield Part(path, name, kind, 0, size, size)


def _kind(path: str) -> str:
    stem = path
    for suffix in COMPRESSION:
        stem = stem.removesuffix(suffix)
    suffix = pathlib.Path(stem).suffix.lower()
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(
        suffix, "text"
    )


def _open(path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        return io.BufferedReader(_Zstandard(path))
    return open(path, "rb")


class _Zstandard(io.RawIOBase):
    """A zstd file as a stream that, unlike the library's own, takes a truncated frame for an error."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 closed with this object
        self._frame: Any = None
        self._raw = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        import zstandard

        while not self._ready:
            self._raw = self._raw or self._file.read(1 << 20)
            if not self._raw:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is truncated")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._raw))
            except zstandard.ZstdError as error:
                raise OSError(f"damaged zstd data ({error})") from None
            self._raw = b""
            if self._frame.eof:
                self._raw, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _jsonl(part: Part, text_field: str) -> Iterator[Sample]:
    with _open(part.path) as file:
        at = part.start
        if at:  # the line that begins before this part belongs to the one before
            file.seek(at - 1)
            at += len(file.readline()) - 1
        compressed = part.path.endswith(COMPRESSION)
        while compressed or at < part.stop:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield _record(_parse(line, part, at), f"{part.name}:{at}", part.path, text_field)
            at += len(line)


def _parse(line: bytes, part: Part, at: int) -> Any:
    try:
        return json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"{part.path} has a line at byte {at} that is not JSON: {error}") from None


def _parquet(part: Part, text_field: str) -> Iterator[Sample]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(part.path) as file:
            columns = [c for c in (text_field, *CHAT_FIELDS) if c in file.schema_arrow.names]
            if not columns:
                raise BadInput(
                    f"{part.path} has columns {', '.join(file.schema_arrow.names[:8])}, but neither "
                    f"{text_field!r} nor "
                    f"a chat ({', '.join(CHAT_FIELDS)}); name the text column with --text_field"
                )
            for group in range(part.start, part.stop):
                row = 0
                for batch in file.iter_batches(256, [group], columns):
                    for record in batch.to_pylist():
                        yield _record(record, f"{part.name}:{group}:{row}", part.path, text_field)
                        row += 1
    except pyarrow.ArrowException as error:
        raise BadInput(f"cannot read {part.path}: {' '.join(str(error).split())[:200]}") from None


def _record(record: Any, name: str, path: str, text_field: str) -> Sample:
    if isinstance(record, dict):
        for field in CHAT_FIELDS:
            if isinstance(record.get(field), list):
                return name, record[field]
        if isinstance(record.get(text_field), str):
            return name, record[text_field]
    held = f"fields {sorted(record)[:8]}" if isinstance(record, dict) else f"a {type(record).__name__}"
    raise BadInput(
        f"{path}: sample {name} has {held}, but neither a text under {text_field!r} nor a chat under "
        f"{', '.join(CHAT_FIELDS)}; name the text field with --text_field"
    )


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _hidden(path: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
