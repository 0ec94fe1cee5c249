"""Reads input files as named samples: text, JSONL and Parquet, plain or compressed.

    find_inputs   paths, globs, hf:...      → files
    make_tasks    files                     → tasks: ranges of files
    samples       one range                 → its samples, and what cannot be read

Large Parquet files and uncompressed ones of JSONL are divided by bytes, so that one big file keeps
all processes busy: a line belongs to the range in which it begins, a row group to that in which its
share of the rows begins. A sample's name is its file and its position there, and its hash decides
whether it is held out. Input that cannot be read comes as a `BadInput` among the samples: a bad
record costs one record, a damaged compressed file its rest, damaged Parquet a row group.
"""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zaya_jax.config import UserError, first_line
from zaya_jax.text import chat, hub, text_files
from zaya_jax.text.tokenizers import utf8

CHAT_FIELDS = ("messages", "conversations", "conversation")
DAMAGE = (OSError, EOFError, zlib.error)
FEATHER = b"ARROW1"  # with which such files begin
Stamp = tuple[int, int]  # bytes, time of change in ns
RECORDS = ("jsonl", "parquet", "arrow", "hub")  # the kinds of files with texts or chats in fields


class Sample(NamedTuple):
    """A text, the turns of a chat, or a pair of chats, by the form of the records."""

    name: str  # its hash decides whether it is held out
    where: str  # the file, and its line or row, for messages
    content: Any


class BadInput(UserError):
    """A record or a file that cannot be read as what its name says."""


class NotText(BadInput):
    """A file that is not read as text, such as a picture or an archive: left out and counted."""

    def __init__(self, input_range: "InputRange", kind: str) -> None:
        super().__init__(f"{input_range} ({kind})")
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class InputRange:
    """A range of bytes of an input file: all of it, or the lines or row groups that begin there."""

    path: str
    name: str  # relative, the same on any machine
    kind: str  # as `text_files.file_kind` says
    stamp: Stamp  # of the file, when the preparation began
    start: int
    stop: int
    cost: int  # bytes, or for a shard of the hub as many as a task has

    def __str__(self) -> str:
        return text_files.printable(self.path)


@dataclasses.dataclass(frozen=True)
class TextOrChat:
    """Records of chats, or of texts under a field."""

    text_field: str = "text"
    way_out = "use prepare_data with --skip_bad to skip it"

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self.text_field, *CHAT_FIELDS, *chat.LEADING_FIELDS, *chat.PAIR_FIELDS)

    @property
    def wanted(self) -> str:
        """The fields that would have been right, for messages."""
        return (
            f"expected a text under {self.text_field!r} (--text_field) or a chat under"
            f" {', '.join(CHAT_FIELDS)}, {' or '.join(map(' with '.join, chat.PAIRS))}"
        )

    def fits(self, names: Sequence[str]) -> bool:
        """Whether records with these fields may have this form."""
        known = any(field in names for field in (self.text_field, *CHAT_FIELDS))
        return known or any({*pair} <= {*names} for pair in chat.PAIRS)

    def content(self, record: dict[str, Any]) -> str | list[chat.Message]:
        """A record's chat, or else its text; an empty record is an empty text.

        Turns under one of CHAT_FIELDS come before a question and its answer, and both before a
        text.
        """
        turns: list[Any] = []
        for field in CHAT_FIELDS:
            if not turns and isinstance(record.get(field), list):
                turns = record[field]
        turns = turns or chat.paired_turns(record, self.text_field)
        if turns:
            return chat.parse_chat(chat.leading_turns(record) + turns)
        text = record.get(self.text_field)
        if isinstance(text, str):
            if len(text) > text_files.LONGEST_TEXT:
                raise BadInput(f"a text that {text_files.TOO_LONG}")
            utf8(text)
            return text
        if text is not None or (self.text_field not in record and record):
            hint = "; for pairs give finetune.py:MODEL,preference=dpo" if "chosen" in record else ""
            raise BadInput(f"fields {chat.named_fields(record)}, but {self.wanted}{hint}")
        return ""


class ChatPair:
    """Records of two answers, the better and the worse one."""

    columns = ("prompt", "chosen", "rejected", *chat.LEADING_FIELDS)
    wanted = chat.PAIR_FORM
    way_out = "remove it"

    def fits(self, names: Sequence[str]) -> bool:
        """Whether records with these fields may have this form."""
        return {"chosen", "rejected"} <= {*names}

    def content(self, record: dict[str, Any]) -> chat.Pair:
        """A record's pair."""
        return chat.parse_pair(record)


Form = TextOrChat | ChatPair  # of the records of a file


def file_stamp(path: str) -> Stamp:
    """A file's size and time of change. A shard of the hub has no size, and its name has the
    commit."""
    if path.startswith(text_files.HUB_PREFIX):
        return 1, 1
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0  # reported, or with --skip_bad left out, when it is to be read
    return status.st_size, status.st_mtime_ns


def find_inputs(
    patterns: list[str], out: str | os.PathLike, planned: Sequence[str] = ()
) -> list[str]:
    """The files that globs, directories and paths name, sorted, each once, but none below `out`;
    UserError where one of them names nothing.

    A data set of the hub stays at the commit of the files that a preparation has `planned`.
    """
    files: list[pathlib.Path] = []
    streamed: list[str] = []
    below_out = os.path.join(os.path.realpath(out), "")
    for pattern in patterns:
        if pattern.startswith(text_files.HUB_PREFIX):
            streamed += hub.shard_inputs(pattern, planned)
            continue
        named = [
            path
            for path in text_files.find_files(pattern)
            if not os.path.realpath(path).startswith(below_out)
        ]
        if not named:
            raise UserError(f"{pattern} names no file; give paths, directories or globs (quoted)")
        files += named
    return [*sorted(map(str, text_files.unique_files(files))), *sorted(set(streamed))]


@dataclasses.dataclass(frozen=True)
class Task:
    """The unit of a preparation: ranges of the input that become at most one training and one
    held-out shard."""

    number: int
    ranges: list[InputRange]

    @property
    def cost(self) -> int:
        """Bytes of input."""
        return sum(input_range.cost for input_range in self.ranges)


def make_tasks(files: Sequence[tuple[str, int, int]], task_bytes: int) -> list[Task]:
    """Tasks of about `task_bytes` of input each: ranges of large files, or several small files
    together.

    Files come with their stamps, so that all who share a preparation divide it alike; none is
    opened.
    """
    folders = [
        os.path.dirname(os.path.abspath(path))
        for path, *_ in files
        if text_files.file_kind(path) != "hub"
    ]
    root = os.path.commonpath(folders) if folders else ""
    tasks: list[Task] = []
    size = 0  # of the last task
    for path, file_size, time_ns in files:
        for input_range in _ranges(path, (file_size, time_ns), root, task_bytes):
            if not tasks or (size and size + input_range.cost > task_bytes):
                tasks.append(Task(len(tasks), []))
                size = 0
            tasks[-1].ranges.append(input_range)
            size += input_range.cost
    return tasks


def whole_file(path: str, name: str) -> InputRange:
    """All of a file."""
    stamp = file_stamp(path)
    return InputRange(path, name, text_files.file_kind(path), stamp, 0, stamp[0], stamp[0])


def samples(input_range: InputRange, form: Form) -> Iterator[Sample | BadInput]:
    """The samples of a range of an input file, and what cannot be read of it as BadInput."""
    try:
        match input_range.kind:
            case "text":
                yield _text(input_range)
            case "jsonl":
                yield from _jsonl(input_range, form)
            case "parquet":
                yield from _parquet(input_range, form)
            case "hub":
                yield from _samples_of_rows(input_range, hub.rows(input_range.path), 0, form)
            case "arrow":
                yield from _samples_of_rows(input_range, _arrow_rows(input_range, form), 0, form)
            case kind:
                raise NotText(input_range, kind)
    except BadInput as error:  # of the whole file, of which its first range tells
        if not input_range.start:
            yield error
    except DAMAGE as error:
        yield BadInput(f"cannot read {input_range}: {first_line(error)}")


def _ranges(path: str, stamp: Stamp, root: str, task_bytes: int) -> Iterator[InputRange]:
    """The ranges that a file is divided into: equal ones of JSONL and Parquet, all of others."""
    kind = text_files.file_kind(path)
    if kind == "hub":  # a task of its own
        yield InputRange(path, path.rpartition("@")[0], kind, stamp, 0, 1, task_bytes)
        return
    name = os.path.abspath(path)[len(root) :].lstrip("/")
    size = max(stamp[0], 1)
    step = task_bytes if kind in ("jsonl", "parquet") and not _is_compressed(path) else size
    for start in range(0, size, step):
        stop = min(start + step, stamp[0])
        yield InputRange(path, name, kind, stamp, start, stop, stop - start)


def _is_compressed(path: str) -> bool:
    return path.lower().endswith(text_files.COMPRESSION)


@contextlib.contextmanager
def _open(path: str) -> Iterator[io.BufferedIOBase]:
    with open(path, "rb") as file:
        if _is_compressed(path) and not file.peek(1):
            raise OSError("the file is empty, which no valid compressed file is")
        # In blocks of this size: damage costs no more than that before it.
        if path.lower().endswith(".gz"):  # zeros behind the data, as tapes leave, are its padding
            yield io.BufferedReader(gzip.GzipFile(fileobj=file), 64 << 10)
        elif _is_compressed(path):
            import pyarrow

            yield io.BufferedReader(pyarrow.input_stream(file, "zstd"), 64 << 10)
        else:
            yield file


def _text(input_range: InputRange) -> Sample:
    with _open(input_range.path) as file:
        raw = file.read(text_files.LONGEST_TEXT + 1)
    if b"\0" in raw:
        raise NotText(input_range, "binary")
    if len(raw) > text_files.LONGEST_TEXT:
        raise BadInput(f"{input_range} {text_files.TOO_LONG}")
    try:
        return Sample(input_range.name, str(input_range), raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        # Python's tests have other encodings
        if pathlib.Path(input_range.path).is_relative_to(text_files.stdlib()):
            raise NotText(input_range, "not UTF-8") from None
        line = 1 + raw[: error.start].count(b"\n")
        raise BadInput(
            f"{input_range}, line {line}: not UTF-8; convert the file, or leave it out"
        ) from None


def _jsonl(input_range: InputRange, form: Form) -> Iterator[Sample | BadInput]:
    with _open(input_range.path) as file:
        offset = input_range.start
        if offset:  # the line that begins before this range belongs to the one before
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        number = 0
        while offset < input_range.stop or _is_compressed(input_range.path):
            number += 1
            # Nobody has counted the lines before a later range of a file.
            where = (
                f"{input_range}, byte {offset}"
                if input_range.start
                else f"{input_range}, line {number:,}"
            )
            try:
                line = file.readline()
            except DAMAGE as error:
                yield BadInput(f"{where}: unreadable from here on: {first_line(error)}")
                return
            if not line:
                return
            if line.strip():
                yield _json_sample(line, f"{input_range.name}:{offset}", where, form)
            offset += len(line)


def _json_sample(line: bytes, name: str, where: str, form: Form) -> Sample | BadInput:
    if line.lstrip().startswith(b"["):
        return BadInput(f"{where}: a JSON array; make a line of each element: jq -c '.[]'")
    try:
        record = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        return BadInput(f"{where}: not a JSON object of its own ({first_line(error)})")
    if not isinstance(record, dict):
        return BadInput(f"{where}: a JSON {type(record).__name__}, but {form.wanted}")
    return _sample(record, name, where, form)


def _sample(record: dict[str, Any], name: str, where: str, form: Form) -> Sample | BadInput:
    try:
        return Sample(name, where, form.content(record))
    except UserError as error:
        return BadInput(f"{where}: {error}")


def _open_parquet(path: str) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (ValueError, OSError, pyarrow.ArrowNotImplementedError) as error:
        if getattr(error, "errno", None):  # of the storage, for this range perhaps alone
            raise
        raise BadInput(
            f"{text_files.printable(path)} is not a Parquet file: {first_line(error)}"
        ) from None


def _parquet(input_range: InputRange, form: Form) -> Iterator[Sample | BadInput]:
    with _open_parquet(input_range.path) as file:
        names = file.schema_arrow.names
        columns = _columns(input_range, names, form)
        groups = range(file.num_row_groups)
        rows = [file.metadata.row_group(number).num_rows for number in groups]
        total = file.metadata.num_rows
        if sum(rows) != total or min(rows, default=0) < 0:
            raise BadInput(f"{input_range} is damaged: its footer has two numbers of rows")
        # Where a group begins is not asked for: in a damaged footer that ends the process.
        for number, before in zip(groups, itertools.accumulate(rows, initial=0), strict=False):
            place = input_range.stamp[0] * before // max(total, 1)
            if input_range.start <= place < input_range.stop:
                records = _rows_of_group(file, number, columns)
                yield from _samples_of_rows(input_range, records, number, form)


def _rows_of_group(file: Any, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a row group; ValueError where there are not as many as the footer says, as where
    a flipped bit has put its pages elsewhere."""
    missing = file.metadata.row_group(group).num_rows
    for batch in file.iter_batches(256, [group], columns):
        missing -= batch.num_rows
        # Arrow's maps as objects: of two values of one key the last counts, as in JSON.
        yield from batch.to_pylist(maps_as_pydicts="lossy")
    if missing:
        raise ValueError(f"{missing:,} rows are missing")


def _columns(input_range: InputRange, names: list[str], form: Form) -> list[str]:
    """The columns to read of a file that has these; BadInput where they are not what is needed."""
    if not form.fits(names):
        few = ascii(", ".join(names[:8]))[1:-1][:200]
        raise BadInput(f"{input_range} has columns {few}, but {form.wanted}")
    columns = [name for name in names if name in form.columns]
    if len(set(columns)) < len(columns):
        raise BadInput(f"{input_range} has two columns of one name among {', '.join(columns)}")
    return columns


def _arrow_rows(input_range: InputRange, form: Form) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow file: a stream of record batches, as `datasets.save_to_disk` writes it,
    or Feather's form, which begins with a mark."""
    import pyarrow

    with pyarrow.memory_map(input_range.path) as file:
        mark = file.read(len(FEATHER))
        file.seek(0)
        if mark == FEATHER:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            reader = batches = pyarrow.ipc.open_stream(file)
        columns = _columns(input_range, reader.schema.names, form)
        for batch in batches:
            batch = batch.select(columns)
            batch.validate(full=True)  # a damaged place in it would end the process
            yield from batch.to_pylist(maps_as_pydicts="lossy")


def _samples_of_rows(
    input_range: InputRange, records: Iterable[dict[str, Any]], group: int, form: Form
) -> Iterator[Sample | BadInput]:
    import pyarrow

    try:
        for row, record in enumerate(records):
            where = f"{input_range}, row {row + 1:,} of row group {group}"
            yield _sample(_without_nulls(record), f"{input_range.name}:{group}:{row}", where, form)
    except UserError:  # a stream of the hub that broke
        raise
    except (OSError, pyarrow.ArrowException, ValueError, ArithmeticError) as error:
        # also a value that Python cannot hold, such as a time out of range
        yield BadInput(f"{input_range}, row group {group} is damaged: {first_line(error)}")


def _without_nulls(value: Any) -> Any:
    """A value without the empty fields that every struct of a Parquet column has for those that
    other rows need."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
