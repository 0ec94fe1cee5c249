"""A run's curves: losses, learning rate, gradient norms, speed, and any other number that the run
records.

Each `..._section` is a part of the page (`run_page`). A metric gets its title, unit and kind of
curve from the tables here; one that no table names is drawn under its own name.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from zaya_jax.report.document import Section
from zaya_jax.report.read import Bins, Series, Workdir
from zaya_jax.report.svg import Chart, Curve, HeatMap, columns
from zaya_jax.report.text import number

POINTS = 300  # of a curve
GROUP = 6  # curves of one picture

OPTIMISER_KEYS = ("lr", "grad_norm", "clipped", "skipped")
SPEED_KEYS = ("step_seconds", "tokens_per_second", "data/wait_fraction", "mfu")
PLACED_KEYS = {"loss", "eval/loss", "tokens", *OPTIMISER_KEYS, *SPEED_KEYS}
TITLES = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "clipped": "Clipped gradients",
    "skipped": "Skipped updates",
    "step_seconds": "Seconds per step",
    "tokens_per_second": "Tokens per second",
    "data/wait_fraction": "Time waiting for data",
    "mfu": "Model FLOPs utilisation",
    "param_norm": "Norm of the weights",
    "update_norm": "Norm of the update",
    "target_tokens": "Targets per step",
    "z": "Drift of the logits, mean of log² Z",
    "bias_change": "Change of the balancing biases",
    "dead_experts": "Experts without a token",
    "greatest_share": "Share of the busiest expert",
    "skip_share": "Skipped tokens",
    "loss": "Train loss",
    "eval/loss": "Held-out loss",
    "data": "Data",
    "checkpoint": "Seconds of a save",
    "eval": "Held-out loss",
}
SHARES = {"clipped", "skipped"}  # 0 or 1 each step: drawn as the share of a few stretches
STRETCHES = 24
FROM_ZERO = {*OPTIMISER_KEYS, *SPEED_KEYS, *SHARES} - {"grad_norm"}
SMOOTHED = {"grad_norm", *SPEED_KEYS}
PERCENT = {"data/wait_fraction", "mfu", *SHARES}


def loss_section(run: Workdir) -> Section:
    """Train and held-out loss over the whole run, and its second half with an axis of its own."""
    train, held_out = run.series.get("loss"), run.series.get("eval/loss")
    if not train and not held_out:
        return Section("Loss")
    lines = []
    if train:
        lines += _lines("train, each step", train, smooth=True)
    if held_out:
        lines.append(Curve("held-out", held_out.coarse(160).course(), 1, "dots"))
    bad = bad_steps(*filter(None, (train, held_out)))
    # The loss before training may lie far above all others, and is still in the picture.
    starts = [value for line in lines for _, value in line.points[:1] if math.isfinite(value)]
    pictures = Chart("Loss", lines, run.steps, keep=starts, bad_steps=bad).draw()
    middle = (run.first_step + run.last_step) / 2
    half = [line.after(middle) for line in lines]
    if train and len(half[0].points) >= 10:
        bad = [step for step in bad if step >= middle]
        x_range = (middle, float(run.last_step))
        pictures += Chart("Loss, second half", half, x_range, bad_steps=bad).draw()
    unit = f"In {run.unit}"
    if run.unit == "nats per byte" and held_out and math.isfinite(held_out.last):
        unit += f"; the last held-out loss is {number(held_out.last / math.log(2))} bits per byte"
    return Section("Loss", f"{unit}.", pictures=pictures)


def optimiser_section(run: Workdir) -> Section:
    """Learning rate, gradient norm, clipped and skipped updates, and norms by group."""
    pictures = "".join(_curve(run, key) for key in OPTIMISER_KEYS)
    for prefix, keys in _groups(run).items():
        if prefix.endswith("_norm"):
            pictures += _group_charts(run, f"{_name(prefix)} by group", keys)
    return Section("Optimisation", pictures=pictures)


def speed_section(run: Workdir) -> Section:
    """Step time, throughput, waiting for data, utilisation."""
    return Section("Speed", pictures="".join(_curve(run, key) for key in SPEED_KEYS))


def other_section(run: Workdir) -> Section:
    """All other metrics: numbers as curves, lists of numbers as heat maps; zeros are only named."""
    groups = _groups(run)
    elsewhere = PLACED_KEYS.union(*groups.values())
    pictures = "".join(_curve(run, key) for key in run.series if key not in elsewhere)
    for prefix, keys in groups.items():
        if not prefix.endswith("_norm"):
            pictures += _group_charts(run, _name(prefix), keys)
    for key in run.vectors:
        if key not in ("load", "load_entropy", "skip_share"):
            pictures += list_map(run, key)
    recorded = [*run.series.items(), *run.vectors.items()]
    zero = "; ".join(title(key) for key, series in recorded if series.zero)
    notes = [f"Zero at every step: {zero}."] if zero else []
    return Section("Other metrics", notes=notes, pictures=pictures)


def title(key: str) -> str:
    """A metric's plain name, where it has one; of `prefix/name` the prefix's."""
    prefix, slash, name = key.partition("/")
    if prefix == "eval" and "/" in name:  # of lm-eval
        return f"Task {name.replace('/', ', ', 1)}"
    if slash and prefix in TITLES and key not in TITLES:
        return f"{TITLES[prefix]}: {name.replace('_', ' ')}"
    return TITLES.get(key, key)


def _groups(run: Workdir) -> dict[str, list[str]]:
    """Metrics `prefix/…` by their prefix, without those that are always zero."""
    groups: dict[str, list[str]] = {}
    for key, series in run.series.items():
        prefix, slash, _ = key.partition("/")
        if slash and prefix != "eval" and key not in PLACED_KEYS and not series.zero:
            groups.setdefault(prefix, []).append(key)
    return groups


def _name(prefix: str) -> str:
    return TITLES.get(prefix, f"{prefix}/…")


def _lines(label: str, series: Series, *, smooth: bool = False) -> list[Curve]:
    """A series as curves: each step faint below its smoothed course, or plain; a band over shared
    bins."""
    bins, band = series.coarse(POINTS), []
    if (bins.counts > 1).any():
        label = label.replace("each step", "mean and range")
        band = list(zip(bins.steps, bins.low.tolist(), bins.high.tolist(), strict=True))
    if not smooth or np.count_nonzero(bins.counts) < 10:
        return [Curve(label, bins.course(), 0, "line", band)]
    course = smoothed(bins, len(bins.steps))
    return [Curve(label, bins.course(), 0, "raw", band), Curve("smoothed", course)]


def smoothed(bins: Bins, length: int) -> list[tuple[float, float]]:
    """A moving mean of the middle half of values, over a thirtieth of the run's `length` in bins,
    and at its start over fewer."""
    half, course = max(1, length // 60), []
    for i, (step, mean) in enumerate(bins.course()):
        near = bins.means[max(0, i - half) : i + 1 + min(i, half)]
        near = np.sort(near[np.isfinite(near)])
        middle = near[len(near) // 4 : len(near) - len(near) // 4]
        course.append((step, float(middle.mean()) if math.isfinite(mean) else math.nan))
    return course


def bad_steps(*some: Series) -> list[int]:
    """The steps at which any of these was not finite."""
    return sorted({step for series in some for step in series.bad_steps})


def _curve(run: Workdir, key: str) -> str:
    """One metric's picture; none where it was not recorded or is always zero."""
    series = run.series.get(key)
    if series is None or series.zero:
        return ""
    unit, series = in_unit(key, series)
    if key in SHARES:
        lines = [Curve("of the steps", series.coarse(STRETCHES).course())]
    else:
        lines = _lines("each step", series, smooth=key in SMOOTHED)
    zero, bad = key in FROM_ZERO, series.bad_steps
    return Chart(title(key), lines, run.steps, zero, unit=unit, bad_steps=bad).draw()


def in_unit(key: str, series: Series) -> tuple[str, Series]:
    """A metric's unit, and its values in it."""
    if key in PERCENT:
        return " %", Series(series.steps, 100 * series.values)
    return "", series


def _group_charts(run: Workdir, name: str, keys: Sequence[str]) -> str:
    """All metrics `prefix/…` in pictures of a few curves each."""
    pictures = ""
    for index, part in enumerate(itertools.batched(keys, GROUP)):
        lines = []
        for color, key in enumerate(part):
            *_, line = _lines("", run.series[key], smooth=True)
            lines.append(Curve(key.partition("/")[2].replace("_", " "), line.points, color))
        bad = bad_steps(*(run.series[key] for key in part))
        heading = name if index == 0 else f"{name} ({index + 1})"
        pictures += Chart(heading, lines, run.steps, bad_steps=bad, note="Smoothed.").draw()
    return pictures


def list_map(run: Workdir, key: str) -> str:
    """A metric of one number a layer, over steps; nothing where it was not recorded or is always
    zero."""
    series = run.vectors.get(key)
    if series is None or series.zero:
        return ""
    bins = series.coarse(columns(series.shape[0]))
    low, high = min(0.0, series.least), max(0.0, series.greatest)
    ends = (number(low, 3), number(high, 3))
    return HeatMap(title(key), bins.steps, bins.means.T, (low, high), run.steps, ends).draw()
