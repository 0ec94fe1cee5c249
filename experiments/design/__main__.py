"""Compares shapes of ZAYA near two budgets for a chip, by formulas: how fast each trains, and how fast it answers.

    python -m experiments.design --chip=mi300x --devices=1024 --active=760M --total=8.3B --out=DIR [--context=4096]
        [--vocab=N] [--figures=FILE_OR_FOLDER] [--write=N]

A shape is a hidden width, heads, a number of experts, their width and a depth, with one expert a token.
Those near both budgets of weights (the embedding not counted) are planned: training tokens per second by
the formulas of experiments.plan, and on one device the time from token to token, and of reading a prompt.
It writes design.md, design.json, design.html and the picture, design.svg. --write=N also writes the config
of shape N. Budgets are held, the loss is not: docs/design.md says what the comparison cannot see.
"""

from zaya_jax import cli
from zaya_jax.hardware import clusters

SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def weights(value: str) -> float:
    """A number of weights: 760M, 8.3B or 760000000."""
    scale = SCALES.get(value[-1:].upper())
    return cli.number(float, 1, 1e15)(f"{float(value[:-1]) * scale:.0f}" if scale else value)


def parser() -> cli.Parser:
    """The options."""
    options = cli.Parser(prog="python -m experiments.design", description=__doc__)
    add, whole = options.add_argument, cli.number(int, 1, 2**20)
    names = sorted({cluster.chip for cluster in clusters.CLUSTERS.values()})
    add("--chip", default="mi300x", choices=names, help="to train and to serve on")
    add("--devices", type=whole, default=1024, metavar="N", help="that train; 1024")
    add("--active", type=weights, default="760M", metavar="N", help="weights that a token uses")
    add("--total", type=weights, default="8.3B", metavar="N", help="all weights")
    add("--context", type=cli.number(int, 16, 2**24), default=4096, metavar="N", help="tokens")
    add("--vocab", type=cli.number(int, 1, 2**26), default=262_272, metavar="N", help="its size")
    add(
        "--figures",
        default="",
        metavar="PATH",
        help="of experiments.characterize, a file or its folder",
    )
    add("--write", type=whole, metavar="N", help="write the config of shape N into --out")
    add("--out", metavar="DIR", help="the folder for the comparison")
    return options


def main() -> int:
    """Formulas in, three files out, and perhaps a config."""
    args = parser().parse_args()
    from experiments.design import page  # imports JAX, 2 s that --help does not need

    return page.run(args)


if __name__ == "__main__":
    cli.leave(cli.exit_code(main))
