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

import sys

from zaya_jax import cli
from zaya_jax.config import fields


def parser() -> cli.Parser:
    """The options."""
    found = cli.Parser(prog="python -m experiments.generate", description=__doc__)
    add, share = found.add_argument, cli.number(float, 0, 1)
    add("--model", required=True, metavar="MODEL", help=f"the model: {fields.MODEL_FORMS}")
    given = found.add_mutually_exclusive_group()
    given.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be repeated; by default empty",
    )
    given.add_argument(
        "--prompt_file", type=cli.path, metavar="FILE", help="a UTF-8 file to continue"
    )
    given.add_argument(
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
    return found


def main() -> int:
    """Prints the prompts and their continuations, or the model's answers."""
    args = parser().parse_args()
    from experiments import _generate  # imports JAX, 2 s that --help does not need

    return _generate.run(args)


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
