"""Several runs on one page: a table of how they ended, each metric's curves in one picture, the
differences of configs.

Runs may have any length, may be unfinished and may have different metrics; the page lists its
omissions.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.report import curves
from zaya_jax.report.document import Page, Section, Table
from zaya_jax.report.read import Series, Workdir, read_workdir
from zaya_jax.report.run_page import flat, median_speed, progress, run_document
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

    def curve(self, points: Sequence[tuple[float, float]] = ()) -> Curve:
        """A curve in the run's colour."""
        dashed = self.place >= COLORS
        return Curve(self.name, points, self.place % COLORS, dashed=dashed)


def drawn(paths: Sequence[Path]) -> str:
    """The page of one run or of several; UserError if one has no recorded step yet."""
    runs = [read_workdir(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if not run.recorded.size:
            raise UserError(
                f"RUN {str(path)!r} has no metrics (no whole line in {path / 'metrics.jsonl'}); give"
                " the folder of a run, or try again later"
            )
    page = run_document(runs[0]) if len(runs) == 1 else comparison(runs)
    return page.html()


def comparison(workdirs: Sequence[Workdir]) -> Page:
    """The page of several runs."""
    names = [run.name for run in workdirs]
    runs = []
    for place, run in enumerate(workdirs):
        name = run.name if names.count(run.name) == 1 else f"{run.name} ({run.path})"
        runs.append(ComparedRun(place, name, run, _numbers(run)))
    keys, notes = _shown(runs)
    if any(run.vectors for run in workdirs):
        notes.append("Figures of each layer and expert are on each run's own page.")
    sections = [
        Section("Runs", tables=[_ends(runs)], notes=notes),
        Section("Curves", "Noisy metrics are smoothed.", pictures=_pictures(runs, keys)),
        Section("Config", tables=_differences(runs, [run.config for run in workdirs])),
        Section("Environment", tables=_differences(runs, [run.environment for run in workdirs])),
    ]
    return Page(
        f"{len(runs)} runs",
        "compared",
        ", ".join(names),
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
    """The metrics to draw, in the page's order, and notes on those that are zero at every step of
    all runs. Tokens are an axis."""
    recorded = {key for run in runs for key in run.series} - {"tokens"}
    drawn = {key for run in runs for key in recorded & {*run.series} if not run.series[key].zero}
    first = [key for key in FIRST if key in drawn]
    # Numbers with a name of their own come before those of a group, prefix/name.
    others = sorted(drawn - {*first}, key=lambda key: ("/" in key, key))
    zero = ", ".join(sorted(recorded - drawn))
    return first + others, [f"Zero at every step of all runs: {zero}."] if zero else []


def near_common_step(runs: Sequence[Workdir]) -> tuple[str, list[float]] | None:
    """What is compared, and the mean training losses of a fiftieth of the steps up to the last that
    all runs have, ten at least, of the same steps of each; None if all end there."""
    begun, shared = max(run.first_step for run in runs), min(run.last_step for run in runs)
    if begun > shared or all(run.last_step == shared for run in runs):
        return None
    first = max(begun, shared + 1 - max(10, shared // 50))
    label = f"train loss near step {shared:,}, the last that all have (mean of steps {first:,} to"
    losses = [run.series["loss"] for run in runs if "loss" in run.series]
    if len(losses) < len(runs):
        return None
    return f"{label} {shared:,})", [loss.mean(first, shared) for loss in losses]


def _ends(runs: Sequence[ComparedRun]) -> Table:
    """How each run ended."""
    workdirs = [run.workdir for run in runs]

    def of(key: str, text: Callable[[Series], str]) -> list[str]:
        return [text(run.series[key]) if key in run.series else "–" for run in runs]

    def last(series: Series) -> str:
        return known(series.last)

    rows = [
        ("folder", [str(run.path) for run in workdirs]),
        ("steps", [_steps(run) for run in workdirs]),
        ("tokens", of("tokens", last)),
        ("held-out loss, last", of("eval/loss", last)),
        ("held-out loss, best", of("eval/loss", lambda series: known(series.least))),
        ("train loss, mean of the last 20 steps", [known(run.train_loss) for run in workdirs]),
    ]
    if near := near_common_step(workdirs):
        rows.append((near[0], [known(loss) for loss in near[1]]))
    rows += [
        ("tokens per second, median", [known(median_speed(run)) for run in workdirs]),
        ("time of all steps", [duration(run.seconds) for run in workdirs]),
        ("model FLOPs utilisation, mean", of("mfu", lambda series: percent(series.mean()))),
        ("losses not finite", of("loss", lambda series: f"{len(series.bad_steps) or '–'}")),
    ]
    for key in sorted({key for run in runs for key in run.series}):
        if key.startswith("eval/") and key.count("/") > 1:  # of lm-eval
            rows.append((f"{curves.title(key)}, last", of(key, last)))
    head = ["", *(Markup(run.curve().swatch + escape(run.name)) for run in runs)]
    known_rows = [[label, *cells] for label, cells in rows if {*cells} != {"–"}]
    return Table("How they ended", head, known_rows)


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


def _pictures(runs: Sequence[ComparedRun], keys: Sequence[str]) -> str:
    """Each metric over steps; the losses over tokens too, to compare runs with different batch
    sizes."""
    count = sum(key in run.series for run in runs for key in keys) or 1
    points = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // count))
    pictures = ""
    for key in keys:
        recorded = [run for run in runs if key in run.series]
        note = ""
        if missing := [run.name for run in runs if key not in run.series]:
            note = f"Not recorded by {', '.join(missing)}."
        pictures += _picture(recorded, key, "step", points, note)
        if key in LOSSES and all("tokens" in run.series for run in recorded):
            pictures += _picture(recorded, key, "tokens", points, note)
    return pictures


def _picture(runs: Sequence[ComparedRun], key: str, over: str, points: int, note: str) -> str:
    """One metric of the runs that recorded it."""
    # One width for all: two runs that do the same are drawn the same, whatever their lengths.
    points = curves.STRETCHES if key in curves.SHARES else points
    width = max(run.series[key].width_for(points) for run in runs)
    length = max(len(run.series[key].merged(width).steps) for run in runs)
    lines, unit = [], ""
    for run in runs:
        unit, series = curves.in_unit(key, run.series[key])
        bins = series.merged(width)
        course = bins.course()
        if length >= 10 and (key in curves.SMOOTHED or key == "loss"):
            course = curves.smoothed(bins, length)
        if over == "tokens":
            tokens = run.series["tokens"]
            places = np.interp(bins.steps, tokens.steps, tokens.good).tolist()
            course = [(place, value) for place, (_, value) in zip(places, course, strict=True)]
        lines.append(run.curve(course))
    title, bad = f"{curves.title(key)} over {over}", []
    if over == "step":
        title, bad = curves.title(key), curves.bad_steps(*(run.series[key] for run in runs))
    zero = key in curves.FROM_ZERO
    return Chart(title, lines, zero=zero, unit=unit, over=over, note=note, bad_steps=bad).draw()


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
