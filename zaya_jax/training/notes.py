"""The lines that a run prints about itself, in words, and the record of its environment."""

import itertools
import math
import sys
from pathlib import Path

import jax

from zaya_jax import schedule
from zaya_jax.config import Mesh, Phase, Precision
from zaya_jax.data import mix
from zaya_jax.hardware import sizing
from zaya_jax.hardware.chips import peak_flops
from zaya_jax.model import zaya
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.parallel.spread import AXES
from zaya_jax.training import logs
from zaya_jax.training.recipe import PlacedPhase, Recipe
from zaya_jax.version import __version__

LONGEST_PATH = 24  # of a source in the table, where the end of a longer one stands


def describe_start(
    recipe: Recipe, placed: PlacedPhase, workdir: Path, reached: int, notes: list[str]
) -> None:
    """Prints the first lines of a start: the phases, the model and its mesh, and the notes of the
    checks."""
    if recipe.config.schedule.phases:
        logs.say(phase_table(recipe))
    logs.say(describe_run(recipe, placed, workdir, reached))
    devices = list(placed.mesh.devices.flat)
    all_notes = [*notes, unknown_peak(), *sizing.notes(placed.config, devices)]
    for note in dict.fromkeys(all_notes):
        if note:
            logs.say(note)


def describe_run(recipe: Recipe, placed: PlacedPhase, workdir: Path, reached: int) -> str:
    """Model, mesh, steps and folder, on one line."""
    config, last = recipe.config, recipe.plan.step(recipe.last_step)
    counts = zaya.param_counts(config.model)
    axes = [f"{axis} {size}" for axis, size in placed.mesh.shape.items() if size > 1]
    resumed = f", from step {reached}" if reached else ""
    return (
        f"{config.name}: {counts['total']:,} parameters ({counts['active']:,} active) on"
        f" {' x '.join(axes) or 'one device'} ({jax.devices()[0].device_kind}), {last.number} steps"
        f" of {last.sequences} x {last.phase.seq_len} tokens, in {workdir}{resumed}"
    )


def other_rounding(meta: dict, devices: int, kernels: dict, reached: int) -> str:
    """A note if a run goes on with another number of devices or processes, or other tiles, than it
    had at this checkpoint; "" otherwise. The config may be the same: `mesh.data` = -1 takes what is
    there."""
    counts = {
        "devices": (meta.get("devices"), devices),
        "processes": (meta.get("processes"), jax.process_count()),
    }
    changed = [
        f"the number of {name} ({before} before, {now} now)"
        for name, (before, now) in counts.items()
        if before not in (None, now)
    ]
    if meta.get("kernels") not in (None, kernels):
        changed.append("our kernels or their tiles")
    if not changed:
        return ""
    return (
        f"note: changed since step {reached}: {', '.join(changed)}: sums have another order from"
        " here on, so the run rounds differently"
    )


def mesh_change_line(recipe: Recipe, end: int) -> str:
    """The last line of a process that ends after step `end`, because the next phase has another
    mesh."""
    placed = recipe.phase_of_step(end + 1)
    mesh = describe_mesh(placed.config.mesh)
    return (
        f"saved after step {end}; phase {placed.phase.name!r} begins with mesh {mesh}: the same"
        " command continues."
    )


def phase_table(recipe: Recipe) -> str:
    """All phases, a column each."""
    config, plan = recipe.config, recipe.plan
    columns = [_column(recipe, placed) for placed in recipe.phases.values()]
    rows: list[tuple[str, ...]] = []
    for name in columns[0]:
        cells = [column[name].split("\n") for column in columns]
        for i, line in enumerate(itertools.zip_longest(*cells, fillvalue="")):
            rows.append(("" if i else name, *line))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    end = f"{plan.last_step:,} steps, {plan.tokens_at_end:,} tokens in all"
    if config.run.num_steps < plan.last_step:
        end += f"; run.num_steps={config.run.num_steps} ends the run before"
    return "\n".join([*lines, "", end, *_about_rates(plan)])


def _about_rates(plan: schedule.Plan) -> list[str]:
    """The warm-up, and each border between phases where the learning rate jumps."""
    warmup = _short(int(plan.schedule.warmup_fraction * plan.tokens_at_end))
    jumps = []
    for before, after in itertools.pairwise(plan.segments):
        old_rate = schedule.learning_rate(plan, after.tokens_before, before)
        new_rate = schedule.learning_rate(plan, after.tokens_before, after)
        if not math.isclose(old_rate, new_rate):
            jumps.append(
                f"note: the learning rate jumps from {old_rate:.4g} to {new_rate:.4g} where phase"
                f" {after.phase.name!r} begins, at step {after.first_step:,}"
            )
    smooth = "" if jumps else "; it has no jump at a border between phases"
    return [f"the learning rate rises over the first {warmup} tokens{smooth}", *jumps]


def describe_mesh(mesh: Mesh, devices: int | None = None) -> str:
    """A mesh in words: its axes of more than one device, and its switches."""
    shape = shape_of(mesh, devices)
    if devices is None and mesh.data == -1:
        axes = ["data rest"]
    else:
        axes = [f"data {shape['data']}"] if shape["data"] > 1 else []
    axes += [f"{axis} {shape[axis]}" for axis in AXES[1:] if shape[axis] > 1]
    switches = [name for name in ("fsdp", "tsp", "ring", "across") if getattr(mesh, name)]
    return ", ".join([" x ".join(axes) or "one device", *switches])


def _column(recipe: Recipe, placed: PlacedPhase) -> dict[str, str]:
    config, phase, segments = recipe.config, placed.phase, placed.segments
    last = segments[-1].first_step + segments[-1].num_steps - 1
    tokens = sum(segment.num_steps * segment.tokens_per_step for segment in segments)
    devices = placed.mesh.size if placed.mesh else None
    weights = mix.parse_mixture(phase.mixture, f"config.schedule.phases[{placed.index}].mixture")
    weights = weights or mix.parse_mixture(config.data.mixture) or {config.data.path: 1.0}
    return {
        "phase": phase.name,
        "steps": f"{segments[0].first_step:,} to {last:,}",
        "tokens": f"{_short(tokens)}, until {_short(segments[0].tokens_before + tokens)}",
        "context": f"{phase.seq_len:,}",
        "RoPE base": f"{phase.rope_theta:,.10g}",
        "sequences per step": " > ".join(f"{s.sequences:,}" for s in segments),
        "tokens per step": " > ".join(_short(s.tokens_per_step) for s in segments),
        "micro-batches": " > ".join(
            f"{s.micro_batches} of {s.sequences // s.micro_batches:,}" for s in segments
        ),
        "learning rate": _rates(recipe.plan, phase, segments[0].first_step, last),
        "mesh": describe_mesh(placed.config.mesh, devices)
        + (" (not here)" if placed.misfit else ""),
        "remat": phase.remat,
        "packing": phase.packing,
        "mixture": "\n".join(
            f"{weight / sum(weights.values()):.4g} {_shorten(path)}"
            for path, weight in weights.items()
        ),
        "evaluation": f"{config.eval.windows} x {phase.eval_seq_len:,} tokens",
    }


def _rates(plan: schedule.Plan, phase: Phase, first: int, last: int) -> str:
    """The learning rate at both ends of a phase; of a rate of its own the form too."""
    if not phase.lr:
        return f"{plan.step(first).lr:.4g} to {plan.step(last).lr:.4g}"
    if phase.lr == phase.lr_end:
        return f"{phase.lr:.4g}"
    return f"{phase.lr:.4g} to {phase.lr_end:.4g}, {phase.schedule}"


def _shorten(path: str) -> str:
    return path if len(path) <= LONGEST_PATH else f"...{path[-LONGEST_PATH:]}"


def _short(tokens: int) -> str:
    """A number of tokens as 8.00T, 16.8M or 512."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)


def environment() -> dict[str, str]:
    """The devices and versions that the run has."""
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "processes": str(jax.process_count()),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "zaya_jax": __version__,
    }


def unknown_peak() -> str:
    """Why no MFU is shown, on an accelerator whose peak is unknown; "" otherwise, and on a CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu" or peak_flops(device.device_kind, Precision()):
        return ""
    return (
        f"MFU is not shown: peak rate of {device.device_kind} unknown (zaya_jax/hardware/chips.py)"
    )


def no_effect_line(updates: int) -> str:
    """Says that the last `updates` updates changed nothing or cannot be trusted."""
    many = f"the last {updates} updates were" if updates > 1 else "the last update was"
    return f"{many} skipped, not finite, or of batches without a target"


def done_line(steps: int, tokens: int, unsound: int, workdir: Path) -> str:
    """The last line of a run."""
    effect = f"Without effect: {no_effect_line(unsound)}. " if unsound else ""
    return f"done: {steps} steps, {tokens:,} tokens. {effect}Report: {workdir / 'report.html'}"


def complete_line(recipe: Recipe, workdir: Path, report: Path) -> str:
    """The line of a start after the last step."""
    all_phases = recipe.config.schedule.phases and recipe.last_step == recipe.plan.last_step
    more = "another of schedule.phases" if all_phases else "--config.run.num_steps=N"
    return f"{workdir} is complete: {recipe.last_step} steps done. More: {more}.  Report: {report}"
