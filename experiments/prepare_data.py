"""Converts text to token shards, once, before training.

    python -m experiments.prepare_data --input='corpus/**/*.jsonl.zst' --tokenizer=tokenizer.json --out=data/web
    python -m experiments.prepare_data --input=stdlib --train_bpe=8192 --out=data/stdlib_bpe
    python -m experiments.prepare_data --input=chats.jsonl --tokenizer=bytes --context=4096 --out=data/chats
    python -m experiments.prepare_data --verify=data/web          # or --verify --out=data/web

Input is plain text (a file is a document), JSONL and Parquet (a text field, or chats of roles and contents),
text and JSONL also as .gz or .zst. Killed at any moment and started again with the same command, it continues.
Many machines share the work by --part=0/N to --part=N-1/N, and then the command without --part, or by --engine=ray.
See docs/data.md.
"""

import argparse
import re
import sys
import time
from typing import Self

from tqdm import tqdm

from zaya_jax.config import UserError, fields, shown
from zaya_jax.data import chat, inputs, prepare, storage, tokens

SAY_EVERY = 60.0  # seconds between lines without a terminal
OF_OUT = object()  # the value of a bare --verify


def main() -> int:
    """Prepare or verify; the exit code."""
    args = parse()
    for name in ("input", "tokenizer", "out", "verify"):
        given = getattr(args, name) or ()
        for value in [given] if isinstance(given, str) else given:
            fields.check_path(f"--{name}", value, addresses=True)
    return verify(args.verify) if args.verify else make(args)


def parse() -> argparse.Namespace:
    """The command line."""
    from zaya_jax import cli  # not above: worker processes import this file, and need no JAX

    parser = cli.Parser(prog="python -m experiments.prepare_data", description=__doc__)
    add = parser.add_argument
    # fmt: off
    add(
        "--input", action="append", default=[], metavar="GLOB",
        help="files, directories or globs, stdlib, or hf:NAME[/SUBSET][:SPLIT] of the hub; may be repeated",
    )
    add("--tokenizer", help="bytes (the default), a tokenizer.json, or a directory with one")
    # The upper bound catches typos: without memory for its table (66 bytes an id) the BPE trainer ends the process.
    add(
        "--train_bpe", type=cli.number(int, 263, 2**22), default=0, metavar="N",
        help="train a byte-level BPE of this many ids on the input and use it",
    )
    add("--out", metavar="DIR", help="directory to write")
    add("--text_field", default="text", metavar="NAME", help="field or column of JSONL and Parquet with the text; text")
    add(
        "--context", type=cli.number(int, 0, 2**27), default=0, metavar="N",
        help="trim chat samples to this many tokens, answers preserved; 0, the default: never",
    )
    add(
        "--held_out", type=cli.number(float, 0, 0.5), default=0.02, metavar="X",
        help="share of documents kept for evaluation, by the hash of their names; 0.02",
    )
    add("--skip_bad", action="store_true", help="count unreadable files and records instead of stopping at the first")
    add("--processes", type=cli.number(int, 1, 1024), metavar="N", help="tasks at a time; by default one per core")
    add(
        "--part_mib", type=cli.number(int, 1, 2**20), default=256, metavar="N",
        help="input per task, about the size of a shard; 256",
    )
    add(
        "--engine", choices=("processes", "ray"), default="processes",
        help="run tasks in processes of this machine (the default) or on its Ray cluster",
    )
    add(
        "--part", metavar="I/N",
        help="do the I-th of N equal parts of the work, counted from 0",
    )
    add(
        "--verify", nargs="?", const=OF_OUT, metavar="DIR",
        help="check this prepared directory (by default --out's) against its manifest and do nothing else",
    )
    # fmt: on
    args = parser.parse_args()
    if args.verify is OF_OUT:
        if not args.out:
            raise UserError("--verify needs a directory: --verify=DIR, or --verify --out=DIR")
        args.verify = args.out
    return args


def make(args: argparse.Namespace) -> int:
    """Prepare --out from --input and print a summary."""
    if not args.input or not args.out:
        raise UserError("give --input=GLOB and --out=DIR, or --verify=DIR")
    if args.train_bpe and args.tokenizer is not None:
        raise UserError("--train_bpe trains the tokenizer; omit --tokenizer")
    options = prepare.Options(
        inputs=args.input,
        tokenizer="bytes" if args.tokenizer is None else args.tokenizer,
        train_bpe=args.train_bpe,
        text_field=args.text_field,
        context=args.context,
        held_out=args.held_out,
        skip_bad=args.skip_bad,
        part_bytes=args.part_mib << 20,
    )
    part = None if args.part is None else parse_part(args.part)
    with Display("" if part is None else f"part {args.part}: ") as display:
        manifest, was_complete = prepare.prepare(
            options, args.out, args.processes or 0, display.tell, args.engine, part
        )
    if was_complete:
        print(f"{inputs.shown(args.out)} is complete already: nothing to do")
    if manifest is None:
        print(f"part {args.part} is done: next the other parts, then the same command without --part")
    else:
        summarise(manifest, args.out)
    return 0


def parse_part(text: str) -> tuple[int, int]:
    """The (index, count) that I/N names; UserError where it names no part."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--part={shown(text)} is no part: give I/N, from 0/N to N-1/N")
    return int(found[1]), int(found[2])


class Display:
    """How far it has come: a bar at a terminal, elsewhere a line a minute, since a log keeps all of them."""

    def __init__(self, title: str) -> None:
        self._title, self._began, self._said = title, time.perf_counter(), time.perf_counter()
        self._bar = tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True, desc=title.rstrip(": ") or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, now: prepare.Progress) -> None:
        """Show it, if it is time."""
        seconds = time.perf_counter() - self._began
        text = f"{now.tasks:,}/{now.total_tasks:,} tasks, {now.tokens / seconds / 1e6:.2f} M tokens/s"
        if self._bar.disable:
            if time.perf_counter() - self._said >= SAY_EVERY:
                self._said = time.perf_counter()
                print(f"{self._title}{text}, {now.done / 1e9:,.1f} of {now.total / 1e9:,.1f} GB", flush=True)
            return
        self._bar.total = now.total
        if self._bar.n == 0:  # the work of an earlier run says nothing of speed
            self._bar.initial = self._bar.n = self._bar.last_print_n = now.done
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(now.done - self._bar.n)


def summarise(manifest: dict, out: str) -> None:
    """Print the contents of a prepared directory."""
    for split, total in manifest["totals"].items():
        print(
            f"{split:9s} {total['tokens']:>16,} tokens  {total['documents']:>12,} documents  "
            f"{total['bundles']:>9,} bundles  {total['bytes'] / 2**20:>10,.1f} MiB"
        )
    made = manifest["tokenizer"]
    print(f"tokenizer {made['kind']}, {made['vocab_size']:,} ids, {manifest['token_bytes']} bytes per token")
    print(f"storage   sigma {manifest['storage_factor']:.3f} (pages read over pages of tokens, {tokens.PAGE_BYTES} B)")
    if manifest["trim"]:
        print(f"chats     {chat.Counts({k: v for k, v in manifest['trim'].items() if k != 'context'})}")
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

    sys.exit(cli.exit_code(main))
