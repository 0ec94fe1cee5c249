"""Trains a model as a config says, and writes a report; the run itself is in zaya_jax/run.py.

    python -m experiments.pretrain [--config=experiments/configs/tiny.py] [--workdir=runs/tiny] [--config.KEY=VALUE ...]
        [--coordinator=HOST:PORT --num_processes=N --process_id=I]     (or from Slurm or variables: docs/clusters.md)
    python -m experiments.pretrain --config=FILE --describe            the run's phases, and nothing else

Without options it trains `tiny`. All files of a run are in its workdir; the same command continues
from the newest checkpoint as if it had never stopped, bit for bit on CPUs (for GPUs see
docs/checkpoints.md). Exit codes: 0 done, 2 bad input, 3 unhealthy (no update took effect for many
steps in a row or in the whole run, the last loss or gradient was not finite, or the loss jumped
again and again: docs/guard.md), 4 storage that fails or is damaged, 5 a device computes wrongly, 75
start the same command again (after a signal, or because the next phase has another mesh), 130 and
143 stopped at once: by a second signal, or by the first one during the set-up. 1 is an unexpected
error.
"""

import importlib
import os
from typing import Any

from zaya_jax import cli
from zaya_jax.cluster import rank


def main() -> int:
    """The program: its options are --config, the config's keys, --workdir, and this process's place
    among several."""
    parser = cli.Parser(prog="python -m experiments.pretrain", description=__doc__)
    parser.add_config("tiny.py")
    parser.add_argument(
        "--workdir", metavar="DIR", help="the run's folder; by default runs/<config name>"
    )
    parser.add_argument(
        "--describe", action="store_true", help="print the phases of the run and exit"
    )
    rank.add_options(parser)
    args = parser.parse_args()

    # Importing JAX takes 2 s, and --help should not wait for it.
    from zaya_jax.cluster import multihost
    from zaya_jax.hardware import host
    from zaya_jax.run import train
    from zaya_jax.training import fork, notes, unused
    from zaya_jax.training import recipe as recipe_lib
    from zaya_jax.training.workdir import folder_of

    if args.describe:
        recipe = recipe_lib.make_recipe(
            fork.fill_in(
                args.config, fork.resolve(args.config, folder_of(args.config, args.workdir))
            )
        )
        recipe_lib.check(recipe, recipe.config.run.fork_step)
        print(
            notes.phase_table(recipe),
            *map("note: {}".format, unused.notes(recipe.config)),
            sep="\n",
        )
        return cli.DONE
    # on CPUs: freed memory stays with the process, steps are dispatched one by one
    host.keep_memory()
    return multihost.run_distributed(
        lambda: train(args.config, folder_of(args.config, args.workdir), _faults()), args
    )


def _faults() -> Any:
    """Injected faults, where tests ask for them; not part of the library."""
    if not os.environ.get("ZAYA_FAULTS"):
        return None
    return importlib.import_module("tools.faults").requested()


if __name__ == "__main__":
    cli.leave(cli.exit_code(main))
