"""The report's part on what befell a supervised run: its time as a picture, goodput, and a table by cause.

Drawn from WORKDIR/aegis, and nothing where no agent has written there. `aegis.accounts` says what each second is.
"""

import math
from collections.abc import Sequence

import numpy as np

from zaya_jax.aegis import accounts, events
from zaya_jax.aegis.accounts import LABELS, Account
from zaya_jax.report.read import Workdir
from zaya_jax.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    escape,
    figure,
    line_chart,
    number,
    open_svg,
    percent,
    step_axis,
    value_axis,
)

BINS = 96  # columns of the timeline
# What is drawn as one: label, its uses, the colour's class. The first lies at the bottom.
GROUPS = (
    ("training", ("step",), 2),
    ("starting, compiling, ending", ("start", "compile", "end"), 3),
    ("evaluating", ("evaluate",), 0),
    ("saving", ("save",), 6),
    ("done again", ("redone",), 4),
    ("lost to faults", ("silent", "stopping", "again"), 1),
    ("not told", ("untold",), 7),
)
UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
INTRO = (
    "Each second of the wall clock has one use, and they sum to the whole. Goodput is the share of the supervised time "
    "that went to steps whose updates are in the run."
)
MOST_ROWS = 40


def aegis_section(run: Workdir) -> str:
    """Everything of it; empty where the run was not supervised."""
    account = accounts.of(events.read(run.path))
    if account is None or account.end <= account.begin:
        return ""
    pictures = timeline(account) + goodput_curve(account) + _card("Where the time went", _uses(account))
    return (
        f"<section><h2>What befell the run</h2><p>{escape(INTRO)}</p>{_tiles(account)}"
        f'<div class="grid2">{pictures}</div>{_causes(account)}{_left_out(account)}</section>\n'
    )


def _tiles(account: Account) -> str:
    faults = [cause for cause in account.causes if cause.event.kind != "border"]
    supervised = sum(account.totals.values()) - account.totals["idle"]
    lost = sum(cause.lost for cause in faults)
    between = f"one in {duration(supervised / len(faults))}" if faults else "none"
    worst = max((cause.recover for cause in faults if cause.recover is not None), default=math.nan)
    goodput = account.goodput
    tiles = [
        (
            "Goodput",
            percent(goodput) if math.isfinite(goodput) else "–",
            f"of {duration(supervised)} supervised",
        ),
        ("Interruptions", f"{len(faults):,}", between),
        ("Lost to them", duration(lost), percent(lost / supervised) if supervised else ""),
    ]
    if math.isfinite(worst):
        tiles.append(("Longest recovery", duration(worst), "from the fault to the first new step"))
    drawn = "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>" for a, b, c in tiles
    )
    return f'<dl class="tiles" style="margin-bottom:14px">{drawn}</dl>'


def duration(seconds: float) -> str:
    """1 d 3 h, 2 min 5 s, 4.2 s, 35 ms."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s" if seconds >= 0.1 or not seconds else f"{1e3 * seconds:.3g} ms"
    left, parts = round(seconds), []
    for name, size in UNITS:
        amount, left = divmod(left, int(size))
        parts.append((amount, name))
    first = next(i for i, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {name}" for amount, name in parts[first : first + 2] if amount)


def timeline(account: Account) -> str:
    """Columns of equal time, each cut into what it went to; marks above them are interruptions."""
    whole = account.end - account.begin
    unit, scale = next((u for u in UNITS if whole >= 2 * u[1]), UNITS[-1])
    shares = binned(account, BINS)
    x = Axis(0.0, whole / scale, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP)
    wide, columns = (WIDTH - RIGHT - LEFT) / BINS, []
    for i, column in enumerate(shares):
        left, base, parts = LEFT + wide * i, 0.0, []
        for share, (_, _, color) in zip(column, GROUPS, strict=True):
            if share > 0:
                top, bottom = y(100 * (base + share)), y(100 * base)
                place = f'x="{left:.2f}" y="{top:.1f}" width="{wide:.2f}" height="{bottom - top:.1f}"'
                parts.append(f'<rect class="bar c{color}" {place}/>')
            base += share
        area = f'<rect class="area" x="{left:.2f}" y="{TOP}" width="{wide:.2f}" height="{HEIGHT - BOTTOM - TOP}"/>'
        told = "|".join(percent(share) for share in column)
        name = f"{number(i * whole / BINS / scale, 3)} {unit}"
        columns.append(f'<g data-name="{name}" data-values="{told}">{"".join(parts)}{area}</g>')
    marks = "".join(
        _mark(x((cause.event.time - account.begin) / scale), f"{cause.label}: {duration(cause.lost)} lost")
        for cause in account.causes[-500:]
        if cause.event.kind != "border"
    )
    totals = account.totals
    supervised = max(whole - totals["idle"], 1e-9)
    shown = [(label, sum(totals[use] for use in uses) / supervised, color) for label, uses, color in GROUPS]
    legend = "".join(
        f'<li><i class="key dots c{color}"></i>{escape(label)} <b data-line="{i}">{percent(share)}</b></li>'
        for i, (label, share, color) in enumerate(shown)
    )
    if marks:
        legend += '<li><i class="key bad">▾</i>interruption</li>'
    svg = (
        open_svg(
            "Timeline",
            "; ".join(f"{a} {percent(b)}" for a, b, _ in shown if b),
            HEIGHT,
            'data-bars="1" data-rest="whole run"',
        )
        + value_axis(y, LEFT, WIDTH - RIGHT, " %")
        + f'<g class="cells">{"".join(columns)}</g>'
        + f"{marks}{step_axis(x, HEIGHT - BOTTOM, unit)}</svg>"
    )
    note = f"A column is {duration(whole / BINS)}; columns without colour were not supervised."
    return figure("Timeline", f'<ul class="legend">{legend}</ul>', svg, note)


def goodput_curve(account: Account) -> str:
    """The share of the supervised time that went to steps that counted: of each column of the timeline, and so far."""
    whole = account.end - account.begin
    unit, scale = next((u for u in UNITS if whole >= 2 * u[1]), UNITS[-1])
    shares = binned(account, BINS)
    training, supervised = shares[:, 0], shares.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        each, so_far = training / supervised, np.cumsum(training) / np.cumsum(supervised)
    ends = [(i + 1) * whole / BINS / scale for i in range(BINS)]
    lines = [
        Line("each column", list(zip(ends, (100 * each).tolist(), strict=True)), 2, "raw"),
        Line("so far", list(zip(ends, (100 * so_far).tolist(), strict=True)), 2),
    ]
    return line_chart(
        "Goodput", lines, x_range=(0.0, whole / scale), y_range=(0.0, 100.0), unit=" %", over=unit,
        describe=f"Goodput so far: {percent(so_far[-1])} at the end." if np.isfinite(so_far[-1]) else "",
        note="The share of the supervised time that went to steps whose updates are in the run.",
    )  # fmt: skip


def _mark(px: float, words: str) -> str:
    return f'<g class="bad"><title>{escape(words)}</title><path d="M{px - 3.5:.1f} {TOP - 9}h7l-3.5 7z"/></g>'


def binned(account: Account, bins: int) -> np.ndarray:
    """[bins, GROUPS]: shares of each column's time; what is missing to 1 is time without an agent."""
    whole = account.end - account.begin
    place = {use: i for i, (_, uses, _) in enumerate(GROUPS) for use in uses}
    found = np.zeros((bins, len(GROUPS)))
    for piece in account.pieces:
        if piece.use not in place:
            continue
        first = (piece.begin - account.begin) / whole * bins
        last = first + piece.seconds / whole * bins
        for i in range(max(int(first), 0), min(math.ceil(last), bins)):
            found[i, place[piece.use]] += max(min(last, i + 1) - max(first, i), 0.0)
    return np.minimum(found, 1.0)


def _card(title: str, table: str) -> str:
    return f'<div class="card" style="margin:0"><h3>{escape(title)}</h3>{table}</div>'


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<table class="num wide"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _uses(account: Account) -> str:
    """Seconds by use; the last row is the whole."""
    whole = account.end - account.begin
    rows = [
        (LABELS[use], duration(seconds), percent(seconds / whole))
        for use, seconds in account.totals.items()
        if seconds
    ]
    return _table(("use", "time", "share"), [*rows, ("together", duration(whole), percent(1.0))])


def _causes(account: Account) -> str:
    rows, count = accounts.by_cause(account), len(account.causes)
    if not rows:
        return ""
    lines = [
        (
            row.label, row.group, f"{len(row.causes):,}", percent(len(row.causes) / count), duration(row.lost),
            *(f"{duration(median)} / {duration(worst)}" for median, worst in (row.detect, row.recover)),
        )
        for row in rows[:MOST_ROWS]
    ]  # fmt: skip
    titles = ("cause", "class", "count", "share", "time lost", "found in, median / worst", "recovered in")
    more = f"{len(rows) - MOST_ROWS} more causes are not shown. " if len(rows) > MOST_ROWS else ""
    note = f"{more}Recovered: from the fault to the first new step. Time lost includes steps that were done again."
    return f'<div class="card"><h3>Interruptions by cause</h3>{_table(titles, lines)}<p class="note">{note}</p></div>'


def _left_out(account: Account) -> str:
    """Which batches were left out, and why."""
    if not account.left_out:
        return ""
    rows = [
        (f"{event.facts['step']:,}", f"{event.facts['batches']:,}", event.seen or event.kind)
        for event in account.left_out[-MOST_ROWS:]
    ]
    table = _table(("after step", "batches", "for"), rows)
    return f'<div class="card"><h3>Batches left out</h3>{table}</div>'
