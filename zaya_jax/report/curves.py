"""A run's curves: losses, learning rate, gradient norms, speed, saving, and any other number that
the run records.

Each `..._section` is a part of the page (`run_page`). A metric gets its title, unit and kind of
curve from the tables here; one that no table names is drawn under its own name.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from zaya_jax.checkpoint.run import timings
from zaya_jax.report.document import Section
from zaya_jax.report.read import Bins, Series, Workdir
from zaya_jax.report.svg import Chart, Curve, HeatMap, Scale, columns, thinned
from zaya_jax.report.text import number

POINTS = 480  # of a curve
ALL_POINTS = 24_000  # of all curves together
FEWEST_POINTS = 60
BAD_MARKS = 40
GROUP = 6  # curves of one picture
LOG_ABOVE = 40  # positive values whose extremes lie further apart get a logarithmic axis
FEW_SAVES = 12  # up to so many saves are points with their values

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
WAITS = (
    "The training waits for the copy, on a GPU only for its part on the device; the rest overlaps."
)
SAVE_FIGURES = (  # title, label, colour, seconds of a save
    ("Copy", "slowest process", 1, lambda save: save.slowest("copy")),
    ("Whole save", "begin to commit", 0, lambda save: save.total()),
)


def loss_section(run: Workdir) -> Section:
    """Train and held-out loss over the whole run, and its second half with an axis of its own."""
    train, held_out = run.series.get("loss"), run.series.get("eval/loss")
    if not train and not held_out:
        return Section("Loss")
    lines = []
    if train:
        lines += _lines("train, each step", train, POINTS, smooth=True)
    if held_out:
        lines.append(Curve("held-out", held_out.coarse(160).course(), 1, "dots"))
    bad = bad_steps(*filter(None, (train, held_out)))
    # The loss before training may lie far above all others, and is still in the picture.
    starts = [value for line in lines for _, value in line.points[:1] if math.isfinite(value)]
    y_range = _range(_drawn(lines), keep=starts)
    pictures = Chart("Loss", lines, run.steps, y_range, bad_steps=bad).draw()
    middle = (run.first_step + run.last_step) / 2
    half = [_later(line, middle) for line in lines]
    if train and len(half[0].points) >= 10:
        pictures += Chart(
            "Loss, second half",
            half,
            (middle, float(run.last_step)),
            _range(_drawn(half)),
            bad_steps=[step for step in bad if step >= middle],
        ).draw()
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


def saves_section(run: Workdir) -> Section:
    """Seconds of each save; empty if the run saved at most once."""
    saves = timings.read_timings(run.path).get("save", {})
    return Section("Checkpoints", WAITS, pictures=save_curves(list(saves.values())))


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


def save_curves(saves: Sequence[timings.StepTiming]) -> str:
    """Two pictures: the slowest process's copy, and from begin to commit; nothing for a single
    save."""
    if len(saves) < 2:
        return ""
    look = "line" if len(saves) > FEW_SAVES else "dots"
    pictures = ""
    for heading, label, color, seconds in SAVE_FIGURES:
        series = Series.of([save.step for save in saves], [seconds(save) for save in saves])
        if not series.finite.size:
            continue
        longest = series.greatest
        unit, scale, note = " s", 1.0, ""
        if longest < 0.1:
            unit, scale = " ms", 1e3
        bins = series.coarse(POINTS)
        if len(bins.steps) < len(saves):
            note = "Each point is the slowest of several saves."
        points = list(zip(bins.steps, (bins.high * scale).tolist(), strict=True))
        pictures += Chart(
            heading,
            [Curve(label, points, color, look)],
            (bins.steps[0], bins.steps[-1]),
            (0.0, longest * scale * 1.08 or 1.0),
            unit=unit,
            note=note,
        ).draw()
    return pictures


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


def _lines(
    label: str, series: Series, points: int, *, smooth: bool = False, factor: float = 1.0
) -> list[Curve]:
    """A series as curves: each step faint below its smoothed course, or plain; a band over shared
    bins."""
    bins = series.coarse(points)
    plain, band = bins.course(factor), []
    shared = bool((bins.counts > 1).any())
    if shared:
        low, high = (bins.low * factor).tolist(), (bins.high * factor).tolist()
        band = list(zip(bins.steps, low, high, strict=True))
    if not smooth or np.count_nonzero(bins.counts) < 10:
        return [Curve("mean and range" if shared else label, plain, 0, "line", band)]
    if shared:
        label = label.replace("each step", "mean and range")
    course = [(step, mean * factor) for step, mean in smoothed(bins, len(bins.steps))]
    return [Curve(label, plain, 0, "raw", band), Curve("smoothed", course)]


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


def _later(line: Curve, step: float) -> Curve:
    """The curve from a step on."""
    points = [point for point in line.points if point[0] >= step]
    band = [point for point in line.band if point[0] >= step]
    return Curve(line.label, points, line.color, line.look, band)


def _range(
    values: Sequence[float], zero: bool = False, keep: Sequence[float] = ()
) -> tuple[float, float]:
    """The range of finite values, without lone extremes that would flatten the rest; `keep` are
    inside in any case."""
    if not values:
        return 0.0, 1.0
    rising, ends = sorted(values), len(values) // 50
    low, high = rising[0], rising[-1]
    usual_low, usual_high = rising[ends], rising[len(rising) - 1 - ends]
    spread = max(usual_high - usual_low, 0.02 * max(abs(usual_low), abs(usual_high)))
    if high > usual_high + 2 * spread:
        high = usual_high + 0.5 * spread
    if low < usual_low - 2 * spread:
        low = usual_low - 0.5 * spread
    low, high = min([low, *keep]), max([high, *keep])
    room = 0.04 * (high - low)
    if zero and low >= 0:
        return 0.0, (high + room) or 1.0
    return low - room, high + room


def _drawn(lines: Sequence[Curve]) -> list[float]:
    """All finite values of the curves and their bands."""
    return [value for line in lines for _, value in line.drawn]


def axis_range(lines: Sequence[Curve], zero: bool = False) -> tuple[tuple[float, float], bool]:
    """The values' range and whether its axis is logarithmic."""
    values = _drawn(lines)
    if not zero and values and min(values) > 0 and max(values) > LOG_ABOVE * min(values):
        return (min(values), max(values)), True
    return _range(values, zero), False


def bad_steps(*some: Series) -> list[float]:
    """Some of the steps at which a series was not finite, the first among them."""
    steps = sorted({float(step) for series in some for step in series.bad_steps})
    return list(thinned(steps, BAD_MARKS))


def _points(run: Workdir) -> int:
    """Points of each curve: with all metrics together the page stays under a megabyte."""
    return max(FEWEST_POINTS, min(POINTS, ALL_POINTS // len(run.series)))


def _curve(run: Workdir, key: str) -> str:
    """One metric's picture; none where it was not recorded or is always zero."""
    series = run.series.get(key)
    if series is None or series.zero:
        return ""
    unit, factor = percent_of(key)
    if key in SHARES:
        lines = [Curve("of the steps", series.coarse(STRETCHES).course(factor))]
    else:
        lines = _lines("each step", series, _points(run), smooth=key in SMOOTHED, factor=factor)
    y_range, log = axis_range(lines, zero=key in FROM_ZERO)
    bad = bad_steps(series)
    return Chart(title(key), lines, run.steps, y_range, log, unit=unit, bad_steps=bad).draw()


def percent_of(key: str) -> tuple[str, float]:
    """A metric's unit, and the factor to it."""
    return (" %", 100.0) if key in PERCENT else ("", 1.0)


def _group_charts(run: Workdir, name: str, keys: Sequence[str]) -> str:
    """All metrics `prefix/…` in pictures of a few curves each."""
    pictures = ""
    for index, part in enumerate(itertools.batched(keys, GROUP)):
        lines = []
        for color, key in enumerate(part):
            *_, line = _lines("", run.series[key], _points(run), smooth=True)
            lines.append(Curve(key.partition("/")[2].replace("_", " "), line.points, color))
        y_range, log = axis_range(lines)
        bad = bad_steps(*(run.series[key] for key in part))
        heading = name if index == 0 else f"{name} ({index + 1})"
        pictures += Chart(
            heading, lines, run.steps, y_range, log, bad_steps=bad, note="Smoothed."
        ).draw()
    return pictures


def list_map(run: Workdir, key: str) -> str:
    """A metric of one number a layer, over steps; nothing where it was not recorded or is always
    zero."""
    series = run.vectors.get(key)
    if series is None or series.zero:
        return ""
    bins = series.coarse(columns(series.shape[0]))
    scale = Scale.between(bins.means.ravel().tolist())
    ends = (number(scale.low, 3), number(scale.high, 3))
    return HeatMap(title(key), bins.steps, bins.means.T, scale, run.steps, "layer", ends).draw()
