"""Checkpoints to and from the public PyTorch implementation.

    python -m experiments.checkpoint from_hf --model=DIR --workdir=DIR
    python -m experiments.checkpoint to_hf --workdir=DIR [--step=N] --out=DIR [--dtype=bfloat16] [--shard-gb=5]

DIR is a directory of transformers' `zaya`: config.json and safetensors. An imported workdir has its weights as step 0:
`experiments.generate` runs it, `experiments.pretrain` trains it further. See docs/pytorch.md.
"""

import sys
from pathlib import Path

from tqdm import tqdm

from zaya_jax import cli
from zaya_jax.checkpoint import exchange


def main() -> int:
    """Runs the subcommand that was asked for."""
    parser = cli.Parser(prog="python -m experiments.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="from_hf | to_hf")
    add = commands.add_parser("from_hf", help="make a workdir of a model directory")
    add.add_argument("--model", required=True, type=Path, metavar="DIR", help="the directory to read")
    add.add_argument("--workdir", required=True, type=Path, metavar="DIR", help="the workdir to make")
    add = commands.add_parser("to_hf", help="write a step of a workdir as a model directory")
    add.add_argument("--workdir", required=True, type=Path, metavar="DIR", help="the workdir to read")
    add.add_argument("--step", type=int, metavar="N", help="its checkpoint; by default the newest")
    add.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory to make")
    add.add_argument("--dtype", choices=list(exchange.DTYPES), help="by default as imported, else float32")
    add.add_argument(
        "--shard-gb", type=float, default=exchange.SHARD_GB, metavar="GB", help="greatest size of a file"
    )
    args = parser.parse_args()
    with tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        if args.command == "from_hf":
            made = exchange.from_hf(args.model, args.workdir, progress)
        else:
            made = exchange.to_hf(args.workdir, args.out, args.step, args.dtype, args.shard_gb, progress)
    print(f"written: {made}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
