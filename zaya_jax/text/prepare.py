"""Makes a prepared directory: input files to token shards, by one machine or many, killable at any
moment.

The work is a fixed list of tasks (`prepare_task`), and `manifest.json` comes last. Machines that
share the work need nothing in common but `--out`: each does its part of the tasks, and the same
command without a part does the rest. There are no locks, which some network file systems lack: two
processes that do the same write the same.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import google_crc32c
import numpy as np

from zaya_jax.config import StorageError, UserError, fields
from zaya_jax.text import chat, chat_template, inputs, prepare_task, sources, tokenizers
from zaya_jax.text import tokens as tokens_lib
from zaya_jax.text.prepare_task import WORK, Job, LeftOut, Options, Plan, Task
from zaya_jax.text.tokenizers import Tokenizer

BPE_BYTES = 64 << 20  # of input that a BPE is trained on at most, spread over all of it
BPE_PIECE = 4 << 20  # characters of a long text that are taken or left together
PLAN = "plan.json"
GOES_ON = "; finished parts stay, and the same command continues from there"


@dataclasses.dataclass
class Progress:
    """How far a preparation, or a part of one, has come."""

    done: int  # bytes of input, those of earlier runs included
    total: int
    tokens: int  # written by this run
    tasks: int
    total_tasks: int


Tell = Callable[[Progress], None]


def prepare(
    options: Options,
    out: str,
    processes: int,
    tell: Tell,
    engine: str = "processes",
    part: tuple | None = None,
) -> tuple[dict[str, Any] | None, bool]:
    """(manifest, whether it was there already) of the prepared directory `out`, made or continued.

    With a part (index, count) only the tasks of this part are done, while machines do other parts
    or this one; the manifest is then made by a call without one, which does what they left. `tell`
    is called after each task.
    """
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("--engine=ray needs Ray, which is not installed: pip install ray")
    directory = _directory(out)
    begun = [path for path, *_ in _begun(directory).get("files", ())]
    plan = prepare_task.make_plan(options, inputs.find(options.inputs, out, begun))
    if os.path.exists(directory / tokens_lib.MANIFEST):
        _clear(directory)  # what one that was killed just before the end left
        manifest = tokens_lib.check_manifest((directory / tokens_lib.MANIFEST).read_bytes(), out)
        skipped = manifest["left_out"]["bad"] and not options.skip_bad
        if skipped or manifest["plan"] != prepare_task.plan_hash(plan):
            raise UserError(
                f"{out} is complete, from other input or options, or another chat template; give"
                " another directory"
            )
        return manifest, True
    try:
        with _failing(out):
            _begin(directory, plan)
            tasks = prepare_task.tasks_of(plan)
            tokenizer = _tokenizer(options, directory, tasks)
            job = prepare_task.make_job(directory, options, plan, tokenizer)
            index, count = part or (0, 1)
            run = prepare_task.run_on_ray if engine == "ray" else prepare_task.run_processes
            mine = [task for task in tasks if task.number % count == index]
            todo = prepare_task.undone(job, mine)
            total = sum(task.cost for task in mine)
            progress = Progress(
                total - sum(task.cost for task in todo), total, 0, len(mine) - len(todo), len(mine)
            )
            for task, written in run(job, todo, processes) if todo else ():
                progress.done += task.cost
                progress.tokens += written
                progress.tasks += 1
                tell(progress)
            return None if part else gather(job, tokenizer, plan, len(tasks)), False
    except StorageError:
        # Another process may have finished just now, and removed `.work/`.
        if not os.path.exists(directory / tokens_lib.MANIFEST):
            raise
        return prepare(options, out, processes, tell, engine, part)


@contextlib.contextmanager
def _failing(out: str) -> Iterator[None]:
    """Turns a failure into one line that says how to go on."""
    try:
        yield
    except inputs.BadInput as error:
        raise UserError(f"{error}{GOES_ON}, also with --skip_bad added") from None
    except OSError as error:  # reading input raises BadInput, so this was written
        raise StorageError(f"{out} cannot be written: {error.strerror or error}{GOES_ON}") from None
    except MemoryError:
        raise UserError(
            f"memory ran out; give fewer --processes, or texts in smaller files{GOES_ON}"
        ) from None


def _begin(directory: pathlib.Path, plan: Plan) -> None:
    """Makes this plan the directory's, unless it has one; UserError where that is another.

    Where two plans come at one moment, the tasks' records tell them apart.
    """
    path = directory / WORK / PLAN
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            tokens_lib.write_atomically(path, json.dumps(plan).encode())
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written: {error.strerror}; give another directory"
        ) from None
    begun = json.loads(path.read_bytes())
    differ = [name for name in plan if name != "skip_bad" and begun.get(name) != plan[name]]
    words = [name for name in differ if name != "files"]
    if "files" in differ:
        changed = {tuple(file) for file in begun.get("files", [])} ^ {
            tuple(file) for file in plan["files"]
        }
        words.append(f"input files ({inputs.shown(min(changed)[0])} was changed, added or removed)")
    if words:
        raise UserError(
            f"{directory} was begun with other {', '.join(words)}; repeat the first command, "
            "give another directory, or remove this one to begin anew"
        )


def _begun(directory: pathlib.Path) -> Plan:
    """The plan with which a preparation began; empty before that, and when it is complete."""
    path = directory / WORK / PLAN
    return json.loads(path.read_bytes()) if path.exists() else {}


def _directory(out: str) -> pathlib.Path:
    """The directory of --out; UserError where something else is in it."""
    fields.check_path("--out", out)
    directory = pathlib.Path(out)
    names = set(os.listdir(out)) if os.path.isdir(out) else set()
    # one look: another process may begin here just now
    if names and not names & {tokens_lib.MANIFEST, WORK}:
        raise UserError(f"{out} exists and is not a preparation; give an empty or new directory")
    return directory


def _tokenizer(options: Options, directory: pathlib.Path, tasks: list[Task]) -> Tokenizer:
    """The directory's tokenizer, put there by the first process."""
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
    return tokenizers.load(final)


def _bpe_texts(options: Options, tasks: list[Task]) -> Iterator[str]:
    """A share of the input, chosen by names; of a long text, piece by piece."""
    share = min(1.0, BPE_BYTES / max(sum(task.cost for task in tasks), 1))
    for part in (part for task in tasks for part in task.ranges):
        for sample in inputs.samples(part, options.text_field):
            if isinstance(sample, inputs.BadInput):
                if not options.skip_bad and not isinstance(sample, inputs.NotText):
                    raise sample
                continue
            name, _, content = sample
            if isinstance(content, str):
                texts = [content[i : i + BPE_PIECE] for i in range(0, len(content), BPE_PIECE)]
            else:
                texts = list(map(str, content))
            yield from (
                text for i, text in enumerate(texts) if sources.held_out(f"bpe {name} {i}", share)
            )


def gather(job: Job, tokenizer: Tokenizer, plan: Plan, num_tasks: int) -> dict[str, Any]:
    """The manifest, written last, of tasks that are all done; and `.work/` is gone.

    Their records are read one at a time: a large corpus has hundreds of thousands.
    """
    directory = job.directory
    shards = np.zeros(2 * num_tasks, tokens_lib.SHARD_TYPE)
    num_shards, left_out = 0, LeftOut()
    outcomes = chat.Counts()
    for number in range(num_tasks):
        record = json.loads(job.record(number).read_bytes())
        for entry in record["shards"]:
            shards[num_shards] = tuple(entry[name] for name in tokens_lib.SHARD_TYPE.names or ())
            num_shards += 1
        left_out.add(record["left_out"])
        outcomes.update(record["trim"])
    learnt = {name: outcomes.pop(name) for name in chat.LEARNT if name in outcomes}
    form = {"template": chat_template.fingerprint(tokenizer)}
    shards = shards[:num_shards]
    of_split = {name: shards[shards["split"] == i] for i, name in enumerate(tokens_lib.SPLITS)}
    if not len(of_split["train"]):
        for shard in shards:
            (directory / tokens_lib.shard_name(shard["split"], shard["task"])).unlink(
                missing_ok=True
            )
        _clear(directory)
        shutil.rmtree(directory / tokens_lib.TOKENIZER)
        with contextlib.suppress(OSError):  # where other files are in it
            directory.rmdir()
        raise UserError(
            f"the input has no document for training: {left_out}; the rest is dropped or held out"
        )
    content = np.concatenate(list(of_split.values())).tobytes()
    tokens_lib.write_atomically(directory / tokens_lib.SHARDS, content, directory / WORK)
    width = np.dtype(tokenizer.dtype).itemsize
    manifest: dict[str, Any] = {
        "format": tokens_lib.FORMAT,
        "version": tokens_lib.VERSION,
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
        "bundle_tokens": tokens_lib.BUNDLE_BYTES // width,
        "totals": {
            split: {
                "shards": len(held),
                **{
                    key: int(held[key].sum()) for key in ("tokens", "documents", "bundles", "bytes")
                },
            }
            for split, held in of_split.items()
        },
        "trim": {"context": plan["context"], **dict(outcomes)} if outcomes else None,
        "chats": form | learnt if outcomes else None,
        "left_out": left_out,
        "storage_factor": (
            int(shards["pages"].sum())
            * tokens_lib.PAGE_BYTES
            / (int(shards["tokens"].sum()) * width)
        ),
        "shards_crc32c": google_crc32c.value(content),
        "plan": prepare_task.plan_hash(plan),
    }
    manifest["sha256"] = tokens_lib.manifest_hash(manifest)
    content = json.dumps(manifest, indent=1).encode()
    tokens_lib.write_atomically(directory / tokens_lib.MANIFEST, content, directory / WORK)
    _clear(directory)
    return manifest


def _clear(directory: pathlib.Path) -> None:
    """Remove `.work/`, also where another process still writes into it: it will find that all is
    done."""
    shutil.rmtree(directory / WORK, ignore_errors=True)
