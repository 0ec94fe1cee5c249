"""Helpers of these tests: they prepare in this process, read the result, and compare batches."""

import json
import os
import pathlib

import numpy as np
import pyarrow

from zaya_jax.data import prepare, prepare_task, tokenizers
from zaya_jax.data.sources import with_targets
from zaya_jax.data.storage import Prepared
from zaya_jax.data.stores import Memory


def jsonl(records):
    """Records as the bytes of a JSONL file."""
    return "".join(json.dumps(r) + "\n" for r in records).encode()


def zstd(raw):
    """Bytes as a file of one zstd frame."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(raw)
    return sink.getvalue().to_pybytes()


def texts_of(directory, tokenizer=None):
    """The documents of both splits as text, sorted."""
    tokenizer = tokenizer or tokenizers.load(os.path.join(directory, "tokenizer"))
    out = []
    for split in ("train", "held_out"):
        store = Prepared(str(directory), split)
        tokens = [b.tokens[a:z] for row in store.parts([(0, store.num_tokens)]) for b, a, z in row]
        ends = [
            np.cumsum(store.lengths(shard)) + store.first_token[shard]
            for shard in range(store.num_shards)
        ]
        if tokens:
            documents = np.split(np.concatenate(tokens), np.concatenate(ends)[:-1])
            out += [tokenizer.decode(part) for part in documents]
    return sorted(out)


def contents(directory):
    """Every file below a directory, byte for byte."""
    root = pathlib.Path(directory)
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def run_here(job, todo, processes):
    """An engine without worker processes, which take a second to start."""
    for task in todo:
        yield task, prepare_task.run(task, job)


def here(options, out):
    """Prepare in this process, without workers."""
    return prepare.prepare(options, str(out), 1, lambda *_: None)


def in_memory(lengths, first=0, bundle_tokens=0):
    """A source of documents whose tokens are the numbers from `first` on, so that each differs from
    all others."""
    starts = np.zeros(int(np.sum(lengths)), bool)
    starts[np.cumsum(lengths) - lengths] = True
    ids = first + np.arange(len(starts), dtype=np.uint32)
    store = Memory(f"s{first}", with_targets(ids, starts), f"f{first}")
    store.bundle_tokens = bundle_tokens
    return store


def assert_same(got, expected):
    """Two lists of batches are the same, array by array."""
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
