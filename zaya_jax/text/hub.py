"""Reads data sets of the Hugging Face hub as a preparation's input:
`hf:NAME[/SUBSET][:SPLIT][@REVISION]`, through `datasets`.

NAME is `owner/name` of the hub, or a folder that `datasets.load_dataset` reads. Each of its shards
is an input of its own, such as `hf:owner/name:train@1a2b3c#3/64`, so that machines and processes
share them as they share files. The commit in it holds a preparation to one revision.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from zaya_jax.config import UserError, first_line
from zaya_jax.text import sources

PREFIX = "hf:"


def shards(given: str, begun: Iterable[str] = ()) -> list[str]:
    """The inputs that --input=hf:... names, those with which a preparation has `begun` if it has;
    UserError where there is no such data set, or `datasets` is missing."""
    name, _, _, revision = _parse(given)
    base = given.removesuffix(f"@{revision}")
    if again := [path for path in begun if path.startswith((f"{base}@", f"{base}#"))]:
        return again
    if not os.path.exists(name):
        base = f"{base}@{_open(given, 'load_dataset_builder').hash}"
    count = _load(base).num_shards
    return [f"{base}#{index}/{count}" for index in range(count)]


def stamp(shard: str) -> tuple[int, int]:
    """As a file's size and time of change: a hash of a folder's; a commit of the hub stays."""
    name, *_ = _parse(shard)
    if not os.path.exists(name):
        return 1, 1
    found = [(str(path), path.stat()) for path in sources.find(name)]
    facts = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]
    return 1, int(hashlib.sha256(repr(facts).encode()).hexdigest()[:12], 16)


def unrevised(shard: str) -> str:
    """A shard's name without the commit, for the names of its records."""
    given, _, place = shard.rpartition("#")
    return f"{given.removesuffix(f'@{_parse(given)[-1]}')}#{place}"


def rows(shard: str) -> Iterator[dict[str, Any]]:
    """The records of one shard."""
    given, _, place = shard.rpartition("#")
    index, count = map(int, place.split("/"))
    data = _load(given)
    if data.num_shards != count:
        raise UserError(
            f"{given} had {count} shards when the preparation began, and has {data.num_shards} now"
        )
    try:
        yield from data.shard(num_shards=count, index=index)
    # no bad record: --skip_bad must not pass over the rest
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{shard} cannot be read on: {first_line(error)}") from None


def _parse(given: str) -> tuple[str, str | None, str, str | None]:
    """(name, subset, split, revision) of an input or of one of its shards."""
    given = re.sub(r"#\d+/\d+$", "", given.removeprefix(PREFIX))
    name, _, split = given.partition(":")
    if os.path.exists(name):
        return name, None, split, None
    given, _, revision = given.partition("@")
    name, _, split = given.partition(":")
    owner, _, subset = name.rpartition("/")
    if "/" in owner:
        return owner, subset, split, revision or None
    return name, None, split, revision or None


def _load(given: str) -> Any:
    return _open(given, "load_dataset", split=_parse(given)[2] or "train", streaming=True)


def _open(given: str, function: str, **more: Any) -> Any:
    """What a function of `datasets` gives for an input."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"--input={given} needs another package: pip install datasets") from None
    name, subset, _, revision = _parse(given)
    try:
        return getattr(datasets, function)(name, subset, revision=revision, **more)
    except Exception as error:  # the library raises its own, the network's and bare ones
        raise UserError(
            f"--input={given} cannot be opened: {first_line(error)}; give"
            " hf:NAME[/SUBSET][:SPLIT][@REVISION]"
        ) from None
