"""Reads data sets of the Hugging Face hub as a preparation's input: `hf:NAME[/SUBSET][:SPLIT]`,
through `datasets`.

NAME is `owner/name` of the hub, or a folder that `datasets.load_dataset` reads. Each of its shards
is an input of its own, such as `hf:owner/name:train#3/64`, so that machines and processes share
them as they share files.
"""

import os
from collections.abc import Iterator
from typing import Any

from zaya_jax.config import UserError, first_line

PREFIX = "hf:"


def shards(given: str) -> list[str]:
    """The inputs that --input=hf:... names; UserError where there is no such data set, or
    `datasets` is missing."""
    count = _load(given).num_shards
    return [f"{given}#{index}/{count}" for index in range(count)]


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


def _load(given: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"--input={given} needs another package: pip install datasets") from None
    name, _, split = given.removeprefix(PREFIX).partition(":")
    subset = None
    if not os.path.exists(name) and name.count("/") == 2:
        name, _, subset = name.rpartition("/")
    try:
        return datasets.load_dataset(name, subset, split=split or "train", streaming=True)
    except Exception as error:  # the library raises its own, the network's and bare ones
        raise UserError(
            f"--input={given} cannot be opened: {first_line(error)}; give hf:NAME[/SUBSET][:SPLIT]"
        ) from None
