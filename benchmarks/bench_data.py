"""Compares preparing and reading with datatrove, MosaicML streaming, Megatron and Grain's own
packing: the same corpus and tokenizer, one core.

    python benchmarks/bench_data.py --work=DIR [--stages prepare read same] [--mib=16] [--rounds=5] [--seconds=3]

Each measurement is a process of its own on one core: its peak memory is its own, and its imports
are not timed. In a round all libraries have their turn, in the opposite order of the round before.
A library that is not installed is named and left out. Every way of preparing must count the same
tokens; every batch has its own documents' ids and positions.
"""

import argparse
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator

import numpy as np
import tokenizers as huggingface

from zaya_jax import config as config_lib
from zaya_jax.data import pipeline, storage
from zaya_jax.text import prepare, tokenizers

SEQ_LEN, BATCH, AT_ONCE, SAME = 4096, 16, 1000, 40
KINDS = ("bpe", "bytes")
NEEDS = {
    "ours": "zaya_jax.text.prepare",
    "datatrove": "datatrove.pipeline.tokens",
    "streaming": "streaming",
    "megatron": "megatron.core.datasets.gpt_dataset",
    "concat": "grain",
    "best_fit": "grain",
    "grain": "grain",
}
PREPARE = ("ours", "datatrove", "streaming", "megatron")
READ = {"concat": ("streaming", "megatron"), "best_fit": ("grain",)}  # our packing: others with it


def make_corpus(work: pathlib.Path, size: int, vocabulary: int) -> None:
    """A JSONL of the Python files here, and both tokenizers as tokenizer.json."""
    work.mkdir(parents=True, exist_ok=True)
    files = sorted(
        pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"),
        key=lambda p: p.name.encode()[::-1],
    )
    texts: list[str] = []
    for path in files:
        if size > 0 and (text := path.read_bytes().decode("utf-8", errors="ignore")).strip():
            texts.append(text)
            size -= len(text)
    (work / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizers.train_bpe(texts[::4], vocabulary).save(work / "bpe")
    tokenizers.Bytes().save(work / "bytes")
    (work / "bytes" / "tokenizer.json").write_text(tokenizers.Bytes().json())


def encoded(work: pathlib.Path, kind: str) -> Iterator[list[int]]:
    """The ids of each document by the fastest call that the tokenizers library has."""
    tokenizer = huggingface.Tokenizer.from_file(str(work / kind / "tokenizer.json"))
    with (work / "corpus.jsonl").open() as lines:
        for some in itertools.batched(lines, AT_ONCE):
            for one in tokenizer.encode_batch_fast([json.loads(line)["text"] for line in some]):
                yield one.ids


def prepare_one(name: str, work: pathlib.Path, kind: str) -> int:
    """Prepare the corpus with one library; the tokens of its texts, counted in its output."""
    out = work / f"{kind}-{name}"
    if name == "ours":
        options = prepare.Options([str(work / "corpus.jsonl")], str(work / kind), held_out=0.0)
        total = prepare.prepare(options, str(out), 1, lambda _: None)[0]["totals"]["train"]
        return total["tokens"] - 2 * total["documents"]
    eos, count = tokenizers.load(work / kind).eos_id, 0
    if name == "datatrove":
        from datatrove.executor import LocalPipelineExecutor
        from datatrove.pipeline.readers import JsonlReader
        from datatrove.pipeline.tokens import DocumentTokenizer

        reader = JsonlReader(str(work), glob_pattern="corpus.jsonl")
        path = str(work / kind / "tokenizer.json")
        writer = DocumentTokenizer(str(out), path, eos_token="<|eos|>", shuffle_documents=False)
        LocalPipelineExecutor([reader, writer], logging_dir=str(out / "logs")).run()
        ends = np.fromfile(next(out.glob("*.index")), "<u8")
        return int(ends[-1]) - len(ends)
    if name == "streaming":
        from streaming import MDSWriter

        row: list[int] = []
        with MDSWriter(columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}, out=str(out)) as mds:
            for ids in encoded(work, kind):
                row += [*ids, eos]
                count += len(ids)
                full = len(row) // SEQ_LEN * SEQ_LEN
                for start in range(0, full, SEQ_LEN):
                    mds.write({"tokens": np.array(row[start : start + SEQ_LEN], np.uint16)})
                del row[:full]
        return count
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    out.mkdir()
    builder = IndexedDatasetBuilder(str(out / "text.bin"), np.uint16)
    for ids in encoded(work, kind):
        # a list, as tools/preprocess_data.py gives
        builder.add_document([*ids, eos], [len(ids) + 1])
        count += len(ids)
    builder.finalize(str(out / "text.idx"))
    return count


def read_ours(work: pathlib.Path, packing: str, process: tuple[int, int]) -> Iterator:
    """Our stream, in the order of a large source, with room for open blocks alone."""
    raw = config_lib.default()
    raw.data.path, raw.data.tokenizer = f"{work}/bpe-ours", f"{work}/bpe"
    raw.data.seq_len, raw.data.global_batch, raw.data.packing = SEQ_LEN, BATCH, packing
    found = pipeline.Batches(
        config_lib.check(raw), tokenizers.load(work / "bpe"), process, rounds=1
    )
    for store in found.stores:
        store.cache.limit = 0
    return pipeline.Stream(found)


def read_grain(work: pathlib.Path, process: tuple[int, int]) -> Iterator:
    """Grain's shuffle, first-fit and batch, of documents that are in memory, cut to S as ours
    are."""
    import grain

    store = storage.Prepared(f"{work}/bpe-ours")
    tape = np.concatenate(
        [b.tokens[a:z] for row in store.parts([(0, store.num_tokens)]) for b, a, z in row]
    )
    ends = np.append(
        0, np.cumsum(np.concatenate([store.lengths(i) for i in range(store.num_shards)]))
    ).tolist()
    cuts = [
        (a, min(a + SEQ_LEN, z))
        for start, z in itertools.pairwise(ends)
        for a in range(start, z, SEQ_LEN)
    ]
    mine = grain.MapDataset.source(cuts).shuffle(seed=1).repeat()[process[0] :: process[1]]
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
    rows = mine.map(lambda cut: {"tokens": tape[slice(*cut)]}).to_iter_dataset(ahead)
    packer = grain.experimental.FirstFitPackIterDataset(
        rows, length_struct={"tokens": SEQ_LEN}, num_packing_bins=64
    )
    for batch in packer.batch(BATCH // process[1]):
        yield with_targets(batch["tokens"], batch["tokens_segment_ids"], batch["tokens_positions"])


def read_streaming(work: pathlib.Path, process: tuple[int, int]) -> Iterator:
    """MosaicML's shuffled rows, joined before they were written; documents are found by their end
    marks."""
    from streaming import StreamingDataset

    rows, eos = BATCH // process[1], tokenizers.load(work / "bpe").eos_id
    dataset = StreamingDataset(local=f"{work}/bpe-streaming", shuffle=True, batch_size=rows)
    place = np.arange(SEQ_LEN)
    while True:
        for some in itertools.batched(dataset, rows):
            tokens = np.stack([row["tokens"] for row in some])
            starts = np.ones(tokens.shape, bool)
            starts[:, 1:] = tokens[:, :-1] == eos
            positions = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
            yield with_targets(tokens, np.cumsum(starts, axis=1), positions)


def read_megatron(work: pathlib.Path, process: tuple[int, int]) -> Iterator:
    """Megatron's GPTDataset in PyTorch's loader, each process with its rows of a batch as its
    sampler gives them."""
    import types

    import torch
    from megatron.core.datasets import gpt_dataset, indexed_dataset, utils

    ids = tokenizers.load(work / "bpe")
    tokenizer = types.SimpleNamespace(
        eod=ids.eos_id, pad=ids.pad_id, vocab_size=ids.vocab_size, unique_identifiers={}
    )
    config = gpt_dataset.GPTDatasetConfig(
        1,
        SEQ_LEN,
        split="1",
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
        inter_document_masking=True,
    )
    prefix = f"{work}/bpe-megatron/text"
    held, num = indexed_dataset.IndexedDataset(prefix), BATCH * 10_000
    documents = np.arange(len(held), dtype=np.int32)
    dataset = gpt_dataset.GPTDataset(held, prefix, documents, num, utils.Split.train, config)
    mine = BATCH // process[1]
    first = range(process[0] * mine, num, BATCH)
    yield from torch.utils.data.DataLoader(
        dataset, batch_sampler=[range(at, at + mine) for at in first]
    )


def with_targets(tokens, segment_ids, positions) -> dict[str, np.ndarray]:
    """A batch with targets, positions and masks, for libraries that leave these to their user."""
    targets = np.zeros(tokens.shape, np.int32)
    targets[:, :-1] = tokens[:, 1:]
    mask = np.zeros(tokens.shape, np.float32)
    mask[:, :-1] = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    found = {"segment_ids": segment_ids.astype(np.int32), "positions": positions.astype(np.int32)}
    return {"tokens": tokens.astype(np.int32), "targets": targets, "loss_mask": mask, **found}


def batches(name: str, work: pathlib.Path, process: tuple[int, int]) -> Iterator:
    """The batches of one library; ours go by their packing."""
    if name in READ:
        return read_ours(work, name, process)
    return {"grain": read_grain, "streaming": read_streaming, "megatron": read_megatron}[name](
        work, process
    )


def child(args: argparse.Namespace) -> dict:
    """One measurement, in this process."""
    what, name, kind = args.one.split(":")
    if what != "same":
        os.sched_setaffinity(0, {args.core})
    importlib.import_module(NEEDS[name])
    if what == "prepare":
        shutil.rmtree(args.work / f"{kind}-{name}", ignore_errors=True)
        begin = time.perf_counter()
        found: dict = {"tokens": prepare_one(name, args.work, kind)}
        found["seconds"] = time.perf_counter() - begin
    else:
        index, count = (int(part) for part in args.process.split("/"))
        stream = iter(batches(name, args.work, (index, count)))
        if what == "same":  # the rows of each batch, whatever their order
            rows = [np.asarray(next(stream)["tokens"], np.int32) for _ in range(SAME)]
            return {
                "rows": [[hashlib.sha256(row.tobytes()).hexdigest() for row in one] for one in rows]
            }
        for _ in range(10):
            next(stream)
        real, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < args.seconds:
            batch = next(stream)
            real += (
                int((batch["segment_ids"] > 0).sum())
                if "segment_ids" in batch
                else batch["tokens"].numel()
            )
        found = {"tokens": real, "seconds": time.perf_counter() - begin}
    usage = [
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return found | {"mib": sum(usage)}


def run(
    args: argparse.Namespace, what: str, name: str, kind: str = "", count: int = 1
) -> list[dict]:
    """The results of `count` processes that run at the same time."""
    running = []
    for i in range(count):
        command = [sys.executable, __file__, f"--work={args.work}", f"--one={what}:{name}:{kind}"]
        command += [f"--process={i}/{count}", f"--seconds={args.seconds}", f"--core={args.core}"]
        ranks = {
            "RANK": i,
            "LOCAL_RANK": i,
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_PORT": 29511,
        }
        environment = (
            os.environ
            | {key: str(value) for key, value in ranks.items()}
            | {"MASTER_ADDR": "127.0.0.1"}
        )
        running.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
        )
    results = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, results, strict=True):
        if process.returncode:
            raise SystemExit(f"{what} {name}: {errors.decode()[-2000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


def compare(args: argparse.Namespace, what: str, names: list[str], kind: str = "") -> None:
    """Print a row for each library: medians over rounds, and of ours over its in each round."""
    found: dict[str, list[dict]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            found[name] += run(args, what, name, kind)
    if (
        what == "prepare"
        and len(counted := {one["tokens"] for held in found.values() for one in held}) > 1
    ):
        raise SystemExit(f"not the same tokens: {counted}")
    rates = {
        name: [one["tokens"] / one["seconds"] / 1e6 for one in held] for name, held in found.items()
    }
    for name in names:
        ratio = statistics.median(
            ours / other for ours, other in zip(rates[names[0]], rates[name], strict=True)
        )
        memory = statistics.median(one["mib"] for one in found[name])
        title = f"{what} {kind}".strip()
        print(
            f"| {title} | {name} | {statistics.median(rates[name]):.2f} | {ratio:.2f} |"
            f" {memory:.0f} |",
            flush=True,
        )


def same(args: argparse.Namespace, name: str) -> None:
    """Print how many batches hold the same rows on 2 and on 4 processes as on one."""
    runs = [run(args, "same", name, count=count) for count in (1, 2, 4)]
    whole = [
        [
            sorted(itertools.chain(*parts))
            for parts in zip(*(one["rows"] for one in held), strict=True)
        ]
        for held in runs
    ]
    equal = [sum(a == b for a, b in zip(whole[0], other, strict=True)) for other in whole[1:]]
    print(f"| {name} | {equal[0]} of {SAME} | {equal[1]} of {SAME} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--stages", nargs="+", default=["prepare", "read", "same"])
    parser.add_argument(
        "--kinds", nargs="+", default=KINDS, choices=KINDS, help="tokenizers to prepare with"
    )
    for name, value in (
        ("--mib", 16.0),
        ("--vocabulary", 8192),
        ("--rounds", 5),
        ("--seconds", 3.0),
        ("--core", 0),
    ):
        parser.add_argument(name, type=type(value), default=value)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--process", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print("\n" + json.dumps(child(args)))
        return
    here = {
        name for name, module in NEEDS.items() if importlib.util.find_spec(module.split(".")[0])
    }
    print(
        "not installed:", ", ".join(sorted(set(NEEDS) - here)) or "none", "| load", *os.getloadavg()
    )
    if not (args.work / "corpus.jsonl").exists():
        make_corpus(args.work, int(args.mib * 2**20), args.vocabulary)
    if "prepare" in args.stages:
        for kind in args.kinds:
            compare(args, "prepare", [name for name in PREPARE if name in here], kind)
    for packing, others in READ.items():
        if "read" in args.stages:
            compare(args, "read", [packing, *(name for name in others if name in here)])
    for name in ("concat", "best_fit", "grain", "streaming", "megatron"):
        if "same" in args.stages and name in here:
            same(args, name)
    print("load", *os.getloadavg())


if __name__ == "__main__":
    main()
