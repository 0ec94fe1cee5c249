"""The programs as commands of an installed package: `zaya-pretrain` is `python -m
experiments.pretrain`, and so on."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs the program that this command is called after, as `python -m` would."""
    name = Path(sys.argv[0]).stem.removeprefix("zaya-").replace("-", "_")
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
