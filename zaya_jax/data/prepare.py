"""Making a prepared directory: input files to token shards, by one machine or many, killable at any moment.

The work is a fixed list of tasks (`prepare_plan`), each a stretch of the input that becomes at most one training and
one held-out shard (`prepare_task`), done by processes or Ray (`prepare_engines`). `manifest.json` comes last. Machines
that share the work need nothing in common but `--out`: each does its part of the tasks, and `merge` writes the
manifest. Nothing is right only because of a lock, which file systems over the network do not all have: locks only keep
a whole preparation from beginning beside another one.
"""

import collections
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import google_crc32c
import numpy as np

from zaya_jax.config import StorageError, UserError, fields
from zaya_jax.data import chat, inputs, prepare_engines, prepare_plan, prepare_task, sources, tokenizers
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.prepare_plan import Options, Part, Task
from zaya_jax.data.prepare_task import WORK, Job, LeftOut
from zaya_jax.data.tokenizers import Tokenizer

# What a prepared directory holds beside shards.
OURS = (WORK, tokens_lib.MANIFEST, tokens_lib.SHARDS, tokens_lib.SOURCES, tokens_lib.TOKENIZER)
BPE_BYTES = 64 << 20  # of input that a BPE is trained on at most, spread over all of it
PLAN, SHARED = "plan.json", "of-"  # `.work/of-8`: somebody made a part of 8
STALE_SECONDS = 3600  # who writes a shard writes to it every few seconds
AFTER_PART = "; the same command does what is left of part {}"
WITH_SKIPS = ", also with --skip_bad added to it and to --merge"
WITH_OTHERS = "; other options need another --out, or this one removed"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a preparation, or a part of one, has come."""

    done: int  # bytes of input, those of earlier runs included
    total: int
    tokens: int  # written by this run
    tasks: int
    total_tasks: int


Tell = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True)
class Made:
    """What a part's tasks came to."""

    tasks: int
    all_tasks: int
    documents: int
    tokens: int
    left_out: dict[str, Any]


class NoDocuments(UserError):
    """Nothing of the input is for training."""


class Preparation:
    """What is made in one directory: the options, the plan that follows from them, and how far it has come."""

    def __init__(self, options: Options, out: str) -> None:
        self.options, self.out, self.directory = options, out, _directory(out)
        self.plan = prepare_plan.make(options, inputs.find(options.inputs, out))
        self.made: list[pathlib.Path] = []  # folders that were not there before

    def manifest(self) -> dict[str, Any] | None:
        """The manifest where all is done; UserError where it was made of something else."""
        if not _finished(self.directory):
            return None
        manifest = tokens_lib.check_manifest((self.directory / tokens_lib.MANIFEST).read_bytes(), self.out)
        if manifest["plan"] != tokens_lib.manifest_hash(self.plan):
            raise UserError(
                f"--out={self.out} is complete, from other input or options; give another directory"
            )
        return manifest

    def work(self) -> tuple[list[Task], Job, Tokenizer]:
        """All tasks, and what they share; the tokenizer is put there by the first who comes."""
        tasks = prepare_plan.tasks(self.plan)
        tokenizer = _tokenizer(self.options, self.directory, self.plan, tasks)
        return tasks, prepare_task.job(self.directory, self.options, self.plan, tokenizer), tokenizer

    @contextlib.contextmanager
    def locked(self, how: int) -> Iterator[None]:
        """While somebody writes here: alone, or with others who make parts.

        Where the file system has no locks there is none: what is done twice gives the same.
        """
        self.made = [folder for folder in (self.directory, *self.directory.parents) if not folder.exists()]
        try:
            (self.directory / WORK).mkdir(parents=True, exist_ok=True)
            lock = (self.directory / WORK / "lock").open("a+")  # over NFS a shared lock must be able to read
        except OSError as error:
            _remove(self.made)
            raise UserError(
                f"--out={self.out} cannot be written: {error.strerror}; give another directory"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"--out={self.out} is being prepared by another process; wait for it or stop it"
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield
        if _finished(self.directory):
            _clear(self.directory)

    @contextlib.contextmanager
    def failing(self, ending: Callable[[BaseException], str]) -> Iterator[None]:
        """What fails in here is one line, with what is to be said of the directory behind it."""
        try:
            yield
        except (UserError, StorageError) as error:
            kind = UserError if isinstance(error, NoDocuments) else type(error)
            raise kind(f"{error}{ending(error)}") from None
        except OSError as error:  # what reading raises is bad input, so this was written
            raise StorageError(
                f"--out={self.out} cannot be written: {error.strerror or error}{ending(error)}"
            ) from None
        except MemoryError as error:
            raise UserError(
                f"memory ran out; give fewer --processes, or texts in smaller files{ending(error)}"
            ) from None

    def begun(self) -> dict[str, Any]:
        """The plan that the directory was begun with."""
        path = self.directory / WORK / PLAN
        try:
            return dict(json.loads(path.read_bytes())) if path.exists() else {}
        except (ValueError, TypeError):
            raise UserError(f"{path} is damaged; remove {self.directory} to begin anew") from None

    def require_same(self, skip_bad: bool = False) -> None:
        """UserError where it was begun with another plan."""
        words = [prepare_plan.difference(self.begun(), self.plan), "skip_bad" if skip_bad else ""]
        if any(words):
            raise UserError(
                f"--out={self.out} was begun with other {', '.join(filter(None, words))}; repeat the first command, "
                "give another directory, or remove this one to begin anew"
            )

    def has_tasks(self) -> int:
        """How many tasks are recorded as done."""
        return len(list((self.directory / WORK).glob("task-*.json")))

    def begin_alone(self) -> None:
        """Writes the plan, where there is none or no task was done for the one that is there."""
        if self.begun() != self.plan:
            if not self.has_tasks():
                shutil.rmtree(self.directory / tokens_lib.TOKENIZER, ignore_errors=True)
            tokens_lib.write_atomically(self.directory / WORK / PLAN, json.dumps(self.plan).encode())

    def begin_part(self, part: Part) -> None:
        """Makes this plan the directory's, unless one was there before: then UserError where it is another."""
        path = self.directory / WORK / PLAN
        if not path.exists():
            mine = tokens_lib.partial_path(path)
            mine.write_text(json.dumps(self.plan), encoding="utf-8")
            try:
                path.hardlink_to(mine)  # unlike a rename, only one of several can
            except FileExistsError:
                pass
            except OSError:  # no links here; where two plans come at one moment, the records tell them apart
                mine.rename(path)
            mine.unlink(missing_ok=True)
        self.require_same()
        (self.directory / WORK / f"{SHARED}{part.count}").touch()

    def after_failure(self, error: BaseException) -> str:
        """What a failed preparation's message ends with; without a task done, nothing of it stays."""
        if done := self.has_tasks():
            return (
                f"; {done} of its tasks are done: the same command on the same input goes on from there, also with "
                f"--skip_bad added; to begin anew, remove {self.directory}"
            )
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            if path.name in OURS or sources.SHARD.match(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        _remove(self.made)
        return ""


def prepare(
    options: Options, out: str, processes: int, tell: Tell, engine: str = "processes"
) -> tuple[dict[str, Any], bool]:
    """(manifest, whether it was there already) of the prepared directory `out`, made or continued.

    `tell` is called about twice a second.
    """
    prepare_engines.require(engine)
    found = Preparation(options, out)
    if (manifest := found.manifest()) and not (found.directory / WORK).exists():
        return manifest, True
    with found.locked(fcntl.LOCK_EX):
        if manifest := found.manifest():  # killed just before the end
            return manifest, True
        if found.has_tasks():  # what was done without skipping is the same with it: there was nothing to skip
            found.require_same(bool(found.begun().get("skip_bad")) and not options.skip_bad)
        with found.failing(found.after_failure):
            found.begin_alone()
            tasks, job, tokenizer = found.work()
            _run(job, tasks, processes, tell, engine)
            try:
                return gather(job, tokenizer, found.plan, len(tasks)), False
            except NoDocuments:
                _clear(found.directory)
                raise


def prepare_part(
    options: Options, out: str, part: Part, processes: int, tell: Tell, engine: str = "processes"
) -> Made | None:
    """Do a part's tasks, beside others who do other parts, or this one; None where `out` is complete already."""
    prepare_engines.require(engine)
    found = Preparation(options, out)
    if found.manifest():
        return None
    with found.locked(fcntl.LOCK_SH):
        found.begin_part(part)
        with found.failing(lambda error: _after_part(part, error)):
            tasks, job, _ = found.work()
            owner = prepare_plan.owners(tasks, part.count)
            mine = [task for task in tasks if owner[task.number] == part.index]
            _run(job, mine, processes, tell, engine, alone=False)
            return _sum(job, mine, len(tasks))


def merge(options: Options, out: str) -> tuple[dict[str, Any], bool]:
    """As `prepare`, of parts that are all done; UserError, with the way out, where they are not."""
    found = Preparation(options, out)
    if (manifest := found.manifest()) and not (found.directory / WORK).exists():
        return manifest, True
    if not (found.directory / WORK / PLAN).exists():
        raise UserError(
            f"--out={out} holds no parts: run the same command with --part=0/N to --part=N-1/N first"
        )
    with found.locked(fcntl.LOCK_EX):
        if manifest := found.manifest():  # killed just before the end
            return manifest, True
        found.require_same()
        with found.failing(lambda _: ""):
            tasks, job, tokenizer = found.work()
            if lacking := prepare_task.undone(job, tasks):
                raise UserError(_lacking(found.directory, out, tasks, lacking))
            return gather(job, tokenizer, found.plan, len(tasks)), False


def _lacking(directory: pathlib.Path, out: str, tasks: list[Task], lacking: dict[int, str]) -> str:
    """What a merge says of tasks that are not done: whose they are, and who mends it."""
    first = next(iter(lacking))
    why = "" if lacking[first] == "missing" else f"; task {first} is {lacking[first]}"
    what = f"--out={out} lacks {len(lacking):,} of {len(tasks):,} tasks{why}"
    if "--skip_bad" in why:
        return f"{what}; merge with --skip_bad, or begin anew without"
    counts = {path: path.stat().st_mtime_ns for path in (directory / WORK).glob(f"{SHARED}*")}
    if not counts:
        return f"{what}; the same command without --merge makes them and ends with the merge"
    newest = max(counts, key=lambda path: counts[path]).name.removeprefix(SHARED)
    parts = prepare_plan.lacking(list(lacking), tasks, int(newest))
    named = ", ".join(f"{part} ({n:,})" for part, n in list(parts.items())[:8])
    more = f" and {len(parts) - 8:,} more parts" if len(parts) > 8 else ""
    return (
        f"{what}, of part {named}{more}; run the same command with --part={next(iter(parts))} in place of --merge"
        + (", and likewise the others" if len(parts) > 1 else "")
    )


def _sum(job: Job, tasks: list[Task], all_tasks: int) -> Made:
    left_out, documents, tokens = LeftOut(), 0, 0
    for task in tasks:
        record = json.loads(job.record(task.number).read_bytes())
        left_out.take(record["left_out"])
        documents += sum(entry["documents"] for entry in record["shards"])
        tokens += sum(entry["tokens"] for entry in record["shards"])
    return Made(len(tasks), all_tasks, documents, tokens, dataclasses.asdict(left_out))


def _finished(directory: pathlib.Path) -> bool:
    return (directory / tokens_lib.MANIFEST).exists()


def _directory(out: str) -> pathlib.Path:
    """The directory of --out; UserError where there can be none or something else is in it."""
    fields.check_path("--out", out)
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


def _after_part(part: Part, error: BaseException) -> str:
    """What a failed part's message ends with: only a record or a file that cannot be read may be skipped."""
    again = AFTER_PART.format(part)
    if isinstance(error, inputs.BadInput):
        return again + WITH_SKIPS
    return again + (WITH_OTHERS if isinstance(error, UserError) else "")


def _run(job: Job, tasks: list[Task], processes: int, tell: Tell, engine: str, alone: bool = True) -> None:
    """Do those of these tasks that are not done."""
    wrong = prepare_task.undone(job, tasks)
    _clean(job, alone)
    todo = [task for task in tasks if task.number in wrong]
    total = sum(task.cost for task in tasks)
    before = total - sum(task.cost for task in todo)

    def told(done: int, tokens: int, finished: int) -> None:
        tell(Progress(before + done, total, tokens, len(tasks) - len(todo) + finished, len(tasks)))

    prepare_engines.run(engine, job, todo, processes, told)


def _clean(job: Job, alone: bool) -> None:
    """Remove what killed processes left half written; beside others only what nobody has written to for long."""
    for folder in (job.directory, job.directory / WORK):
        for partial in folder.glob("*.partial-*"):
            with contextlib.suppress(FileNotFoundError):
                if alone or partial.stat().st_mtime < time.time() - STALE_SECONDS:
                    shutil.rmtree(partial) if partial.is_dir() else partial.unlink()


def _remove(folders: list[pathlib.Path]) -> None:
    """Removes empty folders, innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _tokenizer(
    options: Options, directory: pathlib.Path, plan: dict[str, Any], tasks: list[Task]
) -> Tokenizer:
    """The directory's tokenizer, put there by the first who comes."""
    final = directory / tokens_lib.TOKENIZER
    if not final.exists():
        if options.train_bpe:
            made: Tokenizer = tokenizers.train_bpe(_bpe_texts(options, tasks), options.train_bpe)
        else:
            made = tokenizers.load(options.tokenizer)
        partial = tokens_lib.partial_path(directory / WORK / "tokenizer")
        made.save(partial)
        try:
            partial.rename(final)
        except OSError:
            if not final.exists():
                raise
            shutil.rmtree(partial)
    tokenizer = tokenizers.load(final)
    if plan["tokenizer"] not in ("bpe", tokenizer.sha256):
        raise UserError(
            f"{final} is not --tokenizer={options.tokenizer}; remove it, and this command puts it there again"
        )
    return tokenizer


def _bpe_texts(options: Options, tasks: list[Task]) -> Iterator[str]:
    """A share of the input, chosen by names; of a long text, piece by piece."""
    share = min(1.0, BPE_BYTES / max(sum(task.cost for task in tasks), 1))
    for part in (part for task in tasks for part in task.stretches):
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


def gather(job: Job, tokenizer: Tokenizer, plan: dict[str, Any], num_tasks: int) -> dict[str, Any]:
    """The manifest, written last, of tasks that are all done; and `.work/` is gone.

    Their records are read one at a time: a large corpus has hundreds of thousands.
    """
    directory = job.directory
    shards = np.zeros(2 * num_tasks, tokens_lib.SHARD_TYPE)
    num_shards, left_out = 0, LeftOut()
    outcomes: collections.Counter[str] = collections.Counter()
    sources_part = tokens_lib.partial_path(directory / WORK / tokens_lib.SOURCES)
    with sources_part.open("w", encoding="utf-8") as file:
        last: list[Any] | None = None  # a file's parts follow one another, some in the next task
        for number in range(num_tasks):
            record = json.loads(job.record(number).read_bytes())
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
        raise NoDocuments(
            "the input has no document for training: every file is empty, undecodable, dropped or held out"
        )
    content = np.concatenate(list(of_split.values())).tobytes()
    tokens_lib.write_atomically(directory / tokens_lib.SHARDS, content, directory / WORK)
    sources_crc, _ = tokens_lib.checksum(sources_part)
    sources_part.rename(directory / tokens_lib.SOURCES)
    width = np.dtype(tokenizer.dtype).itemsize
    manifest: dict[str, Any] = {
        "format": tokens_lib.FORMAT,
        "version": tokens_lib.VERSION,
        "corpus": job.corpus,
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
    content = json.dumps(manifest, indent=1).encode()
    tokens_lib.write_atomically(directory / tokens_lib.MANIFEST, content, directory / WORK)
    _clear(directory)
    return manifest


def _clear(directory: pathlib.Path) -> None:
    """Remove `.work/`, also where another process still writes into it: it will find that all is done."""
    shutil.rmtree(directory / WORK, ignore_errors=True)


def _write_source(file: TextIO, source: list[Any] | None) -> None:
    if source is not None:
        name, documents, count = source
        file.write(json.dumps({"name": name, "documents": documents, "tokens": count}) + "\n")
