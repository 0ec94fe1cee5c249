"""A whole run on a cluster, phase by phase: its step, what it takes of devices and storage, and how long it goes on."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.data import sizing
from zaya_jax.hardware import targets
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.parallel import rules
from zaya_jax.parallel import spread as spread_lib
from zaya_jax.plan import goodput, memory, step
from zaya_jax.plan.case import Case
from zaya_jax.plan.goodput import Saving
from zaya_jax.plan.memory import Memory
from zaya_jax.plan.rates import Rates
from zaya_jax.plan.step import Step
from zaya_jax.train import recipe

SIGMA = 2.0  # page reads for one that the tokens fill: the most of well-packed shards (SPEC: 1 to 2)
DEVICES = tuple(2**n for n in range(3, 15))  # of the weak scaling: 8 to 16,384
DAY = 86_400.0
UNDER = "gradients under backward"  # what overlapping all of them would give


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase, its ramp's smaller steps with it."""

    name: str
    case: Case  # of the full batch
    step: Step
    memory: Memory
    capacity: int  # bytes that the chip has for it
    saving: Saving
    tokens: int
    steps: int
    seconds: float  # of all its steps, without failures and saves
    data: sizing.Need

    @property
    def fits(self) -> bool:
        """Whether its memory is there."""
        return self.memory.peak <= self.capacity

    @property
    def days(self) -> float:
        """With failures and saves."""
        return self.seconds / self.saving.goodput / DAY

    @property
    def gpu_hours(self) -> float:
        """Of all devices."""
        return self.days * 24 * self.case.devices

    @property
    def tokens_per_second(self) -> float:
        """Of the cluster, while it computes."""
        return self.case.tokens_per_device * self.case.devices / self.step.seconds


def phases(
    config: Config, devices: int, cluster: Cluster, rates: Rates, at_once: int = 0,
    mtbf_hours: float = goodput.MTBF_HOURS,
) -> tuple[list[Phase], list[str]]:  # fmt: skip
    """All phases of a run that so many devices can train, and a note on each that needs another number of them;
    UserError where none can be trained."""
    capacity = targets.usable(cluster.chip)
    assert capacity is not None
    found: list[Phase] = []
    wrong: list[UserError] = []
    plan = schedule.make_plan(config)
    for _, segments in recipe.by_phase(plan):
        seconds, steps, tokens = 0.0, 0, 0
        try:
            cases = [Case(*_portion(config, segment, devices, cluster.chip, at_once)) for segment in segments]
        except UserError as error:
            wrong.append(error)
            continue
        for segment, case in zip(segments, cases, strict=True):
            time = step.of(case, cluster, rates)
            whole = segment.num_steps * segment.tokens_per_step
            number = -(-whole // (case.sequences * case.here.data.seq_len))
            seconds, steps, tokens = seconds + number * time.seconds, steps + number, tokens + whole
        m = case.model
        need = sizing.Need(
            SIGMA, case.sequences, case.here.data.seq_len, 2 if m.vocab_size <= 2**16 else 4, time.seconds
        )
        found.append(
            Phase(
                segments[0].phase.name, case, time, memory.of(case), capacity,
                goodput.saving(case, cluster, mtbf_hours), tokens, steps, seconds, need,
            )
        )  # fmt: skip
    if not found:
        raise wrong[0]
    notes = [f"not with so many devices: {error}" for error in wrong]
    if config.kernels != ("all",):
        notes.append(
            f"of programs with all kernels of our own, but the config has --config.kernels={','.join(config.kernels)}"
        )
    return found, notes


def _portion(config: Config, segment: schedule.Segment, devices: int, chip: str, at_once: int) -> tuple:
    here, spread, sequences, micro_batches = recipe.portion(config, segment, devices, at_once)
    return here, spread, chip, sequences, micro_batches


@dataclasses.dataclass(frozen=True)
class Scaling:
    """One way to spread a phase over more and more devices, each with as many tokens as now."""

    name: str
    points: tuple[
        tuple[int, float, float], ...
    ]  # devices, seconds of a step, exposed communication; only what fits


def scaling(case: Case, cluster: Cluster, rates: Rates) -> list[Scaling]:
    """The phase's own mesh, the same with gradients under the backward pass, fsdp, experts over a node."""
    own = _over_devices(case, cluster, rates, {})
    under = tuple((n, s - saved, e - saved) for n, s, e, saved in own)
    found = [Scaling("as configured", tuple(p[:3] for p in own)), Scaling(UNDER, under)]
    if not case.spread.fsdp:
        points = _over_devices(case, cluster, rates, {"fsdp": True})
        found.append(Scaling("fsdp", tuple(p[:3] for p in points)))
    if case.model.model_type == "zaya" and case.spread.expert == 1:
        points = _over_devices(case, cluster, rates, {"expert": 8})
        found.append(Scaling("experts over 8", tuple(p[:3] for p in points)))
    return [way for way in found if way.points]


def _over_devices(
    case: Case, cluster: Cluster, rates: Rates, changes: dict
) -> list[tuple[int, float, float, float]]:
    capacity = targets.usable(cluster.chip)
    assert capacity is not None
    found = []
    for devices, other in _wider(case, changes):
        if memory.of(other).peak <= capacity:
            time = step.of(other, cluster, rates)
            found.append((devices, time.seconds, time.by_scope[step.LINKS], time.overlapped))
    return found


def _wider(case: Case, changes: dict) -> Iterator[tuple[int, Case]]:
    mesh = dataclasses.replace(case.here.mesh, data=-1, **changes)
    for devices in DEVICES:
        data, rest = divmod(devices, mesh.expert * mesh.context * mesh.tensor)
        if rest or not data:
            continue
        sizes = {"data": data, "expert": mesh.expert, "context": mesh.context, "tensor": mesh.tensor}
        spread = spread_lib.of(mesh, sizes)
        here = dataclasses.replace(case.here, mesh=mesh)
        try:
            rules.check(here, spread, lengths={"config.data.seq_len": here.data.seq_len})
        except UserError:
            continue
        rows = case.rows * case.micro_batches * data * mesh.expert
        yield devices, Case(here, spread, case.chip, rows, case.micro_batches)


class Stop(NamedTuple):
    """Where a way stops being the fastest."""

    name: str
    devices: int | None  # the most with which it pays; None: with none, or with all
    text: str


def stops(ways: list[Scaling]) -> list[Stop]:
    """For each way that there is, the number of devices from which on another one is faster."""
    said, ways = [], [way for way in ways if way.name != UNDER]
    for way in ways:
        counts = [n for n, *_ in way.points]
        best = [n for n in counts if _at(way, n) <= min(_at(other, n) for other in ways)]
        last = max(best, default=0)
        later = [n for n in counts if n > last]
        if not best:
            said.append(Stop(way.name, None, f"{way.name}: never the fastest"))
        elif later:
            quickest = min(ways, key=lambda other: _at(other, later[0])).name
            text = f"{way.name}: pays up to {last:,} devices; with {later[0]:,} {quickest} is faster"
            said.append(Stop(way.name, last, text))
        elif last < max(n for other in ways for n, *_ in other.points):
            said.append(Stop(way.name, last, f"{way.name}: pays up to {last:,} devices, and fits no more"))
        else:
            said.append(Stop(way.name, None, f"{way.name}: pays from {min(best):,} devices on"))
    return said


def _at(way: Scaling, devices: int) -> float:
    return next((s for n, s, _ in way.points if n == devices), float("inf"))
