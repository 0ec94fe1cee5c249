"""Plans a run and words the plan, for `experiments.plan`."""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from zaya_jax import cli, schedule
from zaya_jax.config import Config, Mesh, UserError
from zaya_jax.hardware import chips, clusters, sizing, targets
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.parallel.spread import spread_of
from zaya_jax.plan import footprint, goodput, network, step_time, work
from zaya_jax.plan import phases as planned_phases
from zaya_jax.plan import rates as rates_lib
from zaya_jax.plan.case import StepCase
from zaya_jax.plan.phases import PlannedPhase
from zaya_jax.plan.rates import Rates
from zaya_jax.report.document import Page, Section, Table, write_results
from zaya_jax.report.text import byte_size, duration, shape_of_step
from zaya_jax.training import unused

# of expert, context and tensor that a search tries: they should stay within a node
SIZES = (1, 2, 4, 8)
REMATS = ("none", "elementwise", "attention", "layer")
BEST = 10  # ways that a search gives
NETWORK = ("for", "kind", "GB sent", "over", "times", "ms")
SUMMARY = (  # of each phase
    "step",
    "step, low",
    "step, high",
    "tokens/s",
    "MFU",
    "memory",
    "days",
    "GPU-hours",
    "page reads/s",
    "save every",
    "goodput",
)


def run(args: argparse.Namespace) -> int:
    """Formulas in, three files out."""
    out, config = cli.out_folder(args.out, "the plan"), args.config
    if config.run.lora or config.run.takes_pairs:
        key = "lora" if config.run.lora else "preference"
        raise UserError(
            f"a plan does not know config.run.{key}; experiments.compile measures its step"
        )
    if config.run.fork:
        raise UserError(
            f"config.run.fork={config.run.fork} has steps that a plan would count again; leave it"
            " out, and give run.num_steps, or the phases' tokens, without the parent's"
        )
    jax.config.update("jax_platforms", "cpu")  # shapes alone are asked of JAX
    cluster = clusters.CLUSTERS[args.cluster]
    hours = args.mtbf_hours or goodput.MTBF_HOURS.value
    rates = rates_lib.for_cluster(cluster, config.hardware.figures)
    phases, notes = planned_phases.plan_run(
        config, args.devices, cluster, rates, args.at_once, hours
    )
    last = schedule.make_plan(config).last_step
    if config.run.num_steps < last:
        notes.append(
            f"The plan is of all {last:,} steps; config.run.num_steps={config.run.num_steps} ends"
            " the run before."
        )
    notes += dict.fromkeys(sizing.describe(phase.case.config, cluster.chip) for phase in phases)
    if own := config.model.layer or config.model.router:
        notes.append(f"Planned as the usual layer and router, which {own} may cost more than.")
    result = {
        "config": config.name,
        "cluster": args.cluster,
        "source": cluster.source,
        "devices": args.devices,
        "date": time.strftime("%Y-%m-%d"),
        "notes": [*notes, *unused.notes(config)],
        "phases": [_phase(phase, cluster, rates, args.search) for phase in phases],
        "assumed": _assumed(rates, hours),
    }
    write_results(out, "plan", result, document(result))
    return cli.DONE


def _phase(p: PlannedPhase, cluster: Cluster, rates: Rates, searched: bool) -> dict[str, Any]:
    case, step = p.case, p.step
    return {
        "name": p.name,
        "mesh": case.spread.facts(),
        "remat": case.config.remat,
        "sequences": case.sequences,
        "micro_batches": case.micro_batches,
        "seq_len": case.config.data.seq_len,
        "tokens_per_device": case.tokens_per_device,
        "tokens": p.tokens,
        "steps": p.steps,
        "tokens_per_second": p.tokens_per_second,
        "days": p.days,
        "gpu_hours": p.gpu_hours,
        "memory": {
            "peak": p.memory.peak,
            "capacity": p.capacity,
            "place": p.memory.peak_moment,
            "at_peak": p.memory.at_peak,
            "places": p.memory.bytes_by_moment,
        },
        "step": {
            "seconds": step.seconds,
            "between": step_time.seconds_between(case, cluster, rates),
            "mfu": step.mfu,
            "by_scope": step.by_scope,
            "by_kind": step.by_kind,
            "links": step.links,
            "exposed": step.exposed,
        },
        "work": _work(case),
        "flows": [
            {**dataclasses.asdict(flow), "seconds": flow.seconds(case, cluster, rates)}
            for flow in network.flows(case)
        ],
        "saving": {**dataclasses.asdict(p.saving), "steps": p.saving.interval / step.seconds},
        "page_reads_per_second": p.page_reads / step.seconds,
        "search": _search(p, cluster, rates) if searched else [],
    }


def _work(case: StepCase) -> list[dict[str, Any]]:
    """Launches, bytes and FLOPs by scope, with the useful FLOPs."""
    rows, every = [], work.list_work(case)
    useful = chips.flops_by_scope(case.model, case.config.data.seq_len)
    for scope in dict.fromkeys(part.scope for part in every):
        parts = [part for part in every if part.scope == scope]
        rows.append(
            {
                "scope": scope,
                "launches": sum(part.launches for part in parts),
                "bytes": sum(part.bytes for part in parts),
                "flops": sum(part.flops for part in parts),
                "useful": useful.get(scope, 0.0) * case.tokens_per_device,
            }
        )
    return rows


class Way(NamedTuple):
    """One way to run a step."""

    case: StepCase
    step: step_time.StepTime
    memory: footprint.Footprint


def fastest(
    config: Config, devices: int, sequences: int, cluster: Cluster, rates: Rates
) -> list[Way]:
    """The fastest ways to run a phase that fit the chip's memory, fastest first; [] where nothing
    fits."""
    capacity, ways = targets.memory_for_jax(cluster.chip), []
    for case in candidates(config, devices, sequences, cluster.chip):
        memory = footprint.estimate(case)
        if memory.peak <= capacity:
            ways.append(Way(case, step_time.estimate(case, cluster, rates), memory))
    return sorted(ways, key=lambda way: (way.step.seconds, way.memory.peak))[:BEST]


def candidates(config: Config, devices: int, sequences: int, chip: str) -> Iterator[StepCase]:
    """Every mesh, micro-batch and remat that `pretrain` would not refuse."""
    for expert, context, tensor, fsdp in itertools.product(SIZES, SIZES, SIZES, (False, True)):
        data, rest = divmod(devices, expert * context * tensor)
        rows = data * expert
        if rest or not data or (fsdp and data == 1) or sequences % rows:
            continue
        mesh = Mesh(data=data, expert=expert, context=context, tensor=tensor, fsdp=fsdp)
        spread = spread_of(mesh, shape_of(mesh, devices))
        config = dataclasses.replace(config, mesh=mesh)
        try:
            sharding.check(config, spread, lengths={"config.data.seq_len": config.data.seq_len})
        except UserError:
            continue
        rows_each = sequences // rows
        for micro_batches in range(rows_each, 0, -1):  # from one sequence at once to all
            if rows_each % micro_batches == 0:
                for remat in REMATS:
                    way = dataclasses.replace(config, remat=remat)
                    yield StepCase(way, spread, chip, sequences, micro_batches)


def _search(p: PlannedPhase, cluster: Cluster, rates: Rates) -> list[dict[str, Any]]:
    rows = []
    for case, step, memory in fastest(
        p.case.config, p.case.devices, p.case.sequences, cluster, rates
    ):
        mesh = " x ".join(f"{axis} {size}" for axis, size in case.axes.items() if size > 1)
        if case.spread.fsdp:
            mesh += ", fsdp"
        rows.append(
            {
                "mesh": mesh,
                "micro_batches": case.micro_batches,
                "remat": case.config.remat,
                "seconds": step.seconds,
                "mfu": step.mfu,
                "peak": memory.peak,
                "links": sum(step.exposed.values()),
            }
        )
    return rows


def _assumed(rates: Rates, mtbf_hours: float) -> list[tuple[str, float, str]]:
    """All that is assumed, with its source."""
    failures = goodput.MTBF_HOURS.source if mtbf_hours == goodput.MTBF_HOURS.value else "given"
    return [
        *rates.rows(),
        ("hours between failures of a device", mtbf_hours, failures),
        ("seconds of a restart", goodput.RESTART.value, goodput.RESTART.source),
        ("seconds of any save", goodput.SAVE.value, goodput.SAVE.source),
        ("bytes/s to a device's host", goodput.HOST_LINK.value, goodput.HOST_LINK.source),
        (
            "page reads for one that tokens fill",
            planned_phases.READ_AMPLIFICATION,
            "the most of well-packed shards: docs/data.md",
        ),
    ]


def document(result: dict[str, Any]) -> Page:
    """A table of the phases, a section each, and the assumptions."""
    title = f"{result['config']} planned for {result['devices']:,} devices of {result['cluster']}"
    about = f"{result['date']}; per device and step unless it says otherwise. {result['source']}"
    sections = [Section("Phases", "", [_summary(result)], result["notes"])]
    for phase in result["phases"]:
        heading = f"{phase['name']}: {headline(phase)}"
        sections.append(Section(heading, f"{shape_of_step(phase)}.", list(_tables(phase))))
    assumed = [[name, f"{value:.3g}", source] for name, value, source in result["assumed"]]
    table = Table("What is assumed", ("rate", "value", "source"), assumed, "code")
    sections.append(Section("Assumptions", "", [table]))
    footer = "Formulas, nothing was compiled or run; docs/planning.md lists their assumptions."
    return Page(title, "", about, sections, footer=footer)


def headline(phase: dict[str, Any]) -> str:
    """A phase in a line."""
    memory, step = phase["memory"], phase["step"]
    fits = "fits" if memory["peak"] <= memory["capacity"] else "does NOT fit"
    low, high = map(duration, step["between"]["all"])
    return (
        f"{duration(step['seconds'])} (low {low}, high {high}) a step,"
        f" {phase['tokens_per_second'] / 1e6:,.2f}M tokens/s,"
        f" MFU {step['mfu']:.1%}, {byte_size(memory['peak'])} of"
        f" {byte_size(memory['capacity'])} ({fits}), {phase['days']:,.1f} days"
    )


def _summary(result: dict[str, Any]) -> Table:
    """A column for each phase: a phone has room for four."""
    phases = result["phases"]
    columns = [
        [
            *map(duration, (phase["step"]["seconds"], *phase["step"]["between"]["all"])),
            f"{phase['tokens_per_second'] / 1e6:,.2f}M",
            f"{phase['step']['mfu']:.1%}",
            byte_size(phase["memory"]["peak"]),
            f"{phase['days']:,.1f}",
            f"{phase['gpu_hours']:,.0f}",
            f"{phase['page_reads_per_second']:,.0f}",
            duration(phase["saving"]["interval"]),
            f"{phase['saving']['goodput']:.2%}",
        ]
        for phase in phases
    ]
    head = ["", *(phase["name"] for phase in phases)]
    return Table("Phase by phase", head, list(zip(SUMMARY, *columns, strict=True)))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _tables(phase: dict[str, Any]) -> Iterable[Table]:
    step, memory, saving = phase["step"], phase["memory"], phase["saving"]
    for title, name, parts in (
        ("Where the step goes", "scope", step["by_scope"]),
        ("Its bounds", "bound by", step["by_kind"]),
    ):
        rows = [[part, _ms(s), f"{s / step['seconds']:.1%}"] for part, s in parts.items()]
        yield Table(title, (name, "ms", "share"), [*rows, ["all", _ms(step["seconds"]), ""]])
    rows = [
        [name, _ms(low), _ms(step["seconds"]), _ms(high)]
        for name, (low, high) in step["between"].items()
    ]
    yield Table("The step by assumption", ("rate at its ends", "low, ms", "likely", "high"), rows)
    kinds = [
        [kind, f"{size / 1e9:,.2f}", f"{size / memory['peak']:.1%}"]
        for kind, size in memory["at_peak"].items()
    ]
    yield Table(f"Memory where it is highest: {memory['place']}", ("kind", "GB", "share"), kinds)
    scopes = [
        [
            part["scope"],
            f"{part['launches']:,.0f}",
            f"{part['bytes'] / 1e9:,.1f}",
            f"{part['flops'] / 1e12:,.2f}",
            f"{part['useful'] / part['flops']:.0%}" if part["flops"] and part["useful"] else "",
        ]
        for part in phase["work"]
    ]
    yield Table("Work by scope", ("scope", "launches", "GB", "TFLOP", "of use"), scopes)
    if step["links"]:
        yield Table("Network", NETWORK, [_flow(flow) for flow in phase["flows"]])
        links = [[name, _ms(s), _ms(step["exposed"][name])] for name, s in step["links"].items()]
        yield Table("Communication", ("for", "ms on the links", "exposed"), links)
    rows = [
        ["state", byte_size(saving["state"])],
        ["a save stands in the way", duration(saving["stall"])],
        ["and is on the storage after", duration(saving["written"])],
        ["a failure every", duration(saving["mtbf"])],
        ["best interval", f"{duration(saving['interval'])}, {saving['steps']:,.0f} steps"],
        ["goodput", f"{saving['goodput']:.2%}"],
    ]
    yield Table("Checkpoints", ("what", "value"), rows)
    ways = [
        [
            way["mesh"],
            str(way["micro_batches"]),
            way["remat"],
            duration(way["seconds"]),
            f"{way['mfu']:.1%}",
            byte_size(way["peak"]),
            duration(way["links"]),
        ]
        for way in phase["search"]
    ]
    if ways:
        head = ("mesh", "micro-batches", "remat", "step", "MFU", "memory", "exposed")
        yield Table("The fastest ways that fit", head, ways)


def _flow(flow: dict[str, Any]) -> list[str]:
    """A row of the table of the network."""
    over = " x ".join(flow["axes"])
    if flow["group"]:
        over += f", {len(flow['group'])} together"
    return [
        flow["what"],
        flow["kind"],
        f"{flow['wire'] / 1e9:,.3f}",
        over,
        f"{flow['times']:,.0f}",
        f"{1e3 * flow['seconds']:,.2f}",
    ]
