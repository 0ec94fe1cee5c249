"""How long a training step waits for a save.

    python -m benchmarks.bench_checkpoint [--gb=2] [--saves=6] [--folder=DIR]

Beside one copy of the state into memory that was touched before, and saving while the step waits.
Prints Markdown; timings in one run, in turns.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zaya_jax.checkpoint import boxes, layout, writing
from zaya_jax.checkpoint.run import store
from zaya_jax.config import Checkpoint
from zaya_jax.hardware import host
from zaya_jax.report.document import Table

ARRAYS = 24  # of one size, as a model's stacked matrices
WAITING = 3  # saves while the step waits


def make_state(gb: float) -> dict:
    """ARRAYS float32 arrays [layers, rows, 1024] of so many GB together, cut over all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = int(gb * 1e9 / ARRAYS / 16 / 1024 / 4) // 64 * 64
    put = NamedSharding(mesh, PartitionSpec("data"))
    make = jax.jit(
        lambda i: jax.random.normal(jax.random.key(i), (16, rows, 1024)), out_shardings=put
    )
    return {"params": {"layers": {f"w{i:02d}": make(i) for i in range(ARRAYS)}}}


def timed(function: Callable, *args) -> float:
    """Seconds of a call."""
    begun = time.perf_counter()
    function(*args)
    return time.perf_counter() - begun


def stall(gb: float, saves: int, folder: Path) -> None:
    """Prints how long a step waits for a save."""
    state = jax.block_until_ready(make_state(gb))
    spread = jax.tree.map(lambda x: layout.cut_replicas(x.shape, x.dtype, x.sharding), state)
    copied = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=spread)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    block = np.random.default_rng(0).integers(0, 256, 32 << 20, np.uint8)
    arrays = [np.asarray(x) for x in jax.tree.leaves(state)]
    touched = [np.ones_like(x) for x in arrays]
    checkpoints = store.Store(folder / "run", Checkpoint(keep=1), print)

    def copy() -> None:
        for to, x in zip(touched, arrays, strict=True):
            np.copyto(to, x)

    def begin(step: int) -> None:
        snapshot = jax.block_until_ready(copied(state))  # the training need not even wait for this
        parts, meta = writing.parts_by_device(snapshot), {"step": step, "tokens": step}
        checkpoints.save(step, parts, meta, boxes.of_tree(snapshot))

    def save(step: int) -> None:
        begin(step)
        checkpoints.wait()

    copies, holds, wholes, disks = [], [], [], []
    for step in range(1, saves + 1):
        copies.append(timed(copy))
        holds.append(timed(begin, step))
        wholes.append(holds[-1] + timed(checkpoints.wait))
        disks.append(timed(writing.write_file, folder / "raw", [block] * (size // len(block))))
        (folder / "raw").unlink()
    waits = [timed(save, step) for step in range(saves + 1, saves + 1 + WAITING)]
    checkpoints.close()
    medians = {
        "one copy into touched memory": statistics.median(copies),
        "the step waits, first save": holds[0],
        "the step waits, from the second save on": statistics.median(holds[1:]),
        "whole save, during the training": statistics.median(wholes[1:]),
        "the step waits until all is committed (synchronous)": statistics.median(waits),
        "the disk: one file of that size, fsynced": statistics.median(disks),
    }
    rows = [(name, f"{took:.3f}", f"{size / 1e9 / took:.2f}") for name, took in medians.items()]
    title = f"{size / 1e9:.2f} GB in {ARRAYS} arrays, {saves} saves; medians, the first save apart"
    print(Table(title, ("", "seconds", "GB/s"), rows).markdown())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--folder", help="where to write; by default the system's temporary folder")
    args = parser.parse_args()
    host.keep_memory()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        stall(args.gb, args.saves, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
