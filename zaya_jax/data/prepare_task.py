"""A preparation's unit of work: a task's stretches of input become its shards, whoever runs it, wherever, how often.

A task is done when its record in `.work/` exists and its shards are there; the record is written after the shards are
on disk and before they get their names, so a finished shard is never written again and an unfinished one never seen.
What is written on the way has a name that nobody else has: two who make one task at a time give the same bytes twice.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.data import chat, inputs, pieces, prepare_plan, sources, tokenizers, trim
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.inputs import Stretch
from zaya_jax.data.prepare_plan import Options, Task
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.data.tokens import Document, ShardWriter

WORK = ".work"
EXAMPLES = 20  # of what was left out, named in the manifest
LIBRARIES = {"huggingface": "tokenizers"}
AT_ONCE = 16  # records read at a time: on a file system over the network, each is a wait


@dataclasses.dataclass(frozen=True)
class Job:
    """What all tasks of a preparation share."""

    directory: pathlib.Path
    options: Options
    corpus: int
    made: dict[str, Any]  # by what; a record made by something else does not count

    def record(self, number: int) -> pathlib.Path:
        """The file that says that a task is done."""
        return self.directory / WORK / f"task-{number:05d}.json"


def job(directory: pathlib.Path, options: Options, plan: dict[str, Any], tokenizer: Tokenizer) -> Job:
    """The job of a plan, whose tokenizer lies in the directory already."""
    made = {"plan": prepare_plan.key(plan), "chats": chat.VERSION, **_tokenizer_facts(tokenizer)}
    return Job(directory, options, prepare_plan.corpus(plan), made)


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, str]:
    library = LIBRARIES.get(tokenizer.kind)
    version = f"{library} {importlib.metadata.version(library)}" if library else "its own"
    return {"tokenizer": tokenizer.sha256, "library": version}


def run(task: Task, job: Job, count: Callable[[int, int], None]) -> None:
    """Tokenise one task's input into its shards and record it; `count(bytes, tokens)` is told of progress."""
    tokenizer = tokenizers.load(job.directory / tokens_lib.TOKENIZER)
    here = _tokenizer_facts(tokenizer)
    if not here.items() <= job.made.items():
        raise UserError(
            f"a worker has {here['library']} and tokenizer {here['tokenizer'][:12]}, the preparation "
            f"{job.made['library']} and {job.made['tokenizer'][:12]}; install the same on all machines"
        )
    writing = _Writing(task, job, tokenizer)
    try:
        for stretch in task.stretches:
            for document_tokens in writing.add(stretch):
                count(0, document_tokens)
            count(stretch.cost, 0)
        for path, *stamp in task.files:
            if [*prepare_plan.stamp(path, job.options.skip_bad)] != stamp:
                raise UserError(f"{inputs.shown(path)} has changed since the preparation began")
        writing.commit()
    finally:
        writing.close()


def undone(job: Job, all_tasks: Iterable[Task]) -> dict[int, str]:
    """The tasks that are not done, each with why not. Shards whose record a killed process left get their names."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda task: (task.number, _wrong(job, task.number)), all_tasks)
        return {number: why for number, why in found if why}


def _wrong(job: Job, number: int) -> str:
    """Why a task does not count as done; "" where it does."""
    try:
        record = json.loads(job.record(number).read_bytes())
        made = record["made"]
        if made["plan"] != job.made["plan"]:
            return "made with other options or input files"
        if made["tokenizer"] != job.made["tokenizer"]:
            return "made with another tokenizer"
        if made["chats"] != job.made["chats"]:
            return "made when chats were spelt otherwise"
        if made["library"] != job.made["library"]:
            return f"made with {made['library']}, while {job.made['library']} is here"
        if record["left_out"]["bad"] and not job.options.skip_bad:
            return "made with --skip_bad, and something was skipped"
        for entry in record["shards"]:
            if not _settled(job.directory, entry):
                return f"without its shard {entry['file']}"
    except FileNotFoundError:
        return "missing"
    except (ValueError, KeyError, TypeError):
        return "recorded by another version of this program, or damaged"
    return ""


def _settled(directory: pathlib.Path, entry: dict[str, Any]) -> bool:
    """Whether a recorded shard is there, under its name from now on."""
    partial, final = directory / WORK / entry["partial"], directory / entry["file"]
    with contextlib.suppress(FileNotFoundError):  # as a rule it has its name already
        partial.replace(final)
    return final.is_file() and final.stat().st_size == entry["bytes"]


@dataclasses.dataclass
class LeftOut:
    """What of the input is in no shard, beside chats that were dropped."""

    bad: int = 0  # records and files that could not be read
    not_text: int = 0  # files among texts that are none, such as pictures
    empty: int = 0  # texts without a character that is not white space
    bad_examples: list[str] = dataclasses.field(default_factory=list)
    not_text_examples: list[str] = dataclasses.field(default_factory=list)

    def add(self, kind: str, example: str) -> None:
        """Count one, and keep the first EXAMPLES."""
        setattr(self, kind, getattr(self, kind) + 1)
        examples = getattr(self, f"{kind}_examples")
        if len(examples) < EXAMPLES:
            examples.append(example)

    def take(self, other: dict[str, Any]) -> None:
        """Add what a task recorded."""
        for kind, held in other.items():
            if isinstance(held, list):
                setattr(self, kind, (getattr(self, kind) + held)[:EXAMPLES])
            else:
                setattr(self, kind, getattr(self, kind) + held)


class _Writing:
    """The writers and counts of one task."""

    def __init__(self, task: Task, job: Job, tokenizer: Tokenizer) -> None:
        self._task, self._job, self._tokenizer, self._options = task, job, tokenizer, job.options
        self._chat = chat.Format(tokenizer)
        self._writers: dict[str, ShardWriter] = {}
        self._outcomes = trim.Counts()
        self._sources: dict[str, list[int]] = {}
        self._left_out = LeftOut()

    def add(self, part: Stretch) -> Iterator[int]:
        """Write a part's samples; yields the tokens of each batch of them."""
        self._sources.setdefault(part.name, [0, 0])
        texts: list[tuple[str, str]] = []
        size = 0
        for found in inputs.samples(part, self._options.text_field):
            if isinstance(found, inputs.BadInput):
                self._bad(found)
                continue
            name, sample = found
            if isinstance(sample, str) and len(sample) <= pieces.PIECE:
                texts.append((name, sample))
                size += len(sample)
                if size < pieces.PIECE:
                    continue
            yield self._add_texts(part, texts)
            texts, size = [], 0
            if isinstance(sample, list):
                yield self._add_chat(part, name, sample)
            elif not isinstance(sample, str) or len(sample) > pieces.PIECE:
                yield self._add_long(part, name, [sample] if isinstance(sample, str) else sample)
        yield self._add_texts(part, texts)

    def close(self) -> None:
        """Let go of the files; of what was not committed nothing stays, but for a kill."""
        for writer in self._writers.values():
            writer.discard()

    def commit(self) -> None:
        """Put the shards on disk, record the task, then give the shards their names."""
        entries = [self._writers[s].close() for s in tokens_lib.SPLITS if s in self._writers]
        record = {
            "made": self._job.made, "shards": entries, "sources": self._sources, "trim": dict(self._outcomes),
            "left_out": dataclasses.asdict(self._left_out),
        }  # fmt: skip
        tokens_lib.write_atomically(self._job.record(self._task.number), json.dumps(record).encode())
        for entry in entries:
            if not _settled(self._job.directory, entry):
                raise FileNotFoundError(
                    errno.ENOENT, "a shard vanished before it had its name", entry["file"]
                )

    def _add_texts(self, part: Stretch, texts: list[tuple[str, str]]) -> int:
        tokenizer = self._tokenizer
        total = 0
        filled = [(name, text) for name, text in texts if text.strip()]
        self._left_out.empty += len(texts) - len(filled)
        try:
            encoded = tokenizer.encode_many([text for _, text in filled])
        except tokenizers.CannotEncode as error:
            if len(filled) > 1:  # one by one, to lose no other
                return sum(self._add_texts(part, [one]) for one in filled)
            self._bad(inputs.BadInput(f"{part}, sample {filled[0][0]}: {error}"))
            return 0
        for (name, _), ids in zip(filled, encoded, strict=True):
            if not len(ids):
                self._left_out.empty += 1
                continue
            tokens: np.ndarray = np.empty(len(ids) + 2, tokenizer.dtype)
            tokens[0], tokens[1:-1], tokens[-1] = tokenizer.bos_id, ids, tokenizer.eos_id
            total += self._write(part, name, Document(tokens))
        return total

    def _add_long(self, part: Stretch, name: str, text: Iterable[str]) -> int:
        try:
            tokens = pieces.document(self._tokenizer, text)
        except inputs.BadInput as error:  # found while it was read
            self._bad(error)
            return 0
        except (pieces.TooLong, tokenizers.CannotEncode) as error:
            self._bad(inputs.BadInput(f"{part}, sample {name}: {error}"))
            return 0
        return self._write(part, name, Document(tokens))

    def _add_chat(self, part: Stretch, name: str, messages: list[chat.Message]) -> int:
        try:
            document, outcome = chat.prepare(self._chat, messages, self._options.context or None)
        except tokenizers.CannotEncode as error:
            self._bad(inputs.BadInput(f"{part}, sample {name}: {error}"))
            return 0
        self._outcomes[outcome] += 1
        return 0 if document is None else self._write(part, name, document)

    def _bad(self, found: inputs.BadInput) -> None:
        if isinstance(found, inputs.NotText):
            self._left_out.add("not_text", str(found))
        elif not self._options.skip_bad:
            raise found
        else:
            self._left_out.add("bad", str(found))

    def _write(self, part: Stretch, name: str, document: Document) -> int:
        split = "held_out" if sources.held_out(name, self._options.held_out) else "train"
        if split not in self._writers:
            kind = tokens_lib.SPLITS.index(split)
            number = self._task.number
            path = self._job.directory / WORK / tokens_lib.shard_name(kind, number)
            self._writers[split] = ShardWriter(path, self._tokenizer.dtype, self._job.corpus, kind, number)
        self._writers[split].add(document)
        source = self._sources[part.name]
        source[0] += 1
        source[1] += len(document.tokens)
        return len(document.tokens)
