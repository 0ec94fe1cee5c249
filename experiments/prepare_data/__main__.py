"""Converts text to token shards, once, before training.

    python -m experiments.prepare_data --input='corpus/**/*.jsonl.zst' --tokenizer=tokenizer.json --out=data/web
    python -m experiments.prepare_data --input=stdlib --train_bpe=8192 --out=data/stdlib_bpe
    python -m experiments.prepare_data --input=chats.jsonl --tokenizer=bytes --context=4096 --out=data/chats
    python -m experiments.prepare_data --verify=data/web

Input is plain text (a file is a document), JSONL and Parquet (a text field, or chats of roles and
contents), text and JSONL also as .gz or .zst. Killed at any moment and started again with the same
command, it continues. Many machines share the work by --part=0/N to --part=N-1/N, and then the
command without --part. See docs/data.md.
"""

import argparse
import re
import sys

from zaya_jax import cli
from zaya_jax.config import UserError, fields, shown


def main() -> int:
    """Prepare or verify; the exit code."""
    args = parse()
    for name in ("tokenizer", "out", "verify"):
        if getattr(args, name):
            fields.check_path(f"--{name}", getattr(args, name), addresses=True)
    for pattern in args.input:
        fields.check_path("--input", pattern, addresses=True)
    from experiments.prepare_data import make  # not above: its imports take longer than --help may

    if args.verify and (args.input or args.out):
        raise UserError("--verify prepares nothing; give --input and --out in a command before it")
    return make.verify(args.verify) if args.verify else make.run_preparation(args)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = cli.Parser(prog="python -m experiments.prepare_data", description=__doc__)
    add = parser.add_argument
    # fmt: off
    add(
        "--input", action="append", default=[], metavar="GLOB",
        help="files, directories or globs, stdlib, or hf:NAME[/SUBSET][:SPLIT] of the hub; may be repeated",
    )
    add("--tokenizer", help="bytes (the default), a tokenizer.json, or a directory with one")
    # The upper bound catches typos: without memory for its table (66 bytes an id) the BPE trainer
    # ends the process.
    add(
        "--train_bpe", type=cli.number(int, 263, 2**22), default=0, metavar="N",
        help="train a byte-level BPE of this many ids on the input and use it",
    )
    add("--out", metavar="DIR", help="directory to write")
    add(
        "--text_field", default="text", metavar="NAME",
        help="field or column of JSONL and Parquet with the text (default: text)",
    )
    add(
        "--context", type=cli.number(int, 0, 2**27), default=0, metavar="N",
        help="trim chat samples to this many tokens, answers preserved; 0, the default: never",
    )
    add(
        "--held_out", type=cli.number(float, 0, 0.5), default=0.02, metavar="X",
        help="share of documents kept for evaluation, by the hash of their names (default: 0.02)",
    )
    add(
        "--skip_bad", action="store_true",
        help="skip and count unreadable files and records instead of stopping at the first",
    )
    add("--processes", type=cli.number(int, 1, 1024), metavar="N", help="tasks at a time; by default one per core")
    add(
        "--part_mib", type=cli.number(int, 1, 2**20), default=256, metavar="N",
        help="input per task, about the size of a shard (default: 256)",
    )
    add(
        "--part", type=parse_part, metavar="I/N",
        help="do the I-th of N equal parts of the work, counted from 0",
    )
    add(
        "--verify", metavar="DIR",
        help="check this prepared directory against its manifest and do nothing else",
    )
    # fmt: on
    return parser.parse_args()


def parse_part(text: str) -> tuple[int, int]:
    """The (index, count) of --part."""
    part = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not part or not int(part[1]) < int(part[2]):
        raise argparse.ArgumentTypeError(f"{shown(text)} must be I/N with 0 <= I < N")
    return int(part[1]), int(part[2])


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
