"""Inspects and verifies a run's checkpoints, and exchanges weights with transformers.

    python -m experiments.checkpoint inspect --workdir=DIR [--step=N] [--html]
    python -m experiments.checkpoint verify --workdir=DIR|URL [--step=N]
    python -m experiments.checkpoint from_hf --model=DIR|OWNER/NAME --workdir=DIR
    python -m experiments.checkpoint to_hf --model=RUN[@N] --out=DIR [--dtype=bfloat16] [--shard_gb=5]
                                          [--adapters | --quantize=fp8|mxfp4]
                                          [--push=OWNER/NAME --license=ID [--private]]

A model directory is transformers' `zaya`: config.json and safetensors. from_hf makes a workdir of
one, with the weights as step 0, to train on in place; every other program takes the directory as it
is. to_hf --push uploads what it wrote to the Hugging Face hub. URL is a place as in
`checkpoint.durable`. Exit codes: 0 done, 2 bad input, 4 damaged, or not pushed. See
docs/checkpoints.md and docs/pytorch.md.
"""

import sys
from collections.abc import Callable
from typing import Any

from zaya_jax import cli

DTYPES = ("float32", "bfloat16", "float16")


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="python -m experiments.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str) -> Any:
        return commands.add_parser(
            name, help=about, description=f"{about}; see docs/checkpoints.md"
        )

    add = command("inspect", "list the checkpoints of a run, their contents and times")
    add.add_argument(
        "--workdir", required=True, type=cli.path, metavar="DIR", help="the run's folder"
    )
    add.add_argument(
        "--step", type=int, metavar="N", help="step whose arrays are listed; by default the newest"
    )
    add.add_argument("--html", action="store_true", help="also write a page, DIR/checkpoints.html")
    add = command("verify", "find every changed, truncated or missing file")
    add.add_argument(
        "--workdir",
        required=True,
        type=cli.path_or_address,
        metavar="DIR|URL",
        help="the run's folder, or the place of its copies",
    )
    add.add_argument("--step", type=int, metavar="N", help="its checkpoint; by default all")
    _add_exports(command)
    return parser


def _add_exports(command: Callable[[str, str], Any]) -> None:
    """The commands that exchange weights with other programs."""
    add = command("from_hf", "make a workdir of a model directory")
    add.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="the directory to read, or OWNER/NAME on the hub",
    )
    add.add_argument(
        "--workdir", required=True, type=cli.path, metavar="DIR", help="the workdir to make"
    )
    add = command("to_hf", "write any model as a model directory")
    add.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a run's folder, FOLDER@STEP, or as for from_hf",
    )
    add.add_argument(
        "--out", required=True, type=cli.path, metavar="DIR", help="the directory to make"
    )
    add.add_argument("--dtype", choices=DTYPES, help="by default as imported, otherwise float32")
    add.add_argument(
        "--quantize",
        choices=("fp8", "mxfp4"),
        help="store the experts so, as compressed-tensors does",
    )
    add.add_argument(
        "--shard_gb",
        type=cli.number(float, 0.01),
        default=5.0,
        metavar="GB",
        help="greatest size of a file",
    )
    add.add_argument(
        "--adapters",
        action="store_true",
        help="write a run's low-rank updates alone, in PEFT's format",
    )
    add.add_argument("--push", metavar="OWNER/NAME", help="then upload it to this repository")
    add.add_argument(
        "--private",
        action="store_true",
        help="make the repository, if there is none, a private one",
    )
    _add_card(add)


def _add_card(add: Any) -> None:
    """What the card of an export says, and its owner alone knows."""
    add.add_argument("--license", metavar="ID", help="the card's: apache-2.0, mit, other ..")
    add.add_argument(
        "--language", nargs="+", default=(), metavar="CODE", help="the card's: en, de .."
    )
    add.add_argument(
        "--datasets", nargs="+", default=(), metavar="OWNER/NAME", help="the card's, on the hub"
    )
    add.add_argument(
        "--base_model",
        metavar="OWNER/NAME",
        help="the model that the run began with; by default as the run names it",
    )


def main() -> int:
    """Runs the subcommand that was asked for."""
    args = _parser().parse_args()
    from experiments.checkpoint import commands  # imports JAX, 2 s that --help does not need

    return commands.run(args)


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
