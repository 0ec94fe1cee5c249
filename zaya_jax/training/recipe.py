"""Places a run's phases on the devices, and checks that each can be trained there.

Phases may differ in their mesh. A process has one mesh from start to end: before a phase with
another it saves and ends, and the same command continues there (`Recipe.last_step_here`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from zaya_jax import schedule
from zaya_jax.config import Config, Phase, UserError
from zaya_jax.hardware import sizing
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import make_mesh, rows_of_process, shape_of
from zaya_jax.parallel.spread import Spread, spread_of
from zaya_jax.schedule import Plan, Segment


@dataclasses.dataclass(frozen=True)
class PlacedPhase:
    """A phase of a run, with its config and its place on the devices at hand."""

    index: int
    segments: tuple[Segment, ...]
    config: Config  # as the phase has it: `schedule.phase_config`
    key: Callable[[str], str]  # names the config key that decides a value: `schedule.key`
    spread: Spread  # on these devices, or on the fewest that it can be on
    # a `jax.sharding.Mesh`; None where there are no devices, or the phase does not fit them
    mesh: Any
    rows: tuple[int, int]  # of a batch in this process: `mesh.rows_of_process`
    misfit: UserError | None  # why the phase does not fit the devices

    @property
    def phase(self) -> Phase:
        """The phase, with every 0 of its keys filled in."""
        return self.segments[0].phase


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The plan and the phases of a run on its devices: made once from the config, and handed on."""

    config: Config
    plan: Plan
    phases: dict[int, PlacedPhase]  # by their index, in their order; of a fork those that are left

    @property
    def last_step(self) -> int:
        """The run's last step: the plan's, unless run.num_steps is lower."""
        return min(self.plan.last_step, self.config.run.num_steps)

    def phase_of_step(self, number: int) -> PlacedPhase:
        """The phase of step `number`; after the last step the last one."""
        return self.phases[self.plan.step(min(number, self.plan.last_step)).phase_index]

    def last_step_here(self, number: int) -> int:
        """The last step on the mesh of step `number`: a process that begins there ends after it."""
        current = self.phase_of_step(number)
        for placed in self.phases.values():
            first = placed.segments[0].first_step
            if first > number and (placed.misfit or placed.spread != current.spread):
                return min(first - 1, self.last_step)
        return self.last_step


def make_recipe(config: Config, devices: list | None = None) -> Recipe:
    """The recipe of a config on these devices, or without any."""
    plan = schedule.make_plan(config)
    phases = {}
    for index, segments, declared, key in schedule.phases_of(config, plan):
        phase_config = sizing.settled(declared, len(devices or ()))
        shape = shape_of(phase_config.mesh, None, key("mesh"))
        mesh, rows, misfit = None, (0, 1), None
        if devices:
            try:
                fitting = make_mesh(phase_config.mesh, devices, key("mesh"))
                rows = rows_of_process(fitting)
                mesh, shape = fitting, fitting.shape
            except UserError as error:
                misfit = error
        spread = spread_of(phase_config.mesh, shape)
        phases[index] = PlacedPhase(index, segments, phase_config, key, spread, mesh, rows, misfit)
    return Recipe(config, plan, phases)


def check(recipe: Recipe, reached: int = 0) -> list[str]:
    """UserError if a phase after step `reached` cannot be trained, before anything is compiled.

    Later phases may be meant for another number of devices: that is not an error but a note, and
    everything else about them is still checked. Without devices all phases are checked like that.
    """
    notes = []
    first = recipe.phase_of_step(reached + 1).index
    for placed in recipe.phases.values():
        if placed.index < first:
            continue
        if placed.misfit and placed.index == first:
            raise placed.misfit
        phase, key, begin = placed.phase, placed.key, placed.segments[0].first_step
        if placed.misfit and begin <= recipe.config.run.num_steps:
            name = f"phase {phase.name!r}, from step {begin},"
            notes.append(f"note: {name} cannot be trained on these devices: {placed.misfit}")
        lengths = {key(name): getattr(phase, name) for name in ("seq_len", "eval_seq_len")}
        sharding.check(placed.config, placed.spread, lengths=lengths, where=key("mesh"))
        # If the number of devices is unknown, `spread` is the smallest that the config allows.
        sizes = tuple(segment.sequences for segment in placed.segments)
        for micro_batch in sorted({min(phase.micro_batch, size) for size in sizes}):
            name = key("micro_batch" if micro_batch == phase.micro_batch else "ramp_from")
            sharding.check_batch(placed.spread, sizes, micro_batch, where=key("mesh"), name=name)
    return notes


def place_segment(
    config: Config, segment: Segment, devices: int, at_once: int = 0
) -> tuple[Config, Spread, int, int]:
    """A segment's config on this many devices, its spread, its sequences per step and its number of
    micro-batches; UserError if these do not fit together.

    With `at_once` that many sequences are taken at once on each row of data x expert, whatever the
    config's batch, which is rounded to whole micro-batches.
    """
    phase = segment.phase
    key = functools.partial(schedule.key, config, segment.phase_index)
    phase_config = sizing.settled(schedule.phase_config(config, phase), devices)
    where = key("mesh")
    spread = spread_of(phase_config.mesh, shape_of(phase_config.mesh, devices, where))
    sharding.check(phase_config, spread, lengths={key("seq_len"): phase.seq_len}, where=where)
    if at_once:
        micro_batch = at_once * spread.data * spread.expert
        micro_batches = max(1, round(segment.sequences / micro_batch))
        return phase_config, spread, micro_batch * micro_batches, micro_batches
    micro_batch = segment.sequences // segment.micro_batches
    name = key("micro_batch")
    try:
        sharding.check_batch(spread, (segment.sequences,), micro_batch, where=where, name=name)
    except UserError as error:
        raise UserError(f"phase {phase.name!r}: {error}; or give --at_once=N") from None
    return phase_config, spread, segment.sequences, segment.micro_batches


def eval_rows(config: Config, phase: Phase, spread: Spread) -> int:
    """Rows of a held-out batch: the number of windows, rounded up for the mesh, at most a
    micro-batch."""
    shards = spread.data * spread.expert
    return min(-(-max(config.eval.windows, 1) // shards) * shards, phase.micro_batch)
