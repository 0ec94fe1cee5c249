"""Measures a machine and derives sizing rules for a run.

    python -m experiments.characterize collectives|matmul|memory --out=DIR [--config=FILE] [--chip=NAME] [--devices=N]
    python -m experiments.characterize storage --data=DIR --out=DIR [--iops_budget=70000]
    python -m experiments.characterize all --out=DIR

`collectives` sends messages of 1 KiB to GiBs over every power of two of the devices, in a node and
across; `matmul` and `memory` measure one device. Each writes DIR/NAME.json and .html: figures, and
sizing rules for the config's model; docs/hardware.md explains them. Several processes, started as
for pretrain, measure together. (`python -m pallas_kernels.tune` finds the kernels' tiles.)

`storage` reads a prepared directory as training would, with a cold and with a warm page cache, and
computes the page reads that a run needs: by default for ZAYA1's batch of 4096 sequences of 4096
tokens every 2.5 seconds.
"""

import argparse
import pathlib
import sys

from zaya_jax import cli
from zaya_jax.hardware import chips

CONFIG = str(pathlib.Path(__file__).parent.parent / "configs" / "zaya1_base.py")
DEVICES = 1024  # ZAYA1's, where only a CPU is here
PARTS = {
    "collectives": "messages between devices: seconds and bandwidth over size and devices",
    "matmul": "matrix products: rates of the model's shapes over tokens, and over tokens an expert",
    "memory": "a device's memory: bandwidth of copying over size",
}


def main() -> int:
    """Runs the measurement that the first argument names."""
    parser = cli.Parser(prog="python -m experiments.characterize", description=__doc__)
    what = parser.add_subparsers(
        dest="what", required=True, metavar="|".join((*PARTS, "storage", "all"))
    )
    for name, about in (*PARTS.items(), ("all", "all of these, without storage")):
        part = what.add_parser(name, help=about, description=f"{about}; see docs/hardware.md")
        part.set_defaults(parts=tuple(PARTS) if name == "all" else (name,), devices_on_cpu=DEVICES)
        add = part.add_argument
        add("--out", required=True, metavar="DIR", help=f"folder for {name}.json and .html")
        add(
            "--config",
            default=CONFIG,
            metavar="FILE",
            help="config with the model and batch to size; zaya1_base",
        )
        add("--chip", choices=chips.CHIPS, help="chip for the rules; this one, on a CPU mi300x")
        count = f"devices for the rules; these, on a CPU {DEVICES}"
        # fmt: off
        add("--devices", type=cli.number(int, 1, 2**24), metavar="N", help=count)
        add("--seconds", type=cli.number(float, 0.001), default=0.1, metavar="X", help="longest time per size; 0.1")
        # fmt: on
    storage_options(
        what.add_parser("storage", help="a run's load on storage, and this storage's speed")
    )
    args = parser.parse_args()
    from experiments.characterize import measure  # imports JAX, 2 s that --help does not need

    return measure.run(args)


def storage_options(parser: argparse.ArgumentParser) -> None:
    """The options of `storage`."""
    add = parser.add_argument
    # fmt: off
    add("--data", required=True, metavar="DIR", help="prepared directory to read")
    add("--out", required=True, metavar="DIR", help="directory for the page and the figures")
    add(
        "--iops_budget", type=cli.number(float, 0), default=0.0, metavar="X",
        help="the storage's page reads per second; 0, the default: as measured",
    )
    add("--seconds", type=cli.number(float, 0.1), default=5.0, metavar="X", help="longest time per measurement; 5")
    add(
        "--rows", type=cli.number(int, 1, 2**24), default=16, metavar="N",
        help="rows of a batch while measuring, a process's share of the global batch; 16",
    )
    add("--seq_len", type=cli.number(int, 1, 2**27), default=4096, metavar="N", help="context of the run; 4096")
    add(
        "--global_batch", type=cli.number(int, 1, 2**24), default=4096, metavar="N",
        help="sequences per step of the run; 4096",
    )
    add("--step_seconds", type=cli.number(float, 1e-6), default=2.5, metavar="X", help="step time of the run; 2.5")
    # fmt: on


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
