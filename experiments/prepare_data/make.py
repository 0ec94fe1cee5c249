"""Runs a preparation or verification and prints the result, for `experiments.prepare_data`."""

import argparse
import time

from zaya_jax.config import UserError
from zaya_jax.data import prepared_store
from zaya_jax.progress import Progress
from zaya_jax.text import prepare, shard_format, text_files


def run_preparation(args: argparse.Namespace) -> int:
    """Prepare --out from --input and print a summary."""
    if not args.input or not args.out:
        raise UserError("give --input=GLOB and --out=DIR, or --verify=DIR")
    if args.train_bpe and args.tokenizer is not None:
        raise UserError("--train_bpe trains the tokenizer; omit --tokenizer")
    options = prepare.Options(
        inputs=args.input,
        tokenizer=args.tokenizer or "bytes",
        train_bpe=args.train_bpe,
        text_field=args.text_field,
        context=args.context,
        held_out=args.held_out,
        skip_bad=args.skip_bad,
        part_bytes=args.part_mib << 20,
    )
    part_name = "" if args.part is None else f"part {args.part[0]}/{args.part[1]}"
    with Progress(desc=part_name or None, unit="B") as bar:
        began, made = time.perf_counter(), 0

        def show(done: int, total: int, tokens: int) -> None:
            nonlocal made
            if bar.total is None:  # the work of an earlier run says nothing of speed
                bar.total = total
                bar.initial = bar.n = bar.last_print_n = done
            made += tokens
            speed = made / (time.perf_counter() - began) / 1e6
            bar.set_postfix_str(f"{speed:.2f} M tokens/s", refresh=False)
            bar.update(done - bar.n)

        manifest, was_complete = prepare.prepare(
            options, args.out, args.processes or 0, show, args.part
        )
    if was_complete:
        print(f"{text_files.printable(args.out)} is complete already: nothing to do")
    if manifest is None:
        print(f"{part_name} is done. When all parts are done, run the same command without --part.")
    else:
        print_summary(manifest, args.out)
        if args.context and not manifest["chats"]:
            print(f"note      --context={args.context} trims chats, and the input has none")
    return 0


def print_summary(manifest: dict, out: str) -> None:
    """Print the contents of a prepared directory."""
    for split, total in manifest["totals"].items():
        print(
            f"{split:9s} {total['tokens']:>16,} tokens  {total['documents']:>12,} documents  "
            f"{total['bundles']:>9,} bundles  {total['bytes'] / 2**20:>10,.1f} MiB"
        )
    tokenizer = manifest["tokenizer"]
    print(
        f"tokenizer {tokenizer['kind']}, {tokenizer['vocab_size']:,} ids,"
        f" {manifest['token_bytes']} bytes per token"
    )
    print(
        f"storage   read amplification sigma {manifest['storage_factor']:.3f}"
        f" ({shard_format.PAGE_BYTES}-byte pages)"
    )
    for name, count in sorted(manifest["counts"].items()):
        print(f"counted   {count:,} {name}")
        examples = manifest["examples"].get(name, ())
        for example in examples:
            print(f"          {example}")
        if examples and count > len(examples):
            print(f"          and {count - len(examples):,} more")
    print(f"written   {text_files.printable(out)}")


def verify(directory: str) -> int:
    """Check a prepared directory; 4 if anything in it is not as it was written."""
    problems = prepared_store.verify(directory)
    for problem in problems:
        print(problem)
    if problems:
        print(
            f"{text_files.printable(directory)} is damaged, as listed above: {len(problems)} in all"
        )
        return 4
    print_summary(prepared_store.load_manifest(directory), directory)
    print("verified  every checksum is as the manifest says")
    return 0
