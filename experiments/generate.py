"""Generates text from prompts, with any model and its tokenizer.

    python -m experiments.generate --model=runs/tiny --prompt='def ' [--num_tokens=200] [--temperature=0.7] [--seed=1]
    python -m experiments.generate --model=runs/tuned --chat
    python -m experiments.generate --model=runs/long --prompt_file=book.txt --mesh=context=8

The text is printed as it is generated. It ends before a --stop text or at the tokenizer's
end-of-document token. Temperature 0 (the default) always takes the likeliest token. Several
--prompt are generated together and printed one after the other, each as if alone. --chat reads each
line of the input as a turn, in the format of the model's own chat template, otherwise in that of
fine-tuning. --mesh splits the cache over devices. The size of the cache is printed on stderr. The
optimizer's state is not read.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_jax import cli
from zaya_jax.config import UserError, fields

if TYPE_CHECKING:
    from zaya_jax import library

RESET = "/reset"  # a line of a chat


def parser() -> cli.Parser:
    """The options."""
    options = cli.Parser(prog="python -m experiments.generate", description=__doc__)
    add, share = options.add_argument, cli.number(float, 0, 1)
    add("--model", required=True, metavar="MODEL", help=f"the model: {fields.MODEL_FORMS}")
    options.add_own_parts()
    texts = options.add_mutually_exclusive_group()
    texts.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be repeated; by default empty",
    )
    texts.add_argument(
        "--prompt_file", type=cli.path, metavar="FILE", help="a UTF-8 file to continue"
    )
    texts.add_argument(
        "--chat",
        action="store_true",
        help="answer each line of the input, until it ends; /reset forgets",
    )
    add("--system", default="", metavar="TEXT", help="the conversation's system text, with --chat")
    add(
        "--num_tokens",
        type=cli.number(int, 1),
        default=200,
        metavar="N",
        help="maximum of new tokens; 200",
    )
    add(
        "--temperature",
        type=cli.number(float, 0),
        default=0.0,
        metavar="T",
        help="sampling temperature; 0: greedy",
    )
    add(
        "--top_k",
        type=cli.number(int, 0),
        default=0,
        metavar="K",
        help="sample among this many tokens; 0: all",
    )
    add(
        "--top_p",
        type=share,
        default=1.0,
        metavar="P",
        help="sample among the likeliest tokens with this total probability; 1",
    )
    add(
        "--min_p",
        type=share,
        default=0.0,
        metavar="P",
        help="minimum probability relative to the likeliest token; 0",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    seeds = cli.number(int, 0, 2**32 - 1)  # random keys take seeds modulo this
    add("--seed", type=seeds, default=0, metavar="N", help="seed of each prompt's sampling; 0")
    add(
        "--mesh",
        type=cli.mesh,
        metavar="AXIS=N",
        help="context=8 splits the cache; by default one device",
    )
    return options


def main() -> int:
    """Prints the prompts and their continuations, or the model's answers."""
    args = parser().parse_args()
    # These import JAX, 2 s that --help does not need.
    from zaya_jax import generation, library
    from zaya_jax.hardware import host
    from zaya_jax.model import decode
    from zaya_jax.model.sampling import Sampling
    from zaya_jax.parallel import tree

    # Made here, so that wrong options are refused before the model is read.
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    if sampling.unused:
        print(f"note: {sampling.unused}", file=sys.stderr, flush=True)
        sampling = Sampling()
    texts = [read_prompt(args.prompt_file)] if args.prompt_file else args.prompt or [""]
    if args.system and not args.chat:
        raise UserError("--system applies to a conversation; give --chat or omit it")
    for option, values in (("--prompt", texts), ("--stop", args.stop), ("--system", [args.system])):
        if any("\ud800" <= c <= "\udfff" for value in values for c in value):
            raise UserError(f"{option} is not UTF-8; convert it")
    if "" in args.stop:
        raise UserError("--stop= is empty; give a text or omit it")
    host.keep_compiled()
    model = library.load(args.model, mesh=args.mesh, **cli.own_parts(args))
    if args.mesh and tree.cache_over(model.mesh).mesh is None:
        print("note: --mesh has no effect without context=N of at least 2", file=sys.stderr)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(f"--model={args.model} has no tokenizer, so it cannot generate text")

    def rows(prompts: list[list[int]], ends: list[int]) -> decode.Continuation:
        return model.continued(
            prompts,
            args.num_tokens,
            **dataclasses.asdict(sampling),
            seed=args.seed,
            ends=[tokenizer.eos_id, *ends],
        )

    def say_cache(rows: decode.Continuation, count: int) -> None:
        per_token, per_row, total = decode.cache_bytes(
            model.config.model,
            model.config.precision,
            rows.num_rows,
            rows.cache_length,
            tree.cache_over(model.mesh),
        )
        print(
            f"cache: {per_token:,} bytes a token and {per_row:,} a row, {total / 2**20:,.1f} MiB on"
            f" a device for {count} of up to {rows.cache_length:,} tokens",
            file=sys.stderr,
            flush=True,
        )

    if args.chat:
        return talk(model, args, rows, say_cache)
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    going = rows(prompts, [])
    say_cache(going, len(prompts))
    if len(prompts) == 1:
        print(texts[0], end="", flush=True)
        for (new,) in generation.stream(going, tokenizer, prompts, args.stop):
            print(new, end="", flush=True)
        print()
        return cli.DONE
    for text, new in zip(
        texts, generation.generate(going, tokenizer, prompts, args.stop), strict=True
    ):
        print(text + new, flush=True)
    return cli.DONE


def talk(
    model: "library.LanguageModel",
    args: argparse.Namespace,
    rows: Callable,
    say_cache: Callable[..., None],
) -> int:
    """Answers the lines of the input until it ends, and ignores empty lines; /reset begins a new
    conversation."""
    from zaya_jax import generation

    assert model.tokenizer is not None
    conversation = generation.Conversation(model.tokenizer, args.system)
    room, shown = model.config.model.max_position_embeddings - args.num_tokens, False
    for number, raw in enumerate(sys.stdin.buffer, 1):
        line = text_of(raw, f"line {number} of the input").strip()
        if line == RESET:
            conversation.reset()
        if not line or line == RESET:
            continue
        left_out = conversation.left_out
        with fields.naming(f"line {number} of the input"):
            asked = conversation.ask(line, room)
        if conversation.left_out > left_out:
            print(
                f"note: the model does not see the {conversation.left_out} oldest turns any more",
                file=sys.stderr,
                flush=True,
            )
        going, answer = rows([asked], conversation.ends), ""
        if not shown:
            say_cache(going, 1)
        shown, stop = True, [*args.stop, *conversation.stop]
        for (new,) in generation.stream(going, model.tokenizer, [asked], stop, follows=False):
            print(new, end="", flush=True)
            answer += new
        print(flush=True)
        conversation.answered(answer, going.ids[0])
    return cli.DONE


def read_prompt(path: Path) -> str:
    """The text of a prompt file; UserError if it cannot be read."""
    try:
        return text_of(path.read_bytes(), f"--prompt_file={path}")
    except OSError as error:
        raise UserError(f"--prompt_file={path} cannot be read ({error.strerror})") from None


def text_of(raw: bytes, name: str) -> str:
    """Decodes UTF-8 without changing line ends."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 (byte {raw[error.start]:#04x} at {error.start}); convert it"
        ) from None


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
