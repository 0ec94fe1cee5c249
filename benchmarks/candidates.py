"""Finds the tiles that are worth measuring on a card, by compiling them without it.

    make setup-targets                      # once
    python -m benchmarks.candidates [--chips mi300x h200] [--operators NAME ...]

writes pallas_kernels/candidates.json: for each kernel those of `candidates.points` that spill no
register, fit the shared memory, and whose machine code no earlier one has. Kernels are compiled as
a step of zaya1_base has them. Each program has the next tile of every kernel of an operator; where
one of them does not compile, halves of them are compiled. On a busy machine of two cores experts
took eight minutes, CCA's mixing one. docs/compiling.md says what the file has.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import absent, machine_code
from pallas_kernels import candidates, chip, table, trying
from pallas_kernels.candidates import Tile
from pallas_kernels.trying import TriedCall
from zaya_jax.config import read_config
from zaya_jax.hardware import targets
from zaya_jax.training import kernels

CHIPS = ("mi300x", "h200")
CONFIG = Path(__file__).parents[1] / "experiments" / "configs" / "zaya1_base.py"


def step_cases(operator: str) -> list[TriedCall]:
    """An operator as a training step of zaya1_base has it, and `tune` times it."""
    request = kernels.tuning_request(read_config(str(CONFIG)), 1)
    return [case for case in trying.request_cases(request, operator) if case.timed]


def compiled(
    name: str, case: TriedCall, tiles: dict[str, Tile], own: tuple[str, ...] = ("all",)
) -> jax.stages.Compiled:
    """A case's result and gradients, compiled for an absent chip with these tiles."""
    given = tuple((kernel, tuple(tile.items())) for kernel, tile in tiles.items())
    target = chip.chip_of(targets.devices(name, 1)[0]).taking(own)._replace(tiles=given)
    like = tuple(a.like for a in case.arguments(case.size)), case.sums(case.size)
    with chip.making(target):
        return absent.compiled(name, case.call(jnp.bfloat16), *like)


def main() -> int:
    """Compiles all, and writes the file after each operator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--operators", nargs="+", choices=chip.OPERATORS, default=chip.OPERATORS)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    file = candidates.FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, operator in itertools.product(options.chips, options.operators):
        here = chip.chip_of(targets.devices(name, 1)[0])
        known, begun = found.setdefault(here.architecture, {}), time.perf_counter()
        for kernel, tiles in distinct(name, operator).items():
            known[kernel] = tiles
            print(f"{name}: {kernel}: {len(tiles)}", flush=True)
        print(f"{name}: {operator} took {time.perf_counter() - begun:.0f} s", flush=True)
        file.write_text(as_text(found), encoding="utf-8")
    return 0


def distinct(name: str, operator: str) -> dict[str, list[Tile]]:
    """The tiles of each of an operator's kernels that are worth measuring."""
    here = chip.chip_of(targets.devices(name, 1)[0])
    rows = table.rows_of_operators(table.rows(here.architecture), [operator])
    points = {kernel: candidates.points(row["tile"]) for kernel, row in rows.items()}
    found: dict[str, list[Tile]] = {kernel: [] for kernel in points}
    seen: set[Any] = set()
    for number in range(max(map(len, points.values()))):
        tiles = {kernel: own[number] for kernel, own in points.items() if number < len(own)}
        for code in codes(name, operator, tiles):
            tile = tiles.get(code.name)  # None of kernels without one, and of those of other turns
            if tile is None or code.spills or (code.name, code.digest) in seen:
                continue
            seen.add((code.name, code.digest))
            if tile not in found[code.name]:
                found[code.name].append(tile)
    return found


def codes(name: str, operator: str, tiles: dict[str, Tile]) -> list[machine_code.Code]:
    """The machine code of these kernels, of those that compile."""
    found = []
    for case in step_cases(operator):
        try:
            found += machine_code.read_kernels(compiled(name, case, tiles))
        except Exception as error:
            if len(tiles) == 1:
                print(f"{name}: {tiles}: {str(error).splitlines()[0][:120]}", flush=True)
                continue
            pairs = list(tiles.items())
            for half in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
                found += [c for c in codes(name, operator, dict(half)) if c.name in dict(half)]
            return found
    return found


def as_text(found: dict[str, Any]) -> str:
    """JSON with a line for each tile."""
    text = json.dumps(found, indent=1)
    for left, right in (("{\n    ", "{"), (",\n    ", ", "), ("\n   }", "}")):
        text = text.replace(left, right)
    return text + "\n"


if __name__ == "__main__":
    sys.exit(main())
