"""Plans a run on a cluster by formulas, before anything is compiled and without any device.

    python -m experiments.plan --config=FILE --cluster=mi300x_pollara --devices=1024 --out=DIR [--config.KEY=VALUE ...]
        [--at_once=N] [--figures=FILE_OR_FOLDER] [--mtbf_hours=H] [--search]

For each phase of the schedule: memory, HBM traffic, FLOPs and network traffic of a step by what they are for, its time
with each second accounted for, tokens per second, days and GPU-hours, what the data asks of storage, how often to save
and what failures leave of the time; and how all that scales from 8 to 16,384 devices. Written are plan.md, plan.json
and plan.html. --search ranks meshes, micro-batches and remat that fit. --at_once=N is as in experiments.compile,
--figures are what experiments.characterize measured there. docs/planning.md says what is assumed.
"""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags

from zaya_jax import cli
from zaya_jax import config as config_lib
from zaya_jax.config.files import write
from zaya_jax.hardware import chips, clusters
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.plan import goodput, least, network, published, run, search
from zaya_jax.plan import rates as rates_lib
from zaya_jax.plan.rates import Rates
from zaya_jax.plan.run import Phase
from zaya_jax.report import plan as page

CONFIG = cli.define_config(str(Path(__file__).parent / "configs" / "zaya1_base.py"))
CLUSTER = flags.DEFINE_enum("cluster", "mi300x_pollara", list(clusters.CLUSTERS), "The cluster to plan for.")
DEVICES = flags.DEFINE_integer("devices", 1024, "How many of its devices.", lower_bound=1, upper_bound=2**20)
OUT = flags.DEFINE_string("out", None, "The folder for the plan.")
AT_ONCE = flags.DEFINE_integer(
    "at_once", 0, "Sequences at once on each row of data x expert; 0: as the config says.", lower_bound=0
)
FIGURES = flags.DEFINE_string(
    "figures", "", "Measured figures of experiments.characterize, a file or its folder."
)
MTBF = flags.DEFINE_float(
    "mtbf_hours",
    goodput.MTBF_HOURS,
    "Hours between the failures of one device.",
    lower_bound=1e-3,
    upper_bound=1e12,
)
# absl's bounds let it through.
flags.register_validator("mtbf_hours", math.isfinite, "nan is no number of hours")
SEARCH = flags.DEFINE_bool("search", False, "Rank the meshes, micro-batches and remat that fit.")


def main() -> int:
    """Formulas in, three files out."""
    out = cli.out_folder(OUT.value, "the plan")
    config = config_lib.check(CONFIG.value)
    jax.config.update("jax_platforms", "cpu")  # shapes alone are asked of JAX
    cluster = clusters.CLUSTERS[CLUSTER.value]
    rates = rates_lib.of(cluster, FIGURES.value)
    phases, notes = run.phases(config, DEVICES.value, cluster, rates, AT_ONCE.value, MTBF.value)
    ways = run.scaling(phases[0].case, cluster, rates)
    result = {
        "config": config.name, "cluster": CLUSTER.value, "source": cluster.source, "devices": DEVICES.value,
        "date": time.strftime("%Y-%m-%d"), "notes": notes,
        "phases": [_phase(p, cluster, rates) for p in phases],
        "scaling": {
            "phase": phases[0].name,
            "ways": [dataclasses.asdict(way) for way in ways],
            "stops": [stop._asdict() for stop in run.stops(ways)],
        },
        "published": [],
        "assumed": _assumed(rates),
    }  # fmt: skip
    if published.applies(phases[0].case):
        result["published"] = [row._asdict() for row in published.account(phases[0].case, cluster, rates)]
    out.mkdir(parents=True, exist_ok=True)
    write(out / "plan.json", json.dumps(result, indent=1).encode())
    write(out / "plan.md", page.text(result).encode())
    write(out / "plan.html", page.render(result).encode())
    print(page.text(result))
    print(f"written: {out}/plan.md, plan.json, plan.html")
    return cli.DONE


def _phase(p: Phase, cluster: Cluster, rates: Rates) -> dict[str, Any]:
    case, step = p.case, p.step
    mesh = {**case.axes, **{x: True for x in ("fsdp", "tsp", "ring") if getattr(case.spread, x)}}
    return {
        "name": p.name, "mesh": mesh, "remat": case.here.remat, "sequences": case.sequences,
        "micro_batches": case.micro_batches, "seq_len": case.here.data.seq_len,
        "tokens_per_device": case.tokens_per_device, "tokens": p.tokens, "steps": p.steps,
        "tokens_per_second": p.tokens_per_second, "days": p.days, "gpu_hours": p.gpu_hours,
        "memory": {
            "peak": p.memory.peak, "capacity": p.capacity, "place": p.memory.place, "at_peak": p.memory.at_peak,
            "places": p.memory.phases,
        },
        "step": {
            "seconds": step.seconds, "mfu": step.mfu, "by_scope": step.by_scope, "by_kind": step.by_kind,
            "links": step.links, "exposed": step.exposed, "overlapped": step.overlapped,
            "hbm_bytes": step.hbm_bytes, "launches": step.launches,
        },
        "work": _work(p),
        "flows": [
            {**dataclasses.asdict(flow), "seconds": flow.seconds(case, cluster, rates)} for flow in network.flows(case)
        ],
        "saving": {**dataclasses.asdict(p.saving), "steps": p.saving.interval / step.seconds},
        "data": {**dataclasses.asdict(p.data), "pages_per_second": p.data.pages_per_second},
        "search": _search(p, cluster, rates) if SEARCH.value else [],
    }  # fmt: skip


def _work(p: Phase) -> list[dict[str, Any]]:
    """Launches, bytes and FLOPs by scope, with the least bytes and the useful FLOPs."""
    case = p.case
    useful = chips.flops_by_scope(case.model, case.here.data.seq_len)
    needed = least.of(case)
    rows: dict[str, dict[str, Any]] = {}
    for part, _ in p.step.parts:
        row = rows.setdefault(
            part.scope,
            {
                "scope": part.scope, "launches": 0.0, "bytes": 0.0, "flops": 0.0,
                "least": needed.get(part.scope, 0.0),
                "useful": useful.get(part.scope, 0.0) * case.tokens_per_device,
            },
        )  # fmt: skip
        row["launches"] += part.launches
        row["bytes"] += part.bytes
        row["flops"] += part.flops
    return list(rows.values())


def _search(p: Phase, cluster: Cluster, rates: Rates) -> list[dict[str, Any]]:
    found = search.best(p.case.here, p.case.devices, p.case.sequences, cluster, rates)
    return [
        {
            "mesh": " x ".join(f"{axis} {n}" for axis, n in c.case.axes.items() if n > 1) + (
                ", fsdp" if c.case.spread.fsdp else ""
            ),
            "micro_batches": c.case.micro_batches, "remat": c.case.here.remat, "seconds": c.step.seconds,
            "mfu": c.step.mfu, "peak": c.memory.peak, "links": sum(c.step.exposed.values()),
        }
        for c in found
    ]  # fmt: skip


def _assumed(rates: Rates) -> list[tuple[str, float, str]]:
    """All that is assumed, with its source."""
    failures = goodput.MTBF_SOURCE if MTBF.value == goodput.MTBF_HOURS else "given"
    return [
        *rates.table(),
        ("hours between failures of a device", MTBF.value, failures),
        ("seconds of a restart", goodput.RESTART, goodput.RESTART_SOURCE),
        ("seconds of any save", goodput.SAVE, goodput.SAVE_SOURCE),
        ("bytes/s to a device's host", goodput.HOST_LINK, goodput.HOST_LINK_SOURCE),
        ("page reads for one that tokens fill", run.SIGMA, "the most of well-packed shards: docs/data.md"),
    ]  # fmt: skip


if __name__ == "__main__":
    cli.leave(cli.run(main))
