"""Compiles the training step for absent chips and reports its cost.

    python -m experiments.compile --config=FILE --target=mi300x --devices=1024 --out=DIR [--config.KEY=VALUE ...]
        [--phase=NAME] [--at_once=N]

For each phase it compiles `pretrain`'s own step and reports memory by kind, HBM traffic and kernel
launches by scope, FLOPs and their useful share, collectives, and a lower bound on the time. If the
step does not fit, experiments.plan --search ranks what does. It writes compile.md, compile.json and
compile.html. GPUs need their compilers: run make setup-targets once.

A batch ramp's smaller steps are not compiled. --at_once=N processes N sequences at once on each row
of data x expert and rounds the config's batch to whole micro-batches, so one config serves any
number of devices.
"""

from zaya_jax import cli
from zaya_jax.hardware import chips


def parser() -> cli.Parser:
    """The options."""
    options = cli.Parser(prog="python -m experiments.compile", description=__doc__)
    options.add_config("zaya1_base.py")
    add = options.add_argument
    add("--target", default="cpu", choices=[*chips.CHIPS, "cpu"], help="the chip to compile for")
    add(
        "--devices",
        type=cli.number(int, 1, 2**20),
        default=1,
        metavar="N",
        help="how many of them; 1",
    )
    add("--out", metavar="DIR", help="folder for the results")
    add("--phase", metavar="NAME", help="the one phase to compile; by default all")
    at_once = "sequences at once on each row of data x expert; 0: as the config says"
    add("--at_once", type=cli.number(int, 0), default=0, metavar="N", help=at_once)
    return options


def main() -> int:
    """Compiles each phase's step."""
    args = parser().parse_args()
    from experiments.compile import page  # imports JAX, 2 s that --help does not need

    return page.run(args)


if __name__ == "__main__":
    cli.leave(cli.exit_code(main))
