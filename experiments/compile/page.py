"""Compiles a run's steps and words their costs, for `experiments.compile`."""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels import chip, table
from zaya_jax import cli, schedule
from zaya_jax.compiled import measure
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import clusters, host, sizing, targets
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.report.document import Page, Section, Table, write_results
from zaya_jax.report.text import byte_size, duration, number, shape_of_step
from zaya_jax.schedule import Segment
from zaya_jax.text import tokenizers
from zaya_jax.training import recipe, unused

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
    "HBM": "HBM at its bandwidth",
    "launches": "kernels too short for either",
    "links": "links, exposed",
    "hidden": "(links, under kernels)",
}


def run(args: argparse.Namespace) -> int:
    """One row of the table for each phase."""
    out = cli.out_folder(args.out, "the results")
    config = _with_ids(args.config)
    host.require_x32()
    capacity, cluster = None, None
    if args.target == "cpu":
        more = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()
    else:
        capacity, cluster = targets.memory_for_jax(args.target), clusters.of_chip(args.target)
    jax.config.update("jax_platforms", "cpu")  # nothing is asked of GPUs that may be here
    segments = _segments(config, args.phase)
    devices = targets.devices(args.target, args.devices, config)
    # report mistakes before compiling
    programs = [_program(config, segment, devices, args.at_once) for segment in segments]
    settings = dict.fromkeys(sizing.describe(program.config, args.target) for program in programs)
    made_with = [_kernels(config, devices[0]), *filter(None, settings), *unused.notes(config)]
    print(*made_with, sep="\n", flush=True)

    rows: list[dict[str, Any]] = []
    compiled: dict[Any, dict[str, Any]] = {}
    for segment, program in zip(segments, programs, strict=True):
        name = segment.phase.name
        if same := compiled.get(program.key):
            print(f"{name}: the same program as {same['phase']!r}", flush=True)
            rows.append({**same, "phase": name, "same_as": same["phase"]})
            continue
        print(f"{name}: compiling for {len(devices)} {args.target} ...", flush=True)
        begun = time.perf_counter()
        row = {
            "phase": name,
            **measure.measure(
                program.config,
                program.mesh,
                program.sequences,
                program.micro_batches,
                cluster,
                capacity,
            ),
        }
        print(f"{name}: {headline(row)} ({time.perf_counter() - begun:.0f} s)", flush=True)
        compiled[program.key] = row
        rows.append(row)

    result = {
        "config": config.name,
        "target": args.target,
        "devices": len(devices),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "made_with": made_with,
        "phases": rows,
    }
    write_results(out, "compile", result, document(result))
    return cli.DONE


def _segments(config: Config, phase: str | None) -> list[Segment]:
    """The phase of this name, or each; of a batch ramp the full batch, which comes last."""
    last = {segment.phase_index: segment for segment in schedule.make_plan(config).segments}
    chosen = [segment for segment in last.values() if phase in (None, segment.phase.name)]
    if not chosen:
        names = ", ".join(repr(segment.phase.name) for segment in last.values())
        raise UserError(f"--phase={phase} is not a phase of {config.name}; it has {names}")
    return chosen


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
    target = chip.chip_of(device)
    if target.maker not in ("cuda", "rocm"):
        return "kernels: a CPU's own algorithms"
    ours = target.taking(config.kernels).kernels
    line = f"kernels: ours for {', '.join(ours) or 'nothing'}, otherwise XLA's"
    if rows := table.rows_of_operators(table.rows(target.architecture), ours):
        line += f"; tiles: {table.counted(rows)}"
    return line


class PhaseProgram(NamedTuple):
    """What a phase's program is made from."""

    config: Config
    mesh: Any
    sequences: int  # per step
    micro_batches: int

    @property
    def key(self) -> Any:
        """Equal for phases that have one program: packing changes the data alone."""
        data = dataclasses.replace(self.config.data, packing="concat")
        same = dataclasses.replace(self.config, data=data)
        return same, self.sequences, self.micro_batches


def _program(config: Config, segment: Segment, devices: list, at_once: int) -> PhaseProgram:
    """UserError where a phase's config, devices and batch do not go together."""
    phase_config, _, *batch = recipe.place_segment(config, segment, len(devices), at_once)
    key = schedule.key(config, segment.phase_index, "mesh")
    return PhaseProgram(phase_config, make_mesh(phase_config.mesh, devices, key), *batch)


def document(result: dict[str, Any]) -> Page:
    """A section a phase."""
    title = f"{result['config']} compiled for {result['devices']:,} {result['target']}"
    about = f"{result['date']}, jax {result['jax']}; per device and step"
    if result["target"] == "cpu":
        about += " (the CPU's program: its own algorithms, no account of kernels)"
    about = "; ".join([about, *result["made_with"]])
    footer = "Read from the compiled program; docs/compiling.md says how."
    return Page(title, "", about, [_phase(row) for row in result["phases"]], footer=footer)


def headline(row: dict[str, Any]) -> str:
    """A phase's program in a line."""
    memory, bound = row["memory"], row["bound"]
    of = f" of {byte_size(memory['capacity'])}" if memory["capacity"] else ""
    time = f", at least {duration(bound['seconds'])} ({bound['binds']} most)" if bound else ""
    return (
        f"peak {byte_size(memory['peak'])}{of}, {byte_size(row['hbm_bytes'])} of traffic,"
        f" {row['launches']:,.0f} launches, {number(row['flops'], 3)} FLOPs, {_useful_share(row):.0%} of"
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
    if loops := ", ".join(row["unknown_loops"]):
        notes.append(f"loops of unknown length, each counted as one turn: {loops}")
    if again := sum(scope["flops_by_stage"].get("again", 0) for scope in row["traffic"]):
        notes.append(f"computed again in the backward pass: {again / 1e12:,.1f} TFLOP, not useful")
    return Section(title, text, list(_tables(row)), notes)


def _verdict(row: dict[str, Any]) -> str:
    memory = row["memory"]
    if not memory["capacity"]:
        return byte_size(memory["peak"])
    used = f"{byte_size(memory['peak'])} of {byte_size(memory['capacity'])}"
    if memory["peak"] <= memory["capacity"]:
        return f"fits, {used}"
    return f"does NOT fit, {used}; `experiments.plan --search` ranks what does"


def _tables(row: dict[str, Any]) -> Iterable[Table]:
    memory = row["memory"]
    kinds = [
        [kind, byte_size(memory[kind]), f"{memory[kind] / memory['peak']:.1%}"] for kind in KINDS
    ]
    yield Table("Memory where it is highest", ("kind", "size", "share"), kinds)
    largest = [
        [byte_size(b["bytes"]), b["shape"], b["kind"], b["scope"], b["op_name"]]
        for b in memory["largest"]
    ]
    head: Sequence[str] = ("size", "array", "kind", "scope", "made by")
    yield Table("Largest temporaries there", head, largest, "code")
    scopes = [_work(part["scope"], part, part["flops_of_use"]) for part in row["traffic"]]
    whole = {name: row[name] for name in ("launches", "flops")}
    for name in ("reads", "writes"):
        whole[name] = sum(part[name] for part in row["traffic"])
    scopes.append(_work("all", whole, _useful(row)))
    head = ("scope", "launches", "read", "written", "FLOPs", "of use")
    yield Table("Traffic and work by scope", head, scopes)
    collectives = [
        [
            collective["kind"],
            collective["scope"],
            f"{collective['bytes'] / 1e6:,.2f}",
            f"{collective['group']:,}",
            "?" if collective["times"] is None else str(collective["times"]),
            str(collective["kernels_beside"]),
        ]
        for collective in row["collectives"]
    ]
    if collectives:
        head = ("kind", "scope", "MB", "devices", "times", "kernels overlapping it")
        yield Table("Collectives", head, collectives)
    if bound := row["bound"]:
        parts = [[words, f"{1e3 * bound[name]:,.1f}"] for name, words in BOUNDS.items()]
        parts.append(["all", f"{1e3 * bound['seconds']:,.1f}"])
        yield Table("A bound on the step's time", ("bound by", "ms"), parts)


def _work(scope: str, part: dict[str, Any], useful: float) -> list[str]:
    """A row of what a scope does."""
    return [
        scope,
        f"{part['launches']:,.0f}",
        byte_size(part["reads"]),
        byte_size(part["writes"]),
        number(part["flops"], 3),
        f"{useful / part['flops']:.0%}" if part["flops"] else "",
    ]


def _useful(row: dict[str, Any]) -> float:
    return sum(part["flops_of_use"] for part in row["traffic"])


def _useful_share(row: dict[str, Any]) -> float:
    return _useful(row) / max(row["flops"], 1)
