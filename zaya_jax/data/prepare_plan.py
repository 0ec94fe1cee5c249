"""What a preparation is to make: its options and input, the list of its tasks, and who of several makes which.

All of it is a pure function of the options and the list of files with their sizes and times, so machines that never
speak with each other number the same tasks in the same way. `key` names it: what was made under another
key is not taken.
"""

import collections
import dataclasses
import heapq
import os
import re
from typing import Any

from zaya_jax.config import UserError, shown
from zaya_jax.data import inputs, sources, tokenizers
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.inputs import Stretch

File = tuple[str, int, int]  # path, bytes, time of change in ns; zeros where it cannot be read
MOST_PARTS = 100_000


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


@dataclasses.dataclass(frozen=True)
class Task:
    """The unit of work: a stretch of the input that becomes at most one training and one held-out shard."""

    number: int
    stretches: list[Stretch]
    files: list[File]  # that these belong to, as they were when the preparation began

    @property
    def cost(self) -> int:
        """Bytes of input."""
        return sum(stretch.cost for stretch in self.stretches)


@dataclasses.dataclass(frozen=True)
class Part:
    """One of several that share a preparation's tasks, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_part(text: str) -> Part:
    """The part that I/N names; UserError where it names none."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if not found or not 1 <= int(found[2]) <= MOST_PARTS:
        raise UserError(
            f"--part={shown(text)} is no part: give I/N, such as 0/8, with N from 1 to {MOST_PARTS:,}"
        )
    part = Part(int(found[1]), int(found[2]))
    if part.index >= part.count:
        raise UserError(
            f"--part={part} is no part: they count from 0, so the last one is {part.count - 1}/{part.count}"
        )
    return part


def make(options: Options, paths: list[str]) -> dict[str, Any]:
    """Everything that the directory's content depends on, the input by names, sizes and times."""
    files: list[list[Any]] = []
    for path in paths:
        size, time_ns = stamp(
            path, options.skip_bad
        )  # of an unreadable one: it is counted when it is to be read
        files.append([path, size, time_ns])
    tokenizer = "bpe" if options.train_bpe else tokenizers.load(options.tokenizer).sha256
    return {
        **dataclasses.asdict(options),
        "tokenizer": tokenizer,
        "files": files,
        "version": tokens_lib.VERSION,
    }


def stamp(path: str, skip_bad: bool) -> tuple[int, int]:
    """A file's size and time of change; zeros for one that cannot be read where that is no error."""
    try:
        stat = os.stat(path)
    except OSError as error:
        if not skip_bad:
            raise UserError(f"cannot read {inputs.shown(path)}: {error.strerror}") from None
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def corpus(plan: dict[str, Any]) -> int:
    """What tells this preparation's shards from all others: not where the input lies, or since when."""
    files = [[os.path.basename(path), size] for path, size, _ in plan["files"]]
    return tokens_lib.corpus_id({**plan, "inputs": None, "skip_bad": None, "files": files})


def key(plan: dict[str, Any]) -> str:
    """One word for the plan. Skipping is no part of it: where nothing had to be skipped, it changes nothing."""
    return tokens_lib.manifest_hash({**plan, "skip_bad": None})


def difference(begun: dict[str, Any], plan: dict[str, Any]) -> str:
    """The options and files in which two plans differ, "" for none; whether something is skipped is not looked at."""
    differ = [name for name in sorted(plan) if begun.get(name) != plan[name]]
    words = [name for name in differ if name not in ("files", "skip_bad")]
    if "files" in differ:
        was, now = ({path: tuple(of) for path, *of in p.get("files", [])} for p in (begun, plan))
        paths = sorted(path for path in was.keys() | now.keys() if was.get(path) != now.get(path))
        what = "is new" if paths[0] not in was else "is gone" if paths[0] not in now else "has changed"
        more = f", and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        words.append(f"input files ({inputs.shown(paths[0])} {what}{more})")
    return ", ".join(words)


def tasks(plan: dict[str, Any]) -> list[Task]:
    """The tasks of a plan, in their order."""
    files: dict[str, File] = {path: (path, size, time_ns) for path, size, time_ns in plan["files"]}
    found = inputs.split(list(files.values()), plan["part_bytes"], plan["skip_bad"])
    return [
        Task(number, stretches, [files[path] for path in dict.fromkeys(s.path for s in stretches)])
        for number, stretches in enumerate(found)
    ]


def owners(all_tasks: list[Task], count: int) -> list[int]:
    """The part that each task belongs to: the largest first, each to the one that has least."""
    least = [(0, part) for part in range(count)]
    owner = [0] * len(all_tasks)
    for task in sorted(all_tasks, key=lambda task: (-task.cost, task.number)):
        load, part = least[0]
        owner[task.number] = part
        heapq.heapreplace(least, (load + max(task.cost, 1), part))
    return owner


def lacking(numbers: list[int], all_tasks: list[Task], count: int) -> dict[Part, int]:
    """The parts that these tasks belong to, with how many of each."""
    owner = owners(all_tasks, count)
    return {Part(i, count): n for i, n in sorted(collections.Counter(owner[n] for n in numbers).items())}
