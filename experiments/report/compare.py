"""Several runs on one page: a table of how they ended, each metric's curves in one picture, the
differences of configs.

Runs may have any length, may be unfinished and may have different metrics; the page lists its
omissions.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from zaya_jax.report import curves
from zaya_jax.report.document import Page, Section, Table
from zaya_jax.report.read import Series, Workdir
from zaya_jax.report.run_page import flat, median_speed, progress
from zaya_jax.report.svg import Chart, Curve
from zaya_jax.report.text import Markup, duration, escape, known, percent, wrapped

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
    names = [run.name for run in workdirs]
    runs = []
    for place, run in enumerate(workdirs):
        name = run.name if names.count(run.name) == 1 else f"{run.name} ({run.path})"
        runs.append(ComparedRun(place, name, run, _numbers(run)))
    keys, zero = _shown(runs)
    sections = [
        Section("Runs", tables=[_ends(runs)], notes=_left_out(runs, zero)),
        Section("Curves", "Noisy metrics are smoothed.", pictures=_pictures(runs, keys)),
        Section("Config", tables=_differences(runs, [run.config for run in workdirs])),
        Section("Environment", tables=_differences(runs, [run.environment for run in workdirs])),
    ]
    return Page(
        f"{len(runs)} runs",
        "compared",
        ", ".join(run.name for run in runs),
        sections,
        warnings=_warnings(runs),
        footer="Drawn from the files of the runs’ workdirs.",
    )


def _numbers(run: Workdir) -> dict[str, Series]:
    """A run's metrics that are one number a step, the mean load entropy of the layers among
    them."""
    numbers = dict(run.series)
    if entropy := run.vectors.get("load_entropy"):
        mean = np.ma.masked_invalid(entropy.good).mean(axis=1).filled(np.nan)
        numbers["load_entropy, mean of the layers"] = Series(entropy.steps, mean)
    return numbers


def _shown(runs: Sequence[ComparedRun]) -> tuple[list[str], list[str]]:
    """The metrics to draw, in the page's order, and those that are zero at every step of all
    runs. Tokens are an axis."""
    recorded = {key for run in runs for key in run.series} - {"tokens"}
    zero = {
        key for key in recorded if all(run.series[key].zero for run in runs if key in run.series)
    }
    first = [key for key in FIRST if key in recorded - zero]
    # Numbers with a name of their own come before those of a group, prefix/name.
    others = sorted(recorded - zero - set(first), key=lambda key: ("/" in key, key))
    return first + others, sorted(zero)


class Near(NamedTuple):
    """Training losses near the last step that all runs have, of the same steps of each run; empty
    if all end there."""

    step: int = 0
    steps: str = ""  # from which to which
    values: Sequence[float] = ()


def near_common_step(runs: Sequence[Workdir]) -> Near:
    """The means of a fiftieth of the steps up to it, ten at least."""
    begun, shared = max(run.first_step for run in runs), min(run.last_step for run in runs)
    if begun > shared or all(run.last_step == shared for run in runs):
        return Near()
    first = max(begun, shared + 1 - max(10, shared // 50))
    values = [
        run.series["loss"].mean(first, shared) if "loss" in run.series else math.nan for run in runs
    ]
    return Near(shared, f"{first:,} to {shared:,}", values)


def _comparable(runs: Sequence[ComparedRun]) -> bool:
    return len({run.workdir.unit for run in runs}) == 1


def _ends(runs: Sequence[ComparedRun]) -> Table:
    """How each run ended; the lowest loss of a row is bold where all are of one unit."""
    rows: list[list[object]] = []

    def add(label: str, cells: Sequence[str]) -> None:
        if any(cell != "–" for cell in cells):
            rows.append([label, *cells])

    def add_losses(label: str, values: Sequence[float]) -> None:
        cells = [known(value) for value in values]
        finite = [value for value in values if math.isfinite(value)]
        if _comparable(runs) and len(set(map(known, finite))) > 1:
            lowest = known(min(finite))
            cells = [Markup(f"<b>{cell}</b>") if cell == lowest else cell for cell in cells]
        add(label, cells)

    def add_metric(label: str, key: str, text: Callable[[Series], str]) -> None:
        add(label, [text(run.series[key]) if key in run.series else "–" for run in runs])

    workdirs = [run.workdir for run in runs]
    add("folder", [str(run.path) for run in workdirs])
    add("steps", [_steps(run) for run in workdirs])
    add_metric("tokens", "tokens", lambda series: known(series.last))
    held_out = [run.series.get("eval/loss") for run in runs]
    last = [series.last if series else math.nan for series in held_out]
    best = [series.least if series else math.nan for series in held_out]
    add_losses("held-out loss, last", last)
    add_losses("held-out loss, best", best)
    add_losses("train loss, mean of the last 20 steps", [run.train_loss for run in workdirs])
    near = near_common_step(workdirs)
    if near.steps:
        add_losses(
            f"train loss near step {near.step:,}, the last that all have (mean of steps"
            f" {near.steps})",
            near.values,
        )
    add("tokens per second, median", [known(median_speed(run)) for run in workdirs])
    add("time of all steps", [duration(run.seconds) for run in workdirs])
    add_metric("model FLOPs utilisation, mean", "mfu", lambda series: percent(series.mean()))
    add_metric("losses not finite", "loss", lambda series: f"{len(series.bad_steps) or '–'}")
    for key in sorted({key for run in runs for key in run.series}):
        if key.startswith("eval/") and key.count("/") > 1:  # of lm-eval
            add_metric(f"{curves.title(key)}, last", key, lambda series: known(series.last))
    head = ["", *(Markup(_curve(run).swatch + escape(run.name)) for run in runs)]
    return Table("How they ended", head, rows)


def _curve(
    run: ComparedRun, points: Sequence[tuple[float, float]] = (), look: str = "line"
) -> Curve:
    return Curve(run.name, points, run.place % COLORS, look, dashed=run.place >= COLORS)


def _steps(run: Workdir) -> str:
    begun = f"from {run.first_step:,} to " if run.first_step > 1 else ""
    return f"{begun}{run.last_step:,}{wrapped(', ', progress(run), '')}"


def _warnings(runs: Sequence[ComparedRun]) -> list[str]:
    """What the runs' readers left out, and a warning about losses in different units."""
    warnings = []
    units: dict[str, list[str]] = {}
    for run in runs:
        warnings += [f"{run.name}: {omission}" for omission in run.workdir.omissions]
        units.setdefault(run.workdir.unit, []).append(run.name)
    if len(units) > 1:
        each = "; ".join(f"{unit}: {', '.join(names)}" for unit, names in units.items())
        warnings.append(f"Losses have different units and cannot be compared: {each}.")
    return warnings


def _left_out(runs: Sequence[ComparedRun], zero: Sequence[str]) -> list[str]:
    """Notes on recorded figures that are not on the page."""
    notes = []
    if zero:
        notes.append(f"Zero at every step of all runs: {', '.join(zero)}.")
    if any(run.workdir.vectors for run in runs):
        notes.append("Figures of each layer and expert are on each run's own page.")
    return notes


def _pictures(runs: Sequence[ComparedRun], keys: Sequence[str]) -> str:
    """Each metric over steps; the losses, which come first, over tokens too, to compare runs with
    different batch sizes."""
    count = sum(key in run.series for run in runs for key in keys) or 1
    points = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // count))
    with_tokens = [
        run for run in runs if "tokens" in run.series and run.series["tokens"].finite.size
    ]
    losses = [key for key in keys if key in LOSSES]
    pictures = "".join(_picture(runs, key, runs, "step", points) for key in losses)
    if len(with_tokens) > 1:
        for key in losses:
            pictures += _picture(runs, key, with_tokens, "tokens", points)
    for key in keys:
        if key not in LOSSES:
            pictures += _picture(runs, key, runs, "step", points)
    return pictures


def _picture(
    runs: Sequence[ComparedRun], key: str, drawn: Sequence[ComparedRun], over: str, points: int
) -> str:
    """One metric of all runs that recorded it; `drawn`: the runs that have the axis."""
    drawn = [run for run in drawn if key in run.series]
    if not drawn:
        return ""
    # One width for all: two runs that do the same are drawn the same, whatever their lengths.
    points = curves.STRETCHES if key in curves.SHARES else points
    width = max(run.series[key].width_for(points) for run in drawn)
    length = max(len(run.series[key].merged(width).steps) for run in drawn)
    unit, factor = curves.percent_of(key)
    lines = []
    for run in drawn:
        bins = run.series[key].merged(width)
        course, places = bins.course(), bins.steps
        if length >= 10 and (key in curves.SMOOTHED or key == "loss"):
            course = curves.smoothed(bins, length)
        if over == "tokens":
            tokens = run.series["tokens"]
            places = np.interp(places, tokens.steps, tokens.good).tolist()
        values = [(place, value * factor) for place, (_, value) in zip(places, course, strict=True)]
        dotted = key == "eval/loss" and run.place < COLORS and len(values) <= 64
        lines.append(_curve(run, values, "dots" if dotted else "line"))
    ends = [place for line in lines for place, _ in line.points if math.isfinite(place)]
    if not ends:
        return ""
    y_range, log = curves.axis_range(lines, zero=key in curves.FROM_ZERO)
    title, bad, notes = curves.title(key), [], []
    if over == "step":
        bad = curves.bad_steps(*(run.series[key] for run in drawn))
    else:
        title += f" over {over}"
    if missing := [run.name for run in runs if key not in run.series]:
        notes.append(f"Not recorded by {', '.join(missing)}.")
    if key in LOSSES and not _comparable(drawn):
        notes.append("The units differ: these curves cannot be compared.")
    return Chart(
        title,
        lines,
        (min(ends), max(ends)),
        y_range,
        log,
        unit=unit,
        over=over,
        note=" ".join(notes),
        bad_steps=bad,
    ).draw()


def _differences(runs: Sequence[ComparedRun], trees: Sequence[dict]) -> list[Table]:
    """Keys that differ, with their values in each run or a dash; 1, 1.0, "1" and true are four
    values."""
    if not any(trees):
        return []
    rows_by_key: dict[str, list[str]] = {}
    for place, tree in enumerate(trees):
        for key, value in flat(tree):
            row = rows_by_key.setdefault(key, ["–"] * len(trees))
            row[place] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    rows = []
    for key, values in rows_by_key.items():
        if len(set(values)) > 1:
            rows.append([_shortened(cell) for cell in (key, *values)])
    head = ["key", *(run.name for run in runs)]
    return [Table("Differences", head, rows, "code", "" if rows else "No key differs.")]


def _shortened(cell: str) -> str:
    return cell if len(cell) <= LONGEST else f"{cell[:LONGEST]}…"
