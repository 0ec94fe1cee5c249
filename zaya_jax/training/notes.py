"""Words the lines that a run prints about itself, and records its environment."""

import sys
from pathlib import Path
from typing import Any

import jax

import zaya_jax
from zaya_jax.config import Config, Precision
from zaya_jax.hardware import sizing_rules
from zaya_jax.hardware.chips import peak_flops
from zaya_jax.model import zaya
from zaya_jax.training import logs, recipe
from zaya_jax.training.recipe import Recipe, Stage


def describe_start(run: Recipe, here: Stage, workdir: Path, reached: int, notes: list[str]) -> None:
    """Prints the first lines of a start: its phases, the model and its place, and the notes of its checks."""
    if run.config.schedule.phases:
        logs.say(recipe.table(run))
    logs.say(describe_run(run, here, workdir, reached))
    found = [*notes, unknown_peak(), *sizing_rules.notes(here.config, list(here.mesh.devices.flat))]
    for note in filter(None, dict.fromkeys(found)):
        logs.say(note)


def describe_run(run: Recipe, here: Stage, workdir: Path, reached: int) -> str:
    """Model, mesh, steps and folder, on one line."""
    config, last = run.config, run.plan.step(run.last_step)
    counts = zaya.param_counts(config.model)
    sizes = " x ".join(f"{axis} {size}" for axis, size in here.mesh.shape.items() if size > 1) or "one device"
    return (
        f"{config.name}: {counts['total']:,} parameters ({counts['active']:,} active) on {sizes} "
        f"({jax.devices()[0].device_kind}), {last.number} steps of {last.sequences} x {last.phase.seq_len} tokens, "
        f"in {workdir}" + (f", from step {reached}" if reached else "")
    )


def environment() -> dict[str, str]:
    """The devices and versions that the run has."""
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "processes": str(jax.process_count()),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "zaya_jax": zaya_jax.__version__,
        **({"mfu": unknown_peak()} if unknown_peak() else {}),
    }


def unknown_peak() -> str:
    """Why no MFU is shown, on an accelerator whose peak is not known; a CPU has none that would mean something."""
    device = jax.devices()[0]
    if device.platform == "cpu" or peak_flops(device.device_kind, Precision()):
        return ""
    return f"MFU is not shown: peak rate of {device.device_kind} unknown (zaya_jax/hardware/chips.py)"


def new_length(meta: dict[str, Any], config: Config, last_step: int) -> str:
    """A note where another number of steps than before changes the learning rate's course."""
    before = meta["config"]["run"]["num_steps"]
    if before == config.run.num_steps or config.schedule.phases:
        return ""
    return f"note: run.num_steps was {before}, now it is {last_step}; the learning rate follows the new length"


def without_effect(updates: int) -> str:
    """Says that so many updates, up to the last one, changed nothing or are not to be trusted."""
    many = f"the last {updates} updates were" if updates > 1 else "the last update was"
    return f"{many} skipped, not finite, or of batches without a target"


def done(steps: int, tokens: int, unsound: int, workdir: Path, asked: str) -> str:
    """The last line of a run; `asked`: the signal that came before sample and report were made."""
    effect = f"Without effect: {without_effect(unsound)}. " if unsound else ""
    report = f"Report: {workdir / 'report.html'}"
    if asked:
        report = (
            f"{asked} came before sample and report were made: the same command makes the report, "
            f"python -m experiments.generate --workdir={workdir} a sample"
        )
    return f"done: {steps} steps, {tokens:,} tokens. {effect}{report}"


def complete(run: Recipe, workdir: Path, report: Path) -> str:
    """The line of a start after the last step."""
    all_phases = run.config.schedule.phases and run.last_step == run.plan.total_steps
    more = "another of schedule.phases" if all_phases else "--config.run.num_steps=N"
    return f"{workdir} is complete: {run.last_step} steps done. More: {more}.  Report: {report}"
