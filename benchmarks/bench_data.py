"""How fast batches come, from text in memory and from prepared shards, with each packing, and that memory
stays flat.

    python benchmarks/bench_data.py --data=DIR [--seq_len=4096] [--global_batch=16]

DIR is a prepared directory (python -m experiments.prepare_data --input=stdlib --out=DIR). Nothing is done
with the batches, so the figures are upper bounds of reading; the first line reads 40 million tokens and
more and compares the memory of the process after ten million and at the end.
"""

import dataclasses
import itertools
import resource
import time

import psutil
from absl import app, flags

from zaya_jax import config as config_lib
from zaya_jax.data import pipeline, storage, tokenizers

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "prepared directory", required=True)
flags.DEFINE_integer("seq_len", 4096, "context")
flags.DEFINE_integer("global_batch", 16, "rows per step")
flags.DEFINE_float("seconds", 5.0, "time for each measurement")


def main(_: list[str]) -> None:
    """Print a Markdown table."""
    tokenizer = tokenizers.load(f"{FLAGS.data}/tokenizer")
    raw = config_lib.default()
    raw.data.seq_len, raw.data.global_batch = FLAGS.seq_len, FLAGS.global_batch
    base = config_lib.check(raw)
    storage.CACHE_BYTES = 0
    flat(pipeline.Stream(pipeline.Batches(on(base, FLAGS.data, "concat"), tokenizer, rounds=1)))
    print("| source | order | packing | M tokens/s | rows filled | bundles read a bundle of rows |")
    print("|---|---|---|---|---|---|")
    for source, rounds, packing in itertools.product(
        (FLAGS.data, "stdlib"), (1, 1 << 40), ("concat", "first_fit", "best_fit")
    ):
        if source == "stdlib" and (tokenizer.kind != "bytes" or rounds == 1):
            continue
        batches = pipeline.Batches(on(base, source, packing), tokenizer, rounds=rounds)
        rate, filled, read = measure(pipeline.Stream(batches))
        what = "in memory" if source == "stdlib" else "shards"
        order = "blocks, as in a large source" if rounds == 1 else "all rows shuffled, as in a small one"
        print(f"| {what} | {order} | {packing} | {rate / 1e6:.1f} | {filled:.1%} | {read:.2f} |", flush=True)


def on(config: config_lib.Config, path: str, packing: str) -> config_lib.Config:
    """The config with another source and packing."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=path, packing=packing))


def measure(stream: pipeline.Stream) -> tuple[float, float, float]:
    """(tokens per second, share of places filled, bundles read over those that the tokens fill) after a warm-up."""
    for _ in range(20):
        next(stream)
    places, real, before, begin = 0, 0, stream.counters().records, time.perf_counter()
    while time.perf_counter() - begin < FLAGS.seconds:
        segments = next(stream)["segment_ids"]
        places, real = places + segments.size, real + int((segments > 0).sum())
    seconds, records = time.perf_counter() - begin, stream.counters().records - before
    filled = real / places
    stream.close()
    bundle = stream.batches.stores[0].bundle_tokens if stream.batches.stores else 1
    return places * filled / seconds, filled, records * bundle / places


def flat(stream: pipeline.Stream) -> None:
    """Memory after 10 and after 40 million tokens."""
    process, seen, early = psutil.Process(), 0, 0
    while seen < 40e6:
        seen += next(stream)["tokens"].size
        if seen >= 10e6 and not early:
            early = process.memory_info().rss
    late = process.memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"memory: {early / 2**20:.0f} MiB after 10 M tokens, {late / 2**20:.0f} MiB after 40 M, "
        f"peak {peak / 2**10:.0f} MiB\n"
    )


if __name__ == "__main__":
    app.run(main)
