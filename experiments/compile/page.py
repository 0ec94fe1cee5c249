"""Compiles a run's steps and words their costs, for `experiments.compile`."""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterable
from typing import Any

import jax

from pallas_kernels import chip, table
from zaya_jax import cli, schedule
from zaya_jax.compiled import measure
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import clusters, host, sizing, targets
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.report.document import Page, Section, Table, Tile, write_results
from zaya_jax.report.text import byte_size, duration, number, shape_of_step
from zaya_jax.schedule import Segment
from zaya_jax.text import tokenizers
from zaya_jax.training import recipe

KINDS = (
    "weights",
    "optimizer",
    "batch and figures",
    "gradients",
    "activations",
    "exchange",
    "other temporaries",
    "gaps",
)
BOUNDS = {
    "compute": "products at the peak of their format",
    "memory": "HBM at its bandwidth",
    "launches": "kernels too short for either",
    "links": "links, exposed",
    "hidden": "(links, under kernels)",
}


def run(args: argparse.Namespace) -> int:
    """One row of the table for each phase."""
    out = cli.out_folder(args.out, "the results")
    config = _with_ids(args.config)
    host.require_x32()
    if args.target == "cpu":
        more = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()
    jax.config.update("jax_platforms", "cpu")  # nothing is asked of GPUs that may be here
    plan = schedule.make_plan(config)
    last = {segment.phase_index: segment for segment in plan.segments}  # of a ramp, the full batch
    chosen = [s for s in last.values() if args.phase in (None, s.phase.name)]
    if not chosen:
        names = ", ".join(repr(s.phase.name) for s in last.values())
        raise UserError(f"--phase={args.phase} is not a phase of {config.name}; it has {names}")
    devices = targets.devices(args.target, args.devices, config.hardware.figures)
    capacity, cluster = None, None
    if args.target != "cpu":
        capacity, cluster = targets.memory_for_jax(args.target), clusters.of_chip(args.target)
    # report mistakes before compiling
    programs = [_program(config, segment, devices, args.at_once) for segment in chosen]
    settings = dict.fromkeys(sizing.describe(here, args.target) for here, *_ in programs)
    made_with = [_kernels(config, devices[0]), *filter(None, settings)]
    print(*made_with, sep="\n", flush=True)

    found: list[dict[str, Any]] = []
    seen: dict[Any, dict[str, Any]] = {}
    for segment, (here, mesh, sequences, micro_batches) in zip(chosen, programs, strict=True):
        name = segment.phase.name
        same = dataclasses.replace(here, data=dataclasses.replace(here.data, packing="concat"))
        key = (same, sequences, micro_batches)
        if key in seen:
            print(f"{name}: the same program as {seen[key]['phase']!r}", flush=True)
            found.append({**seen[key], "phase": name, "same_as": seen[key]["phase"]})
            continue
        print(f"{name}: compiling for {len(devices)} {args.target} ...", flush=True)
        begun = time.perf_counter()
        row = {
            "phase": name,
            **measure.measure(here, mesh, sequences, micro_batches, cluster, capacity),
        }
        print(f"{name}: {headline(row)} ({time.perf_counter() - begun:.0f} s)", flush=True)
        seen[key] = row
        found.append(row)

    result = {
        "config": config.name,
        "target": args.target,
        "devices": len(devices),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "made_with": made_with,
        "phases": found,
    }
    write_results(out, "compile", result, document(result))
    return cli.DONE


def _with_ids(config: Config) -> Config:
    """The config with its tokenizer's ids, as `pretrain` has it: with a padding id the embedding is
    another program."""
    try:
        tokenizer = tokenizers.load(config.data.tokenizer)
    except UserError as error:  # of a run elsewhere
        if config.model.pad_token_id is None:
            print(f"note: compiled without a padding id: {error}", flush=True)
        return config
    return tokenizers.with_model_ids(config, tokenizer)


def _kernels(config: Config, device: Any) -> str:
    """Which kernels of ours the program has, and with which tiles, in a line."""
    here = chip.chip_of(device)
    if here.maker not in ("cuda", "rocm"):
        return "kernels: a CPU's own algorithms"
    own = here.taking(config.kernels).kernels
    rows = table.rows_of_operators(table.rows(here.architecture), own)
    said = f"; tiles: {table.counted(rows)}" if rows else ""
    return f"kernels: ours for {', '.join(own) or 'nothing'}, otherwise XLA's{said}"


def _program(
    config: Config, segment: Segment, devices: list, at_once: int
) -> tuple[Config, Any, int, int]:
    """A phase's config, mesh, sequences per step and micro-batches; UserError where these do not go
    together."""
    here, _, sequences, micro_batches = recipe.portion(config, segment, len(devices), at_once)
    mesh = make_mesh(here.mesh, devices, schedule.key(config, segment.phase_index, "mesh"))
    return here, mesh, sequences, micro_batches


def document(result: dict[str, Any]) -> Page:
    """A section a phase."""
    title = f"{result['config']} compiled for {result['devices']:,} {result['target']}"
    host = (
        " (the CPU's program: its own algorithms, no account of kernels)"
        if result["target"] == "cpu"
        else ""
    )
    about = f"{result['date']}, jax {result['jax']}; per device and step{host}"
    footer = "Read from the compiled program; docs/compiling.md says how."
    about += "; ".join(["", *result["made_with"]])
    return Page(title, "", about, [_phase(row) for row in result["phases"]], footer=footer)


def headline(row: dict[str, Any]) -> str:
    """A phase's program in a line."""
    memory, bound = row["memory"], row["bound"]
    of = f" of {byte_size(memory['capacity'])}" if memory["capacity"] else ""
    time = f", at least {duration(bound['seconds'])} ({bound['binds']} most)" if bound else ""
    return (
        f"peak {byte_size(memory['peak'])}{of}, {byte_size(row['hbm_bytes'])} of traffic,"
        f" {row['launches']:,.0f} launches, {number(row['flops'], 3)} FLOPs, {_of_use(row):.0%} of"
        f" use{time}"
    )


def _phase(row: dict[str, Any]) -> Section:
    title = f"{row['phase']}: {_verdict(row)}"
    if "same_as" in row:
        return Section(title, notes=[f"The same program as {row['same_as']!r}."])
    text = (
        f"{shape_of_step(row)}. {headline(row)}. Compiled in {row['seconds']['compiling']:.0f} s."
    )
    notes = []
    if row["unknown_loops"]:
        loops = ", ".join(row["unknown_loops"])
        notes.append(f"loops of unknown length, each counted as one turn: {loops}")
    if again := sum(r["flops_by_stage"].get("again", 0) for r in row["traffic"]):
        notes.append(f"computed again in the backward pass: {again / 1e12:,.1f} TFLOP, not useful")
    return Section(title, text, list(_tables(row)), notes, _tiles(row))


def _verdict(row: dict[str, Any]) -> str:
    memory = row["memory"]
    if not memory["capacity"]:
        return byte_size(memory["peak"])
    used = f"{byte_size(memory['peak'])} of {byte_size(memory['capacity'])}"
    if memory["peak"] <= memory["capacity"]:
        return f"fits, {used}"
    return f"does NOT fit, {used}; `experiments.plan --search` ranks what does"


def _tables(row: dict[str, Any]) -> Iterable[Table]:
    memory, traffic = row["memory"], row["traffic"]
    kinds = [
        [kind, byte_size(memory[kind]), f"{memory[kind] / memory['peak']:.1%}"] for kind in KINDS
    ]
    yield Table("Memory where it is highest", ("kind", "size", "share"), kinds)
    largest = [
        [byte_size(b["bytes"]), b["shape"], b["kind"], b["scope"], b["op_name"]]
        for b in memory["largest"]
    ]
    yield Table(
        "Largest temporaries there", ("size", "array", "kind", "scope", "made by"), largest, "code"
    )
    scopes = [
        [
            r["scope"],
            f"{r['launches']:,.0f}",
            byte_size(r["reads"]),
            byte_size(r["writes"]),
            number(r["flops"], 3),
            f"{r['flops_of_use'] / r['flops']:.0%}" if r["flops"] else "",
        ]
        for r in traffic
    ]
    scopes.append(
        [
            "all",
            f"{row['launches']:,.0f}",
            *(byte_size(sum(r[x] for r in traffic)) for x in ("reads", "writes")),
            number(row["flops"], 3),
            f"{_of_use(row):.0%}",
        ]
    )
    yield Table(
        "Traffic and work by scope",
        ("scope", "launches", "read", "written", "FLOPs", "of use"),
        scopes,
    )
    kernels = [
        [
            byte_size(k["times"] * (k["reads"] + k["writes"])),
            f"{k['times']:,.0f}",
            k["scope"],
            k["stage"],
            k["op_name"],
            k["name"],
        ]
        for k in row["largest"]
    ]
    yield Table(
        "Kernels that move most",
        ("moved", "times", "scope", "stage", "made by", "kernel"),
        kernels,
        "code",
    )
    collectives = [
        [
            c["kind"],
            c["scope"],
            f"{c['bytes'] / 1e6:,.2f}",
            f"{c['group']:,}",
            "?" if c["times"] is None else str(c["times"]),
            str(c["kernels_beside"]),
        ]
        for c in row["collectives"]
    ]
    if collectives:
        yield Table(
            "Collectives",
            ("kind", "scope", "MB", "devices", "times", "kernels overlapping it"),
            collectives,
        )
    if bound := row["bound"]:
        rows = [[words, f"{1e3 * bound[name]:,.1f}"] for name, words in BOUNDS.items()]
        rows.append(["all", f"{1e3 * bound['seconds']:,.1f}"])
        yield Table("A bound on the step's time", ("bound by", "ms"), rows)


def _tiles(row: dict[str, Any]) -> list[Tile]:
    memory, bound = row["memory"], row["bound"]
    of = f"of {byte_size(memory['capacity'])}" if memory["capacity"] else ""
    tiles = [
        ("Peak memory", byte_size(memory["peak"]), of),
        ("HBM traffic", byte_size(row["hbm_bytes"]), ""),
        ("Launches", number(row["launches"]), ""),
        ("FLOPs", number(row["flops"], 3), f"{_of_use(row):.0%} of use"),
    ]
    return (
        [*tiles, ("Step, at least", duration(bound["seconds"]), f"{bound['binds']} most")]
        if bound
        else tiles
    )


def _of_use(row: dict[str, Any]) -> float:
    return sum(r["flops_of_use"] for r in row["traffic"]) / max(row["flops"], 1)
