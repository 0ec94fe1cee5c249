"""Text to token shards: the one-off step between a corpus and a training run.

    python -m experiments.prepare_data --input='corpus/**/*.jsonl.zst' --tokenizer=tokenizer.json --out=data/web
    python -m experiments.prepare_data --input=stdlib --train_bpe=8192 --out=data/stdlib_bpe
    python -m experiments.prepare_data --input=chats.jsonl --tokenizer=bytes --context=4096 --out=data/chats
    python -m experiments.prepare_data --verify=data/web          # or --verify --out=data/web

Input is plain text (a file is a document), JSONL and Parquet (a text field, or chats of roles and contents),
text and JSONL also as .gz or .zst. Killed at any moment and started again with the same command, it continues. See
docs/data.md.
"""

import itertools
import os
import sys
import time

from absl import flags
from tqdm import tqdm

from zaya_jax.config import UserError, fields
from zaya_jax.data import inputs, prepare, storage, trim

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("input", [], "files, directories or globs, or stdlib; may be given several times")
flags.DEFINE_string(
    "tokenizer", "bytes", "bytes, a tokenizer.json, a SentencePiece .model, or a saved directory"
)
# Bounds above keep out what is a slip: the BPE trainer ends the process where its table, 66 bytes an id, has no memory.
flags.DEFINE_integer(
    "train_bpe", 0, "train a byte-level BPE of this many ids on the input and use it", 0, 2**22
)
flags.DEFINE_string("out", None, "directory to write")
flags.DEFINE_string("text_field", "text", "field or column of JSONL and Parquet that holds the text")
flags.DEFINE_integer(
    "context", 0, "trim chat samples to this many tokens, answers preserved; 0: never", 0, 2**27
)
flags.DEFINE_float(
    "held_out", 0.02, "share of documents kept for evaluation, by the hash of their names", 0.0, 0.5
)
flags.DEFINE_bool("skip_bad", False, "count unreadable files and records instead of stopping at the first")
flags.DEFINE_integer("processes", None, "worker processes; by default one a core", 1, 1024)
flags.DEFINE_integer("part_mib", 256, "input a task, and so about the size of a shard", 1, 2**20)
flags.DEFINE_string("verify", None, "check this prepared directory against its manifest and do nothing else")


def main() -> int:
    """Prepare or verify; the exit code."""
    for name in ("input", "tokenizer", "out", "verify"):
        given = FLAGS[name].value or ()
        for value in [given] if isinstance(given, str) else given:
            fields.check_path(f"--{name}", value)
    return verify(FLAGS.verify) if FLAGS.verify else make()


def spell_out(argv: list[str]) -> list[str]:
    """The arguments with a bare --verify given the directory of --out."""
    bare = [i for i, arg in enumerate(argv) if arg == "--verify" and argv[i + 1 : i + 2] in ([], [""])]
    bare += [i for i, arg in enumerate(argv[:-1]) if arg == "--verify" and argv[i + 1].startswith("-")]
    out = [arg.removeprefix("--out=") for arg in argv if arg.startswith("--out=")]
    out += [after for arg, after in itertools.pairwise(argv) if arg == "--out"]
    return [f"--verify={out[0]}" if i in bare and out else arg for i, arg in enumerate(argv)]


def make() -> int:
    """Prepare FLAGS.out from FLAGS.input, and say what came of it."""
    if not FLAGS.input or not FLAGS.out:
        raise UserError("give --input=GLOB and --out=DIR, or --verify=DIR")
    if not 0 <= FLAGS.held_out <= 0.5:  # NaN passes the flag's own bounds
        raise UserError(f"--held_out={FLAGS.held_out} must be at least 0 and at most 0.5")
    if FLAGS.train_bpe and FLAGS["tokenizer"].present:
        raise UserError("--train_bpe makes the tokenizer; do not give --tokenizer as well")
    options = prepare.Options(
        inputs=list(FLAGS.input),
        tokenizer=FLAGS.tokenizer,
        train_bpe=FLAGS.train_bpe,
        text_field=FLAGS.text_field,
        context=FLAGS.context,
        held_out=FLAGS.held_out,
        skip_bad=FLAGS.skip_bad,
        part_bytes=FLAGS.part_mib << 20,
    )
    began = time.perf_counter()
    with tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True) as bar:

        def progress(done: int, total: int, tokens: int) -> None:
            bar.total = total
            if bar.n == 0:
                bar.initial = bar.n = bar.last_print_n = done  # what an earlier run did says nothing of speed
            bar.set_postfix_str(
                f"{tokens / (time.perf_counter() - began) / 1e6:.2f} M tokens/s", refresh=False
            )
            bar.update(done - bar.n)

        manifest, was_complete = prepare.prepare(
            options, FLAGS.out, FLAGS.processes or os.cpu_count() or 1, progress
        )
    if was_complete:
        print(f"{inputs.shown(FLAGS.out)} is complete already: nothing to do")
    summarise(manifest, FLAGS.out)
    return 0


def summarise(manifest: dict, out: str) -> None:
    """Print what a prepared directory holds."""
    for split, total in manifest["totals"].items():
        print(
            f"{split:9s} {total['tokens']:>16,} tokens  {total['documents']:>12,} documents  "
            f"{total['bundles']:>9,} bundles  {total['bytes'] / 2**20:>10,.1f} MiB"
        )
    made = manifest["tokenizer"]
    print(f"tokenizer {made['kind']}, {made['vocab_size']:,} ids, {manifest['token_bytes']} bytes per token")
    print(
        f"storage   sigma {manifest['storage_factor']:.3f} (pages read over pages of tokens, "
        f"{manifest['page_bytes']} B)"
    )
    if manifest["trim"]:
        print(f"chats     {trim.Counts({k: v for k, v in manifest['trim'].items() if k != 'context'})}")
    left_out = manifest["left_out"]
    print(
        f"left out  {left_out['bad']:,} bad records and files, {left_out['not_text']:,} files that are not text, "
        f"{left_out['empty']:,} empty texts"
    )
    for kind, word in (("bad", "skipped"), ("not_text", "not text")):
        for example in left_out[f"{kind}_examples"]:
            print(f"{word:9s} {example}")
        if left_out[kind] > len(left_out[f"{kind}_examples"]):
            print(f"{word:9s} and {left_out[kind] - len(left_out[f'{kind}_examples']):,} more")
    print(f"written   {inputs.shown(out)}")


def verify(directory: str) -> int:
    """Check a prepared directory; 4 if anything in it is not as it was written."""
    problems = storage.verify(directory)
    for problem in problems:
        print(problem)
    if problems:
        print(f"{inputs.shown(directory)} is damaged: {len(problems)} problems")
        return 4
    summarise(storage.load_manifest(directory), directory)
    print("verified  every checksum is as the manifest says")
    return 0


if __name__ == "__main__":
    from zaya_jax import cli  # not above: worker processes import this file, and need no JAX

    sys.exit(cli.run(main, spell_out(sys.argv)))
