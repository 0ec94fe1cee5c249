"""The last step of a preparation: what its tasks recorded becomes the tables and the manifest, in the tasks' order."""

import collections
import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any, TextIO

import google_crc32c
import numpy as np

from zaya_jax.config import UserError
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.prepare_task import WORK, Job, LeftOut
from zaya_jax.data.tokenizers import Tokenizer


class NoDocuments(UserError):
    """Nothing of the input is for training."""


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
    clear(directory)
    return manifest


def clear(directory: pathlib.Path) -> None:
    """Remove `.work/`, also where another process still writes into it: it will find that all is done."""
    shutil.rmtree(directory / WORK, ignore_errors=True)


def _write_source(file: TextIO, source: list[Any] | None) -> None:
    if source is not None:
        name, documents, count = source
        file.write(json.dumps({"name": name, "documents": documents, "tokens": count}) + "\n")
