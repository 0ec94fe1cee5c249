"""Plans a run on a cluster by formulas, before anything is compiled and without any device.

    python -m experiments.plan --config=FILE --cluster=mi300x_pollara --devices=1024 --out=DIR [--config.KEY=VALUE ...]
        [--at_once=N] [--mtbf_hours=H] [--search]

For each phase it computes memory, HBM traffic, FLOPs and network traffic of a step by purpose, the
parts of its time, tokens per second, days and GPU-hours, the load on storage, how often to save,
and the time lost to failures. It writes plan.md, plan.json and plan.html. --search ranks meshes,
micro-batches and remat that fit. --at_once=N is as in experiments.compile; with
--config.hardware.figures=PATH, of experiments.characterize, measured rates take the place of assumed
ones. docs/planning.md lists the assumptions.
"""

from zaya_jax import cli
from zaya_jax.hardware import clusters


def parser() -> cli.Parser:
    """The options."""
    options = cli.Parser(prog="python -m experiments.plan", description=__doc__)
    options.add_config("zaya1_base.py")
    add, whole = options.add_argument, cli.number(int, 1, 2**20)
    add("--cluster", default="mi300x_pollara", choices=list(clusters.CLUSTERS), help="to plan for")
    add("--devices", type=whole, default=1024, metavar="N", help="how many of its devices; 1024")
    add("--out", metavar="DIR", help="the folder for the plan")
    at_once = "sequences at once on each row of data x expert; 0: as the config says"
    add("--at_once", type=cli.number(int, 0), default=0, metavar="N", help=at_once)
    add(
        "--mtbf_hours",
        type=cli.number(float, 1e-3, 1e12),
        metavar="H",
        help="between failures of one device; by default those of Llama 3's training",
    )
    add("--search", action="store_true", help="rank the meshes, micro-batches and remat that fit")
    return options


def main() -> int:
    """Formulas in, three files out."""
    args = parser().parse_args()
    from experiments.plan import page  # imports JAX, 2 s that --help does not need

    return page.run(args)


if __name__ == "__main__":
    cli.leave(cli.exit_code(main))
