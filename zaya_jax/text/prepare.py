"""Makes a prepared directory: input files to token shards, by one machine or many, killable at any
moment.

The work is a fixed list of tasks (`prepare_task`), and `manifest.json` comes last. Machines that
share the work need nothing in common but `--out`: each does its part of the tasks, and the same
command without a part does the rest. There are no locks, which some network file systems lack: two
processes that do the same write the same.
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import google_crc32c
import numpy as np

from zaya_jax.config import StorageError, UserError, fields, files
from zaya_jax.text import (
    chat,
    chat_template,
    inputs,
    prepare_task,
    shard_format,
    text_files,
    tokenizers,
)
from zaya_jax.text.prepare_task import WORK, Job, Options, Plan, Tally
from zaya_jax.text.tokenizers import Tokenizer

BPE_BYTES = 64 << 20  # of input that a BPE is trained on at most, spread over all of it
BPE_STRETCH = 4 << 20  # characters of a long text that are taken or left together
PLAN = "plan.json"
RESUME_HINT = "; finished parts stay, and the same command continues from there"


OnProgress = Callable[[int, int, int], None]  # bytes of input done and in all, new tokens


def prepare(
    options: Options,
    out: str,
    processes: int,
    on_progress: OnProgress,
    part: tuple[int, int] | None = None,
) -> tuple[dict[str, Any] | None, bool]:
    """(manifest, whether it was there already) of the prepared directory `out`, made or continued.

    With a part (index, count) only the tasks of this part are done, while machines do other parts
    or this one; the manifest is then made by a call without one, which does what they left.
    `on_progress` is called at the beginning and after each task.
    """
    directory = _directory(out)
    # The saved plan first: it has the commits of data sets of the hub.
    planned = [path for path, *_ in _saved_plan(directory).get("files", ())]
    plan = prepare_task.make_plan(options, inputs.find_inputs(options.inputs, out, planned))
    if os.path.exists(directory / shard_format.MANIFEST):
        return _complete(directory, options, plan), True
    try:
        manifest = _continue(options, directory, plan, processes, on_progress, part)
    except inputs.BadInput as error:
        raise UserError(f"{error}{RESUME_HINT}, also with --skip_bad added") from None
    except OSError as error:  # reading input raises BadInput, so this is of the directory
        # Another process may have finished just now, and removed `.work/`.
        if os.path.exists(directory / shard_format.MANIFEST):
            return prepare(options, out, processes, on_progress, part)
        path = text_files.printable(error.filename or out)
        raise StorageError(
            f"{path} cannot be read or written: {error.strerror or error}{RESUME_HINT}"
        ) from None
    return manifest, False


def _complete(directory: pathlib.Path, options: Options, plan: Plan) -> dict[str, Any]:
    """The manifest of a directory that is complete; UserError where another plan made it."""
    _remove_work_folder(directory)  # left by a process that was killed just before the end
    path = directory / shard_format.MANIFEST
    manifest = shard_format.check_manifest(path.read_bytes(), str(directory))
    skipped = manifest["counts"].get(prepare_task.BAD) and not options.skip_bad
    if skipped or manifest["plan"] != prepare_task.plan_hash(plan):
        raise UserError(
            f"{directory} is complete, from other input or options, or another chat template; give"
            " another directory"
        )
    return manifest


def _continue(
    options: Options,
    directory: pathlib.Path,
    plan: Plan,
    processes: int,
    on_progress: OnProgress,
    part: tuple[int, int] | None,
) -> dict[str, Any] | None:
    """Do the tasks that are left; returns the manifest, or None after a part."""
    _save_or_check_plan(directory, plan)
    tasks = inputs.make_tasks(plan["files"], plan["part_bytes"])
    tokenizer = _tokenizer(options, directory, tasks)
    job = prepare_task.make_job(directory, options, plan, tokenizer)
    index, count = part or (0, 1)
    ours = [task for task in tasks if task.number % count == index]
    unfinished = prepare_task.unfinished_tasks(job, ours)
    total = sum(task.cost for task in ours)
    done = total - sum(task.cost for task in unfinished)
    if unfinished:
        on_progress(done, total, 0)
        for task, tokens in prepare_task.run_processes(job, unfinished, processes):
            done += task.cost
            on_progress(done, total, tokens)
    if part:
        return None
    return gather(job, tokenizer, plan, len(tasks))


def _save_or_check_plan(directory: pathlib.Path, plan: Plan) -> None:
    """Makes this plan the directory's, unless it has one; UserError where that is another.

    If two processes write different plans at the same moment, the plan's hash in each task's record
    keeps their results apart.
    """
    path = directory / WORK / PLAN
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            files.write(path, json.dumps(plan).encode())
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written: {error.strerror}; give another directory"
        ) from None
    saved = json.loads(path.read_bytes())
    differing = [name for name in plan if name != "skip_bad" and saved.get(name) != plan[name]]
    if "files" in differing:
        before = {tuple(file) for file in saved.get("files", [])}
        changed = before ^ {tuple(file) for file in plan["files"]}
        differing.remove("files")
        example = text_files.printable(min(changed)[0])
        differing.append(f"input files ({example} was changed, added or removed)")
    if differing:
        raise UserError(
            f"{directory} was begun with other {', '.join(differing)}; repeat the first command, "
            "give another directory, or remove this one to begin anew"
        )


def _saved_plan(directory: pathlib.Path) -> Plan:
    """The plan with which a preparation began; empty before that, and when it is complete."""
    try:
        return json.loads((directory / WORK / PLAN).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _directory(out: str) -> pathlib.Path:
    """The directory of --out; UserError where something else is in it."""
    fields.check_path("--out", out)
    # one look: another process may begin here just now
    names = set(os.listdir(out)) if os.path.isdir(out) else set()
    if names and not names & {shard_format.MANIFEST, WORK}:
        raise UserError(f"{out} exists and is not a preparation; give an empty or new directory")
    return pathlib.Path(out)


def _tokenizer(options: Options, directory: pathlib.Path, tasks: list[inputs.Task]) -> Tokenizer:
    """The directory's tokenizer, put there by the first process."""
    final = directory / shard_format.TOKENIZER
    if not final.exists():
        if options.train_bpe:
            tokenizer: Tokenizer = tokenizers.train_bpe(
                _bpe_texts(options, tasks), options.train_bpe
            )
        else:
            tokenizer = tokenizers.load(options.tokenizer)
        partial = shard_format.partial_path(directory / WORK / "tokenizer")
        tokenizer.save(partial)
        try:
            partial.rename(final)
        except OSError:
            if not final.exists():
                raise
            shutil.rmtree(partial)
    return tokenizers.load(final)


def _bpe_texts(options: Options, tasks: list[inputs.Task]) -> Iterator[str]:
    """A share of the input, chosen by names; of a long text, stretch by stretch."""
    share = min(1.0, BPE_BYTES / max(sum(task.cost for task in tasks), 1))
    for input_range in (input_range for task in tasks for input_range in task.ranges):
        for sample in inputs.samples(input_range, inputs.TextOrChat(options.text_field)):
            if isinstance(sample, inputs.BadInput):
                if not options.skip_bad and not isinstance(sample, inputs.NotText):
                    raise sample
                continue
            content = sample.content
            if isinstance(content, str):
                texts = [content[i : i + BPE_STRETCH] for i in range(0, len(content), BPE_STRETCH)]
            else:
                texts = list(map(str, content))
            for i, text in enumerate(texts):
                if text_files.hash_below(f"bpe {sample.name} {i}", share):
                    yield text


def gather(job: Job, tokenizer: Tokenizer, plan: Plan, num_tasks: int) -> dict[str, Any]:
    """The manifest of tasks that are all done."""
    directory = job.directory
    shards, tally = _collect_records(job, num_tasks)
    by_split = [shards[shards["split"] == index] for index in range(len(shard_format.SPLITS))]
    if not len(by_split[0]):
        _remove_all(directory, shards)
        raise UserError(
            "the input has no document for training"
            f" ({chat.in_words(tally.counts) or 'all are held out'}); give more input, or a smaller"
            " --held_out"
        )
    # In this order, so that a directory with a manifest is complete: the table of shards, the
    # manifest, and `.work/` goes last.
    table = np.concatenate(by_split).tobytes()
    files.write(directory / shard_format.SHARDS, table, directory / WORK)
    width = np.dtype(tokenizer.dtype).itemsize
    totals = {}
    for split, of_split in zip(shard_format.SPLITS, by_split, strict=True):
        totals[split] = {"shards": len(of_split)}
        for key in ("tokens", "documents", "bundles", "bytes"):
            totals[split][key] = int(of_split[key].sum())
    pages, tokens = int(shards["pages"].sum()), int(shards["tokens"].sum())
    manifest: dict[str, Any] = {
        "format": shard_format.FORMAT,
        "version": shard_format.VERSION,
        "corpus": job.corpus,
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.sha256,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "pad_id": tokenizer.pad_id,
        },
        "token_bytes": width,
        "bundle_tokens": shard_format.BUNDLE_BYTES // width,
        "totals": totals,
        "chats": None,
        **vars(tally),
        "storage_factor": pages * shard_format.PAGE_BYTES / (tokens * width),
        "shards_crc32c": google_crc32c.value(table),
        "plan": prepare_task.plan_hash(plan),
    }
    if "answers learnt" in tally.counts:
        template = chat_template.fingerprint(tokenizer)
        manifest["chats"] = {"context": plan["context"], "template": template}
    manifest["sha256"] = shard_format.json_sha256(manifest)
    content = json.dumps(manifest, indent=1).encode()
    files.write(directory / shard_format.MANIFEST, content, directory / WORK)
    _remove_work_folder(directory)
    return manifest


def _collect_records(job: Job, num_tasks: int) -> tuple[np.ndarray, Tally]:
    """What the records of all tasks say: the entries of their shards, and what became of their
    input. They are read one at a time: a large corpus has hundreds of thousands."""
    shards = np.zeros(2 * num_tasks, shard_format.SHARD_TYPE)
    num_shards = 0
    tally = Tally()
    for number in range(num_tasks):
        record = json.loads(job.record(number).read_bytes())
        for entry in record["shards"]:
            shards[num_shards] = tuple(entry[name] for name in shard_format.SHARD_TYPE.names or ())
            num_shards += 1
        tally.add(record["counts"], record["examples"])
    return shards[:num_shards], tally


def _remove_all(directory: pathlib.Path, shards: np.ndarray) -> None:
    """Remove what a preparation of no use has written."""
    for shard in shards:
        name = shard_format.shard_name(shard["split"], shard["task"])
        (directory / name).unlink(missing_ok=True)
    _remove_work_folder(directory)
    shutil.rmtree(directory / shard_format.TOKENIZER)
    with contextlib.suppress(OSError):  # where other files are in it
        directory.rmdir()


def _remove_work_folder(directory: pathlib.Path) -> None:
    """Remove `.work/`, even if another process is still writing there; it will notice that the work
    is done."""
    shutil.rmtree(directory / WORK, ignore_errors=True)
