"""The unit of work of a preparation: a task's ranges of input become its shards, on any machine.

A task is done when its record in `.work/` exists and its shards are there. The record is written after the shards are
on disk and before they get their names, so a finished shard is never written again and an unfinished one is never
visible. Files in progress have unique names: two processes that run one task write the same bytes twice. Tasks run in
processes of this machine or on a Ray cluster, and both give the same files.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.data import chat, inputs, sources, tokenizers
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.inputs import InputRange
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.data.tokens import Document, ShardWriter

Plan = dict[str, Any]  # everything that a prepared directory's content depends on
File = tuple[str, int, int]  # path, bytes, time of change in ns; zeros where it cannot be read
Tell = Callable[[int, int, int], None]  # of (bytes, tokens, tasks) done so far, about twice a second
WORK = ".work"
EXAMPLES = 20  # of what was left out, named in the manifest
LIBRARIES = {"huggingface": "tokenizers"}
AT_ONCE = 16  # records read at a time: each is a wait on a network file system
RETRIES = 3  # of a task whose Ray worker or node died: a task that always kills its worker must end some day

_shared: dict[str, Any] = {}


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
    """The unit of work: ranges of the input that become at most one training and one held-out shard."""

    number: int
    ranges: list[InputRange]
    files: list[File]  # that these belong to, as they were when the preparation began

    @property
    def cost(self) -> int:
        """Bytes of input."""
        return sum(part.cost for part in self.ranges)


def make_plan(options: Options, paths: list[str]) -> Plan:
    """The plan of these options and input files; the machines that share a preparation all make the same one."""
    files = [[path, *inputs.stamp(path, options.skip_bad)] for path in paths]
    tokenizer = "bpe" if options.train_bpe else tokenizers.load(options.tokenizer).sha256
    return {**dataclasses.asdict(options), "tokenizer": tokenizer, "files": files, "version": tokens_lib.VERSION}


def tasks_of(plan: Plan) -> list[Task]:
    """The tasks of a plan, in their order."""
    files: dict[str, File] = {path: (path, size, time_ns) for path, size, time_ns in plan["files"]}
    found = inputs.split(list(files.values()), plan["part_bytes"], plan["skip_bad"])
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
    made: dict[str, Any]  # by what; a record made by something else does not count

    def record(self, number: int) -> pathlib.Path:
        """The file that says that a task is done."""
        return self.directory / WORK / f"task-{number:05d}.json"


def make_job(directory: pathlib.Path, options: Options, plan: Plan, tokenizer: Tokenizer) -> Job:
    """The job of a plan, whose tokenizer lies in the directory already."""
    # Skipping changes nothing where nothing had to be skipped.
    key = tokens_lib.manifest_hash({**plan, "skip_bad": None})
    made = {"plan": key, "chats": chat.VERSION, **_tokenizer_facts(tokenizer)}
    # Shards carry a number of the corpus, which does not depend on where the input lies or on its times.
    files = [[os.path.basename(path), size] for path, size, _ in plan["files"]]
    corpus = tokens_lib.corpus_id({**plan, "inputs": None, "skip_bad": None, "files": files})
    return Job(directory, options, corpus, made)


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
        for part in task.ranges:
            for document_tokens in writing.add(part):
                count(0, document_tokens)
            count(part.cost, 0)
        for path, *stamp in task.files:
            if [*inputs.stamp(path, job.options.skip_bad)] != stamp:
                raise UserError(f"{inputs.shown(path)} has changed since the preparation began")
        writing.commit()
    finally:
        writing.close()


def undone(job: Job, all_tasks: Iterable[Task]) -> dict[int, str]:
    """The tasks that are not done, each with the reason. Shards that a killed process recorded get their names."""
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
    """Counts of input that is in no shard, beside dropped chats."""

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
        self._outcomes = chat.Counts()
        self._sources: dict[str, list[int]] = {}
        self._left_out = LeftOut()

    def add(self, part: InputRange) -> Iterator[int]:
        """Write a part's samples; yields the tokens of each batch of them."""
        self._sources.setdefault(part.name, [0, 0])
        texts: list[tuple[str, str]] = []
        size = 0
        for found in inputs.samples(part, self._options.text_field):
            if isinstance(found, inputs.BadInput):
                self._bad(found)
                continue
            name, sample = found
            if isinstance(sample, str) and len(sample) <= tokenizers.PIECE:
                texts.append((name, sample))
                size += len(sample)
                if size < tokenizers.PIECE:
                    continue
            yield self._add_texts(part, texts)
            texts, size = [], 0
            if isinstance(sample, list):
                yield self._add_chat(part, name, sample)
            elif not isinstance(sample, str) or len(sample) > tokenizers.PIECE:
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
                raise FileNotFoundError(errno.ENOENT, "a shard vanished before it had its name", entry["file"])

    def _add_texts(self, part: InputRange, texts: list[tuple[str, str]]) -> int:
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

    def _add_long(self, part: InputRange, name: str, text: Iterable[str]) -> int:
        try:
            tokens = tokenizers.encode_document(self._tokenizer, text)
        except inputs.BadInput as error:  # found while it was read
            self._bad(error)
            return 0
        except (tokenizers.TooLong, tokenizers.CannotEncode) as error:
            self._bad(inputs.BadInput(f"{part}, sample {name}: {error}"))
            return 0
        return self._write(part, name, Document(tokens))

    def _add_chat(self, part: InputRange, name: str, messages: list[chat.Message]) -> int:
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

    def _write(self, part: InputRange, name: str, document: Document) -> int:
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


class Stopped(Exception):
    """Another task failed: this one is given up."""


def run_processes(job: Job, todo: list[Task], at_once: int, tell: Tell) -> None:
    """Run the tasks in processes of this machine, one per core where `at_once` is 0."""
    spawn = multiprocessing.get_context("spawn")
    done, tokens, stop = spawn.Value("q", 0), spawn.Value("q", 0), spawn.Event()
    finished_tasks = 0
    with concurrent.futures.ProcessPoolExecutor(
        min(at_once or os.cpu_count() or 1, len(todo)), spawn, _start_worker, (done, tokens, stop, os.getpid())
    ) as pool:
        try:
            futures = {pool.submit(_work, task, job) for task in todo}
            while futures:
                finished, futures = concurrent.futures.wait(futures, 0.5, concurrent.futures.FIRST_EXCEPTION)
                finished_tasks += len(finished)
                tell(done.value, tokens.value, finished_tasks)
                for future in finished:
                    future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, perhaps with fewer "
                "--processes"
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(done: Any, tokens: Any, stop: Any, parent: int) -> None:
    """In a worker: keep the shared counters, leave Ctrl-C to the parent, and end when the parent has."""
    _shared.update(done=done, tokens=tokens, stop=stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"  # the tokenizers library's threads: processes share the cores here

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _count(done: int, tokens: int) -> None:
    if _shared["stop"].is_set():
        raise Stopped
    for name, value in (("done", done), ("tokens", tokens)):
        with _shared[name].get_lock():
            _shared[name].value += value


def _work(task: Task, job: Job) -> None:
    run(task, job, _count)


def run_on_ray(job: Job, todo: list[Task], at_once: int, tell: Tell) -> None:
    """Run the tasks on the Ray cluster of RAY_ADDRESS, or that this machine belongs to: one core a task."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster at RAY_ADDRESS={address}: {inputs.one_line(error)}") from None
    remote, shared = ray.remote(num_cpus=1, max_retries=RETRIES)(_ray_work), ray.put(job)
    waiting, running = list(reversed(todo)), dict[Any, Task]()
    done = tokens = 0
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or len(todo)):
                task = waiting.pop()
                running[remote.remote(task, shared, os.getcwd())] = task
            finished, _ = ray.wait(list(running), num_returns=len(running), timeout=0.5)
            for ref in finished:
                tokens += ray.get(ref)
                done += running.pop(ref).cost
            tell(done, tokens, len(todo) - len(waiting) - len(running))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise UserError(
            f"Ray gave a task up after {RETRIES} retries ({type(error).__name__}: out of memory, or nodes lost?); run "
            "the same command again, perhaps with fewer --processes"
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
    made: list[int] = []
    run(task, job, lambda _, tokens: made.append(tokens))
    return sum(made)
