"""Reads data sets of the Hugging Face hub as a preparation's input, through `datasets`:
`hf:OWNER/NAME[/SUBSET][:SPLIT]`.

Each of a data set's shards is an input of its own, such as `hf:owner/name:train#3/64@1a2b3c`, so
that machines and processes share them as they share files. It ends with the hub's commit, with
which a preparation stays.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from zaya_jax.config import UserError, first_line
from zaya_jax.text.text_files import HUB_PREFIX


def shard_inputs(spec: str, planned: Iterable[str] = ()) -> list[str]:
    """The inputs that --input=hf:... names: those that a preparation has `planned`, if it has, or
    those of the newest commit; UserError where there is no such data set, or `datasets` is
    missing."""
    already_planned = [path for path in planned if path.startswith(f"{spec}#")]
    if already_planned:
        return already_planned
    commit = _call("load_dataset_builder", spec).hash
    count = _load(spec, commit).num_shards
    return [f"{spec}#{index}/{count}@{commit}" for index in range(count)]


def rows(shard: str) -> Iterator[dict[str, Any]]:
    """The records of one shard."""
    spec, _, part = shard.rpartition("#")
    part, _, commit = part.partition("@")
    index, count = map(int, part.split("/"))
    data = _load(spec, commit)
    try:
        yield from data.shard(num_shards=count, index=index)
    # not a BadInput, because --skip_bad would then silently drop the rest of the shard
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{shard} failed while streaming: {first_line(error)}") from None


def _parse(spec: str) -> tuple[str, str | None, str]:
    """(name, subset, split) of an input."""
    name, _, split = spec.removeprefix(HUB_PREFIX).partition(":")
    subset = None
    if name.count("/") == 2:
        name, _, subset = name.rpartition("/")
    return name, subset, split or "train"


def _load(spec: str, commit: str) -> Any:
    split = _parse(spec)[2]
    return _call("load_dataset", spec, split=split, streaming=True, revision=commit)


def _call(function: str, spec: str, **options: Any) -> Any:
    """The result of a function of `datasets` for an input."""
    name, subset, _ = _parse(spec)
    try:
        import datasets
    except ImportError:
        raise UserError(f"{spec} needs another package: pip install datasets") from None
    try:
        return getattr(datasets, function)(name, subset, **options)
    except Exception as error:  # the library raises its own, the network's and bare ones
        raise UserError(
            f"{spec} cannot be opened: {first_line(error)}; give hf:NAME[/SUBSET][:SPLIT]"
        ) from None
