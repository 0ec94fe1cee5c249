"""The unit of work of a preparation: a task's ranges of input become its shards, on any machine.

A task is done when its record in `.work/` exists and its shards are there. The record comes last,
so an unfinished shard never counts. Files in progress have unique names: two processes that run one
task write the same bytes twice. Tasks run in processes of this machine or on a Ray cluster, and
both give the same files.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from zaya_jax.config import UserError, first_line
from zaya_jax.text import chat, chat_template, inputs, sources, tokenizers
from zaya_jax.text import tokens as tokens_lib
from zaya_jax.text.inputs import InputRange
from zaya_jax.text.tokenizers import Tokenizer
from zaya_jax.text.tokens import Document, ShardWriter

Plan = dict[str, Any]  # everything that a prepared directory's content depends on
File = tuple[str, int, int]  # path, bytes, time of change in ns
WORK = ".work"
EXAMPLES = 20  # of left-out input, named in the manifest
AT_ONCE = 16  # records read at a time: each is a wait on a network file system
# of a task whose Ray worker or node died: a task that always kills its worker must end some day
RETRIES = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that decide the content of a prepared directory."""

    inputs: list[str]
    tokenizer: str = "bytes"
    train_bpe: int = 0  # train a BPE of this many ids on the input instead
    text_field: str = "text"
    context: int = 0  # chat samples are trimmed to it; 0: never
    held_out: float = sources.HELD_OUT_SHARE
    skip_bad: bool = False  # count unreadable files and samples instead of stopping at the first
    part_bytes: int = 256 << 20


@dataclasses.dataclass(frozen=True)
class Task:
    """The unit of work: ranges of the input that become at most one training and one held-out
    shard."""

    number: int
    ranges: list[InputRange]
    files: list[File]  # that these belong to, as they were when the preparation began

    @property
    def cost(self) -> int:
        """Bytes of input."""
        return sum(part.cost for part in self.ranges)


def make_plan(options: Options, paths: list[str]) -> Plan:
    """The plan of these options and input files; the machines that share a preparation all make the
    same one."""
    files = [[path, *inputs.stamp(path)] for path in paths]
    tokenizer = tokenizers.load("bytes" if options.train_bpe else options.tokenizer)
    return {
        **dataclasses.asdict(options),
        "tokenizer": "bpe" if options.train_bpe else tokenizer.sha256,
        "chat template": chat_template.fingerprint(tokenizer),
        "files": files,
        "version": tokens_lib.VERSION,
    }


def plan_hash(plan: Plan) -> str:
    """SHA-256 of a plan; skipping changes nothing where nothing had to be skipped."""
    return tokens_lib.manifest_hash({**plan, "skip_bad": None})


def tasks_of(plan: Plan) -> list[Task]:
    """The tasks of a plan, in their order."""
    files: dict[str, File] = {path: (path, size, time_ns) for path, size, time_ns in plan["files"]}
    found = inputs.split(list(files.values()), plan["part_bytes"])
    return [
        Task(number, ranges, [files[path] for path in dict.fromkeys(s.path for s in ranges)])
        for number, ranges in enumerate(found)
    ]


@dataclasses.dataclass(frozen=True)
class Job:
    """The facts that all tasks of a preparation share."""

    directory: pathlib.Path
    options: Options
    corpus: int
    made: list[Any]  # by which plan and versions; a record made by others does not count

    def record(self, number: int) -> pathlib.Path:
        """The file that says that a task is done."""
        return self.directory / WORK / f"task-{number:05d}.json"


def make_job(directory: pathlib.Path, options: Options, plan: Plan, tokenizer: Tokenizer) -> Job:
    """The job of a plan, whose tokenizer lies in the directory already."""
    made = [plan_hash(plan), *_versions(tokenizer)]
    # Shards carry a number of the corpus, which does not depend on where the input lies or on its
    # times.
    files = [[os.path.basename(path), size] for path, size, _ in plan["files"]]
    corpus = tokens_lib.corpus_id({**plan, "inputs": None, "skip_bad": None, "files": files})
    return Job(directory, options, corpus, made)


def _versions(tokenizer: Tokenizer) -> list[Any]:
    """Everything but the plan that decides which ids a text becomes."""
    form = chat_template.fingerprint(tokenizer)
    return [tokenizer.sha256, form, importlib.metadata.version("tokenizers")]


def run(task: Task, job: Job) -> int:
    """Tokenise one task's input into its shards and record it; returns its number of tokens."""
    tokenizer = tokenizers.load(job.directory / tokens_lib.TOKENIZER)
    if _versions(tokenizer) != job.made[1:]:
        raise UserError(
            "a worker has another version of this program, of its tokenizer or of the library"
            " tokenizers than the preparation; install the same on all machines"
        )
    writing = _Writing(task, job, tokenizer)
    try:
        for part in task.ranges:
            writing.add(part)
        for path, *stamp in task.files:
            if [*inputs.stamp(path)] != stamp:
                raise UserError(f"{inputs.shown(path)} has changed since the preparation began")
        return writing.commit()
    finally:
        writing.close()


def undone(job: Job, tasks: list[Task]) -> list[Task]:
    """Those of these tasks that are not done."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        done = pool.map(lambda task: _done(job, task.number), tasks)
        return [task for task, was in zip(tasks, done, strict=True) if not was]


def _done(job: Job, number: int) -> bool:
    """Whether a task has its record and its shards, made with these options, input files and
    versions."""
    try:
        record = json.loads(job.record(number).read_bytes())
        if record["made"] != job.made or (record["left_out"]["bad"] and not job.options.skip_bad):
            return False
        return all(
            (job.directory / shard["file"]).stat().st_size == shard["bytes"]
            for shard in record["shards"]
        )
    except (OSError, ValueError, KeyError, TypeError):  # missing, or of another version
        return False


class LeftOut(dict[str, Any]):
    """Counts of input that is in no shard, beside dropped chats: bad records, files that are no
    text, empty texts."""

    def __init__(self) -> None:
        super().__init__(bad=0, not_text=0, empty=0, bad_examples=[], not_text_examples=[])
        self["not_text_kinds"] = collections.Counter[str]()

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self["not_text_kinds"].items())
        return (
            f"{self['bad']:,} bad records and files, {self['not_text']:,} files that are not text"
            f"{f' ({kinds})' if kinds else ''}, {self['empty']:,} empty texts"
        )

    def add(self, more: dict[str, Any]) -> None:
        """Add counts, and what is named of them, up to EXAMPLES."""
        for kind, held in more.items():
            self[kind] += collections.Counter(held) if isinstance(held, dict) else held
            if isinstance(held, list):
                del self[kind][EXAMPLES:]


class _Writing:
    """The writers and counts of one task."""

    def __init__(self, task: Task, job: Job, tokenizer: Tokenizer) -> None:
        self._task, self._job, self._tokenizer, self._options = task, job, tokenizer, job.options
        self._writers: dict[str, ShardWriter] = {}
        self._outcomes = chat.Counts()
        self._left_out = LeftOut()

    def add(self, part: InputRange) -> None:
        """Write a part's samples."""
        for sample in inputs.samples(part, self._options.text_field):
            if isinstance(sample, inputs.BadInput):
                self._bad(sample)
            elif isinstance(sample.content, str):
                self._add_text(sample.name, sample.content)
            else:
                self._add_chat(sample, sample.content)

    def close(self) -> None:
        """Let go of the files, and delete those that were not committed."""
        for writer in self._writers.values():
            writer.discard()

    def commit(self) -> int:
        """Put the shards in their places, then record the task; returns its number of tokens."""
        entries = [self._writers[s].close() for s in tokens_lib.SPLITS if s in self._writers]
        for entry in entries:
            (self._job.directory / WORK / entry.pop("partial")).replace(
                self._job.directory / entry["file"]
            )
        record = {
            "made": self._job.made,
            "shards": entries,
            "trim": dict(self._outcomes),
            "left_out": self._left_out,
        }
        tokens_lib.write_atomically(
            self._job.record(self._task.number), json.dumps(record).encode()
        )
        return sum(entry["tokens"] for entry in entries)

    @functools.cached_property
    def _template(self) -> chat_template.Template:
        return chat_template.Template(self._tokenizer)

    def _add_text(self, name: str, text: str) -> None:
        tokens = self._tokenizer.document(text if text.strip() else "")
        if len(tokens) > 2:
            self._write(name, Document(tokens))
        else:
            self._left_out["empty"] += 1

    def _add_chat(self, sample: inputs.Sample, messages: list[chat.Message]) -> None:
        try:
            document, outcome = self._template.prepare(messages, self._options.context or None)
        except chat_template.Refused as error:
            self._bad(inputs.BadInput(f"{sample.where}: {error}"))
            return
        self._outcomes.add(document, outcome, any(self._template.ending))
        if document is not None:
            self._write(sample.name, document)

    def _bad(self, found: inputs.BadInput) -> None:
        if isinstance(found, inputs.NotText):
            kinds = {found.kind: 1}
            self._left_out.add(
                {"not_text": 1, "not_text_kinds": kinds, "not_text_examples": [str(found)]}
            )
        elif not self._options.skip_bad:
            raise found
        else:
            self._left_out.add({"bad": 1, "bad_examples": [str(found)]})

    def _write(self, name: str, document: Document) -> None:
        split = "held_out" if sources.held_out(name, self._options.held_out) else "train"
        if split not in self._writers:
            kind = tokens_lib.SPLITS.index(split)
            number = self._task.number
            path = self._job.directory / WORK / tokens_lib.shard_name(kind, number)
            self._writers[split] = ShardWriter(
                path, self._tokenizer.dtype, self._job.corpus, kind, number
            )
        self._writers[split].add(document)


def run_processes(job: Job, todo: list[Task], at_once: int) -> Iterator[tuple[Task, int]]:
    """Run the tasks in processes of this machine, one per core where `at_once` is 0; yields each
    when it is done, with its number of tokens.
    """
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    with concurrent.futures.ProcessPoolExecutor(
        min(at_once or os.cpu_count() or 1, len(todo)), spawn, _start_worker, (stop, os.getpid())
    ) as pool:
        try:
            running = {pool.submit(run, task, job): task for task in todo}
            for future in concurrent.futures.as_completed(running):
                yield running.pop(future), future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, perhaps"
                " with fewer --processes"
            ) from None
        except BaseException:  # the other tasks must not go on writing
            pool.shutdown(wait=False, cancel_futures=True)
            stop.set()
            raise


def _start_worker(stop: Any, parent: int) -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent has or says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = (
        "1"  # the tokenizers library's threads: processes share the cores here
    )

    def watch() -> None:
        while os.getppid() == parent and not stop.wait(0.2):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_on_ray(job: Job, todo: list[Task], at_once: int) -> Iterator[tuple[Task, int]]:
    """As `run_processes`, on the Ray cluster of RAY_ADDRESS, or that this machine belongs to: one
    core a task."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level="error", ignore_reinit_error=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster at RAY_ADDRESS={address}: {first_line(error)}") from None
    remote, shared = ray.remote(num_cpus=1, max_retries=RETRIES)(_ray_work), ray.put(job)
    waiting, running = list(reversed(todo)), dict[Any, Task]()
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or len(todo)):
                task = waiting.pop()
                running[remote.remote(task, shared, os.getcwd())] = task
            (finished,), _ = ray.wait(list(running))
            yield running.pop(finished), ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise UserError(
            f"Ray gave a task up after {RETRIES} retries ({type(error).__name__}: out of memory, or"
            " nodes lost?); run the same command again, perhaps with fewer --processes"
        ) from None
    finally:  # after a failure the other tasks must not go on writing
        for ref in running:
            ray.cancel(ref, force=True)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=30)


def _ray_work(task: Task, job: Job, folder: str) -> int:
    """Run a task in a Ray worker, with paths relative to this folder; its number of tokens."""
    os.chdir(folder)
    os.environ["RAYON_NUM_THREADS"] = "1"
    return run(task, job)
