"""The unit of work of a preparation: a task's ranges of input become its shards, on any machine.

A task is done when its record in `.work/` exists and its shards are there. The record comes last,
so an unfinished shard never counts. Files in progress have unique names: two processes that run one
task write the same bytes twice. Tasks run in processes of this machine.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.config import UserError, files
from zaya_jax.text import chat, chat_template, inputs, shard_format, text_files, tokenizers
from zaya_jax.text.inputs import InputRange, Task
from zaya_jax.text.shard_format import WORK, ShardWriter
from zaya_jax.text.token_block import Document
from zaya_jax.text.tokenizers import Tokenizer

Plan = dict[str, Any]  # everything that a prepared directory's content depends on
EXAMPLES = 20  # of each kind of input that is left out, named in the manifest
BAD = "bad records and files"  # that cannot be read
RECORD_READERS = 16  # at a time: each record is a wait on a network file system


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that decide the content of a prepared directory."""

    inputs: list[str]
    tokenizer: str = "bytes"
    train_bpe: int = 0  # train a BPE of this many ids on the input instead
    text_field: str = "text"
    context: int = 0  # chats are fitted to it; 0: to none
    held_out: float = text_files.HELD_OUT_SHARE
    skip_bad: bool = False  # skip and count unreadable input instead of stopping at the first
    part_bytes: int = 256 << 20  # input of a task; a machine's part is of many tasks


def make_plan(options: Options, paths: list[str]) -> Plan:
    """The plan of these options and input files; the machines that share a preparation all make the
    same one."""
    tokenizer = tokenizers.load("bytes" if options.train_bpe else options.tokenizer)
    return {
        **dataclasses.asdict(options),
        "tokenizer": "bpe" if options.train_bpe else tokenizer.sha256,
        "chat template": chat_template.fingerprint(tokenizer),
        "files": [[path, *inputs.file_stamp(path)] for path in paths],
        "version": shard_format.VERSION,
    }


def plan_hash(plan: Plan) -> str:
    """SHA-256 of a plan; skipping changes nothing where nothing had to be skipped."""
    return shard_format.json_sha256({**plan, "skip_bad": None})


@dataclasses.dataclass(frozen=True)
class Job:
    """The facts that all tasks of a preparation share."""

    directory: pathlib.Path
    options: Options
    corpus: int
    made_by: list[Any]  # plan hash and versions; records made under others are ignored

    def record(self, number: int) -> pathlib.Path:
        """The file that says that a task is done."""
        return self.directory / WORK / f"task-{number:05d}.json"


def make_job(directory: pathlib.Path, options: Options, plan: Plan, tokenizer: Tokenizer) -> Job:
    """The job of a plan, whose tokenizer is in the directory already."""
    # The plan, and everything else that decides which ids a text becomes.
    library = importlib.metadata.version("tokenizers")
    made_by = [plan_hash(plan), tokenizer.sha256, library]
    # Shards carry a number of the corpus, which depends neither on the input's folder nor on its
    # times.
    sizes = [[os.path.basename(path), size] for path, size, _ in plan["files"]]
    corpus = shard_format.corpus_id({**plan, "inputs": None, "skip_bad": None, "files": sizes})
    return Job(directory, options, corpus, made_by)


def run_task(task: Task, job: Job) -> int:
    """Tokenise one task's input into its shards and record it; returns its number of tokens."""
    tokenizer = tokenizers.load(job.directory / shard_format.TOKENIZER)
    with contextlib.closing(_TaskWriter(task, job, tokenizer)) as writer:
        for input_range in task.ranges:
            writer.add(input_range)
        # After reading, so that a change in the meantime is noticed, too.
        for input_range in task.ranges:
            if inputs.file_stamp(input_range.path) != input_range.stamp:
                raise UserError(
                    f"{input_range} has changed since the preparation began;"
                    " restore it, or begin anew in another directory"
                )
        return writer.commit()


def unfinished_tasks(job: Job, tasks: list[Task]) -> list[Task]:
    """Those of these tasks that are not done."""
    with concurrent.futures.ThreadPoolExecutor(RECORD_READERS) as pool:
        done = pool.map(lambda task: _is_done(job, task.number), tasks)
        return [task for task, is_done in zip(tasks, done, strict=True) if not is_done]


def _is_done(job: Job, number: int) -> bool:
    """Whether a task has its record and its shards, made with these options, input files and
    versions."""
    try:
        record = json.loads(job.record(number).read_bytes())
        if record["made"] != job.made_by:
            return False
        if record["counts"].get(BAD) and not job.options.skip_bad:
            return False
        return all(
            (job.directory / shard["file"]).stat().st_size == shard["bytes"]
            for shard in record["shards"]
        )
    except (OSError, ValueError, KeyError, TypeError):  # missing, or of another version
        return False


@dataclasses.dataclass
class Tally:
    """What became of input: how often each thing happened, and the first examples of what is in no
    shard."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(
        self, counts: Mapping[str, int], examples: Mapping[str, list[str]] | None = None
    ) -> None:
        """Add those of other input."""
        self.counts.update(counts)
        for name, more in (examples or {}).items():
            self.examples[name] = (self.examples.get(name, []) + more)[:EXAMPLES]


class _TaskWriter:
    """The shards and counts of one task."""

    def __init__(self, task: Task, job: Job, tokenizer: Tokenizer) -> None:
        self._task = task
        self._job = job
        self._tokenizer = tokenizer
        self._writers: dict[int, ShardWriter] = {}  # by the index of the split
        self._tally = Tally()

    def add(self, input_range: InputRange) -> None:
        """Write a range's samples."""
        for sample in inputs.samples(input_range, inputs.TextOrChat(self._job.options.text_field)):
            if isinstance(sample, inputs.BadInput):
                self._count_bad_or_raise(sample)
            elif isinstance(sample.content, str):
                self._add_text(sample.name, sample.content)
            else:
                self._add_chat(sample, sample.content)

    def close(self) -> None:
        """Close the files, and delete those that were not committed."""
        for writer in self._writers.values():
            writer.discard()

    def commit(self) -> int:
        """Give the shards their names, then record the task; returns its number of tokens."""
        entries = [self._writers[split].close() for split in sorted(self._writers)]
        for entry in entries:
            partial = self._job.directory / WORK / entry.pop("partial")
            partial.replace(self._job.directory / entry["file"])
        record = {"made": self._job.made_by, "shards": entries, **vars(self._tally)}
        files.write(self._job.record(self._task.number), json.dumps(record).encode())
        return sum(entry["tokens"] for entry in entries)

    @functools.cached_property
    def _template(self) -> chat_template.Template:
        return chat_template.Template(self._tokenizer)

    def _add_text(self, name: str, text: str) -> None:
        tokens = self._tokenizer.encode_document(text if text.strip() else "")
        if len(tokens) > 2:
            self._write(name, Document(tokens))
        else:
            self._tally.add({"empty texts": 1})

    def _add_chat(self, sample: inputs.Sample, messages: list[chat.Message]) -> None:
        try:
            document, outcome = self._template.encode_within(
                messages, self._job.options.context or None
            )
        except chat_template.Refused as error:
            self._count_bad_or_raise(inputs.BadInput(f"{sample.where}: {error}"))
            return
        self._tally.add({outcome: 1})
        if document is not None:
            self._tally.add(document.counts)
            self._write(sample.name, document)

    def _count_bad_or_raise(self, error: inputs.BadInput) -> None:
        reason = BAD
        if isinstance(error, inputs.NotText):
            reason = f"files that are no text ({error.kind})"
        elif not self._job.options.skip_bad:
            raise error
        self._tally.add({reason: 1}, {reason: [str(error)]})

    def _write(self, name: str, document: Document) -> None:
        split = int(text_files.hash_below(name, self._job.options.held_out))  # 1: held out
        if split not in self._writers:
            number = self._task.number
            path = self._job.directory / WORK / shard_format.shard_name(split, number)
            self._writers[split] = ShardWriter(
                path, self._tokenizer.dtype, self._job.corpus, split, number
            )
        self._writers[split].add(document)


def run_processes(job: Job, tasks: list[Task], max_running: int) -> Iterator[tuple[Task, int]]:
    """Run the tasks in processes of this machine, one per core where `max_running` is 0; yields
    each when it is done, with its number of tokens.
    """
    spawn = multiprocessing.get_context("spawn")
    # The workers end when our end of this pipe is closed. No event: its `set` waits for each worker
    # that waited for it, for ever if one has ended meanwhile.
    workers_end, our_end = spawn.Pipe(duplex=False)
    count = min(max_running or os.cpu_count() or 1, len(tasks))
    with concurrent.futures.ProcessPoolExecutor(
        count, spawn, _start_worker, (workers_end,)
    ) as pool:
        try:
            running = {pool.submit(run_task, task, job): task for task in tasks}
            for future in concurrent.futures.as_completed(running):
                yield running.pop(future), future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, perhaps"
                " with fewer --processes"
            ) from None
        except BaseException:  # the other tasks must not go on writing
            pool.shutdown(wait=False, cancel_futures=True)
            our_end.close()
            raise


def _start_worker(lifeline: Any) -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent has ended or says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before its first use: the tokenizers library has threads, and processes share the cores.
    os.environ["RAYON_NUM_THREADS"] = "1"

    def watch() -> None:
        lifeline.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
