"""The commands of `experiments.checkpoint`."""

import sys
from typing import Any

from tqdm import tqdm

from experiments.checkpoint.page import checkpoints_document, steps_table
from zaya_jax import cli
from zaya_jax.checkpoint import source
from zaya_jax.checkpoint.run import look, timings
from zaya_jax.checkpoint.vault import vault_of
from zaya_jax.config import UserError
from zaya_jax.pytorch import adapters, exchange, hub
from zaya_jax.pytorch.card import PLACEHOLDER, Publication
from zaya_jax.report.document import Table, write_page
from zaya_jax.report.text import byte_size


def run(args: Any) -> int:
    """Runs the subcommand of this name."""
    commands = (inspect, verify, from_hf, to_hf)
    return {command.__name__: command for command in commands}[args.command](args)


def inspect(args: Any) -> int:
    """Prints tables, and draws the page if asked to."""
    seen, damaged = look.summarise_all(args.workdir)
    if seen:
        print(steps_table(seen, timings.read_timings(args.workdir).get("save", {})).markdown())
    if seen or damaged:
        print(*look.remarks(args.workdir, seen, damaged), sep="\n")
    print(arrays_table(look.summarise(args.workdir, args.step)).markdown())
    if args.html:
        target = args.workdir / "checkpoints.html"
        print(f"written: {write_page(target, lambda: checkpoints_document(args.workdir).html())}")
    return cli.DONE


def arrays_table(seen: look.Summary) -> Table:
    """The arrays of a step, with sums of its parts."""
    shape = lambda lengths: " x ".join(map(str, lengths)) or "()"  # noqa: E731
    rows = []
    for part, size in seen.part_bytes().items():
        rows += [
            (
                a.name,
                shape(a.shape),
                a.dtype,
                byte_size(a.num_bytes),
                shape(a.chunk),
                str(a.num_chunks),
            )
            for a in seen.arrays
            if a.name.split(".")[0] == part
        ]
        rows.append((f"= {part}", "", "", byte_size(size), "", ""))
    title = (
        f"Step {seen.step}, by {seen.meta.get('processes', 1)} process(es), version"
        f" {seen.meta.get('version')}"
    )
    return Table(title, ("array", "shape", "type", "size", "chunk", "chunks"), rows)


def verify(args: Any) -> int:
    """A line for each step, and one for each damage."""
    vault, workdir = vault_of(args.workdir)
    listed = vault.numbered if workdir else vault.steps
    steps = listed()
    chosen = source.choose_step(args.workdir, steps, args.step)
    if args.step is not None:
        steps = [chosen]
    damaged = 0
    for step in steps:
        with _Bar() as bar:
            damages = vault.verify(step, bar.show)
        if damages and step not in listed():
            print(f"step {step}: deleted meanwhile")
            continue
        if not damages:
            print(f"step {step}: {byte_size(bar.total or 0)}, whole")
        for damage in damages:
            print(f"step {step}: {damage}")
        damaged += bool(damages)
    for name in () if workdir else vault.unfinished():
        print(f"{name}: its upload has not ended")
    if damaged:
        print(f"error: {damaged} of {len(steps)} checkpoints damaged", file=sys.stderr)
        return cli.STORAGE
    return cli.DONE


def from_hf(args: Any) -> int:
    """See `exchange`."""
    with _Bar() as bar:
        made = exchange.from_hf(args.model, args.workdir, bar.show)
    if not (made / "tokenizer").is_dir():
        print(
            f"note: {args.model} has no tokenizer; to generate, put tokenizer.json into"
            f" {made / 'tokenizer'}"
        )
    print(f"written: {made}")
    return cli.DONE


def to_hf(args: Any) -> int:
    """See `exchange`, and `adapters`; what would end the push is looked for first."""
    if args.private and not args.push:
        raise UserError("--private is about a repository; add --push=OWNER/NAME")
    if args.push and not args.license:
        raise UserError(
            f"--push={args.push} needs a license for the model's card; add --license=apache-2.0, or"
            " your choice"
        )
    if args.push:
        hub.check_access(args.push)
    publication = Publication(
        args.push or PLACEHOLDER,
        args.license,
        tuple(args.language),
        tuple(args.datasets),
        args.base_model,
    )
    of_whole_models = {
        "quantize": args.quantize,
        "dtype": args.dtype,
        "shard_gb": args.shard_gb != exchange.SHARD_GB,
    }
    for name, given in of_whole_models.items():
        if args.adapters and given:
            raise UserError(
                f"--{name} is about the weights of a whole model, which --adapters leaves out; its"
                " updates are float32, in one file; give one of the two"
            )
    if args.adapters:
        made = adapters.to_peft(args.model, args.out, publication)
    else:
        with _Bar() as bar:
            made = exchange.to_hf(
                args.model,
                args.out,
                args.dtype,
                args.shard_gb,
                bar.show,
                publication,
                args.quantize,
            )
    print(f"written: {made}")
    if args.push:
        print(f"pushed: {hub.push(made, args.push, args.private)}")
    return cli.DONE


class _Bar(tqdm):
    """Bytes done and in all, where there is a terminal."""

    def __init__(self) -> None:
        super().__init__(unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)

    def show(self, done: int, total: int) -> None:
        self.total = total
        self.update(done - self.n)
