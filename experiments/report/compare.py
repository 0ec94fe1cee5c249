"""Several runs on one page: a table of how they ended, each metric's curves in one picture, the
differences of configs.

Runs may have any length, may be unfinished and may have different metrics; the page lists its
omissions.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.report import curves
from zaya_jax.report.document import Page, Section, Table
from zaya_jax.report.read import Series, Workdir
from zaya_jax.report.run_page import flat, median_speed
from zaya_jax.report.svg import Chart, Curve
from zaya_jax.report.text import Markup, duration, escape, known, percent

MOST_RUNS = 16  # eight colours, each whole and dashed
COLORS = 8
POINTS, FEWEST_POINTS, ALL_POINTS = 400, 40, 26_000  # of a curve, and of all together
LONGEST = 200  # characters of a config's value
LOSSES = ("loss", "eval/loss")
FIRST = (*LOSSES, "grad_norm", "lr", *curves.SPEED_KEYS)


class ComparedRun(NamedTuple):
    """A run with its place among the runs and a name of its own, and its metrics of one number a
    step."""

    place: int
    name: str
    workdir: Workdir
    series: dict[str, Series]


def comparison(workdirs: Sequence[Workdir]) -> Page:
    """The page of several runs."""
    called = [run.name for run in workdirs]
    names = [
        name if called.count(name) == 1 else f"{name} ({run.path})"
        for name, run in zip(called, workdirs, strict=True)
    ]
    runs = [ComparedRun(i, names[i], run, _numbers(run)) for i, run in enumerate(workdirs)]
    found = {key for run in runs for key, series in run.series.items() if not series.zero} - {
        "tokens"
    }
    keys = [key for key in FIRST if key in found] + sorted(
        found.difference(FIRST), key=lambda key: ("/" in key, key)
    )
    near = near_common_step([run.workdir for run in runs])
    sections = [
        Section("Runs", tables=[_ends(runs, near)], notes=_left_out(runs, found)),
        Section("Curves", "Noisy metrics are smoothed.", pictures=_pictures(runs, keys)),
        Section("Config", tables=_differences(runs, [run.workdir.config for run in runs])),
        Section(
            "Environment", tables=_differences(runs, [run.workdir.environment for run in runs])
        ),
    ]
    footer = "Drawn from the files of the runs’ workdirs."
    return Page(
        f"{len(runs)} runs", "compared", ", ".join(names), sections, (), _warnings(runs), footer
    )


def _numbers(run: Workdir) -> dict[str, Series]:
    """A run's metrics that are one number a step, the mean load entropy of the layers among
    them."""
    found = dict(run.series)
    if entropy := run.vectors.get("load_entropy"):
        mean = np.ma.masked_invalid(entropy.good).mean(axis=1).filled(np.nan)
        found["load_entropy, mean of the layers"] = Series(entropy.steps, mean)
    return found


class Near(NamedTuple):
    """Training losses near the last step that all runs have, of the same steps of each run; empty
    if all end there."""

    step: int = 0
    steps: str = ""  # from which to which
    values: Sequence[float] = ()


def near_common_step(runs: Sequence[Workdir]) -> Near:
    """The means of a fiftieth of the steps up to it, ten at least."""
    begun, shared = max(run.first_step for run in runs), min(run.last_step for run in runs)
    if begun > shared or len({run.last_step for run in runs}) == 1:
        return Near()
    first = max(begun, shared + 1 - max(10, shared // 50))
    values = [
        run.series["loss"].mean(first, shared) if "loss" in run.series else math.nan for run in runs
    ]
    return Near(shared, f"{first:,} to {shared:,}", values)


def _comparable(runs: Sequence[ComparedRun]) -> bool:
    return len({run.workdir.unit for run in runs}) == 1


def _ends(runs: Sequence[ComparedRun], near: Near) -> Table:
    """How each run ended; the lowest loss of a row is bold where all are of one unit."""

    def losses(label: str, values: Sequence[float]) -> list[object]:
        cells, good = [known(v) for v in values], [v for v in values if math.isfinite(v)]
        lowest = (
            known(min(good)) if _comparable(runs) and len({known(v) for v in good}) > 1 else None
        )
        return [label, *(Markup(f"<b>{cell}</b>") if cell == lowest else cell for cell in cells)]

    def figure(label: str, key: str, value: Callable[[Series], str]) -> list[object]:
        return [label, *(value(run.series[key]) if key in run.series else "–" for run in runs)]

    held_out = [run.series.get("eval/loss") for run in runs]
    rows: list[list[Any]] = [
        ["folder", *(str(run.workdir.path) for run in runs)],
        ["steps", *(_steps(run.workdir) for run in runs)],
        figure("tokens", "tokens", lambda series: known(series.last)),
        losses("held-out loss, last", [series.last if series else math.nan for series in held_out]),
        losses(
            "held-out loss, best", [series.low[0] if series else math.nan for series in held_out]
        ),
        losses("train loss, mean of the last 20 steps", [run.workdir.train_loss for run in runs]),
    ]
    if near.steps:
        label = (
            f"train loss near step {near.step:,}, the last that all have (mean of steps"
            f" {near.steps})"
        )
        rows.append(losses(label, near.values))
    rows += [
        ["tokens per second, median", *(known(median_speed(run.workdir)) for run in runs)],
        ["time of all steps", *(duration(run.workdir.seconds) for run in runs)],
        figure("model FLOPs utilisation, mean", "mfu", lambda series: percent(series.mean())),
        figure("losses not finite", "loss", lambda series: f"{len(series.bad_steps) or '–'}"),
    ]
    tasks = {key for run in runs for key in run.series if key.startswith("eval/")}
    for key in sorted(key for key in tasks if key.count("/") > 1):  # of lm-eval
        rows.append(figure(f"{curves.title(key)}, last", key, lambda series: known(series.last)))
    head = ["", *(Markup(_curve(run).swatch + escape(run.name)) for run in runs)]
    return Table(
        "How they ended", head, [row for row in rows if any(cell != "–" for cell in row[1:])]
    )


def _curve(
    run: ComparedRun, points: Sequence[tuple[float, float]] = (), look: str = "line"
) -> Curve:
    return Curve(run.name, points, run.place % COLORS, look, dash=run.place // COLORS)


def _steps(run: Workdir) -> str:
    planned = run.setting("run.num_steps")
    begun = f"from {run.first_step:,} to " if run.first_step > 1 else ""
    if not run.recorded.size or not isinstance(planned, int):
        return f"{begun}{run.last_step:,}"
    return f"{begun}{run.last_step:,}, " + (
        "complete" if run.last_step >= planned else f"of {planned:,} planned"
    )


def _warnings(runs: Sequence[ComparedRun]) -> list[str]:
    """Notes of the runs' readers, and a warning about losses in different units."""
    warnings = [f"{run.name}: {note}" for run in runs for note in run.workdir.notes]
    units: dict[str, list[str]] = {}
    for run in runs:
        units.setdefault(run.workdir.unit, []).append(run.name)
    if len(units) > 1:
        each = "; ".join(f"{unit}: {', '.join(names)}" for unit, names in units.items())
        warnings.append(f"Losses have different units and cannot be compared: {each}.")
    return warnings


def _left_out(runs: Sequence[ComparedRun], found: Collection[str]) -> list[str]:
    """Notes on recorded figures that are not on the page."""
    notes = []
    if zero := sorted({key for run in runs for key in run.series} - {"tokens", *found}):
        notes.append(f"Zero at every step of all runs: {', '.join(zero)}.")
    if any(run.workdir.vectors for run in runs):
        notes.append("Figures of each layer and expert are on each run's own page.")
    return notes


def _pictures(runs: Sequence[ComparedRun], keys: Sequence[str]) -> str:
    """Each metric over steps; the losses over tokens too, to compare runs with different batch
    sizes."""
    count = sum(key in run.series for run in runs for key in keys) or 1
    points = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // count))
    with_tokens = [
        run for run in runs if "tokens" in run.series and run.series["tokens"].finite.size
    ]
    pictures = [(key, runs, "step") for key in keys]
    pictures += [
        (key, with_tokens, "tokens") for key in LOSSES if key in keys and len(with_tokens) > 1
    ]
    pictures.sort(key=lambda one: one[0] not in LOSSES)
    return "".join(_picture(runs, key, some, over, points) for key, some, over in pictures)


def _picture(
    runs: Sequence[ComparedRun], key: str, drawn: Sequence[ComparedRun], over: str, points: int
) -> str:
    """One metric of all runs that recorded it."""
    unit, factor = (" %", 100.0) if key in curves.PERCENT else ("", 1.0)
    known = [run for run in drawn if key in run.series]
    if not known:
        return ""
    # One width for all: two runs that do the same are drawn the same, whatever their lengths.
    points = curves.STRETCHES if key in curves.SHARES else points
    width = max(run.series[key].width_for(points) for run in known)
    length = max(len(run.series[key].merged(width).steps) for run in known)
    lines = []
    for run in known:
        bins = run.series[key].merged(width)
        rough = length >= 10 and (key in curves.SMOOTHED or key == "loss")
        course, places = curves.smoothed(bins, length) if rough else bins.course(), bins.steps
        if over == "tokens":
            tokens = run.series["tokens"]
            places = np.interp(places, tokens.steps, tokens.good).tolist()
        values = [(place, value * factor) for place, (_, value) in zip(places, course, strict=True)]
        look = "dots" if key == "eval/loss" and run.place < COLORS and len(values) <= 64 else "line"
        lines.append(_curve(run, values, look))
    ends = [place for line in lines for place, _ in line.points if math.isfinite(place)]
    if not ends:
        return ""
    y_range, log = curves.axis_range(lines, zero=key in curves.FROM_ZERO)
    missing = ", ".join(run.name for run in runs if key not in run.series)
    notes = [f"Not recorded by {missing}."] if missing else []
    notes += (
        ["The units differ: these curves cannot be compared."]
        if key in LOSSES and not _comparable(known)
        else []
    )
    title = curves.title(key) + (" over tokens" if over == "tokens" else "")
    return Chart(
        title,
        lines,
        (min(ends), max(ends)),
        y_range,
        log,
        unit=unit,
        over=over,
        note=" ".join(notes),
        bad_steps=curves.bad_steps(*(run.series[key] for run in known)) if over == "step" else (),
    ).draw()


def _differences(runs: Sequence[ComparedRun], trees: Sequence[dict]) -> list[Table]:
    """Keys that differ, with their values in each run or a dash; 1, 1.0, "1" and true are four
    values."""
    trees = [
        {key: json.dumps(v, ensure_ascii=False, sort_keys=True) for key, v in flat(tree)}
        for tree in trees
    ]
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    found = [[key, *(tree.get(key, "–") for tree in trees)] for key in keys]
    differing = [row for row in found if len({*row[1:]}) > 1]
    rows = [
        [cell if len(cell) <= LONGEST else f"{cell[:LONGEST]}…" for cell in row]
        for row in differing
    ]
    head = ["key", *(run.name for run in runs)]
    note = "" if rows else "No key differs."
    return [Table("Differences", head, rows, "code", note)] if any(trees) else []
