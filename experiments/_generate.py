"""Generates text and answers, for `experiments.generate`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from zaya_jax import cli, generation, library
from zaya_jax.config import UserError
from zaya_jax.hardware import host
from zaya_jax.model import decode
from zaya_jax.model.sampling import Sampling
from zaya_jax.parallel import tree

RESET = "/reset"  # a line of a chat


def run(args: argparse.Namespace) -> int:
    """Prints the prompts and their continuations, or the model's answers."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    texts = [read_prompt(args.prompt_file)] if args.prompt_file else args.prompt or [""]
    for option, values in (("--prompt", texts), ("--stop", args.stop)):
        if any("\ud800" <= c <= "\udfff" for value in values for c in value):
            raise UserError(f"{option} is not UTF-8; convert it")
    if "" in args.stop:
        raise UserError("--stop= is empty; give a text or omit it")
    host.keep_compiled()
    model = library.load(args.model, mesh=args.mesh)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(f"--model={args.model} has no tokenizer, so it cannot generate text")

    def rows(prompts: list[list[int]], ends: list[int]) -> decode.Generation:
        return model.continued(
            prompts,
            args.num_tokens,
            sampling=sampling,
            seeds=args.seed,
            ends=[tokenizer.eos_id, *ends],
        )

    def say_cache(rows: decode.Generation, count: int) -> None:
        own, precision = model.config.model, model.config.precision
        a_token, a_row, here = decode.cache_bytes(
            own, precision, rows.rows, rows.columns, tree.cache_over(model.mesh)
        )
        print(
            f"cache: {a_token:,} bytes a token and {a_row:,} a row, {here / 2**20:,.1f} MiB on a"
            f" device for {count} of up to {rows.columns:,} tokens",
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
    model: library.LanguageModel,
    args: argparse.Namespace,
    rows: Callable,
    say_cache: Callable[..., None],
) -> int:
    """Answers the lines of the input until it ends, and ignores empty lines; /reset begins a new
    conversation."""
    assert model.tokenizer is not None
    conversation = generation.Conversation(model.tokenizer, args.system)
    room, shown, left_out = model.config.model.max_position_embeddings - args.num_tokens, False, 0
    for number, raw in enumerate(sys.stdin.buffer, 1):
        line = text_of(raw, f"line {number} of the input").strip()
        if line == RESET:
            conversation.reset()
            left_out = 0
        if not line or line == RESET:
            continue
        try:
            asked = conversation.ask(line, room)
        except UserError as error:
            raise UserError(
                f"line {number} of the input: {error} beside --num_tokens={args.num_tokens}"
            ) from None
        if conversation.left_out > left_out:
            left_out = conversation.left_out
            print(
                f"note: the model does not see the {left_out} oldest turns any more",
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
