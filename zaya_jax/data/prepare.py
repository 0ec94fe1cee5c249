"""Making a prepared directory: input files to token shards, by one machine or many, killable at any moment.

The work is a fixed list of tasks (`prepare_plan`), each a stretch of the input that becomes at most one training and
one held-out shard (`prepare_task`), done by processes or Ray (`prepare_engines`). `manifest.json` comes last
(`prepare_manifest`). Machines that share the work need nothing in common but `--out`: each does its part of the
tasks, and `merge` writes the manifest. Nothing is right only because of a lock, which file systems over the network do
not all have: locks only keep a whole preparation from beginning beside another one.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.config import StorageError, UserError
from zaya_jax.data import (
    chat,
    inputs,
    prepare_engines,
    prepare_manifest,
    prepare_plan,
    prepare_task,
    sources,
    tokenizers,
)
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


def prepare(
    options: Options, out: str, processes: int, tell: Tell, engine: str = "processes"
) -> tuple[dict[str, Any], bool]:
    """(manifest, whether it was there already) of the prepared directory `out`, made or continued.

    `tell` is called about twice a second.
    """
    prepare_engines.require(engine)
    directory = _directory(out)
    plan = prepare_plan.make(options, inputs.find(options.inputs, out))
    if _finished(directory) and not (directory / WORK).exists():
        return _complete(directory, plan, out), True
    with _locked(directory, out, fcntl.LOCK_EX) as made:
        if _finished(directory):  # killed just before the end
            return _complete(directory, plan, out), True
        _same_plan(directory, plan, out)
        with _failing(directory, out, lambda _: _after_failure(directory, made)):
            return _make(options, directory, plan, processes, tell, engine), False


def prepare_part(
    options: Options, out: str, part: Part, processes: int, tell: Tell, engine: str = "processes"
) -> Made | None:
    """Do a part's tasks, beside others who do other parts, or this one; None where `out` is complete already."""
    prepare_engines.require(engine)
    directory = _directory(out)
    plan = prepare_plan.make(options, inputs.find(options.inputs, out))
    if _finished(directory):
        _complete(directory, plan, out)
        return None
    with _locked(directory, out, fcntl.LOCK_SH):
        _claim(directory, plan, out)
        (directory / WORK / f"{SHARED}{part.count}").touch()
        try:
            with _failing(directory, out, lambda error: _after_part(part, error)):
                tasks = prepare_plan.tasks(plan)
                owner = prepare_plan.owners(tasks, part.count)
                mine = [task for task in tasks if owner[task.number] == part.index]
                tokenizer = _tokenizer(options, directory, plan, tasks)
                job = prepare_task.job(directory, options, plan, tokenizer)
                _run(job, mine, processes, tell, engine, alone=False)
                return _sum(job, mine, len(tasks))
        except (UserError, StorageError):
            if not _finished(directory):  # else somebody else has made this part too, and merged
                raise
            _complete(directory, plan, out)
            return None


def merge(options: Options, out: str) -> tuple[dict[str, Any], bool]:
    """As `prepare`, of parts that are all done; UserError, with the way out, where they are not."""
    directory = _directory(out)
    plan = prepare_plan.make(options, inputs.find(options.inputs, out))
    if _finished(directory) and not (directory / WORK).exists():
        return _complete(directory, plan, out), True
    if not (directory / WORK / PLAN).exists():
        raise UserError(
            f"--out={out} holds no parts: run the same command with --part=0/N to --part=N-1/N first"
        )
    with _locked(directory, out, fcntl.LOCK_EX):
        if _finished(directory):  # killed just before the end
            return _complete(directory, plan, out), True
        _refuse(out, prepare_plan.difference(_begun(directory), plan))
        try:
            with _failing(directory, out, lambda _: ""):
                tasks = prepare_plan.tasks(plan)
                tokenizer = _tokenizer(options, directory, plan, tasks)
                job = prepare_task.job(directory, options, plan, tokenizer)
                lacking = prepare_task.undone(job, tasks)
                if lacking:
                    raise UserError(_lacking(directory, out, tasks, lacking))
                return prepare_manifest.gather(job, tokenizer, plan, len(tasks)), False
        except (UserError, StorageError):
            if not _finished(directory):  # else another merge came first
                raise
            return _complete(directory, plan, out), True


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


@contextlib.contextmanager
def _locked(directory: pathlib.Path, out: str, how: int) -> Iterator[list[pathlib.Path]]:
    """While somebody writes here: alone, or with others who make parts; the folders that were made for it.

    Where the file system has no locks there is none: what is done twice gives the same.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        (directory / WORK).mkdir(parents=True, exist_ok=True)
        lock = (directory / WORK / "lock").open("a+")  # over NFS a shared lock must be able to read
    except OSError as error:
        _remove(made)
        raise UserError(f"--out={out} cannot be written: {error.strerror}; give another directory") from None
    with lock:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out={out} is being prepared by another process; wait for it or stop it"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield made
    if _finished(directory):
        prepare_manifest.clear(directory)


@contextlib.contextmanager
def _failing(directory: pathlib.Path, out: str, ending: Callable[[BaseException], str]) -> Iterator[None]:
    """What fails in here is one line, with what is to be said of the directory behind it."""
    try:
        yield
    except prepare_manifest.NoDocuments as error:
        raise UserError(f"{error}{ending(error)}") from None
    except (UserError, StorageError) as error:
        raise type(error)(f"{error}{ending(error)}") from None
    except OSError as error:  # what reading raises is bad input, so this was written
        raise StorageError(
            f"--out={out} cannot be written: {error.strerror or error}{ending(error)}"
        ) from None
    except MemoryError as error:
        raise UserError(
            f"memory ran out; give fewer --processes, or texts in smaller files{ending(error)}"
        ) from None


def _after_part(part: Part, error: BaseException) -> str:
    """What a failed part's message ends with: only a record or a file that cannot be read may be skipped."""
    again = AFTER_PART.format(part)
    if isinstance(error, inputs.BadInput):
        return again + WITH_SKIPS
    return again + (WITH_OTHERS if isinstance(error, UserError) else "")


def _complete(directory: pathlib.Path, plan: dict[str, Any], out: str) -> dict[str, Any]:
    manifest = tokens_lib.check_manifest((directory / tokens_lib.MANIFEST).read_bytes(), out)
    if manifest["plan"] != tokens_lib.manifest_hash(plan):
        raise UserError(f"--out={out} is complete, from other input or options; give another directory")
    return manifest


def _make(
    options: Options, directory: pathlib.Path, plan: dict[str, Any], processes: int, tell: Tell, engine: str
) -> dict[str, Any]:
    if _begun(directory) != plan:
        if not any((directory / WORK).glob("task-*.json")):
            shutil.rmtree(directory / tokens_lib.TOKENIZER, ignore_errors=True)
        tokens_lib.write_atomically(directory / WORK / PLAN, json.dumps(plan).encode())
    tasks = prepare_plan.tasks(plan)
    tokenizer = _tokenizer(options, directory, plan, tasks)
    job = prepare_task.job(directory, options, plan, tokenizer)
    _run(job, tasks, processes, tell, engine)
    try:
        return prepare_manifest.gather(job, tokenizer, plan, len(tasks))
    except prepare_manifest.NoDocuments:
        prepare_manifest.clear(directory)
        raise


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


def _after_failure(directory: pathlib.Path, made: list[pathlib.Path]) -> str:
    """What a failed preparation's message ends with; without a task done, nothing of it stays."""
    done = len(list((directory / WORK).glob("task-*.json")))
    if done:
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


def _same_plan(directory: pathlib.Path, plan: dict[str, Any], out: str) -> None:
    """UserError where tasks were done for another plan; without any, this plan may take the other's place."""
    if any((directory / WORK).glob("task-*.json")):
        begun = _begun(directory)
        # What was done without skipping is the same with it: there was nothing to skip.
        _refuse(
            out, prepare_plan.difference(begun, plan), bool(begun.get("skip_bad")) and not plan["skip_bad"]
        )


def _claim(directory: pathlib.Path, plan: dict[str, Any], out: str) -> None:
    """Make the plan that of all parts, unless one was there before: then UserError where it is another."""
    path = directory / WORK / PLAN
    if not path.exists():
        mine = tokens_lib.partial_path(path)
        mine.write_text(json.dumps(plan), encoding="utf-8")
        try:
            path.hardlink_to(mine)  # unlike a rename, only one of several can
        except FileExistsError:
            pass
        except OSError:  # no links here; where two plans come at one moment, the records tell them apart
            mine.rename(path)
        mine.unlink(missing_ok=True)
    _refuse(out, prepare_plan.difference(_begun(directory), plan))


def _refuse(out: str, differ: str, skip_bad: bool = False) -> None:
    words = ", ".join(filter(None, [differ, "skip_bad" if skip_bad else ""]))
    if words:
        raise UserError(
            f"--out={out} was begun with other {words}; repeat the first command, give another directory, or remove "
            "this one to begin anew"
        )


def _begun(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / WORK / PLAN
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged; remove {directory} to begin anew") from None


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
