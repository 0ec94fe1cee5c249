"""A supervised run's interruptions: a timeline, goodput, and tables by use and by cause.

Reads WORKDIR/aegis; empty without an agent's events. `aegis.accounts` assigns a use to each second.
The run's page and `python -m experiments.supervise report` show the same tables.
"""

import math

import numpy as np

from zaya_jax.aegis import accounts
from zaya_jax.aegis.accounts import LABELS, Account
from zaya_jax.cluster import events
from zaya_jax.report.document import Section, Table, Tile
from zaya_jax.report.read import Workdir
from zaya_jax.report.svg import FLOOR, LEFT, RIGHT, TOP, WIDTH, Axis, figure, lower_axis, value_axis
from zaya_jax.report.text import UNITS, duration, escape, percent, wrapped

BINS = 96  # columns of the timeline
# Bands of the drawing: label, its uses, the colour's class. The first lies at the bottom.
GROUPS = (
    ("training", ("step",), 2),
    ("starting, compiling, ending", ("start", "compile", "end"), 3),
    ("evaluating", ("evaluate",), 0),
    ("saving", ("save",), 6),
    ("done again", ("recomputed",), 4),
    ("lost to faults", ("undetected", "stopping", "recovering"), 1),
    ("not recorded", ("unrecorded",), 7),
)
INTRO = (
    "Each second of the wall clock has one use, and they sum to the whole. Goodput is the share of"
    " the supervised time that went to steps whose updates are in the run."
)
RECOVERED = (
    "Recovered: from the fault to the first new step. Time lost includes steps that were done"
    " again."
)
HEAD = (  # of the causes
    "cause",
    "class",
    "count",
    "share",
    "time lost",
    "found in, median / worst",
    "recovered in",
)
MOST_ROWS = 40
MOST_MARKS = 500  # of interruptions, above the timeline


def supervised_section(run: Workdir) -> Section:
    """The section; empty if the run was not supervised."""
    account = accounts.account_of(events.read(run.path))
    if account is None or account.end <= account.begin:
        return Section("Interruptions")
    tables, tiles = account_tables(account), _tiles(account)
    return Section("Interruptions", INTRO, tables, tiles=tiles, pictures=timeline(account))


def account_tables(account: Account) -> list[Table]:
    """The uses of the time, and the interruptions by cause."""
    whole = max(account.end - account.begin, 1e-9)
    uses = []
    for use, seconds in account.totals.items():
        if seconds:
            uses.append([LABELS[use], duration(seconds), percent(seconds / whole)])
    uses.append(["together", duration(whole), percent(1.0)])
    tables = [Table("Where the time went", ("use", "time", "share"), uses)]
    causes = [
        [
            row.label,
            row.group,
            f"{row.count:,}",
            percent(row.count / len(account.interruptions)),
            duration(row.lost),
            " / ".join(map(duration, row.detect)),
            " / ".join(map(duration, row.recover)),
        ]
        for row in accounts.by_cause(account)
    ]
    if causes:
        note = RECOVERED
        if len(causes) > MOST_ROWS:
            note = f"{len(causes) - MOST_ROWS} more causes are not shown. {note}"
        tables.append(Table("Interruptions by cause", HEAD, causes[:MOST_ROWS], note=note))
    return tables


def _tiles(account: Account) -> list[Tile]:
    faults, supervised = account.faults, account.supervised
    lost = sum(cause.lost for cause in faults)
    rate = f"one in {duration(supervised / len(faults))}" if faults else "none"
    tiles = [
        ("Goodput", percent(account.goodput), f"of {duration(supervised)} supervised"),
        ("Interruptions", f"{len(faults):,}", rate),
        ("Lost to them", duration(lost), percent(lost / supervised) if supervised else ""),
    ]
    recoveries = [cause.recover for cause in faults if cause.recover is not None]
    if recoveries:
        longest = duration(max(recoveries))
        tiles.append(("Longest recovery", longest, "from the fault to the first new step"))
    return tiles


def timeline(account: Account) -> str:
    """Columns of equal time, split by use; marks above them are interruptions."""
    whole = account.end - account.begin
    unit, scale = next((unit for unit in UNITS if whole >= 2 * unit[1]), UNITS[-1])
    x = Axis(0.0, whole / scale, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 100.0, FLOOR, TOP)
    bars = marks = legend = ""
    wide = (WIDTH - RIGHT - LEFT) / BINS
    shares = binned(account, BINS)
    tops = y.start + shares.cumsum(axis=1) * (y.end - y.start)
    totals, words = account.totals, []
    for group, (label, uses, color) in enumerate(GROUPS):
        path = ""
        for column in np.flatnonzero(shares[:, group] > 0):
            high = shares[column, group] * (y.start - y.end)
            left, top = f"{LEFT + wide * column:.2f}", f"{tops[column, group]:.1f}"
            path += f"M{left} {top}h{wide:.2f}v{high:.1f}h-{wide:.2f}z"
        bars += wrapped(f'<path class="bar c{color}" d="', path, '"/>')
        share = percent(sum(totals[use] for use in uses) / max(account.supervised, 1e-9))
        legend += f'<li><i class="key dots c{color}"></i>{escape(label)} <b>{share}</b></li>'
        words.append(f"{label} {share}")
    for cause in account.faults[-MOST_MARKS:]:
        place = x((cause.event.time - account.begin) / scale)
        marks += _mark(place, f"{cause.label}: {duration(cause.lost)} lost")
    if marks:
        legend += '<li><i class="key bad">▾</i>interruption</li>'
    svg = f'{value_axis(y, " %")}<g class="cells">{bars}</g>{marks}{lower_axis(x, FLOOR, unit)}'
    note = f"A column is {duration(whole / BINS)}; columns without colour were not supervised."
    return figure("Timeline", legend, svg, describe="; ".join(words), note=note)


def _mark(px: float, words: str) -> str:
    return (
        f'<g class="bad"><title>{escape(words)}</title><path d="M{px - 3.5:.1f} {TOP - 9}h7l-3.5'
        ' 7z"/></g>'
    )


def binned(account: Account, bins: int) -> np.ndarray:
    """[bins, GROUPS]: shares of each column's time; the rest to 1 is time without an agent."""
    whole = account.end - account.begin
    group_of = {use: group for group, (_, uses, _) in enumerate(GROUPS) for use in uses}
    shares, columns = np.zeros((bins, len(GROUPS))), np.arange(bins)
    for piece in account.spans:
        if piece.use in group_of:
            first = (piece.begin - account.begin) / whole * bins
            last = first + piece.seconds / whole * bins
            inside = np.minimum(last, columns + 1) - np.maximum(first, columns)
            shares[:, group_of[piece.use]] += np.maximum(inside, 0.0)
    return np.minimum(shares, 1.0)


def account_text(account: Account | None) -> str:
    """The tables in words."""
    if account is None:
        return "No agent has recorded a start here.\n"
    supervised = duration(account.supervised)
    goodput = percent(account.goodput) if math.isfinite(account.goodput) else "not known"
    tables = "\n".join(table.markdown() for table in account_tables(account))
    return f"Goodput {goodput} of {supervised} supervised.\n\n{tables}"
