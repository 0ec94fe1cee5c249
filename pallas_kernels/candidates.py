"""The tiles that `tune` measures for each kernel.

`candidates.json` has those that are worth a card's time on an architecture: compiled without the
card, they spill no register, fit the shared memory, and differ in their machine code
(`python -m benchmarks.candidates`). Elsewhere all `points` are.
"""

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Tile = dict[str, int]

FILE = Path(__file__).with_name("candidates.json")
LEAST = {"rows": 16, "columns": 16, "keys": 16, "depth": 16, "warps": 2, "threads": 128}
MOST = {"rows": 256, "columns": 256, "keys": 256, "depth": 128, "warps": 8, "threads": 512}
# Forms that public tuning records of such products have as their best, further away than a step.
PRODUCTS = (
    (128, 128, 32, 4, 4),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 8, 5),
    (128, 256, 32, 8, 5),
    (128, 256, 64, 8, 3),
)


def tiles_to_measure(architecture: str, kernel: str, tile: Tile) -> list[Tile]:
    """The tiles to measure beside this one."""
    known = compiled().get(architecture, {}).get(kernel)
    tiles = points(tile) if known is None else known
    return [other for other in tiles if other != tile]


def described(architecture: str, kernels: Iterable[str]) -> str:
    """Which tiles are measured beside these kernels' own, in words."""
    if {*kernels} <= {*compiled().get(architecture, {})}:
        return "the tiles that candidates.json has"
    return f"all tiles near its own: candidates.json has none for {architecture}"


@functools.cache
def compiled() -> dict[str, Any]:
    """What the file has: the tiles by architecture and kernel."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def points(tile: Tile) -> list[Tile]:
    """Tiles near this one: one size doubled or halved, with as many stages or more."""
    tiles = [tile, *_steps(tile)]
    if "stages" in tile:
        tiles += [other | {"stages": other["stages"] + more} for other in tiles for more in (1, 2)]
    if "depth" in tile:
        tiles += [dict(zip(tile, sizes, strict=True)) for sizes in PRODUCTS]
    return [other for i, other in enumerate(tiles) if other not in tiles[:i]]


def _steps(tile: Tile) -> Iterator[Tile]:
    for name, size in tile.items():
        for other in (size - 1,) if name == "stages" else (2 * size, size // 2):
            if LEAST.get(name, 1) <= other <= MOST.get(name, other):
                yield tile | {name: other}
