"""Several runs on one page: a table of how they ended, each metric's curves in one picture, what configs differ in.

Pictures are over steps and over tokens, between which the reader chooses. Runs may be of any length, may still go on,
and may have recorded different metrics; what is left out of the page is said on it.
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zaya_jax.aegis import accounts, events
from zaya_jax.report import curves, svg, tables
from zaya_jax.report.page import duration, median_speed
from zaya_jax.report.read import Series, Workdir
from zaya_jax.report.svg import Line, escape, number, percent

MOST_RUNS = 16  # eight colours, each whole and dashed
COLORS = 8
MOST_PICTURES = 24
MOST_POINTS, FEWEST_POINTS = 400, 40  # of a curve
ALL_POINTS = 26_000  # of all curves together, over steps as over tokens
LONGEST_NAME = 40
LONGEST = 200  # characters of a config's value
FIRST = ("loss", "eval/loss", "grad_norm", "lr", *curves.SPEED_KEYS)
TITLES = {**curves.TITLES, "loss": "Train loss", "eval/loss": "Held-out loss"}
NOT_DRAWN = {"tokens"}
LAYERS = "load_entropy"  # of each layer: its mean is drawn


class Compared:
    """The runs, each with a name of its own."""

    def __init__(self, runs: Sequence[Workdir]):
        self.runs = list(runs)
        self.names = names(self.runs)
        self.series = [_numbers(run) for run in self.runs]

    def keys(self) -> list[str]:
        """The metrics, well-known ones first, then those that most runs have."""
        count: dict[str, int] = {}
        for series in self.series:
            for key in series:
                count[key] = count.get(key, 0) + (key not in NOT_DRAWN)
        found = [key for key in FIRST if count.get(key)]
        return found + sorted((k for k in count if count[k] and k not in FIRST), key=lambda k: (-count[k], k))


def names(runs: Sequence[Workdir]) -> list[str]:
    """What the runs are called: the config's name where that is enough, otherwise as much of the folder as it takes."""
    called = [run.name if len(run.name) <= LONGEST_NAME else f"{run.name[:LONGEST_NAME]}…" for run in runs]
    found = list(called)
    paths = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        twice = {name for name in found if found.count(name) > 1}
        if not twice:
            break
        found = [
            f"{own} ({'/'.join(path[-depth:])})" if name in twice else name
            for name, own, path in zip(found, called, paths, strict=True)
        ]
    return found


def parts(runs: Sequence[Workdir]) -> dict[str, str]:
    """The page's parts by name, in their order."""
    found = Compared(runs)
    made = {
        "head": _head(found), "curves": _curves(found), "config": _configs(found), "environment": _environments(found),
    }  # fmt: skip
    return {name: html for name, html in made.items() if html}


def title(runs: Sequence[Workdir]) -> str:
    """What the window is called."""
    return f"Comparison of {len(runs)} runs: {', '.join(names(runs))}"


def _numbers(run: Workdir) -> dict[str, Series]:
    """A run's metrics that are one number a step, the mean over the layers of what is one for each among them."""
    found = dict(run.series)
    if LAYERS in run.vectors:
        mean = Series()
        for step, values in zip(*run.vectors[LAYERS].coarse(run.vectors[LAYERS].capacity), strict=True):
            good = values[np.isfinite(values)]
            mean.add(round(step), float(good.mean()) if good.size else math.nan)
        found[f"{LAYERS}, mean of the layers"] = mean
    return found


########################################################################################################################
# The table of runs
########################################################################################################################


def _head(found: Compared) -> str:
    head = "".join(
        f'<th scope="col"><i class="key line {_look(i)}"></i>{escape(name)}</th>'
        for i, name in enumerate(found.names)
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for label, cells in _figures(found)
        if any(cell != "–" for cell in cells)
    )
    table = f'<table class="runs"><thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    said = "".join(f"<p>{escape(text)}</p>" for text in _said(found))
    warn = f'<div class="warn">{said}</div>' if said else ""
    warn += "".join(f'<p class="note">{escape(text)}</p>' for text in _left_out(found))
    return (
        f"<header><h1>{len(found.runs)} runs <span>compared</span></h1></header>"
        f'<div class="card">{table}</div>{warn}\n'
    )


def _look(index: int) -> str:
    dash = index // COLORS
    return f"c{index % COLORS}" + (f" dash{dash}" if dash else "")


def _figures(found: Compared) -> list[tuple[str, list[str]]]:
    """Rows: what it is, and of each run as HTML; the lowest of a row of losses is bold."""
    runs = found.runs
    rows = [
        ("folder", [f"<code>{escape(run.path)}</code>" for run in runs]),
        ("comes from", [escape(_origin(found, run)) for run in runs]),
        ("steps", [escape(_steps(run)) for run in runs]),
        ("last written", [escape(_written(run)) for run in runs]),
        ("tokens", [_cell(run.last("tokens"), 4) for run in runs]),
        ("held-out loss, last", _lowest([run.last("eval/loss") for run in runs])),
        ("held-out loss, best", _lowest([_best(run.series.get("eval/loss")) for run in runs])),
        ("train loss, mean of the last 20 steps", _lowest([run.train_loss for run in runs])),
    ]
    if (near := _near(runs)).steps:
        label = f"train loss near step {near.shared:,}, the last that all have (mean of steps {near.steps})"
        rows.append((label, _lowest(near.values)))
    goodput = [
        account.goodput if (account := accounts.of(events.read(run.path))) else math.nan for run in runs
    ]
    rows += [
        ("gradient norm, last", [_cell(run.last("grad_norm")) for run in runs]),
        ("tokens per second, median", [_cell(median_speed(run), 3) for run in runs]),
        ("time of all steps", [escape(duration(run.seconds)) for run in runs]),
        ("waiting for data, mean", [_share(_mean(run, "data/wait_fraction")) for run in runs]),
        ("model FLOPs utilisation, mean", [_share(_mean(run, "mfu")) for run in runs]),
        ("goodput, where supervised", [_share(value) for value in goodput]),
        ("losses not finite", [_bad(run) for run in runs]),
    ]
    return [(label, ["–" if cell in ("", "–") else cell for cell in cells]) for label, cells in rows]


def _origin(found: Compared, run: Workdir) -> str:
    """From which run it was forked, by its name here if it is here."""
    if not run.lineage:
        return ""
    parent = run.lineage[0]
    folder, step = parent.get("folder"), parent.get("step")
    where = f" at step {step:,}" if isinstance(step, int) else ""
    for name, other in zip(found.names, found.runs, strict=True):
        if isinstance(folder, str) and "\0" not in folder and other.path.resolve() == Path(folder).resolve():
            return f"{name}{where}"
    return f"{tables.value_text(folder)}{where}"


def _steps(run: Workdir) -> str:
    planned = run.setting("run.num_steps")
    if not run.lines:
        return "none yet"
    begun = f"from {run.first_step:,} " if run.first_step > 1 else ""
    if not isinstance(planned, int) or isinstance(planned, bool):
        return f"{begun}to {run.last_step:,}" if begun else f"{run.last_step:,}"
    whole = "complete" if run.last_step >= planned else f"of {planned:,} planned"
    return f"{begun}to {run.last_step:,}, {whole}" if begun else f"{run.last_step:,}, {whole}"


def _written(run: Workdir) -> str:
    try:
        when = (run.path / "metrics.jsonl").stat().st_mtime
    except OSError:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))


def _best(series: Series | None) -> float:
    return series.total.low if series and series.total.count else math.nan


@dataclasses.dataclass(frozen=True)
class Near:
    """Training losses near the last step that all runs have, of the same steps of each; none where `steps` is empty."""

    shared: int = 0
    steps: str = ""  # from which to which
    values: Sequence[float] = ()
    width: int = 0  # of the bins of the longest run, where no whole one lies before that step


def _near(runs: Sequence[Workdir]) -> Near:
    """The means of about a fiftieth of the steps before it, ten at least: of whole bins of the longest run."""
    begun, shared = max(run.first_step for run in runs), min(run.last_step for run in runs)
    known = [run.series["loss"] for run in runs if "loss" in run.series]
    if begun > shared or len({run.last_step for run in runs}) == 1 or not known:
        return Near()
    width = max(series.width for series in known)
    last = (shared + 1) // width - 1
    first = max(last + 1 - -(-max(10, shared // 50) // width), 0 if begun <= 1 else -(-begun // width))
    if first > last:
        return Near(shared, width=width)
    values = []
    for run in runs:
        bins = run.series["loss"].merged(width) if "loss" in run.series else []
        near = [b for b in bins if b.count and first <= b.step // width <= last]
        many = sum(b.count for b in near)
        values.append(sum(b.mean * b.count for b in near) / many if many else math.nan)
    return Near(shared, f"{max(begun, first * width):,} to {(last + 1) * width - 1:,}", values)


def _mean(run: Workdir, key: str) -> float:
    return run.series[key].total.mean if key in run.series else math.nan


def _bad(run: Workdir) -> str:
    count = sum(run.series[key].total.bad for key in ("loss", "eval/loss") if key in run.series)
    return f"{count:,}" if count else ""


def _cell(value: float, digits: int = 4) -> str:
    return escape(number(value, digits)) if math.isfinite(value) else ""


def _share(value: float) -> str:
    return percent(value) if math.isfinite(value) else ""


def _lowest(values: Sequence[float]) -> list[str]:
    cells, good = [_cell(v) for v in values], [v for v in values if math.isfinite(v)]
    lowest = _cell(min(good)) if len({_cell(v) for v in good}) > 1 else None  # what reads alike is alike
    return [f"<b>{cell}</b>" if cell == lowest else cell for cell in cells]


def _said(found: Compared) -> list[str]:
    """What the reader must know of these runs."""
    said = [
        f"{name}: {note}" for name, run in zip(found.names, found.runs, strict=True) for note in run.notes
    ]
    units: dict[str, list[str]] = {}
    for name, run in zip(found.names, found.runs, strict=True):
        units.setdefault(run.unit, []).append(name)
    if len(units) > 1:
        each = "; ".join(f"{unit}: {', '.join(who)}" for unit, who in units.items())
        said.append(f"Losses are not of one unit and cannot be compared: {each}.")
    without = [name for name, run in zip(found.names, found.runs, strict=True) if not _has_tokens(run)]
    if without:
        said.append(f"No tokens are recorded by {', '.join(without)}: left out of the pictures over tokens.")
    return said


def _left_out(found: Compared) -> list[str]:
    """What is recorded and not on the page."""
    said = []
    if (near := _near(found.runs)).width:
        said.append(
            f"Train losses near step {near.shared:,}, the last that all have, are not compared: of the longest run "
            f"means of {near.width:,} steps are known."
        )
    more = found.keys()[MOST_PICTURES:]
    if more:
        some = ", ".join(more[:8]) + (" and others" if len(more) > 8 else "")
        said.append(f"Of {len(more) + MOST_PICTURES} metrics {len(more)} are left out: {some}.")
    lists = sorted({key for run in found.runs for key in run.vectors})
    if lists:
        said.append(
            f"Left out are figures of each layer or expert ({', '.join(lists[:8])}): see each run's own page."
        )
    return said


########################################################################################################################
# The pictures
########################################################################################################################


def _has_tokens(run: Workdir) -> bool:
    return "tokens" in run.series and run.series["tokens"].total.count > 0


def _curves(found: Compared) -> str:
    keys = found.keys()[:MOST_PICTURES]
    if not keys:
        return ""
    count = sum(key in series for series in found.series for key in keys)
    points = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // (2 * count)))
    over = {
        way: "".join(_picture(found, key, points, way == "tokens") for key in keys)
        for way in ("step", "tokens")
    }
    grids = "".join(
        f'<div class="grid2 over-{way}">{pictures}</div>' for way, pictures in over.items() if pictures
    )
    choice = "".join(
        f'<input type="radio" name="by" id="by-{way}"{checked}/><label for="by-{way}">by {way}</label>'
        for way, checked in (("step", " checked"), ("tokens", ""))
        if over["tokens"]
    )
    return (
        "<section><h2>Curves</h2><p>Noisy metrics are smoothed. A dash in place of a value: the run has none there."
        f"</p>{choice}{grids}</section>\n"
    )


def _picture(found: Compared, key: str, points: int, by_tokens: bool) -> str:
    """One metric of all runs that recorded it."""
    unit, factor = (" %", 100.0) if key in curves.PERCENT else ("", 1.0)
    lines, bad, missing, says = [], set[float](), [], []
    # Of one width for all: two runs that do the same are drawn the same, whatever their lengths.
    width = max(series[key].width_for(points) for series in found.series if key in series)
    length = max(len(series[key].merged(width)) for series in found.series if key in series)
    for i, (name, run, all_series) in enumerate(zip(found.names, found.runs, found.series, strict=True)):
        series = all_series.get(key)
        if series is None:
            missing.append(name)
            continue
        if by_tokens and not _has_tokens(run):
            continue
        bins = series.merged(width)
        rough = length >= 10 and (key in curves.SMOOTHED or key == "loss")
        course = curves.smoothed(bins, length) if rough else [(b.step, b.mean) for b in bins]
        steps, marked = [step for step, _ in course], curves.bad_steps(series)
        if by_tokens:
            steps, marked = _tokens_at(run, steps), _tokens_at(run, marked)
        drawn = [(step, value * factor) for step, (_, value) in zip(steps, course, strict=True)]
        look = "dots" if key == "eval/loss" and not i // COLORS and len(drawn) <= 64 else "line"
        lines.append(Line(name, drawn, i % COLORS, look, dash=i // COLORS))
        bad |= set(marked)
        says.append(curves.describe(name, series))
    places = [step for line in lines for step, _ in line.points if math.isfinite(step)]
    if not places:
        return ""
    y_range, log = curves.axis_range(lines, zero=key in curves.FROM_ZERO)
    marks = sorted(bad)
    beyond = [
        line.label for line in lines
        if any(not y_range[0] <= v <= y_range[1] for _, v in line.points if math.isfinite(v))
    ]  # fmt: skip
    notes = [f"Not recorded by {', '.join(missing)}."] if missing else []
    notes += [f"Partly beyond the picture: {', '.join(beyond)}."] if beyond else []
    return svg.line_chart(
        TITLES.get(key, key), lines, x_range=(min(places), max(places)), y_range=y_range, log=log,
        bad_steps=marks[:: -(-len(marks) // curves.BAD_MARKS) or 1], describe=" ".join(says), note=" ".join(notes),
        unit=unit, over="tokens" if by_tokens else "step",
    )  # fmt: skip


def _tokens_at(run: Workdir, steps: Sequence[float]) -> list[float]:
    """How many tokens were seen at those steps; between two that are recorded, in proportion."""
    series = run.series["tokens"]
    known = {(b.step, b.mean) for b in series.coarse(series.capacity) if b.count}
    ends = {(series.low_step, series.low), (series.high_step, series.high)}  # of which bins have means
    at, tokens = zip(*sorted(known | ends), strict=True)
    return [float(v) for v in np.interp(steps, at, tokens)]


########################################################################################################################
# What differs
########################################################################################################################


def _configs(found: Compared) -> str:
    trees = [run.config for run in found.runs]
    if not any(trees):
        return ""
    rows = _differing(trees)
    without = [name for name, tree in zip(found.names, trees, strict=True) if not tree]
    text = f"<p>{escape(', '.join(without))}: no config is recorded.</p>" if without else ""
    if not rows:
        return f"<section><h2>Config</h2>{text}<p>No key differs between the runs.</p></section>\n"
    count = f"{len(rows)} key{'s' if len(rows) > 1 else ''}"
    table = tables.folded(f"What differs <span>({count})</span>", _table(found, rows), opened=True)
    return f"<section><h2>Config</h2>{text}{table}</section>\n"


def _environments(found: Compared) -> str:
    rows = _differing([run.environment for run in found.runs])
    if not rows:
        return ""
    return f"<section><h2>Environment</h2>{tables.folded('What differs', _table(found, rows), opened=True)}</section>\n"


def _differing(trees: Sequence[dict]) -> list[tuple[str, list[str]]]:
    """(key, its value in each, a dash where it is not there): 1, 1.0, "1" and true are four values."""
    flat = [
        {
            key: json.dumps(value, ensure_ascii=False, sort_keys=True)
            for key, value in tables.flat(_indexed(tree))
        }
        for tree in trees
    ]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [(key, [one.get(key, "–") for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _indexed(value: dict) -> dict:
    """Lists of groups (the schedule's phases) become groups themselves."""
    out = {}
    for key, item in value.items():
        if isinstance(item, list) and item and all(isinstance(one, dict) for one in item):
            item = {f"[{i}]": one for i, one in enumerate(item)}
        out[key] = _indexed(item) if isinstance(item, dict) else item
    return out


def _table(found: Compared, rows: Sequence[tuple[str, list[str]]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("key", *found.names))
    body = "".join(
        f'<tr><th scope="row"><code>{escape(key)}</code></th>'
        + "".join(f"<td><code>{escape(_cut(value))}</code></td>" for value in values)
        + "</tr>"
        for key, values in rows
    )
    return f'<table class="runs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
