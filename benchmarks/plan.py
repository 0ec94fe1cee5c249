"""The plan's formulas against compiled programs: memory, HBM traffic and launches of many small
configs.

    python -m benchmarks.plan --out=FOLDER [--only=NAME ...]

Each config is compiled for absent MI300X (make setup-targets), half a minute of one core each;
FOLDER keeps the results, which are not compiled again. It prints the table of benchmarks/plan.md.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.compiled import measure
from zaya_jax.config import Config
from zaya_jax.hardware import clusters, targets
from zaya_jax.parallel.mesh import make_mesh, shape_of
from zaya_jax.parallel.spread import spread_of
from zaya_jax.plan import footprint, work
from zaya_jax.plan.case import StepCase
from zaya_jax.report.document import Table

BASE = {
    "data.seq_len": 4096,
    "model.num_hidden_layers": 4,
    "remat": "attention",
    "precision.weights": "float32",
    "optim.z_loss": 1e-5,
    "run.skip_update": "spike",
}
COPIES = {"precision.weights": "compute"}  # the default
# name: devices, sequences at once on a row of data x expert, micro-batches, differences from
# ZAYA1-base of four layers
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "ZAYA1-base, all 40 layers": (
        1024,
        4,
        1,
        COPIES | {"model.num_hidden_layers": 40, "remat": "elementwise"},
    ),
    "all 40 layers, remat attention": (1024, 4, 1, COPIES | {"model.num_hidden_layers": 40}),
    "alone": (1, 4, 1, {}),
    "8 devices": (8, 4, 1, COPIES),
    "12 devices": (12, 4, 1, COPIES),
    "1,024 devices, 2 micro-batches": (1024, 2, 2, COPIES),
    "8 layers, remat elementwise": (
        64,
        4,
        1,
        COPIES | {"remat": "elementwise", "model.num_hidden_layers": 8},
    ),
    "64 devices, nothing recomputed": (64, 1, 1, COPIES | {"remat": "none"}),
    "layers recomputed, 4 micro-batches": (8, 2, 4, COPIES | {"remat": "layer"}),
    "dense": (
        8,
        4,
        1,
        COPIES
        | {"model.model_type": "dense", "model.num_experts": 1, "model.intermediate_size": 8192},
    ),
    "8 layers, 6 of them linear": (
        8,
        2,
        1,
        COPIES
        | {
            "model.layer_types": (("hybrid_linear",) * 3 + ("hybrid",)) * 2,
            "model.num_hidden_layers": 8,
        },
    ),
    "sliding window of 1,024": (
        8,
        2,
        1,
        COPIES
        | {
            "model.layer_types": ("hybrid_sliding",) * 3 + ("hybrid",),
            "model.sliding_window": 1024,
        },
    ),
    "fsdp": (8, 4, 1, {"mesh.fsdp": True}),
    "experts over 8": (8, 4, 1, {"mesh.expert": 8}),
    "context over 2": (
        16,
        1,
        1,
        COPIES | {"mesh.context": 2, "data.seq_len": 32768, "model.num_hidden_layers": 2},
    ),
    "half the width, 32 experts, 8 layers": (
        64,
        4,
        1,
        {
            "model.hidden_size": 1024,
            "model.num_experts": 32,
            "model.moe_intermediate_size": 1024,
            "model.num_hidden_layers": 8,
            "model.vocab_size": 65536,
        },
    ),
    # Of these nothing was looked at before the formulas stood.
    "context over 8, 131,072 tokens": (
        64,
        1,
        1,
        {"mesh.context": 8, "data.seq_len": 131072, "model.num_hidden_layers": 2},
    ),
    "tensor over 2, 3 micro-batches": (16, 2, 3, {"mesh.tensor": 2}),
    "fsdp, 2 micro-batches, layers recomputed": (32, 2, 2, {"mesh.fsdp": True, "remat": "layer"}),
}


HEAD = (
    "config",
    "memory, GB",
    "compiled",
    "ratio",
    "traffic, GB",
    "compiled",
    "ratio",
    "launches",
    "compiled",
    "TFLOP",
    "compiled",
)


def config_of(changes: dict[str, Any]) -> Config:
    """ZAYA1-base's shapes with four layers, and the differences."""
    c = config_lib.default()
    c.update_from_flattened_dict(BASE | changes)
    return config_lib.check(c)


def first_phase(config: Config) -> Config:
    """The config of its one phase."""
    return schedule.phase_config(config, schedule.make_plan(config).segments[0].phase)


def compiled(name: str, folder: Path) -> dict[str, Any]:
    """The figures of `experiments.compile` for a case; from the folder where it is there."""
    path = folder / f"{name.replace(' ', '_').replace(',', '')}.json"
    if path.exists():
        return json.loads(path.read_text())
    devices, at_once, micro_batches, changes = CASES[name]
    config = first_phase(config_of(changes))
    mesh = make_mesh(config.mesh, targets.devices("mi300x", devices))
    sequences = at_once * micro_batches * mesh.shape["data"] * mesh.shape["expert"]
    begun = time.perf_counter()
    row = measure.measure(
        config,
        mesh,
        sequences,
        micro_batches,
        clusters.of_chip("mi300x"),
        targets.memory_for_jax("mi300x"),
    )
    print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    path.write_text(json.dumps(row))
    return row


def planned(devices: int, at_once: int, micro_batches: int, changes: dict[str, Any]) -> StepCase:
    """A case for the formulas."""
    config = first_phase(config_of(changes))
    sizes = shape_of(config.mesh, devices)
    sequences = at_once * micro_batches * sizes["data"] * sizes["expert"]
    return StepCase(config, spread_of(config.mesh, sizes), "mi300x", sequences, micro_batches)


def table(folder: Path, names: list[str]) -> str:
    """Planned and compiled side by side, as Markdown."""
    rows = []
    for name in names:
        row, case = compiled(name, folder), planned(*CASES[name])
        parts = work.list_work(case)
        cells = [name]
        for ours, theirs in (
            (footprint.estimate(case).peak, row["memory"]["peak"]),
            (sum(part.bytes for part in parts), row["hbm_bytes"]),
        ):
            cells += [f"{ours / 1e9:,.1f}", f"{theirs / 1e9:,.1f}", f"{ours / theirs:.3f}"]
        for key, unit, form in (("launches", 1, ",.0f"), ("flops", 1e12, ",.1f")):
            ours = sum(getattr(part, key) for part in parts)
            cells += [format(ours / unit, form), format(row[key] / unit, form)]
        rows.append(cells)
    return Table("Planned and compiled", HEAD, rows).markdown()


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for the compiled figures")
    parser.add_argument(
        "--only", nargs="*", choices=CASES, default=list(CASES), help="some of the cases"
    )
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__}")
    print(table(options.out, options.only))


if __name__ == "__main__":
    main()
