"""Continues a prompt with the model of any workdir, trained here or imported, and the tokenizer stored there.

    python -m experiments.generate --workdir=runs/tiny --prompt='def ' [--num_tokens=200] [--temperature=0.7] [--seed=1]

The text appears as it comes and stops at the tokenizer's end-of-document token. Temperature 0 (the default) always
takes the likeliest token. Only parameters and balancing biases are read, not the optimizer's state.
"""

import codecs
import math
import sys
from pathlib import Path

from zaya_jax import cli, schedule
from zaya_jax.checkpoint import store
from zaya_jax.config import UserError, shown
from zaya_jax.data import tokenizers
from zaya_jax.hardware import host
from zaya_jax.model import decode
from zaya_jax.model.sampling import Sampling
from zaya_jax.pytorch import exchange
from zaya_jax.train.workdir import read_config


def main() -> int:
    """Prints the prompt and its continuation."""
    parser = cli.Parser(prog="python -m experiments.generate", description=__doc__)
    parser.add_argument("--workdir", required=True, type=cli.path, metavar="DIR", help="the run's folder")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default="", metavar="TEXT", help="what to continue; by default nothing")
    prompts.add_argument("--prompt_file", type=cli.path, metavar="FILE", help="a UTF-8 file to continue")
    parser.add_argument("--num_tokens", type=int, default=200, metavar="N", help="at most so many; 200")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of the sampling; 0: greedy"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling; 0")
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
    if not 0 <= args.seed < 2**32:  # random keys would take it modulo that
        raise UserError(f"--seed={shown(args.seed)} must be at least 0 and below {2**32}")
    prompt = read_prompt(args.prompt_file) if args.prompt_file is not None else args.prompt
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise UserError("--prompt has bytes that are not UTF-8; convert it")
    read_config(args.workdir)  # or it is no run's folder
    step = store.latest_step(args.workdir, args.step)
    config = exchange.config_at(args.workdir, step)
    model = schedule.model_at(config, step)
    if not (args.workdir / "tokenizer").is_dir():
        raise UserError(f"--workdir={args.workdir} holds no tokenizer; put one into its folder tokenizer/")
    tokenizer = tokenizers.load(args.workdir / "tokenizer")
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
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
    # The continuation, written piece by piece; a piece may end within a character
    ####################################################################################################################
    host.keep_compiled()
    params, balance = exchange.read_weights(args.workdir, step, model)
    print(prompt, end="", flush=True)
    text = Text(tokenizer)
    for (new,) in decode.stream(
        model, params, balance, [ids], args.num_tokens, config.precision,
        sampling=Sampling(args.temperature), seeds=args.seed, ends=[tokenizer.eos_id],
    ):  # fmt: skip
        print(text.add(new), end="", flush=True)
    print(text.rest())
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


class Text:
    """Tokens to text as they come: what is still a part of a character waits for the rest."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, ids: list[int]) -> str:
        """The text that these tokens settle."""
        self._ids += ids
        return self._advance(self._tokenizer.decode(self._ids).rstrip("\N{REPLACEMENT CHARACTER}"))

    def rest(self) -> str:
        """What was held back."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown += new
        return new


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
