"""The cost of saving and loading: the step's wait, a whole model.

    python benchmarks/bench_checkpoint.py stall [--gb=2] [--folder=DIR]     one process
    python benchmarks/bench_checkpoint.py model [--model=1M|100M|1B] [--folder=DIR]

`stall` compares with one copy of the state into memory that was touched before, and with saving while
the step waits. `model` saves and loads the state of a whole
model on one device, as the training does, each in a process of its own: seconds, files and peak
memory. Prints Markdown; timings in one run, in turns.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zaya_jax import config
from zaya_jax.checkpoint import boxes, layout, writing
from zaya_jax.checkpoint.run import store
from zaya_jax.config import Checkpoint
from zaya_jax.hardware import host
from zaya_jax.model import zaya
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.training import snapshot
from zaya_jax.training import state as states

# Of about so many parameters, with the default precision and Muon.
MODELS = {
    "1M": dict(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        moe_intermediate_size=96,
        num_experts=4,
        router_hidden_size=32,
        vocab_size=4096,
    ),
    "100M": dict(
        hidden_size=512,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=512,
        num_experts=10,
        router_hidden_size=64,
        vocab_size=32768,
    ),
    "1B": dict(
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        moe_intermediate_size=1024,
        num_experts=18,
        router_hidden_size=128,
        vocab_size=65536,
    ),
}
ARRAYS = 24  # of one size, as a model's stacked matrices


def make_state(gb: float, mesh: jax.sharding.Mesh) -> dict:
    """ARRAYS float32 arrays [layers, rows, 1024] of so many GB together, cut over the mesh."""
    rows = int(gb * 1e9 / ARRAYS / 16 / 1024 / 4) // 64 * 64
    put = NamedSharding(mesh, PartitionSpec("data"))
    make = jax.jit(
        lambda i: jax.random.normal(jax.random.key(i), (16, rows, 1024)), out_shardings=put
    )
    return {"params": {"layers": {f"w{i:02d}": make(i) for i in range(ARRAYS)}}}


def copier(state: dict) -> Any:
    """The program that copies a state, as `training.snapshot` has it."""
    spread = jax.tree.map(lambda x: layout.cut_replicas(x.shape, x.dtype, x.sharding), state)
    return jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=spread)


def mesh_of_all() -> jax.sharding.Mesh:
    """All devices along `data`."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def timed(function, *args) -> tuple[float, object]:
    """(seconds, result)."""
    begun = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - begun, result


def stall(args: argparse.Namespace) -> None:
    """How long a step waits for a save."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    state = jax.block_until_ready(make_state(args.gb, mesh_of_all()))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    raw = folder / "raw"
    block, disks = np.random.default_rng(0).integers(0, 256, 32 << 20, np.uint8), []
    host = [np.asarray(x) for x in jax.tree.leaves(state)]
    touched = [np.ones_like(x) for x in host]
    copied = copier(state)
    checkpoints = store.Store(folder / "run", Checkpoint(keep=1), print)
    copies, holds, saves, syncs = [], [], [], []

    def copy() -> None:
        for to, x in zip(touched, host, strict=True):
            np.copyto(to, x)

    def begin(step: int) -> None:
        snapshot = jax.block_until_ready(copied(state))  # the training need not even wait for this
        save_tree(checkpoints, step, snapshot, {"step": step, "tokens": step})

    for step in range(1, args.saves + 1):
        copies.append(timed(copy)[0])
        held, _ = timed(begin, step)
        after, _ = timed(checkpoints.wait)
        disks.append(timed(writing.write_file, raw, [block] * (size // len(block)))[0])
        raw.unlink()
        holds.append(held)
        saves.append(held + after)
    for step in range(args.saves + 1, args.saves + 4):
        seconds, _ = timed(lambda: (begin(step), checkpoints.wait()))  # noqa: B023
        syncs.append(seconds)
    checkpoints.close()
    shutil.rmtree(folder)
    copy_time, hold = statistics.median(copies), statistics.median(holds[1:])
    print(
        f"\n{size / 1e9:.2f} GB in {ARRAYS} arrays, {len(holds)} saves; medians, the first save"
        " apart\n"
    )
    print("| | seconds | GB/s |\n|---|---|---|")
    rows = [
        ("one copy into touched memory", copy_time),
        ("the step waits, first save", holds[0]),
        ("the step waits, from the second save on", hold),
        ("whole save, during the training", statistics.median(saves[1:])),
        ("the step waits until all is committed (synchronous)", statistics.median(syncs)),
        ("the disk: one file of that size, fsynced", statistics.median(disks)),
    ]
    for name, seconds in rows:
        print(f"| {name} | {seconds:.3f} | {size / 1e9 / seconds:.2f} |")
    print(
        f"\nwait / copy = {hold / copy_time:.2f}; synchronous / wait ="
        f" {statistics.median(syncs) / hold:.1f}"
    )


def save_tree(checkpoints: store.Store, step: int, tree: dict, meta: dict) -> None:
    """Begins to save a tree whose arrays are the checkpoint's own."""
    checkpoints.save(step, writing.parts_by_device(tree), meta, boxes.of_tree(tree))


def model_run(name: str) -> tuple:
    """(config, setup, snapshots) of a model of about so many parameters, on one device."""
    settings = config.check({"model": MODELS[name]})
    mesh = make_mesh(settings.mesh, jax.devices()[:1])
    setup = states.set_up(settings, mesh)
    like = states.abstract(settings, setup)
    return settings, setup, snapshot.Snapshots(setup.optimizer, like)


def model_save(args: argparse.Namespace) -> dict:
    """Two saves of a model's state."""
    settings, setup, snapshots = model_run(args.model)
    begun = resident()
    state = jax.block_until_ready(states.init(settings, setup))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    checkpoints = store.Store(Path(args.folder) / "run", Checkpoint(keep=1), print)
    checkpoints.find_newest()
    measured = []
    for step in (1, 2):
        begin = time.perf_counter()
        copy = snapshots.take(state)
        jax.block_until_ready([[*parts.values()] for parts in copy.values()])
        held = time.perf_counter() - begin
        checkpoints.save(step, copy, {"step": step, "tokens": step}, snapshots.locations)
        del copy
        checkpoints.wait()
        measured.append((held, time.perf_counter() - begin))
    checkpoints.close()
    written = [
        p for p in (Path(args.folder) / "run" / "checkpoints" / "2").rglob("*") if p.is_file()
    ]
    return {
        "parameters": zaya.param_counts(settings.model)["total"],
        "bytes": size,
        "files": len(written),
        "copy": measured[1][0],
        "save": measured[1][1],
        "peak": (peak() - begun) / size,
    }


def model_load(args: argparse.Namespace) -> dict:
    """One load by a new process, checksums first."""
    _, _, snapshots = model_run(args.model)
    checkpoints = store.Store(Path(args.folder) / "run", Checkpoint(keep=1), print)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(snapshots.abstract))
    begun = resident()
    verify, step = timed(checkpoints.find_newest)
    load, found = timed(
        lambda: checkpoints.restore(
            step, snapshots.abstract, snapshots.locations, snapshots.to_state
        )
    )
    del found
    checkpoints.close()
    return {"verify": verify, "load": load, "load peak": (peak() - begun) / size}


def resident(name: str = "VmRSS") -> int:
    """Bytes of memory that this process has, or had at most."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", status)[1])


def peak() -> int:
    """The most that it had."""
    return resident("VmHWM")


def model(args: argparse.Namespace) -> int:
    """Saving in one process, loading in another one; a row of a table."""
    folder = tempfile.mkdtemp(dir=args.folder)
    row: dict = {}
    try:
        for part in ("model_save", "model_load"):
            row |= child(args, folder, part)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cells = [
        f"{row['parameters'] / 1e6:,.0f} M",
        f"{row['bytes'] / 1e9:.3f} GB",
        row["files"],
        f"{row['copy']:.3f} s",
        f"{row['save']:.2f} s",
        f"{row['peak']:.2f} states",
        f"{row['verify']:.2f} s",
        f"{row['load']:.2f} s",
        f"{row['load peak']:.2f} states",
    ]
    print(
        "| parameters | state | files | the copy | whole save | peak | checking | loading | peak |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print(f"| {' | '.join(map(str, cells))} |")
    return 0


def child(args: argparse.Namespace, folder: str, part: str) -> dict:
    """What one part found in a process of its own."""
    command = [sys.executable, __file__, "model", f"--model={args.model}", f"--folder={folder}"]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "BENCH_WORKER": part}
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("stall", "model"))
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--model", choices=MODELS, default="100M")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument(
        "--folder", default=None, help="where to write; by default the system's temporary folder"
    )
    args = parser.parse_args()
    worker = os.environ.get("BENCH_WORKER")
    if worker is None and args.what == "model":
        return model(args)
    host.keep_memory()
    if worker is None:
        stall(args)
    else:
        print(json.dumps({"model_save": model_save, "model_load": model_load}[worker](args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
