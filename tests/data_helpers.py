"""What the tests of text and of data share: small corpora and configs, preparing in this process,
reading the result, putting batches together."""

import io
import itertools
import json
import pathlib
from collections.abc import Callable

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from zaya_jax import config as config_lib
from zaya_jax.data.prepared_store import PreparedStore, lengths_of_all
from zaya_jax.data.stores import MemoryStore
from zaya_jax.text import prepare, prepare_task, shard_format, tokenizers
from zaya_jax.text.token_block import with_targets


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    """Sixty text files of very different lengths, one of them empty and one not UTF-8."""
    rng = np.random.default_rng(0)
    words = [rng.integers(0, 1000, int(rng.integers(5, 400))) for _ in range(60)]
    texts = {
        f"doc{i:02d}.txt": f"document {i}: " + " ".join(f"w{word}" for word in of_text)
        for i, of_text in enumerate(words)
    }
    return write(tmp_path / "corpus", texts | {"empty.txt": "", "latin.txt": b"caf\xe9"})


def make_config(
    run_seed: int = 0,
    windows: int = 8,
    vocab_size: int = 264,
    eval_named: tuple[str, ...] = (),
    phases: tuple[config_lib.Phase, ...] = (),
    **data,
) -> config_lib.Config:
    """A checked config of 40 steps with these data keys; the named ones go to their own groups."""
    raw = config_lib.default()
    raw.model.vocab_size, raw.schedule.phases = vocab_size, phases
    raw.run.seed, raw.run.num_steps = run_seed, 40
    raw.eval.windows, raw.eval.named = windows, eval_named
    raw.data.update({"seq_len": 64, "global_batch": 8} | data)
    return config_lib.check(raw)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing runs here, without worker processes, which take a second to start."""
    monkeypatch.setattr(prepare_task, "run_processes", run_in_process)


@pytest.fixture
def prepare_text(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pathlib.Path]:
    """Writes documents as a prepared directory of many small shards and bundles, in this
    process."""

    def make(
        name: str,
        count: int,
        seed: int = 0,
        bundle_bytes: int = 2048,
        longest: int = 700,
        shards: int = 3,
    ) -> pathlib.Path:
        monkeypatch.setattr(shard_format, "BUNDLE_BYTES", bundle_bytes)
        rng = np.random.default_rng(seed)
        source = tmp_path / f"{name}.jsonl"
        with source.open("w") as file:
            for i in range(count):
                letters = bytes(
                    rng.integers(97, 123, int(rng.integers(1, longest))).tolist()
                ).decode()
                file.write(json.dumps({"text": f"{name}{i}:{letters}"}) + "\n")
        options = prepare.Options([str(source)], part_bytes=1 + source.stat().st_size // shards)
        prepare.prepare(options, str(tmp_path / name), 1, lambda *_: None)
        return tmp_path / name

    return make


def write(folder, contents):
    """Files with these contents, by their paths below a folder, which is returned."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def jsonl(records):
    """Records as the bytes of a JSONL file."""
    return "".join(json.dumps(r) + "\n" for r in records).encode()


def parquet(columns, **options):
    """Columns as the bytes of a Parquet file."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
    return file.getvalue()


def arrow(columns):
    """Columns as the bytes of a stream of batches, as `datasets.save_to_disk` writes them."""
    file, table = io.BytesIO(), pyarrow.table(columns)
    with pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=300)
    return file.getvalue()


def damage(path, place):
    """Flips a bit of a file's byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def zstd(raw):
    """Bytes as a file of one zstd frame."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(raw)
    return sink.getvalue().to_pybytes()


def texts_of(directory):
    """The documents of both splits as text, sorted."""
    tokenizer = tokenizers.load(directory / "tokenizer")
    out = []
    for split in shard_format.SPLITS:
        store = PreparedStore(str(directory), split)
        for first, lengths in zip(store.first_token, lengths_of_all(store), strict=False):
            edges = itertools.pairwise(first + np.append(0, np.cumsum(lengths)))
            out += [tokenizer.decode(block.tokens) for block in store.read_spans(list(edges))]
    return sorted(out)


def contents(directory):
    """Every file below a directory, byte for byte."""
    root = pathlib.Path(directory)
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def run_in_process(job, todo, processes):
    """An engine without worker processes, which take a second to start."""
    for task in todo:
        yield task, prepare_task.run_task(task, job)


def prepared(options, out):
    """Prepare in this process, without workers."""
    return prepare.prepare(options, str(out), 1, lambda *_: None)


def in_memory(lengths, first=0, bundle_tokens=0):
    """A source of documents whose tokens are the numbers from `first` on, so that each differs from
    all others."""
    starts = np.zeros(int(np.sum(lengths)), bool)
    starts[np.cumsum(lengths) - lengths] = True
    ids = first + np.arange(len(starts), dtype=np.uint32)
    store = MemoryStore(f"s{first}", with_targets(ids, starts), f"f{first}")
    store.bundle_tokens = bundle_tokens
    return store


def side_by_side(batches):
    """The batch whose rows are those of several processes' batches of one step."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def calls_of(monkeypatch, owner, name):
    """The arguments of each call of a method from here on."""
    calls, method = [], getattr(owner, name)

    def noted(*arguments):
        calls.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(owner, name, noted)
    return calls
