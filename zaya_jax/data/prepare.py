"""Making a prepared directory: input files to token shards, over processes, killable at any moment.

The work is a fixed list of tasks, each a stretch of the input that becomes at most one training and one
held-out shard. A task is done when its record in `.work/` exists; it is written after the shards are on disk
and before they get their names, so a finished shard is never written again and an unfinished one never seen.
`manifest.json` comes last.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import google_crc32c
import numpy as np

from zaya_jax.config import StorageError, UserError
from zaya_jax.data import chat, inputs, pieces, sources, tokenizers, trim
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.inputs import Stretch
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.data.tokens import Document, ShardWriter

WORK = ".work"
EXAMPLES = 20  # of what was left out, named in the manifest
# What a prepared directory holds beside shards.
OURS = (WORK, tokens_lib.MANIFEST, tokens_lib.SHARDS, tokens_lib.SOURCES, tokens_lib.TOKENIZER)
BPE_BYTES = 64 << 20  # of input that a BPE is trained on at most, spread over all of it


@dataclasses.dataclass(frozen=True)
class Options:
    """What decides the content of a prepared directory."""

    inputs: list[str]
    tokenizer: str = "bytes"
    train_bpe: int = 0  # train a BPE of this many ids on the input instead
    text_field: str = "text"
    context: int = 0  # chat samples are trimmed to it; 0: never
    held_out: float = sources.HELD_OUT_SHARE
    skip_bad: bool = False  # count unreadable files and samples instead of stopping at the first
    part_bytes: int = 256 << 20


def prepare(
    options: Options, out: str, processes: int, progress: Callable[[int, int, int], None]
) -> tuple[dict[str, Any], bool]:
    """(manifest, whether it was there already) of the prepared directory `out`, made or continued.

    `progress(done, total, tokens)` is called about twice a second with bytes of input and tokens written.
    """
    directory = _directory(out)
    plan = _plan(options, inputs.find(options.inputs, out))
    if _finished(directory) and not (directory / WORK).exists():
        return _complete(directory, plan, out), True
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        (directory / WORK).mkdir(parents=True, exist_ok=True)
        lock = (directory / WORK / "lock").open("w")
    except OSError as error:
        _remove(made)
        raise UserError(f"--out={out} cannot be written: {error.strerror}; give another directory") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out={out} is being prepared by another process; wait for it or stop it"
            ) from None
        if _finished(directory):  # killed just before the end
            shutil.rmtree(directory / WORK)
            return _complete(directory, plan, out), True
        _same_plan(directory, plan, out)
        try:
            return _make(options, directory, plan, processes, progress), False
        except (UserError, StorageError) as error:
            raise type(error)(f"{error}{_after_failure(directory, made)}") from None
        except OSError as error:  # what reading raises is bad input, so this was written
            raise StorageError(
                f"--out={out} cannot be written: {error.strerror or error}{_after_failure(directory, made)}"
            ) from None
        except MemoryError:
            raise UserError(
                f"memory ran out; give fewer --processes, or texts in smaller files{_after_failure(directory, made)}"
            ) from None


def run_task(
    number: int, parts: list[Stretch], directory: str, options: Options, count: Callable[[int, int], None]
) -> None:
    """Tokenise one task's input into its shards and record it; `count(bytes, tokens)` is told of progress."""
    tokenizer = tokenizers.load(pathlib.Path(directory) / tokens_lib.TOKENIZER)
    task = _Task(number, pathlib.Path(directory), tokenizer, options)
    try:
        for part in parts:
            for document_tokens in task.add(part):
                count(0, document_tokens)
            count(part.cost, 0)
        task.commit()
    finally:
        task.close()


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


class _Task:
    """The writers and counts of one task."""

    def __init__(self, number: int, directory: pathlib.Path, tokenizer: Tokenizer, options: Options) -> None:
        self._number, self._directory, self._tokenizer, self._options = number, directory, tokenizer, options
        self._corpus = _corpus(json.loads((directory / WORK / "plan.json").read_bytes()))
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
        """Let go of the files; what was not committed stays behind under its temporary name."""
        for writer in self._writers.values():
            writer.release()

    def commit(self) -> None:
        """Put the shards on disk, record the task, then give the shards their names."""
        entries = [self._writers[s].close() for s in tokens_lib.SPLITS if s in self._writers]
        record = {
            "shards": entries, "sources": self._sources, "trim": dict(self._outcomes),
            "left_out": dataclasses.asdict(self._left_out),
        }  # fmt: skip
        path = self._directory / WORK / f"task-{self._number:05d}.json"
        tokens_lib.write_atomically(path, json.dumps(record).encode())
        for entry in entries:
            (self._directory / entry["partial"]).rename(self._directory / entry["file"])

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
            path = self._directory / tokens_lib.shard_name(kind, self._number)
            self._writers[split] = ShardWriter(path, self._tokenizer.dtype, self._corpus, kind, self._number)
        self._writers[split].add(document)
        source = self._sources[part.name]
        source[0] += 1
        source[1] += len(document.tokens)
        return len(document.tokens)


def _finished(directory: pathlib.Path) -> bool:
    return (directory / tokens_lib.MANIFEST).exists()


def _directory(out: str) -> pathlib.Path:
    """The directory of --out; UserError where there can be none or something else is in it."""
    if "://" in out:
        raise UserError(f"--out={out} is a URL; prepare into a local directory and copy that")
    directory = pathlib.Path(out)
    try:
        if directory.exists() and not directory.is_dir():
            raise UserError(f"--out={out} is a file; give an empty or new directory")
        ours = _finished(directory) or (directory / WORK).is_dir()
        if directory.exists() and not ours and any(directory.iterdir()):
            raise UserError(f"--out={out} exists and is not a preparation; give an empty or new directory")
    except OSError as error:
        raise UserError(f"--out={out} cannot be used: {error.strerror}; give another directory") from None
    return directory


def _complete(directory: pathlib.Path, plan: dict[str, Any], out: str) -> dict[str, Any]:
    manifest = tokens_lib.check_manifest((directory / tokens_lib.MANIFEST).read_bytes(), out)
    if manifest["plan"] != tokens_lib.manifest_hash(plan):
        raise UserError(f"--out={out} is complete, from other input or options; give another directory")
    return manifest


def _make(
    options: Options,
    directory: pathlib.Path,
    plan: dict[str, Any],
    processes: int,
    progress: Callable[[int, int, int], None],
) -> dict[str, Any]:
    if _begun(directory) != plan:
        if not any((directory / WORK).glob("task-*.json")):
            shutil.rmtree(directory / tokens_lib.TOKENIZER, ignore_errors=True)
        tokens_lib.write_atomically(directory / WORK / "plan.json", json.dumps(plan).encode())
    tasks = inputs.split([path for path, *_ in plan["files"]], options.part_bytes, options.skip_bad)
    _recover(directory, len(tasks))
    tokenizer = _tokenizer(options, directory, tasks)
    _run(options, directory, tasks, processes, progress)
    return _finish(directory, tokenizer, plan, len(tasks))


def _after_failure(directory: pathlib.Path, made: list[pathlib.Path]) -> str:
    """What a failed preparation's message ends with; without a task done, nothing of it stays."""
    done = len(list((directory / WORK).glob("task-*.json")))
    if done:
        for partial in directory.glob("*.partial-*"):
            partial.unlink()
        return (
            f"; {done} of its tasks are done: the same command on the same input goes on from there, also with "
            f"--skip_bad added; to begin anew, remove {directory}"
        )
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name in OURS or sources.SHARD.match(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _remove(made)
    return ""


def _remove(folders: list[pathlib.Path]) -> None:
    """Removes empty folders, innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _plan(options: Options, paths: list[str]) -> dict[str, Any]:
    """Everything that the directory's content depends on, the input by names, sizes and times."""
    files: list[list[Any]] = []
    for path in paths:
        try:
            stat = os.stat(path)
            files.append([path, stat.st_size, stat.st_mtime_ns])
        except OSError as error:
            if not options.skip_bad:
                raise UserError(f"cannot read {inputs.shown(path)}: {error.strerror}") from None
            files.append([path, 0, 0])  # counted when it is to be read
    tokenizer = "bpe" if options.train_bpe else tokenizers.load(options.tokenizer).sha256
    return {
        **dataclasses.asdict(options),
        "tokenizer": tokenizer,
        "files": files,
        "version": tokens_lib.VERSION,
    }


def _corpus(plan: dict[str, Any]) -> int:
    """What tells this preparation's shards from all others: not where the input lies, or since when."""
    files = [[os.path.basename(path), size] for path, size, _ in plan["files"]]
    return tokens_lib.corpus_id({**plan, "inputs": None, "skip_bad": None, "files": files})


def _same_plan(directory: pathlib.Path, plan: dict[str, Any], out: str) -> None:
    """UserError where tasks were done for another plan; without any, this plan may take the other's place."""
    begun = _begun(directory)
    if any((directory / WORK).glob("task-*.json")):
        # What was done without skipping is the same with it: there was nothing to skip.
        differ = sorted(k for k in plan if begun.get(k) != plan[k] and not (k == "skip_bad" and plan[k]))
        if differ:
            raise UserError(
                f"--out={out} was begun with other {', '.join(differ)}; repeat the first command, give another "
                "directory, or remove this one to begin anew"
            )


def _begun(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / WORK / "plan.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def _recover(directory: pathlib.Path, num_tasks: int) -> None:
    """Finish what a killed run recorded but did not name, and remove what it left half written."""
    for number in range(num_tasks):
        record = directory / WORK / f"task-{number:05d}.json"
        if not record.exists():
            continue
        for entry in json.loads(record.read_bytes())["shards"]:
            partial, final = directory / entry["partial"], directory / entry["file"]
            if not final.exists() and partial.exists():
                partial.rename(final)
            if not final.exists():
                record.unlink()  # its shard is gone: the task is done again
                break
    for folder in (directory, directory / WORK):
        for partial in folder.glob("*.partial-*"):
            partial.unlink()


def _tokenizer(options: Options, directory: pathlib.Path, tasks: list[list[Stretch]]) -> Tokenizer:
    final = directory / tokens_lib.TOKENIZER
    if not final.exists():
        if options.train_bpe:
            made: Tokenizer = tokenizers.train_bpe(_bpe_texts(options, tasks), options.train_bpe)
        else:
            made = tokenizers.load(options.tokenizer)
        partial = directory / WORK / "tokenizer"
        made.save(partial)
        partial.rename(final)
    return tokenizers.load(final)


def _bpe_texts(options: Options, tasks: list[list[Stretch]]) -> Iterator[str]:
    """A share of the input, chosen by names; of a long text, piece by piece."""
    total = sum(part.cost for task in tasks for part in task)
    share = min(1.0, BPE_BYTES / max(total, 1))
    for part in (part for task in tasks for part in task):
        for found in inputs.samples(part, options.text_field):
            try:
                if isinstance(found, inputs.BadInput):
                    raise found
                name, sample = found
                if not isinstance(sample, (str, list)):
                    yield from (
                        text for i, text in enumerate(sample) if sources.held_out(f"bpe {name} {i}", share)
                    )
                elif sources.held_out("bpe " + name, share):
                    yield from [sample] if isinstance(sample, str) else _contents(sample)
            except inputs.BadInput as error:
                if not options.skip_bad and not isinstance(error, inputs.NotText):
                    raise


def _contents(messages: list[chat.Message]) -> Iterator[str]:
    for message in messages:
        yield from (message.role, message.reasoning, message.content)


_shared: dict[str, Any] = {}


class Stopped(Exception):
    """Another task failed: this one is given up."""


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


def _work(number: int, parts: list[Stretch], directory: str, options: Options) -> None:
    run_task(number, parts, directory, options, _count)


def _run(
    options: Options,
    directory: pathlib.Path,
    tasks: list[list[Stretch]],
    processes: int,
    progress: Callable[[int, int, int], None],
) -> None:
    todo = [n for n in range(len(tasks)) if not (directory / WORK / f"task-{n:05d}.json").exists()]
    total = sum(part.cost for task in tasks for part in task)
    before = total - sum(part.cost for n in todo for part in tasks[n])
    spawn = multiprocessing.get_context("spawn")
    done, tokens, stop = spawn.Value("q", before), spawn.Value("q", 0), spawn.Event()
    if not todo:
        return
    with concurrent.futures.ProcessPoolExecutor(
        min(processes, len(todo)), spawn, _start_worker, (done, tokens, stop, os.getpid())
    ) as pool:
        try:
            futures = {pool.submit(_work, n, tasks[n], str(directory), options) for n in todo}
            while futures:
                finished, futures = concurrent.futures.wait(futures, 0.5, concurrent.futures.FIRST_EXCEPTION)
                progress(done.value, total, tokens.value)
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


def _finish(
    directory: pathlib.Path, tokenizer: Tokenizer, plan: dict[str, Any], num_tasks: int
) -> dict[str, Any]:
    """Put the tasks' records together, one at a time: a large corpus has hundreds of thousands."""
    shards = np.zeros(2 * num_tasks, tokens_lib.SHARD_TYPE)
    num_shards, left_out = 0, LeftOut()
    outcomes: collections.Counter[str] = collections.Counter()
    sources_part = directory / WORK / tokens_lib.SOURCES
    with sources_part.open("w", encoding="utf-8") as file:
        last: list[Any] | None = None  # a file's parts follow one another, some in the next task
        for number in range(num_tasks):
            record = json.loads((directory / WORK / f"task-{number:05d}.json").read_bytes())
            for entry in record["shards"]:
                for name in tokens_lib.SHARD_TYPE.names or ():
                    shards[num_shards][name] = entry[name]
                num_shards += 1
            for name, (documents, count) in record["sources"].items():
                if last is not None and last[0] == name:
                    last[1], last[2] = last[1] + documents, last[2] + count
                    continue
                _write_source(file, last)
                last = [name, documents, count]
            left_out.take(record["left_out"])
            outcomes.update(record["trim"])
        _write_source(file, last)
        file.flush()
        os.fsync(file.fileno())
    shards = shards[:num_shards]
    of_split = {name: shards[shards["split"] == i] for i, name in enumerate(tokens_lib.SPLITS)}
    if not len(of_split["train"]):
        shutil.rmtree(directory / WORK)
        raise UserError(
            "the input has no document for training: every file is empty, undecodable, dropped or held out"
        )
    content = np.concatenate(list(of_split.values())).tobytes()
    tokens_lib.write_atomically(directory / tokens_lib.SHARDS, content)
    sources_crc, _ = tokens_lib.checksum(sources_part)
    sources_part.rename(directory / tokens_lib.SOURCES)
    width = np.dtype(tokenizer.dtype).itemsize
    manifest: dict[str, Any] = {
        "format": tokens_lib.FORMAT,
        "version": tokens_lib.VERSION,
        "corpus": _corpus(plan),
        "tokenizer": {
            "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.sha256,
            "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id,
        },
        "token_bytes": width,
        "bundle_tokens": tokens_lib.BUNDLE_BYTES // width,
        "totals": {
            split: {
                "shards": len(held),
                **{key: int(held[key].sum()) for key in ("tokens", "documents", "bundles", "bytes")},
            }
            for split, held in of_split.items()
        },
        "trim": {"context": plan["context"], **dict(outcomes)} if outcomes else None,
        "left_out": dataclasses.asdict(left_out),
        "storage_factor": int(shards["pages"].sum())
        * tokens_lib.PAGE_BYTES
        / (int(shards["tokens"].sum()) * width),
        "page_bytes": tokens_lib.PAGE_BYTES,
        "shards_crc32c": google_crc32c.value(content),
        "sources_crc32c": sources_crc,
        "plan": tokens_lib.manifest_hash(plan),
    }  # fmt: skip
    manifest["sha256"] = tokens_lib.manifest_hash(manifest)
    tokens_lib.write_atomically(directory / tokens_lib.MANIFEST, json.dumps(manifest, indent=1).encode())
    shutil.rmtree(directory / WORK)
    return manifest


def _write_source(file: TextIO, source: list[Any] | None) -> None:
    if source is not None:
        name, documents, count = source
        file.write(json.dumps({"name": name, "documents": documents, "tokens": count}) + "\n")
