"""Reads data sets of the Hugging Face hub as a preparation's input: `hf:NAME[/SUBSET][:SPLIT]`,
through `datasets`.

NAME is `owner/name` of the hub, or a folder that `datasets.load_dataset` reads. Each of its shards
is an input of its own, such as `hf:owner/name:train#3/64@1a2b3c`, so that machines and processes
share them as they share files. It ends with the data set's revision, which stays a preparation's:
a commit of the hub, or a hash of the folder's names, sizes and times.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from zaya_jax.config import UserError, first_line
from zaya_jax.text import sources

PREFIX = "hf:"


def shards(given: str, begun: Iterable[str] = ()) -> list[str]:
    """The inputs that --input=hf:... names, those with which a preparation has `begun` if it has;
    UserError where there is no such data set, or `datasets` is missing."""
    again = [path for path in begun if path.startswith(f"{given}#")]
    if again:
        return again
    revision = _revision(given)
    count = _load(given, revision).num_shards
    return [f"{given}#{index}/{count}@{revision}" for index in range(count)]


def rows(shard: str) -> Iterator[dict[str, Any]]:
    """The records of one shard."""
    given, _, place = shard.rpartition("#")
    place, _, revision = place.partition("@")
    index, count = map(int, place.split("/"))
    data = _load(given, revision)
    try:
        yield from data.shard(num_shards=count, index=index)
    # no bad record: --skip_bad must not pass over the rest
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{shard} cannot be read on: {first_line(error)}") from None
    if _is_folder(given) and _revision(given) != revision:
        raise UserError(f"{given} has changed since the preparation began")


def _revision(given: str) -> str:
    if not _is_folder(given):
        return _open("load_dataset_builder", given).hash
    files = sources.find(_parse(given)[0])
    facts = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _is_folder(given: str) -> bool:
    return os.path.exists(_parse(given)[0])


def _parse(given: str) -> tuple[str, str | None, str]:
    """(name, subset, split) of an input."""
    name, _, split = given.removeprefix(PREFIX).partition(":")
    subset = None
    if not os.path.exists(name) and name.count("/") == 2:
        name, _, subset = name.rpartition("/")
    return name, subset, split or "train"


def _load(given: str, revision: str) -> Any:
    commit = None if _is_folder(given) else revision
    return _open("load_dataset", given, split=_parse(given)[2], streaming=True, revision=commit)


def _open(function: str, given: str, **more: Any) -> Any:
    """The result of a function of `datasets` for an input."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{given} needs another package: pip install datasets") from None
    name, subset, _ = _parse(given)
    try:
        return getattr(datasets, function)(name, subset, **more)
    except Exception as error:  # the library raises its own, the network's and bare ones
        raise UserError(
            f"{given} cannot be opened: {first_line(error)}; give hf:NAME[/SUBSET][:SPLIT]"
        ) from None
