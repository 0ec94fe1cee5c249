"""A run's phases before it starts: whether each can be trained on these devices, and a table of them all.

Phases may differ in their mesh. A program has one mesh from start to end: at the border to a phase with another it
saves and ends, and the same command goes on there (`last_step_here`).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from zaya_jax import schedule
from zaya_jax.checkpoint import writing
from zaya_jax.config import Config, Mesh, Phase, UserError
from zaya_jax.data import mix
from zaya_jax.parallel import rules
from zaya_jax.parallel import spread as spread_lib
from zaya_jax.parallel.mesh import make_mesh, rows_of_process, shape_of
from zaya_jax.parallel.spread import AXES, Spread
from zaya_jax.schedule import Plan, Segment

LONGEST_PATH = 24  # of a source in the table, where the end of a longer one stands
ROUNDING = 1e-9  # of 1 - warmup_fraction, as a config file computes it
SIDE_BY_SIDE = 4  # phases in a table: as many as a terminal is wide


def check(config: Config, plan: Plan, reached: int = 0, devices: list | None = None) -> list[str]:
    """UserError where a phase that comes after step `reached` cannot be trained, before anything is compiled.

    Later phases may be meant for another number of devices than there are here: that is no error but a note, and what
    does not depend on the number is checked nevertheless. Without devices all phases are checked like that.
    """
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
    notes = []
    first = plan.step(min(reached + 1, plan.total_steps)).phase_index
    for index, segments in by_phase(plan):
        if index < first:
            continue
        phase, where = segments[0].phase, schedule.key(config, index, "mesh")
        here = schedule.phase_config(config, phase)
        count = len(devices) if devices else None
        try:
            shape = shape_of(here.mesh, count, where)
        except UserError as error:
            shape = shape_of(here.mesh, None, where)
            if index == first:
                raise
            if segments[0].first_step <= config.run.num_steps:
                begin = f"phase {phase.name!r}, from step {segments[0].first_step},"
                notes.append(f"note: {begin} cannot be trained on these devices: {error}")
            count = None
        spread = spread_lib.of(here.mesh, shape)
        sizes = tuple(segment.sequences for segment in segments)
        lengths = {
            schedule.key(config, index, name): getattr(phase, name) for name in ("seq_len", "eval_seq_len")
        }
        rules.check(here, spread, lengths=lengths, rows=math.gcd(*sizes), where=where)
        # Without a number of devices, over those that the mesh has in any case.
        for micro_batch in sorted({min(_micro_batch(phase), size) for size in sizes}):
            rules.check_batch(
                here, spread, sizes, micro_batch, lengths=lengths, where=where,
                name=schedule.key(config, index, "micro_batch" if micro_batch == _micro_batch(phase) else "ramp_from"),
            )  # fmt: skip
        if count is not None:
            rows_of_process(make_mesh(here.mesh, devices, where))
    return notes


def spread_at(config: Config, phase: Phase, devices: int) -> Spread:
    """How a phase's work is spread over so many devices."""
    mesh = schedule.phase_config(config, phase).mesh
    return spread_lib.of(mesh, shape_of(mesh, devices))


def portion(
    config: Config, segment: Segment, devices: int, at_once: int = 0
) -> tuple[Config, Spread, int, int]:
    """A segment's config on so many devices, how it is spread, its sequences per step and its micro-batches; UserError
    where these do not go together.

    With `at_once` so many sequences are taken at once on each row of data x expert, whatever the config's batch, which
    is rounded to whole micro-batches.
    """
    index, phase = segment.phase_index, segment.phase
    here, where = schedule.phase_config(config, phase), schedule.key(config, index, "mesh")
    shape = shape_of(here.mesh, devices, where)
    spread = spread_lib.of(here.mesh, shape)
    lengths = {schedule.key(config, index, "seq_len"): phase.seq_len}
    if at_once:
        micro = at_once * spread.data * spread.expert
        micro_batches = max(1, round(segment.sequences / micro))
        rules.check(here, spread, lengths=lengths, rows=micro, where=where)
        return here, spread, micro * micro_batches, micro_batches
    rules.check(here, spread, lengths=lengths, rows=segment.sequences, where=where)
    try:
        rules.check_batch(
            here, spread, (segment.sequences,), segment.sequences // segment.micro_batches, lengths=lengths,
            where=where, name=schedule.key(config, index, "micro_batch"),
        )  # fmt: skip
    except UserError as error:
        raise UserError(f"phase {phase.name!r}: {error}; or give --at_once=N") from None
    return here, spread, segment.sequences, segment.micro_batches


def last_step_here(config: Config, plan: Plan, number: int, devices: int) -> int:
    """The last step that a program can train which begins with step `number`: after it another mesh is due."""
    last = plan.step(number)
    spread = spread_at(config, last.phase, devices)
    for segment in plan.segments:
        if segment.first_step > number:
            try:
                same = spread_at(config, segment.phase, devices) == spread
            except UserError:  # it fits another number of devices
                same = False
            if not same:
                return segment.first_step - 1
    return plan.total_steps


def border(config: Config, plan: Plan, end: int) -> str:
    """What a run says that ends after step `end`, where another mesh is due."""
    phase = plan.step(end + 1).phase
    mesh = describe_mesh(schedule.phase_config(config, phase).mesh)
    return f"saved after step {end}; phase {phase.name!r} begins with mesh {mesh}: the same command goes on."


def peek(workdir: Path) -> int:
    """The step that a run goes on from if its newest checkpoint is here and whole; touches nothing."""
    return max(writing.numbered(workdir / "checkpoints"), default=0)


def eval_rows(config: Config, phase: Phase, spread: Spread) -> int:
    """Rows of a held-out batch: as many as there are windows, as the mesh needs them, at most a micro-batch."""
    shards = spread.data * spread.expert
    return min(-(-max(config.eval.windows, 1) // shards) * shards, _micro_batch(phase))


def table(config: Config, plan: Plan, devices: int | None = None) -> str:
    """All phases of a plan, a column each; without a number of devices, for as many as a micro-batch can use."""
    columns = [_column(config, index, segments, devices) for index, segments in by_phase(plan)]
    lines = []
    for some in itertools.batched(columns, SIDE_BY_SIDE):
        widths = [max(len(line) for cell in column.values() for line in cell.split("\n")) for column in some]
        for title in columns[0]:
            cells = [column[title].split("\n") for column in some]
            for i, parts in enumerate(itertools.zip_longest(*cells, fillvalue="")):
                row = "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True))
                lines.append(f"{'' if i else title:<20}  {row}".rstrip())
        lines.append("")
    end = f"{plan.total_steps:,} steps, {plan.total_tokens:,} tokens in all"
    if config.run.num_steps < plan.total_steps:
        end += f"; run.num_steps={config.run.num_steps} ends the run before"
    return "\n".join([*lines, end])


def describe_mesh(mesh: Mesh, devices: int | None = None) -> str:
    """Its axes of more than one device, and its switches."""
    shape = shape_of(mesh, devices)
    if devices is None and mesh.data == -1:
        axes = ["data rest"]
    else:
        axes = [f"data {shape['data']}"] if shape["data"] > 1 else []
    axes += [f"{axis} {shape[axis]}" for axis in AXES[1:] if shape[axis] > 1]
    switches = [name for name in ("fsdp", "tsp", "ring") if getattr(mesh, name)]
    return ", ".join([" x ".join(axes) or "one device", *switches])


def _column(config: Config, index: int, segments: Sequence[Segment], devices: int | None) -> dict[str, str]:
    phase = segments[0].phase
    here = schedule.phase_config(config, phase)
    last = segments[-1].first_step + segments[-1].num_steps - 1
    tokens = sum(segment.num_steps * segment.tokens_per_step for segment in segments)
    micro = _micro_batch(phase)
    try:
        spread, note = spread_lib.of(here.mesh, shape_of(here.mesh, devices)), ""
    except UserError:
        devices = None
        spread, note = spread_lib.of(here.mesh, shape_of(here.mesh, None)), " (not here)"
    if devices is None and here.mesh.data == -1:  # one sequence at a time on each row of data x expert
        spread = dataclasses.replace(spread, data=max(micro // spread.expert, 1))
    count = math.prod(getattr(spread, axis) for axis in AXES)
    at_once = micro * phase.seq_len // (spread.data * spread.expert * spread.sequence_parts)
    weights = mix.parse(phase.mixture, f"config.schedule.phases[{index}].mixture")
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
        "micro-batches": _numbers_of(segments),
        "tokens at once": f"{at_once:,} on each of {count:,}",
        "mesh": describe_mesh(here.mesh, devices) + note,
        "remat": phase.remat,
        "packing": phase.packing,
        "mixture": "\n".join(
            f"{weight / sum(weights.values()):.4g} {_end(path)}" for path, weight in weights.items()
        ),
        "evaluation": f"{config.eval.windows} x {phase.eval_seq_len:,} tokens",
    }


def by_phase(plan: Plan) -> list[tuple[int, list[Segment]]]:
    """The segments of each phase, with its index."""
    groups = itertools.groupby(plan.segments, key=lambda segment: segment.phase_index)
    return [(index, list(segments)) for index, segments in groups]


def _numbers_of(segments: Sequence[Segment]) -> str:
    numbers = [(segment.micro_batches, segment.sequences // segment.micro_batches) for segment in segments]
    if len({size for _, size in numbers}) == 1:
        return " > ".join(str(number) for number, _ in numbers) + f" of {numbers[0][1]:,}"
    return " > ".join(f"{number} of {size:,}" for number, size in numbers)


def _micro_batch(phase: Phase) -> int:
    return phase.micro_batch or phase.global_batch


def _end(path: str) -> str:
    return (
        path
        if len(path) <= LONGEST_PATH
        else f".../{path[-LONGEST_PATH:].partition('/')[2] or path[-LONGEST_PATH:]}"
    )


def _short(tokens: int) -> str:
    """8.00T, 16.8M, 512."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)
