"""The report's curves: losses, learning rate, gradient norms, speed, any other number that a run records."""

import math
from collections.abc import Sequence

import numpy as np

from zaya_jax.report import svg
from zaya_jax.report.heat import Scale, columns, heat_map
from zaya_jax.report.read import Bin, Series, Workdir
from zaya_jax.report.svg import Line, number

POINTS = 480  # of a curve
ALL_POINTS = 24_000  # of all curves together: keeps the page under a megabyte
FEWEST_POINTS = 60
BAD_MARKS = 40
GROUP = 6  # curves of one picture
GAP = (math.nan, math.nan, math.nan)  # breaks a band
LOG_ABOVE = 40  # positive values whose extremes lie further apart get a logarithmic axis

OPTIMISER_KEYS = ("lr", "grad_norm", "skipped")
SPEED_KEYS = ("step_seconds", "tokens_per_second", "data/wait_fraction", "mfu")
PLACED_KEYS = {"loss", "eval/loss", "tokens", *OPTIMISER_KEYS, *SPEED_KEYS}
TITLES = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "skipped": "Skipped updates",
    "step_seconds": "Seconds per step",
    "tokens_per_second": "Tokens per second",
    "data/wait_fraction": "Time waiting for data",
    "mfu": "Model FLOPs utilisation",
}
FROM_ZERO = {"lr", "step_seconds", "tokens_per_second", "data/wait_fraction", "mfu", "skipped"}
SMOOTHED = {"grad_norm", "step_seconds", "tokens_per_second", "data/wait_fraction", "mfu"}
PERCENT = {"data/wait_fraction", "mfu"}


def loss_section(run: Workdir) -> str:
    """Train and held-out loss over the whole run, and its second half with an axis of its own."""
    train, held_out = run.series.get("loss"), run.series.get("eval/loss")
    if not train and not held_out:
        return ""
    lines = _lines("train, each step", train, POINTS, smooth=True) if train else []
    if held_out:
        lines.append(Line("held-out", [(b.step, b.mean) for b in held_out.coarse(160)], 1, "dots"))
    bad = sorted({step for series in (train, held_out) if series for step in bad_steps(series)})
    text = " ".join(describe(n, s) for n, s in (("Train loss", train), ("Held-out loss", held_out)) if s)
    pictures = [_loss_picture(run, "Loss", lines, bad, text)]
    middle = (run.first_step + run.last_step) / 2
    if train and sum(step >= middle for step, _ in lines[0].points) >= 10:
        half = [_later(line, middle) for line in lines]
        bad = [step for step in bad if step >= middle]
        pictures.append(_loss_picture(run, "Loss, second half", half, bad, text, since=middle))
    unit = f"In {run.unit}"
    if run.unit == "nats per byte" and held_out and math.isfinite(held_out.last):
        unit += f"; the last held-out loss is {number(held_out.last / math.log(2))} bits per byte"
    return svg.section("Loss", f"{unit}.", "".join(pictures))


def optimiser_section(run: Workdir) -> str:
    """Learning rate, gradient norm, skipped updates, and norms by group."""
    pictures = [_curve(run, key) for key in OPTIMISER_KEYS if key in run.series]
    groups = _prefixes(run)
    pictures += [_grouped(run, prefix, keys) for prefix, keys in groups.items() if prefix.endswith("_norm")]
    return svg.section("Optimisation", "", "".join(pictures))


def speed_section(run: Workdir) -> str:
    """Step time, throughput, waiting for data, utilisation."""
    return svg.section("Speed", "", "".join(_curve(run, key) for key in SPEED_KEYS if key in run.series))


def other_section(run: Workdir) -> str:
    """Whatever else the metrics hold: numbers as curves, lists of numbers as heat maps."""
    groups = _prefixes(run)
    grouped = {key for keys in groups.values() for key in keys}
    pictures = [_curve(run, key) for key in run.series if key not in PLACED_KEYS and key not in grouped]
    pictures += [
        _grouped(run, prefix, keys) for prefix, keys in groups.items() if not prefix.endswith("_norm")
    ]
    pictures += [_list_map(run, key) for key in run.vectors if key not in ("load", "load_entropy")]
    return svg.section("Other metrics", "", "".join(pictures))


def x_range(run: Workdir) -> tuple[float, float]:
    """The steps that all pictures of the whole run have in common."""
    return float(run.first_step), float(run.last_step)


def _budget(run: Workdir) -> int:
    return max(FEWEST_POINTS, min(POINTS, ALL_POINTS // max(1, len(run.series))))


def _prefixes(run: Workdir) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key in run.series:
        prefix, slash, _ = key.partition("/")
        if slash and prefix != "eval" and key not in PLACED_KEYS:
            groups.setdefault(prefix, []).append(key)
    return groups


def _lines(
    label: str, series: Series, points: int, *, smooth: bool = False, factor: float = 1.0
) -> list[Line]:
    """A series as curves: each step faint below its smoothed course, or plain; a band over shared bins."""
    bins = series.coarse(points)
    merged = any(b.count > 1 for b in bins)
    band = [(b.step, b.low * factor, b.high * factor) if b.count else GAP for b in bins if merged]
    plain = [(b.step, b.mean * factor) for b in bins]
    if smooth and sum(b.count > 0 for b in bins) >= 10:
        label = label.replace("each step", "mean and range") if merged else label
        course = [(step, mean * factor) for step, mean in smoothed(bins)]
        return [Line(label, plain, 0, "raw", band), Line("smoothed", course)]
    return [Line("mean and range" if merged else label, plain, 0, "line", band)]


def smoothed(bins: Sequence[Bin], length: int = 0) -> list[tuple[float, float]]:
    """A moving mean of the middle half of values, over a thirtieth of the run and at its start over fewer.

    `length`: of how many bins the thirtieth is, where it is not these.
    """
    half = max(1, (length or len(bins)) // 60)
    out = []
    for i, b in enumerate(bins):
        near = sorted(c.mean for c in bins[max(0, i - half) : i + 1 + min(i, half)] if c.count)
        near = near[len(near) // 4 : len(near) - len(near) // 4]
        out.append((b.step, sum(near) / len(near)) if b.count else (math.nan, math.nan))
    return out


def _later(line: Line, step: float) -> Line:
    points = [p for p in line.points if not p[0] < step]
    return Line(line.label, points, line.color, line.look, [p for p in line.band if not p[0] < step])


def _range(values: Sequence[float], zero: bool = False, keep: float = math.nan) -> tuple[float, float]:
    """The values' range, without lone extremes that would flatten the rest; `keep` is inside in any case."""
    good = sorted(v for v in values if math.isfinite(v))
    if not good:
        return 0.0, 1.0
    low, high = good[0], good[-1]
    a, b = good[len(good) // 50], good[len(good) - 1 - len(good) // 50]
    spread = max(b - a, 0.02 * max(abs(a), abs(b)))
    high = b + 0.5 * spread if high > b + 2 * spread else high
    low = a - 0.5 * spread if low < a - 2 * spread else low
    if math.isfinite(keep):
        low, high = min(low, keep), max(high, keep)
    room = 0.04 * (high - low)
    if zero and low >= 0:
        return 0.0, (high + room) or 1.0
    return low - room, high + room


def _drawn(lines: Sequence[Line]) -> list[float]:
    """All finite values of the curves and their bands."""
    values = [v for line in lines for _, v in line.points]
    values += [v for line in lines for _, *ends in line.band for v in ends]
    return [v for v in values if math.isfinite(v)]


def axis_range(lines: Sequence[Line], zero: bool = False) -> tuple[tuple[float, float], bool]:
    """The values' range and whether its axis is logarithmic."""
    values = _drawn(lines)
    if not zero and values and min(values) > 0 and max(values) > LOG_ABOVE * min(values):
        return (min(values), max(values)), True
    return _range(values, zero), False


def _outside(series: Series, low: float, high: float, unit: str = "") -> str:
    """A sentence on values that the picture leaves out."""
    factor = 100.0 if unit else 1.0
    parts = []
    for name, side, value, step in (
        ("highest", "above", series.total.high * factor, series.high_step),
        ("lowest", "below", series.total.low * factor, series.low_step),
    ):
        if series.total.count and (value > high if side == "above" else value < low):
            parts.append(f"the {name}, {number(value)}{unit} at step {step:,}, is {side} the picture")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def describe(name: str, series: Series) -> str:
    """A curve in words."""
    total = series.total
    if not total.count:
        return f"{name}: no finite value."
    between = f"between {number(total.low)} and {number(total.high)}"
    bad = f" Not finite at {total.bad} steps." if total.bad else ""
    return f"{name}: last {number(series.last)} at step {series.last_step}, {between}.{bad}"


def bad_steps(series: Series) -> list[float]:
    """Some of the steps at which it was not finite, the first among them."""
    bad = [b for b in series.coarse(series.capacity) if b.bad]
    stride = -(-len(bad) // BAD_MARKS) or 1
    return [float(b.bad_step) for b in bad[::stride]]


def _curve(run: Workdir, key: str) -> str:
    """One metric's picture."""
    series, title = run.series[key], TITLES.get(key, key)
    unit, factor = (" %", 100.0) if key in PERCENT else ("", 1.0)
    lines = _lines("each step", series, _budget(run), smooth=key in SMOOTHED, factor=factor)
    y_range, log = axis_range(lines, zero=key in FROM_ZERO)
    note = _outside(series, *y_range, unit)
    return svg.line_chart(
        title,
        lines,
        x_range=x_range(run),
        y_range=y_range,
        log=log,
        bad_steps=bad_steps(series),
        describe=describe(title, series),
        note=note,
        unit=unit,
    )


def _grouped(run: Workdir, prefix: str, keys: Sequence[str]) -> str:
    """All metrics `prefix/…` in pictures of a few curves each."""
    pictures = []
    for start in range(0, len(keys), GROUP):
        part = keys[start : start + GROUP]
        lines = []
        for color, key in enumerate(part):
            *_, line = _lines("", run.series[key], _budget(run), smooth=True)
            lines.append(Line(key.partition("/")[2], line.points, color))
        y_range, log = axis_range(lines)
        bad = sorted({step for key in part for step in bad_steps(run.series[key])})
        pictures.append(
            svg.line_chart(
                f"{prefix}/…" + (f" ({start // GROUP + 1})" if start else ""),
                lines,
                x_range=x_range(run),
                y_range=y_range,
                log=log,
                bad_steps=bad[:: -(-len(bad) // BAD_MARKS) or 1],
                describe=" ".join(describe(key, run.series[key]) for key in part),
                note="Smoothed.",
            )
        )
    return "".join(pictures)


def _loss_picture(
    run: Workdir, title: str, lines: list[Line], bad: list[float], text: str, since: float | None = None
) -> str:
    first = next((v for line in lines for _, v in line.points if math.isfinite(v)), math.nan)
    low, high = _range(_drawn(lines), keep=first if since is None else math.nan)
    whole = run.series.get("loss")
    return svg.line_chart(
        title,
        lines,
        x_range=x_range(run) if since is None else (since, float(run.last_step)),
        y_range=(low, high),
        bad_steps=bad,
        describe=text,
        note=_outside(whole, low, high) if whole and since is None else "",
    )


def _list_map(run: Workdir, key: str) -> str:
    rows = run.vectors[key].shape[0]
    steps, values = run.vectors[key].coarse(columns(rows))
    good = values[np.isfinite(values)]
    low, high = (float(good.min()), float(good.max())) if good.size else (math.nan, math.nan)
    scale = Scale.between(good.tolist())
    return heat_map(
        key,
        [str(i) for i in range(rows)],
        steps,
        values.T.tolist(),
        scale,
        x_range=x_range(run),
        row_name="row",
        ends=(number(scale.low, 3), number(scale.high, 3)),
        describe=f"Heat map, row by step, of {key}, from {number(low)} to {number(high)}.",
        note=f"{number(low)} throughout." if low == high else "",
    )
