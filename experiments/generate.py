"""Continues prompts with the model of any workdir, trained here or imported, and the tokenizer stored there.

    python -m experiments.generate --workdir=runs/tiny --prompt='def ' [--num_tokens=200] [--temperature=0.7] [--seed=1]
    python -m experiments.generate --workdir=runs/tuned --chat

The text appears as it comes and stops before a --stop text and at the tokenizer's end-of-document token. Temperature 0
(the default) always takes the likeliest token. Several --prompt are continued side by side and printed one after the
other, each as it would be alone. --chat talks: each line that it reads is a turn, in the format of fine-tuning. What
the cache takes is said on stderr. Only parameters and balancing biases are read, not the optimizer's state.
"""

import codecs
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from zaya_jax import cli, generation, schedule
from zaya_jax.checkpoint import store
from zaya_jax.config import UserError, shown
from zaya_jax.data import tokenizers
from zaya_jax.hardware import host
from zaya_jax.model import decode
from zaya_jax.model.sampling import Sampling
from zaya_jax.pytorch import exchange, tokenizer_files
from zaya_jax.train.workdir import read_config


def main() -> int:
    """Prints the prompts and their continuations, or the model's answers."""
    parser = cli.Parser(prog="python -m experiments.generate", description=__doc__)
    parser.add_argument("--workdir", required=True, type=cli.path, metavar="DIR", help="the run's folder")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what to continue, several times for several; by default nothing",
    )
    given.add_argument("--prompt_file", type=cli.path, metavar="FILE", help="a UTF-8 file to continue")
    given.add_argument("--chat", action="store_true", help="answer each line of the input, until it ends")
    parser.add_argument("--num_tokens", type=int, default=200, metavar="N", help="at most so many; 200")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of the sampling; 0: greedy"
    )
    parser.add_argument("--top_k", type=int, default=0, metavar="K", help="draw among so many tokens; 0: all")
    parser.add_argument(
        "--top_p", type=float, default=1.0, metavar="P", help="among the likeliest with this share; 1"
    )
    parser.add_argument(
        "--min_p",
        type=float,
        default=0.0,
        metavar="P",
        help="among those at least so likely as the likeliest; 0",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling, of each prompt; 0")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint; by default the newest")
    args = parser.parse_args()

    ####################################################################################################################
    # Everything that can be wrong, before the weights are read
    ####################################################################################################################
    if args.num_tokens < 1 or not 0 <= args.temperature < math.inf:
        raise UserError(
            f"--num_tokens={shown(args.num_tokens)} must be at least 1 and --temperature={args.temperature:g} a number "
            "of at least 0"
        )
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    if not 0 <= args.seed < 2**32:  # random keys would take it modulo that
        raise UserError(f"--seed={shown(args.seed)} must be at least 0 and below {2**32}")
    if "" in args.stop:
        raise UserError("--stop= is empty; give a text that ends the continuation, or leave it out")
    texts = [read_prompt(args.prompt_file)] if args.prompt_file is not None else args.prompt or [""]
    for option, values in (("--prompt", texts), ("--stop", args.stop)):
        if any("\ud800" <= c <= "\udfff" for text in values for c in text):
            raise UserError(f"{option} has bytes that are not UTF-8; convert it")
    read_config(args.workdir)  # or it is no run's folder
    step = store.latest_step(args.workdir, args.step)
    config = exchange.config_at(args.workdir, step)
    model = schedule.model_at(config, step)
    if not (args.workdir / "tokenizer").is_dir():
        raise UserError(f"--workdir={args.workdir} holds no tokenizer; put one into its folder tokenizer/")
    tokenizer = tokenizers.load(args.workdir / "tokenizer")
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    for ids in prompts:
        if max(ids) >= model.vocab_size:
            raise UserError(
                f"the prompt has token {max(ids)}, the model a vocabulary of {model.vocab_size}; "
                f"{args.workdir / 'tokenizer'} does not belong to it"
            )
        if len(ids) + args.num_tokens > model.max_position_embeddings:
            raise UserError(
                f"{len(ids)} tokens of prompt and --num_tokens={shown(args.num_tokens)} are above the model's "
                f"max_position_embeddings={model.max_position_embeddings}; give fewer"
            )

    ####################################################################################################################
    # The continuations; of a single prompt piece by piece
    ####################################################################################################################
    host.keep_compiled()
    params, balance = exchange.read_weights(args.workdir, step, model)

    def stream(prompts: list[list[int]], stop: list[str], **more) -> Iterator[list[str]]:
        return generation.stream(
            model, params, balance, tokenizer, prompts, args.num_tokens, config.precision,
            sampling=sampling, seeds=args.seed, stop=[*args.stop, *stop],
            kernels=config.kernels, **more,
        )  # fmt: skip

    def say_cache(rows: decode.Generation) -> None:
        a_token, a_row, _ = decode.cache_bytes(model, config.precision, len(prompts), 1)
        print(
            f"cache: {a_token:,} bytes a token and {a_row:,} a row, {rows.cache_bytes / 2**20:,.1f} MiB "
            f"for {len(prompts)} of up to {rows.columns:,} tokens",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    if args.chat:
        if tokenizer_files.came_with_template(args.workdir / "tokenizer") and not config.data.chats:
            print("note: the model came with a chat template of its own; --chat speaks ours", file=sys.stderr)
        return talk(
            stream, generation.Conversation(tokenizer), say_cache, model.max_position_embeddings, args
        )
    if len(prompts) == 1:
        print(texts[0], end="", flush=True)
        for (new,) in stream(prompts, [], began=say_cache):
            print(new, end="", flush=True)
        print()
        return cli.DONE
    parts = zip(*stream(prompts, [], began=say_cache), strict=True)
    for text, pieces in zip(texts, parts, strict=True):
        print(text + "".join(pieces), flush=True)
    return cli.DONE


def talk(stream, conversation: generation.Conversation, say_cache, context: int, args) -> int:
    """Answers the lines of the input until it ends; empty ones are passed over."""
    began = {"began": say_cache}
    for number, raw in enumerate(sys.stdin.buffer, 1):
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(
                f"line {number} of the input is not UTF-8 (byte {raw[error.start]:#04x} at {error.start}); convert it"
            ) from None
        if not line:
            continue
        asked, answer = conversation.ask(line), ""
        if len(asked) + args.num_tokens > context:
            raise UserError(
                f"the conversation has come to {len(asked):,} tokens, with --num_tokens={args.num_tokens} more than "
                f"the model's max_position_embeddings={context:,}; begin it anew, or give a smaller --num_tokens"
            )
        for (new,) in stream([asked], conversation.stop, ends=conversation.ends, follows=False, **began):
            print(new, end="", flush=True)
            answer += new
        print(flush=True)
        conversation.answered(answer)
        began = {}  # said once
    return cli.DONE


def read_prompt(path: Path) -> str:
    """The text of a prompt file; UserError where there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"--prompt_file={path} cannot be read ({error.strerror})") from None
    try:
        return codecs.decode(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt_file={path} is not UTF-8 (byte {raw[error.start]:#04x} at {error.start}); convert it"
        ) from None


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
