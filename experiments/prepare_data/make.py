"""Prepares and verifies, and words the results, for `experiments.prepare_data`."""

import argparse
import time

from zaya_jax.config import UserError
from zaya_jax.data import storage
from zaya_jax.progress import Progress
from zaya_jax.text import chat, inputs, prepare, tokens


def make(args: argparse.Namespace, part: tuple[int, int] | None) -> int:
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
    with Progress(desc=None if part is None else f"part {args.part}", unit="B") as bar:
        began = time.perf_counter()

        def tell(now: prepare.Progress) -> None:
            if bar.total is None:  # the work of an earlier run says nothing of speed
                bar.total = now.total
                bar.initial = bar.n = bar.last_print_n = now.done
            speed = now.tokens / (time.perf_counter() - began)
            text = f"{now.tasks:,}/{now.total_tasks:,} tasks, {speed / 1e6:.2f} M tokens/s"
            bar.set_postfix_str(text, refresh=False)
            bar.update(now.done - bar.n)

        manifest, was_complete = prepare.prepare(
            options, args.out, args.processes or 0, tell, args.engine, part
        )
    if was_complete:
        print(f"{inputs.shown(args.out)} is complete already: nothing to do")
    if manifest is None:
        print(
            f"part {args.part} is done: next the other parts, then the same command without --part"
        )
    else:
        summarise(manifest, args.out)
    return 0


def summarise(manifest: dict, out: str) -> None:
    """Print the contents of a prepared directory."""
    for split, total in manifest["totals"].items():
        print(
            f"{split:9s} {total['tokens']:>16,} tokens  {total['documents']:>12,} documents  "
            f"{total['bundles']:>9,} bundles  {total['bytes'] / 2**20:>10,.1f} MiB"
        )
    made = manifest["tokenizer"]
    print(
        f"tokenizer {made['kind']}, {made['vocab_size']:,} ids, {manifest['token_bytes']} bytes per"
        " token"
    )
    print(
        f"storage   sigma {manifest['storage_factor']:.3f} (pages read over pages of tokens,"
        f" {tokens.PAGE_BYTES} B)"
    )
    if manifest["trim"]:
        print(
            "chats    "
            f" {chat.Counts({k: v for k, v in manifest['trim'].items() if k != 'context'})}"
        )
        learnt = {k: v for k, v in (manifest.get("chats") or {}).items() if k != "template"}
        print(f"learnt    {chat.Counts(learnt).learnt}")
    left_out = prepare.LeftOut()
    left_out.add(manifest["left_out"])
    print(f"left out  {left_out}")
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
        print(f"{inputs.shown(directory)} is damaged, as listed above: {len(problems)} in all")
        return 4
    summarise(storage.load_manifest(directory), directory)
    print("verified  every checksum is as the manifest says")
    return 0
