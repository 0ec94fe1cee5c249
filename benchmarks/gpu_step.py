"""A training step of ZAYA1-base on this machine's first device: its time, its memory, and where the
time goes.

    python -m benchmarks.gpu_step [--layers=8] [--sequences=4] [--micro-batches=8] [--profile=DIR]
        [--config=FILE] [--config.KEY=VALUE ...]

The step is `pretrain`'s own in the config's first phase, with random weights, tokens and documents;
--layers=0 takes all of the config's layers. Without --profile it is timed, and its memory and time
are held against the compiled program's and the plan's. With it two steps are traced, without
command buffers: a GPU runs a graph of kernels as one, and the trace then names none of them. Each
kernel's rates are by the program's own account. The last line printed is JSON.
"""

import argparse
import collections
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import timing
from zaya_jax import cli, schedule
from zaya_jax.compiled import launches, measure
from zaya_jax.hardware import chips, clusters, host, sizing
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.plan import footprint, rates, step_time
from zaya_jax.plan.case import StepCase
from zaya_jax.training import kernels as chosen
from zaya_jax.training import state as states

DOCUMENT = 500  # tokens of a document on average
TRACED = 2  # steps
SHOWN = 40  # kernels
SHORT = 3e3  # ns of a kernel that does next to nothing


def main() -> int:
    """Times or traces the step."""
    parser = cli.Parser(prog="python -m benchmarks.gpu_step", description=__doc__)
    parser.add_config("zaya1_base.py")
    parser.add_argument("--layers", type=cli.number(int, 0), default=8)
    parser.add_argument("--sequences", type=cli.number(int, 1), default=4, help="at once")
    parser.add_argument("--micro-batches", type=cli.number(int, 1), default=8, help="of a step")
    parser.add_argument("--seconds", type=cli.number(float, 0), default=10.0, help="or five steps")
    parser.add_argument("--profile", type=cli.path, metavar="DIR", help="trace into this folder")
    args = parser.parse_args()
    if args.profile and sizing.platform():
        wanted = {"xla_gpu_enable_command_buffer": ""}
        os.environ["XLA_FLAGS"] = sizing.merged(os.environ.get("XLA_FLAGS", ""), wanted)
    host.keep_compiled()
    print(json.dumps({"found": measured(args)}))
    return cli.DONE


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The step's figures, or what its trace says."""
    config = schedule.phase_config(args.config, schedule.make_plan(args.config).segments[0].phase)
    layers = args.layers or config.model.num_hidden_layers
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_hidden_layers=layers)
    )
    tiles = chosen.choose_tiles(config, jax.devices()[0])
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    sizes = args.sequences * args.micro_batches, args.micro_batches
    setup = states.set_up(config, mesh)
    program = measure.lower(config, setup, *sizes).compile()
    state = [states.init(config, setup)]
    like = measure.batch_like(config, setup, *sizes)
    given = {
        name: jax.device_put(x.astype(like[name].dtype), like[name].sharding)
        for name, x in batch(like["tokens"].shape, config.model.vocab_size).items()
    }

    def step() -> Any:
        state[0], figures = program(state[0], given, np.float32(1e-4))
        return figures

    if not args.profile:
        taken = timing.time_call(step, args.seconds, queue=False)
        chip = chips.named(jax.devices()[0].device_kind) or "h100"  # the plan beside a CPU's time
        case = StepCase(config, setup.spread, chip, *sizes)
        return {"tiles": tiles.summary, **figures(case, mesh, program, taken)}
    jax.block_until_ready(step())
    with jax.profiler.trace(str(args.profile)):
        jax.block_until_ready([step() for _ in range(TRACED)])
    kernels = {kernel.name: kernel for kernel in launches.read_program(program).kernels}
    return account(list(events_in(args.profile, kernels)), kernels)


def batch(shape: tuple[int, ...], vocabulary: int) -> dict[str, np.ndarray]:
    """Random tokens in packed documents."""
    rng = np.random.default_rng(0)
    begins = rng.random(shape) < 1 / min(DOCUMENT, shape[-1] / 4)
    places = np.broadcast_to(np.arange(shape[-1]), shape)
    return {
        "tokens": rng.integers(3, vocabulary, shape),
        "targets": rng.integers(3, vocabulary, shape),
        "segment_ids": 1 + np.cumsum(begins, axis=-1),
        "positions": places - np.maximum.accumulate(np.where(begins, places, 0), axis=-1),
        "loss_mask": np.ones(shape),
    }


def figures(case: StepCase, mesh: Any, program: Any, taken: timing.Timing) -> dict[str, Any]:
    """Tokens a second, MFU of useful FLOPs; memory and time as measured, compiled and planned."""
    device, config, seconds = mesh.devices.flat[0], case.config, taken.median
    tokens = case.sequences * config.data.seq_len
    peak = chips.peak_flops(device.device_kind, config.precision)
    useful = chips.model_flops(config.model, config.data.seq_len) * tokens / seconds
    cluster = clusters.of_chip(case.chip)
    shares = rates.for_cluster(cluster, config.hardware.figures)
    planned = step_time.estimate(case, cluster.of_devices(1), shares).seconds
    memory, statistics = program.memory_analysis(), device.memory_stats() or {}
    compiled = memory.argument_size_in_bytes + memory.output_size_in_bytes
    compiled += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return {
        "device": device.device_kind,
        "layers": config.model.num_hidden_layers,
        "tokens of a micro-batch": tokens // case.micro_batches,
        "micro-batches of a step": case.micro_batches,
        "remat, weights, kernels": (
            f"{config.remat}, {config.precision.weights}, {','.join(config.kernels)}"
        ),
        "tokens a second": round(tokens / seconds),
        "ms a step": f"{1e3 * seconds:.2f} ({1e3 * taken.low:.2f} to {1e3 * taken.high:.2f})",
        "ms a micro-batch, with its share of the optimizer": round(
            1e3 * seconds / case.micro_batches, 2
        ),
        f"ms a step, planned for {case.chip}": round(1e3 * planned, 2),
        "useful TFLOP/s": round(useful / 1e12, 3),
        "MFU of useful FLOPs": round(useful / peak, 4) if peak else None,
        "peak GB, measured": round(statistics.get("peak_bytes_in_use", 0) / 1e9, 3) or None,
        "peak GB, compiled": round(compiled / 1e9, 3),
        "peak GB, planned": round(footprint.estimate(case).peak / 1e9, 3),
    }


class Event(NamedTuple):
    """Something that the device ran."""

    name: str  # the kernel's
    op: str  # the instruction's, in the compiled program
    begin: float  # ns
    duration: float


def events_in(folder: Path, kernels: Mapping[str, Any]) -> Iterator[Event]:
    """What the device ran. A GPU has a line for each stream beside lines that sum up others; a
    CPU's threads have the program's instructions among much else."""
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            on_device, lines = plane.name.startswith("/device:"), list(plane.lines)
            streams = [line for line in lines if line.name.startswith("Stream")]
            for event in (event for line in streams or lines for event in line.events):
                op = str(dict(event.stats).get("hlo_op", event.name))
                if on_device or op in kernels:
                    yield Event(event.name, op, event.start_ns, event.duration_ns)


def account(events: list[Event], kernels: Mapping[str, launches.GpuKernel]) -> dict[str, str]:
    """The time of a step by scope and by kernel, and what is between kernels."""
    assert events, "the trace has no kernel of the program"
    by_scope, by_name = collections.defaultdict(list), collections.defaultdict(list)
    for event in events:
        kernel = kernels.get(event.op)
        ours = kernel and kernel.op == "custom-call" and "flops=" in kernel.op_name
        scope = f"{kernel.scope} {kernel.stage}" if kernel else "unknown"
        by_scope[f"scope {scope}".strip()].append(event)
        by_name[f"{'ours' if ours else 'kernel'} {event.name}"].append(event)
    end = max(event.begin + event.duration for event in events)
    wall, total = end - min(event.begin for event in events), ns(events)

    def words(group: list[Event]) -> str:
        taken, known = ns(group), [kernels[event.op] for event in group if event.op in kernels]
        flops, moved = sum(k.flops for k in known), sum(k.bytes for k in known)
        return (
            f"{milliseconds(taken)}, {taken / total:.1%}, {len(group) / TRACED:g} times, mean"
            f" {taken / len(group) / 1e3:,.1f} µs"
            + (f", {flops / taken / 1e3:,.1f} TFLOP/s" if flops else "")
            + (f", {moved / taken:,.0f} GB/s" if moved else "")
        )

    order = sorted(by_name, key=lambda name: -ns(by_name[name]))
    shown = order[:SHOWN] + [name for name in order[SHOWN:] if name.startswith("ours")]
    short = [event for event in events if event.duration < SHORT]
    return {
        "wall of a step, traced": milliseconds(wall),
        "sum of kernels": milliseconds(total),
        "gaps, the wall less the sum": milliseconds(wall - total),
        f"kernels under {SHORT / 1e3:g} µs": (
            f"{milliseconds(ns(short))}, {len(short) / TRACED:g} of {len(events) / TRACED:g}"
        ),
        **{
            name: words(by_scope[name]) for name in sorted(by_scope, key=lambda s: -ns(by_scope[s]))
        },
        **{name: words(by_name[name]) for name in shown},
    }


def ns(events: Iterable[Event]) -> float:
    """The time that these took together."""
    return sum(event.duration for event in events)


def milliseconds(traced: float) -> str:
    """The milliseconds of a step, of the ns of all traced steps."""
    return f"{traced / TRACED / 1e6:,.3f} ms"


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
