"""The page of one run, `report.html`: headline figures, curves, expert load, agent, sample, numbers,
config.

It reads the workdir: metrics.jsonl, config.json, sample.txt, environment.json (any facts, `device`
among them, and `forked`, a fork's ancestors) and a supervised run's aegis/events*.jsonl. Only
`loss`, the step times, the time waiting for data, the expert load and the held-out losses are known
by name. Any other number in metrics.jsonl gets a curve under its own name, `prefix/name` metrics
share one picture per prefix, and lists of one number per layer become heat maps.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from zaya_jax import config as config_module
from zaya_jax.report import curves, expert_load, supervised
from zaya_jax.report.document import OPEN_ROWS, Page, Section, Table, Tile, write_page
from zaya_jax.report.read import Workdir, read_workdir
from zaya_jax.report.text import counted, duration, escape, known, number, wrapped


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Writes `report.html` into the workdir, whole or not at all."""
    path = pathlib.Path(workdir)
    return write_page(path / "report.html", lambda: run_document(read_workdir(path)).html())


def run_document(run: Workdir) -> Page:
    """The whole page."""
    return Page(
        run.name,
        "training report",
        " · ".join(_about(run)),
        [section(run) for section in SECTIONS],
        _tiles(run),
        _warnings(run),
        "Drawn from the files of the run’s workdir.",
    )


def _about(run: Workdir) -> Iterator[str]:
    """The device, the model and the batch, as far as the recorded files say them."""
    if device := run.environment.get("device"):
        yield str(device)
    if layers := run.setting("model.num_hidden_layers"):
        experts = ""
        if run.setting("model.model_type") != "dense":
            experts = f" of {run.setting('model.num_experts')} experts"
        width = run.setting("model.hidden_size")
        yield f"{layers} layers{experts}, width {width}"
    # Each phase has its own.
    if (seq_len := run.setting("data.seq_len")) and not run.setting("schedule.phases"):
        yield f"{run.setting('data.global_batch')} × {seq_len} tokens per step"


def median_speed(run: Workdir) -> float:
    """The median over the run: the first step's compilation does not weigh in."""
    if "tokens_per_second" not in run.series:
        return math.nan
    speeds = run.series["tokens_per_second"].finite
    return float(np.median(speeds)) if speeds.size else math.nan


def _tiles(run: Workdir) -> list[Tile]:
    tiles = []
    if held_out := run.series.get("eval/loss"):
        best = held_out.steps[held_out.values == held_out.least]  # none where no loss is finite
        remark = run.unit
        if best.size and best[0] != held_out.steps[-1]:
            remark += f"; best {held_out.least:.4g} at step {best[0]:,}"
        tiles.append(("Held-out loss", number(held_out.last), remark))
    if "loss" in run.series:
        averaged = len(run.last_losses)
        remark = f"{run.unit}, mean of last {averaged} steps" if averaged > 1 else run.unit
        tiles.append(("Train loss", number(run.train_loss), remark))
    tiles.append(("Steps", f"{run.last_step:,}", progress(run)))
    if tokens := run.series.get("tokens"):
        remark = "trained on"
        if run.lineage:
            remark += f"; {number(run.lineage[0]['tokens'], 3)} of them before the fork"
        tiles.append(("Tokens", number(tokens.last, 3), remark))
    if "tokens_per_second" in run.series:
        tiles.append(("Speed", number(median_speed(run), 3), "tokens per second, median"))
    if "step_seconds" in run.series:
        tiles.append(("Training time", duration(run.seconds), "sum of all steps"))
    return tiles


def progress(run: Workdir) -> str:
    """Whether the run has ended; "" where its planned steps are not known, as of phases, which are
    counted in tokens."""
    planned = run.setting("run.num_steps")
    if not isinstance(planned, int) or run.setting("schedule.phases") or not run.recorded.size:
        return ""
    return "complete" if run.last_step >= planned else f"of {planned:,} planned"


def _warnings(run: Workdir) -> list[str]:
    warnings = []
    for key in ("loss", "eval/loss", "grad_norm"):
        if key in run.series and (steps := run.series[key].bad_steps):
            times = counted(len(steps), "step")
            warnings.append(f"{key} was not finite at {times}, first at step {steps[0]:,}.")
    return warnings + run.omissions


def _lineage(run: Workdir) -> Section:
    """A fork's section: its ancestors, and the keys that each step on the way changed."""
    tables, notes = [], []
    for parent in run.lineage:
        notes.append(
            f"Forked from {parent['folder']} (run {parent['run']}) at step {parent['step']:,},"
            f" {parent['tokens']:,} tokens."
        )
        rows = [[key, *map(value_text, pair)] for key, pair in parent["changed"].items()]
        if rows:
            head = ("key", "there", "here")
            tables.append(Table("Differences", head, rows, "code", folded=False))
    return Section("Lineage", tables=tables, notes=notes)


def _sample(run: Workdir) -> Section:
    """The generated text, which begins with its prompt."""
    card = wrapped('<div class="card"><pre>', escape(run.sample), "</pre></div>")
    return Section("Sample", "The trained model’s own text.", below=card)


def _numbers(run: Workdir) -> Section:
    """A table of all metrics: the pictures in numbers."""
    rows = []
    for key, series in sorted(run.series.items()):
        extremes = known(series.least), known(series.greatest)
        bad = f"{len(series.bad_steps) or '–'}"
        rows.append([key, number(series.last, 5), f"{series.steps[-1]:,}", *extremes, bad])
    head = ("metric", "last", "at step", "lowest", "highest", "not finite")
    table = Table("All metrics", head, rows, folded=len(rows) > OPEN_ROWS)
    return Section("Numbers", tables=[table] if rows else [])


def _config(run: Workdir) -> Section:
    """The recorded config: first the keys that differ from the defaults, then all; at last where
    the run took place."""
    defaults = _leaves(config_module.to_dict(config_module.Config()))
    recorded, environment = _leaves(run.config), _leaves(run.environment)
    tables, changed = [], []
    for key, value in recorded.items():
        default = defaults.get(key, "–")
        if value != default:
            changed.append([key, value, default])
    if recorded:
        head = ("key", "value", "default")
        title = "Differences from the defaults"
        tables.append(Table(title, head, changed, "code", folded=False))
    for title, leaves in (("All keys", recorded), ("Environment", environment)):
        if leaves:
            tables.append(Table(title, ("key", "value"), [*leaves.items()], "code", folded=True))
    return Section("Config", tables=tables)


def _leaves(tree: dict) -> dict[str, str]:
    """By their keys, as people read them."""
    return {key: value_text(value) for key, value in flat(tree)}


def flat(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested groups, and of lists of groups (the schedule's phases), by their dotted
    keys."""
    for key, item in value.items():
        if isinstance(item, list) and item and all(isinstance(group, dict) for group in item):
            item = {f"[{i}]": group for i, group in enumerate(item)}
        if isinstance(item, dict) and item:
            yield from flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def value_text(value: object) -> str:
    """A config's value as people read it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


SECTIONS = (
    _lineage,
    curves.loss_section,
    expert_load.experts_section,
    curves.optimiser_section,
    curves.speed_section,
    supervised.supervised_section,
    curves.other_section,
    _sample,
    _numbers,
    _config,
)
