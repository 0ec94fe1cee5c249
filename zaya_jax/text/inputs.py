"""Reads input files as named samples: text, JSONL and Parquet, plain or compressed.

Large uncompressed JSONL files are shared out by byte ranges and Parquet files by row groups, so
that one big file keeps all processes busy. A sample's name is its file and place, and its hash
decides whether it is held out. Input that cannot be read comes as a `BadInput` among the samples: a
bad record costs one record, a damaged compressed file its rest, damaged Parquet a row group.
"""

import concurrent.futures
import contextlib
import dataclasses
import gzip
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zaya_jax.config import UserError, first_line
from zaya_jax.text import chat, hub, sources
from zaya_jax.text.tokenizers import NotUnicode, utf8

CHAT_FIELDS = ("messages", "conversations", "conversation")
OPENED_AT_ONCE = 16
DAMAGE = (OSError, EOFError, zlib.error)
RECORDS = ("jsonl", "parquet", "arrow", "hub")  # the kinds of files with texts or chats in fields


class Sample(NamedTuple):
    """A text, or the turns of a chat."""

    name: str  # its hash decides whether it is held out
    where: str  # the file, and its line or row, for messages
    content: str | list[chat.Message]


class BadInput(UserError):
    """A record or a file that cannot be read as what its name says."""


class NotText(BadInput):
    """A file that is not read as text, such as a picture or an archive: left out and counted."""

    def __init__(self, part: "InputRange", kind: str) -> None:
        super().__init__(f"{part} ({kind})")
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class InputRange:
    """A stretch of one input file: bytes of JSONL, row groups of Parquet, or all of it."""

    path: str
    name: str  # relative, the same on any machine
    kind: str  # as `kind_of` says
    start: int
    stop: int
    cost: int  # bytes, for progress

    def __str__(self) -> str:
        return shown(self.path)


def shown(path: str) -> str:
    """A path on one line, whatever bytes it has."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]


def stamp(path: str) -> tuple[int, int]:
    """A file's size and time of change. A shard of the hub has no size, and its name has the
    revision."""
    if path.startswith(hub.PREFIX):
        return 1, 1
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0  # it is named, or with --skip_bad left out, when it is to be read
    return found.st_size, found.st_mtime_ns


def find(patterns: list[str], out: str | os.PathLike, begun: Sequence[str] = ()) -> list[str]:
    """The files that globs, directories and paths name, sorted, each once, but none below `out`;
    UserError where one of them names nothing.

    A data set of the hub stays the revision with which a preparation has `begun`.
    """
    found: list[pathlib.Path] = []
    written = os.path.join(os.path.realpath(out), "")
    streamed: list[str] = []
    for pattern in patterns:
        if pattern.startswith(hub.PREFIX):
            streamed += hub.shards(pattern, begun)
            continue
        here = [p for p in sources.find(pattern) if not os.path.realpath(p).startswith(written)]
        if not here:
            raise UserError(f"{pattern} names no file; give paths, directories or globs (quoted)")
        sources.refuse_shards(here, pattern, "give a directory without it")
        found += here
    return [*sorted(map(str, sources.once(found))), *streamed]


def split(files: Sequence[tuple[str, int, int]], part_bytes: int) -> list[list[InputRange]]:
    """Tasks of about `part_bytes` of input each: parts of large files, or several small files
    together.

    Files come with their sizes, so that all who share a preparation divide it alike. Those of
    Parquet are opened, for the number of their row groups, many at a time: on a file system over
    the network each is a wait.
    """
    here = [os.path.dirname(os.path.abspath(path)) for path, *_ in files if kind_of(path) != "hub"]
    root = os.path.commonpath(here) if here else ""
    parquet = [path for path, *_ in files if kind_of(path) == "parquet"]
    with concurrent.futures.ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
        groups = dict(zip(parquet, pool.map(_row_groups, parquet), strict=True))
    parts = (part for file in files for part in _parts(file, root, part_bytes, groups))
    tasks: list[list[InputRange]] = []
    size = 0
    for part in parts:
        if not tasks or (size and size + part.cost > part_bytes):
            tasks.append([])
            size = 0
        tasks[-1].append(part)
        size += part.cost
    return tasks


def samples(part: InputRange, text_field: str) -> Iterator[Sample | BadInput]:
    """The samples of a part of an input file, each with its name, and its unreadable parts as
    BadInput."""
    try:
        if part.kind == "text":
            yield from _text(part)
        elif part.kind == "jsonl":
            yield from _jsonl(part, text_field)
        elif part.kind == "parquet":
            yield from _parquet(part, text_field)
        elif part.kind in RECORDS:
            yield from _group(
                part, (hub.rows if part.kind == "hub" else _arrow_rows)(part.path), 0, text_field
            )
        else:
            raise NotText(part, part.kind)
    except BadInput as error:
        yield error
    except DAMAGE as error:
        yield BadInput(f"cannot read {part}: {first_line(error)}")


def _row_groups(path: str) -> int:
    try:
        with _open_parquet(path) as opened:
            return opened.num_row_groups
    except BadInput:
        return 1  # found bad again when it is to be read, and named there


def _parts(
    file: tuple[str, int, int], root: str, part_bytes: int, groups: dict[str, int]
) -> Iterator[InputRange]:
    path, size, _ = file
    kind = kind_of(path)
    if kind == "hub":  # a task of its own
        yield InputRange(path, path.rpartition("@")[0], kind, 0, 1, part_bytes)
        return
    name = os.path.abspath(path)[len(root) :].lstrip("/")
    if path in groups:
        count = groups[path]
        each = max(1, count * part_bytes // max(size, 1))
        for start in range(0, count, each):
            stop = min(start + each, count)
            yield InputRange(path, name, kind, start, stop, size * (stop - start) // count)
    elif kind == "jsonl" and not path.lower().endswith(sources.COMPRESSION):
        for start in range(0, max(size, 1), part_bytes):
            stop = min(start + part_bytes, size)
            yield InputRange(path, name, kind, start, stop, stop - start)
    else:
        yield InputRange(path, name, kind, 0, size, size)


def kind_of(path: str) -> str:
    """The kind of content by a file's name; hub for a shard of the hub."""
    return "hub" if path.startswith(hub.PREFIX) else sources.kind_of(path)


@contextlib.contextmanager
def _open(path: str) -> Iterator[io.BufferedIOBase]:
    compressed = path.lower().endswith(sources.COMPRESSION)
    with open(path, "rb") as file:
        if compressed and not file.peek(1):
            raise OSError("it has no bytes, which no compression makes")
        # In blocks of this size: damage costs no more than that before it.
        if path.lower().endswith(".gz"):  # zeros behind the data, as tapes leave, are its padding
            yield io.BufferedReader(gzip.GzipFile(fileobj=file), 64 << 10)
        elif compressed:
            import pyarrow

            yield io.BufferedReader(pyarrow.input_stream(file, "zstd"), 64 << 10)
        else:
            yield file


def _text(part: InputRange) -> Iterator[Sample]:
    with _open(part.path) as file:
        raw = file.read(sources.LONGEST + 1)
    if b"\0" in raw:
        raise NotText(part, "binary")
    if len(raw) > sources.LONGEST:
        raise BadInput(f"{part} {sources.TOO_LONG}")
    try:
        yield Sample(part.name, str(part), raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        # Python's tests have other encodings
        if pathlib.Path(part.path).is_relative_to(sources.stdlib()):
            raise NotText(part, "not UTF-8") from None
        line = 1 + raw[: error.start].count(b"\n")
        raise BadInput(
            f"{part}, line {line}: not UTF-8; convert the file, or leave it out"
        ) from None


def _jsonl(part: InputRange, text_field: str) -> Iterator[Sample | BadInput]:
    compressed = part.path.lower().endswith(sources.COMPRESSION)
    with _open(part.path) as file:
        at = part.start
        if at:  # the line that begins before this part belongs to the one before
            file.seek(at - 1)
            at += len(file.readline()) - 1
        number = 0
        while compressed or at < part.stop:
            number += 1
            # Nobody has counted the lines before a later part of a file.
            where = f"{part}, byte {at}" if part.start else f"{part}, line {number:,}"
            try:
                line = file.readline()
            except DAMAGE as error:
                yield BadInput(f"{where}: cannot be read, nor what follows it: {first_line(error)}")
                return
            if not line:
                return
            if line.strip():
                try:
                    if line.lstrip().startswith(b"["):
                        raise BadInput("a JSON array; make a line of each element: jq -c '.[]'")
                    content = _content(json.loads(line.rstrip()), text_field)
                    yield Sample(f"{part.name}:{at}", where, content)
                except (BadInput, chat.BadChat) as error:
                    yield BadInput(f"{where}: {error}")
                except (ValueError, RecursionError) as error:
                    yield BadInput(f"{where}: not a JSON object of its own ({first_line(error)})")
            at += len(line)


def _open_parquet(path: str) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise BadInput(f"{shown(path)} is not a Parquet file: {first_line(error)}") from None


def _parquet(part: InputRange, text_field: str) -> Iterator[Sample | BadInput]:
    with _open_parquet(part.path) as file:
        names = file.schema_arrow.names
        known = any(field in names for field in (text_field, *CHAT_FIELDS))
        if not known and not any({*pair} <= {*names} for pair in chat.PAIRS):
            if part.start:  # it is the file's, and counts once
                return
            held = ascii(", ".join(names[:8]))[1:-1][:200]
            raise BadInput(f"{part} has columns {held}, but {_wanted(text_field)}")
        wanted = (text_field, *CHAT_FIELDS, *chat.LEADING_FIELDS, *chat.PAIR_FIELDS)
        columns = [name for name in names if name in wanted]
        if len(set(columns)) < len(columns):
            raise BadInput(f"{part} has two columns of one name among {', '.join(columns)}")
        for group in range(part.start, part.stop):
            batches = file.iter_batches(256, [group], columns)
            yield from _group(
                part, (row for batch in batches for row in batch.to_pylist()), group, text_field
            )


def _arrow_rows(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a file of `datasets.save_to_disk`: a stream of record batches."""
    import pyarrow

    with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
        for batch in stream:
            yield from batch.to_pylist()


def _group(
    part: InputRange, records: Iterable[dict[str, Any]], group: int, text_field: str
) -> Iterator[Sample | BadInput]:
    import pyarrow

    try:
        for row, record in enumerate(records):
            where = f"{part}, row {row + 1:,} of row group {group}"
            try:
                content = _content(_without_nulls(record), text_field)
                yield Sample(f"{part.name}:{group}:{row}", where, content)
            except (BadInput, chat.BadChat) as error:
                yield BadInput(f"{where}: {error}")
    except UserError:  # a stream of the hub that broke
        raise
    except (OSError, pyarrow.ArrowException, ValueError, ArithmeticError) as error:
        # also a value that Python cannot hold, such as a time out of range
        yield BadInput(f"{part}, row group {group} is damaged: {first_line(error)}")


def _without_nulls(value: Any) -> Any:
    """A value without the empty fields that every struct of a Parquet column has for those that
    other rows need."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _content(record: Any, text_field: str) -> str | list[chat.Message]:
    """A record's chat, or else the text under `text_field`; an empty record is an empty text.

    Turns under one of CHAT_FIELDS come before a question and its answer, and both before a text.
    """
    if not isinstance(record, dict):
        raise BadInput(f"a JSON {type(record).__name__}, but {_wanted(text_field)}")
    given = [record[field] for field in CHAT_FIELDS if isinstance(record.get(field), list)]
    turns = next(filter(None, given), None) or chat.paired_turns(record, text_field)
    if turns:
        return chat.read(chat.leading_turns(record) + turns)
    text = record.get(text_field)
    if isinstance(text, str):
        if len(text) > sources.LONGEST:
            raise BadInput(f"a text that {sources.TOO_LONG}")
        try:
            utf8(text)
        except NotUnicode as error:
            raise BadInput(str(error)) from None
        return text
    if text is not None or (text_field not in record and record):
        raise BadInput(f"fields {chat.named_fields(record)}, but {_wanted(text_field)}")
    return ""


def _wanted(text_field: str) -> str:
    return (
        f"neither a text under {text_field!r} (--text_field) nor a chat under"
        f" {', '.join(CHAT_FIELDS)}, {' or '.join(map(' with '.join, chat.PAIRS))}"
    )
