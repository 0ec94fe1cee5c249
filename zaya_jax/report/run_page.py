"""The page of one run, `report.html`: headline figures, curves, expert load, saves, agent, sample,
numbers, config.

It reads the workdir: metrics.jsonl, config.json, sample.txt (prompt and continuation; the prompt is
marked where the text starts with the config's `log.sample_prompt`), environment.json (any facts,
`device` among them), a fork's lineage.json, checkpoint_times.jsonl and a supervised run's
 aegis/events*.jsonl. Only `loss`, the step times, the time waiting for data,
the expert load and the held-out losses are known by name; any other number in metrics.jsonl gets a
curve under its own name, `prefix/name` metrics share one picture per prefix, and lists of one
number per layer become heat maps.
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
from zaya_jax.report.text import counted, duration, escape, known, number


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Writes `report.html` into the workdir, whole or not at all."""
    path = pathlib.Path(workdir)
    if not path.is_dir():
        message = (
            f"no report: workdir {str(path)!r} is not a directory; give the one a run wrote to"
        )
        raise config_module.UserError(message)
    return write_page(path / "report.html", lambda: run_document(read_workdir(path)).html())


def run_document(run: Workdir) -> Page:
    """The whole page."""
    model, data = run.config.get("model"), run.config.get("data")
    facts = [str(run.environment["device"])] if run.environment.get("device") else []
    if isinstance(model, dict) and model.get("num_hidden_layers"):
        kind = (
            f" of {model.get('num_experts', '?')} experts"
            if model.get("model_type") != "dense"
            else ""
        )
        facts.append(
            f"{model['num_hidden_layers']} layers{kind}, width {model.get('hidden_size', '?')}"
        )
    if isinstance(data, dict) and data.get("seq_len"):
        facts.append(f"{data.get('global_batch', '?')} × {data['seq_len']} tokens per step")
    return Page(
        run.name,
        "training report",
        " · ".join(facts),
        [section(run) for section in SECTIONS],
        _tiles(run),
        _warnings(run),
        "Drawn from the files of the run’s workdir.",
    )


def median_speed(run: Workdir) -> float:
    """The median over the run: the first step's compilation does not weigh in."""
    if "tokens_per_second" not in run.series:
        return math.nan
    speeds = run.series["tokens_per_second"].finite
    return float(np.median(speeds)) if speeds.size else math.nan


def _tiles(run: Workdir) -> list[Tile]:
    tiles = []
    if held_out := run.series.get("eval/loss"):
        low, step = held_out.low
        lowest = (
            f"; best {low:.4g} at step {step:,}" if step not in (-1, held_out.steps[-1]) else ""
        )
        tiles.append(("Held-out loss", number(held_out.last), run.unit + lowest))
    if loss := run.series.get("loss"):
        many = len(run.last_losses)
        remark = run.unit + (f", mean of last {many} steps" if many > 1 else "")
        remark = remark if math.isfinite(loss.last) else f"not finite at step {loss.steps[-1]:,}"
        tiles.append(("Train loss", number(run.train_loss), remark))
    planned, of = run.setting("run.num_steps"), ""
    if isinstance(planned, int) and run.recorded.size:
        of = "complete" if run.last_step >= planned else f"of {planned:,} planned"
    tiles.append(("Steps", f"{run.last_step:,}", of))
    if "tokens" in run.series:
        before = run.lineage[0].get("tokens") if run.lineage else None
        of = f"; {number(before, 3)} of them before the fork" if isinstance(before, int) else ""
        tiles.append(("Tokens", number(run.series["tokens"].last, 3), f"trained on{of}"))
    if "tokens_per_second" in run.series:
        tiles.append(("Speed", number(median_speed(run), 3), "tokens per second, median"))
    if "step_seconds" in run.series:
        tiles.append(("Training time", duration(run.seconds), "sum of all steps"))
    return tiles


def _warnings(run: Workdir) -> list[str]:
    bad = {
        key: run.series[key].bad_steps
        for key in ("loss", "eval/loss", "grad_norm")
        if key in run.series
    }
    warnings = [
        f"{key} was not finite at {counted(len(steps), 'step')}, first at step {steps[0]:,}."
        for key, steps in bad.items()
        if steps
    ]
    return warnings + run.notes


def _lineage(run: Workdir) -> Section:
    """A fork's section: its ancestors, and the keys that each step on the way changed."""
    tables, notes = [], []
    for parent in run.lineage:
        step, tokens = (parent.get(key) for key in ("step", "tokens"))
        known = isinstance(step, int) and isinstance(tokens, int)
        at = f"step {step:,}, {tokens:,} tokens" if known else "?"
        folder, name = (value_text(parent.get(key)) for key in ("folder", "run"))
        notes.append(f"Forked from {folder} (run {name}) at {at}.")
        changed = parent.get("changed")
        if isinstance(changed, dict) and changed:
            rows = [
                [key, *map(value_text, pair)]
                for key, pair in changed.items()
                if isinstance(pair, list)
            ]
            tables.append(
                Table("Differences", ("key", "there", "here"), rows, "code", folded=False)
            )
    return Section("Lineage", tables=tables, notes=notes)


def _sample(run: Workdir) -> Section:
    """The generated text, its prompt marked."""
    mark = f"<mark>{escape(run.prompt)}</mark>" if run.prompt else ""
    text = (
        f'<div class="card"><pre>{mark}{escape(run.sample[len(run.prompt) :])}</pre></div>'
        if run.sample
        else ""
    )
    after = " after the marked prompt" if run.prompt else ""
    return Section("Sample", f"The trained model’s own text{after}.", below=text)


def _numbers(run: Workdir) -> Section:
    """A table of all metrics: the pictures in numbers."""
    rows = []
    for key, series in sorted(run.series.items()):
        rows.append(
            [
                key,
                number(series.last, 5),
                f"{series.steps[-1]:,}",
                known(series.low[0]),
                known(series.high[0]),
                f"{len(series.bad_steps) or '–'}",
            ]
        )
    head = ("metric", "last", "at step", "lowest", "highest", "not finite")
    table = Table("All metrics", head, rows, folded=len(rows) > OPEN_ROWS)
    return Section("Numbers", tables=[table] if rows else [])


def _config(run: Workdir) -> Section:
    """The recorded config: first the keys that differ from the defaults, then all; at last where
    the run took place."""
    defaults = dict(flat(config_module.to_dict(config_module.Config())))
    found = list(flat(run.config))
    changed = [
        [key, value_text(value), value_text(defaults[key]) if key in defaults else "–"]
        for key, value in found
        if key not in defaults or not _same(value, defaults[key])
    ]
    title = "Differences from the defaults"
    tables = (
        [Table(title, ("key", "value", "default"), changed, "code", folded=False)] if found else []
    )
    for title, pairs in (("All keys", found), ("Environment", flat(run.environment))):
        rows = [[key, value_text(value)] for key, value in pairs]
        tables += [Table(title, ("key", "value"), rows, "code", folded=True)] if rows else []
    return Section("Config", tables=tables)


def flat(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested groups, and of lists of groups (the schedule's phases), by their dotted
    keys."""
    for key, item in value.items():
        if isinstance(item, list) and item and all(isinstance(one, dict) for one in item):
            item = {f"[{i}]": one for i, one in enumerate(item)}
        if isinstance(item, dict) and item:
            yield from flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _same(value: object, default: object) -> bool:
    """Equal as a config takes it: 1 is 1.0, but not true."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def value_text(value: object) -> str:
    """A config's value as people read it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list) and len(value) > 4 and all(item == value[0] for item in value):
        return f"{len(value)} × {json.dumps(value[0], ensure_ascii=False)}"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


SECTIONS = (
    _lineage,
    curves.loss_section,
    expert_load.experts_section,
    curves.optimiser_section,
    curves.speed_section,
    curves.saves_section,
    supervised.supervised_section,
    curves.other_section,
    _sample,
    _numbers,
    _config,
)
