"""Lays a run's phases on the devices, checks that each can be trained there, and describes them in a table.

Phases may differ in their mesh. A program has one mesh from start to end: at the border to a phase with another it
saves and ends, and the same command goes on there (`Recipe.last_step_here`).
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

from zaya_jax import schedule
from zaya_jax.checkpoint import writing
from zaya_jax.config import Config, Mesh, Phase, UserError
from zaya_jax.data import mix
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import make_mesh, rows_of_process, shape_of
from zaya_jax.parallel.spread import AXES, Spread, spread_of
from zaya_jax.schedule import Plan, Segment

LONGEST_PATH = 24  # of a source in the table, where the end of a longer one stands
ROUNDING = 1e-9  # of 1 - warmup_fraction, as a config file computes it


@dataclasses.dataclass(frozen=True)
class Stage:
    """A phase of a run, with its config and its place on the devices at hand."""

    index: int
    segments: tuple[Segment, ...]
    config: Config  # as the phase has it: `schedule.phase_config`
    spread: Spread  # on these devices, or on the fewest that it can be on
    mesh: Any  # a `jax.sharding.Mesh`; None where there are no devices, or the phase does not fit them
    misfit: UserError | None  # why they do not

    @property
    def phase(self) -> Phase:
        """The phase, with every 0 of its keys filled in."""
        return self.segments[0].phase


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The plan and the phases of a run on its devices: made once from the config, and handed on."""

    config: Config
    plan: Plan
    devices: list | None
    stages: dict[int, Stage]  # by the phase's index, in their order; of a fork those that are left

    @property
    def last_step(self) -> int:
        """The run's last step: the plan's, or where run.num_steps ends it before."""
        return min(self.plan.total_steps, self.config.run.num_steps)

    def stage(self, number: int) -> Stage:
        """The phase of step `number`; after the last step the last one."""
        return self.stages[self.plan.step(min(number, self.plan.total_steps)).phase_index]

    def coming(self, reached: int) -> list[Stage]:
        """The phases that are left after step `reached`."""
        first = self.stage(reached + 1).index
        return [stage for stage in self.stages.values() if stage.index >= first]

    def last_step_here(self, number: int) -> int:
        """The last step on the mesh of step `number`: a program that begins there ends after it."""
        here = self.stage(number)
        for stage in self.stages.values():
            first = stage.segments[0].first_step
            if first > number and (stage.misfit or stage.spread != here.spread):
                return min(first - 1, self.last_step)
        return self.last_step


def make(config: Config, devices: list | None = None) -> Recipe:
    """The recipe of a config on these devices, or without any."""
    plan, stages = schedule.make_plan(config), {}
    for index, segments in by_phase(plan):
        here, where = schedule.phase_config(config, segments[0].phase), schedule.key(config, index, "mesh")
        mesh = misfit = None
        try:
            shape = shape_of(here.mesh, len(devices) if devices else None, where)
            mesh = make_mesh(here.mesh, devices, where) if devices else None
        except UserError as error:
            shape, misfit = shape_of(here.mesh, None, where), error
        spread = spread_of(here.mesh, shape)
        stages[index] = Stage(index, tuple(segments), here, spread, mesh, misfit)
    return Recipe(config, plan, devices, stages)


def check(recipe: Recipe, reached: int = 0) -> list[str]:
    """UserError where a phase that comes after step `reached` cannot be trained, before anything is compiled.

    Later phases may be meant for another number of devices than there are here: that is no error but a note, and what
    does not depend on the number is checked nevertheless. Without devices all phases are checked like that.
    """
    config, notes = recipe.config, []
    _check_fractions(config, recipe.plan)
    for i, stage in enumerate(recipe.coming(reached)):
        if stage.misfit and i == 0:
            raise stage.misfit
        index, begin = stage.index, stage.segments[0].first_step
        where = schedule.key(config, index, "mesh")
        if stage.misfit and begin <= config.run.num_steps:
            phase = f"phase {stage.phase.name!r}, from step {begin},"
            notes.append(f"note: {phase} cannot be trained on these devices: {stage.misfit}")
        sizes = tuple(segment.sequences for segment in stage.segments)
        lengths = {
            schedule.key(config, index, name): getattr(stage.phase, name) for name in ("seq_len", "eval_seq_len")
        }
        sharding.check(stage.config, stage.spread, lengths=lengths, where=where)
        # Without a number of devices, over those that the mesh has in any case.
        whole = _micro_batch(stage.phase)
        for micro_batch in sorted({min(whole, size) for size in sizes}):
            sharding.check_batch(
                stage.spread, sizes, micro_batch, where=where,
                name=schedule.key(config, index, "micro_batch" if micro_batch == whole else "ramp_from"),
            )  # fmt: skip
        if stage.mesh is not None:
            rows_of_process(stage.mesh)
    return notes


def _check_fractions(config: Config, plan: Plan) -> None:
    up, down = config.schedule.warmup_fraction, config.schedule.decay_fraction
    if plan.decay_tokens is not None:
        if up + plan.decay_tokens / plan.total_tokens > 1 + ROUNDING:
            raise UserError(
                f"config.schedule.warmup_fraction={up:g} and decay_steps={config.schedule.decay_steps} of "
                f"{plan.total_steps:,} steps overlap; give less of one"
            )
    elif up + down > 1 + ROUNDING:
        raise UserError(
            f"config.schedule.warmup_fraction={up:g} and decay_fraction={down:g} overlap; "
            "give fractions that add up to at most 1"
        )


def portion(config: Config, segment: Segment, devices: int, at_once: int = 0) -> tuple[Config, Spread, int, int]:
    """A segment's config on so many devices, its spread, its sequences per step and its micro-batches; UserError where
    these do not go together.

    With `at_once` so many sequences are taken at once on each row of data x expert, whatever the config's batch, which
    is rounded to whole micro-batches.
    """
    phase, key = segment.phase, functools.partial(schedule.key, config, segment.phase_index)
    here, where = schedule.phase_config(config, phase), key("mesh")
    spread = spread_of(here.mesh, shape_of(here.mesh, devices, where))
    sharding.check(here, spread, lengths={key("seq_len"): phase.seq_len}, where=where)
    if at_once:
        micro = at_once * spread.data * spread.expert
        micro_batches = max(1, round(segment.sequences / micro))
        return here, spread, micro * micro_batches, micro_batches
    micro = segment.sequences // segment.micro_batches
    try:
        sharding.check_batch(spread, (segment.sequences,), micro, where=where, name=key("micro_batch"))
    except UserError as error:
        raise UserError(f"phase {phase.name!r}: {error}; or give --at_once=N") from None
    return here, spread, segment.sequences, segment.micro_batches


def border(recipe: Recipe, end: int) -> str:
    """The last line of a program that ends after step `end`, where another mesh is due."""
    stage = recipe.stage(end + 1)
    mesh = describe_mesh(stage.config.mesh)
    return f"saved after step {end}; phase {stage.phase.name!r} begins with mesh {mesh}: the same command goes on."


def peek(workdir: Path) -> int:
    """The step that a run goes on from if its newest checkpoint is here and whole; touches nothing."""
    return max(writing.numbered(workdir / "checkpoints"), default=0)


def eval_rows(config: Config, phase: Phase, spread: Spread) -> int:
    """Rows of a held-out batch: as many as there are windows, as the mesh needs them, at most a micro-batch."""
    shards = spread.data * spread.expert
    return min(-(-max(config.eval.windows, 1) // shards) * shards, _micro_batch(phase))


def table(recipe: Recipe) -> str:
    """All phases, a column each."""
    config, plan = recipe.config, recipe.plan
    columns = [_column(recipe, stage) for stage in recipe.stages.values()]
    lines = []
    widths = [max(len(line) for cell in column.values() for line in cell.split("\n")) for column in columns]
    for title in columns[0]:
        cells = [column[title].split("\n") for column in columns]
        for i, parts in enumerate(itertools.zip_longest(*cells, fillvalue="")):
            row = "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True))
            lines.append(f"{'' if i else title:<20}  {row}".rstrip())
    lines.append("")
    end = f"{plan.total_steps:,} steps, {plan.total_tokens:,} tokens in all"
    if config.run.num_steps < plan.total_steps:
        end += f"; run.num_steps={config.run.num_steps} ends the run before"
    return "\n".join([*lines, end])


def describe_mesh(mesh: Mesh, devices: int | None = None) -> str:
    """A mesh in words: its axes of more than one device, and its switches."""
    shape = shape_of(mesh, devices)
    if devices is None and mesh.data == -1:
        axes = ["data rest"]
    else:
        axes = [f"data {shape['data']}"] if shape["data"] > 1 else []
    axes += [f"{axis} {shape[axis]}" for axis in AXES[1:] if shape[axis] > 1]
    switches = [name for name in ("fsdp", "tsp", "ring") if getattr(mesh, name)]
    return ", ".join([" x ".join(axes) or "one device", *switches])


def _column(recipe: Recipe, stage: Stage) -> dict[str, str]:
    config, here, phase, segments = recipe.config, stage.config, stage.phase, stage.segments
    last = segments[-1].first_step + segments[-1].num_steps - 1
    tokens = sum(segment.num_steps * segment.tokens_per_step for segment in segments)
    devices = None if stage.misfit or not recipe.devices else len(recipe.devices)
    weights = mix.parse(phase.mixture, f"config.schedule.phases[{stage.index}].mixture")
    weights = weights or mix.parse(config.data.mixture) or {config.data.path: 1.0}
    steps = [segment.sequences for segment in segments]
    return {
        "phase": phase.name,
        "steps": f"{segments[0].first_step:,} to {last:,}",
        "tokens": f"{_short(tokens)}, until {_short(segments[0].first_token + tokens)}",
        "context": f"{phase.seq_len:,}",
        "RoPE base": f"{phase.rope_theta:,.10g}",
        "sequences per step": " > ".join(f"{size:,}" for size in steps),
        "tokens per step": " > ".join(_short(size * phase.seq_len) for size in steps),
        "micro-batches": " > ".join(f"{s.micro_batches} of {s.sequences // s.micro_batches:,}" for s in segments),
        "mesh": describe_mesh(here.mesh, devices) + (" (not here)" if stage.misfit else ""),
        "remat": phase.remat,
        "packing": phase.packing,
        "mixture": "\n".join(f"{weight / sum(weights.values()):.4g} {_end(path)}" for path, weight in weights.items()),
        "evaluation": f"{config.eval.windows} x {phase.eval_seq_len:,} tokens",
    }


def by_phase(plan: Plan) -> list[tuple[int, list[Segment]]]:
    """The segments of each phase, with its index."""
    groups = itertools.groupby(plan.segments, key=lambda segment: segment.phase_index)
    return [(index, list(segments)) for index, segments in groups]


def _micro_batch(phase: Phase) -> int:
    return phase.micro_batch or phase.global_batch


def _end(path: str) -> str:
    return path if len(path) <= LONGEST_PATH else f"...{path[-LONGEST_PATH:]}"


def _short(tokens: int) -> str:
    """A number of tokens as 8.00T, 16.8M or 512."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)
