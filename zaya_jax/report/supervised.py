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
from zaya_jax.report.text import UNITS, duration, escape, percent

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
MOST_ROWS = 40


def supervised_section(run: Workdir) -> Section:
    """The section; empty if the run was not supervised."""
    account = accounts.account_of(events.read(run.path))
    if account is None or account.end <= account.begin:
        return Section("Interruptions")
    tables, tiles = account_tables(account), _tiles(account)
    return Section("Interruptions", INTRO, tables, tiles=tiles, pictures=timeline(account))


def account_tables(account: Account) -> list[Table]:
    """The uses of the time, the interruptions by cause, and the batches that were left out."""
    whole = max(account.end - account.begin, 1e-9)
    uses = [
        [LABELS[use], duration(s), percent(s / whole)] for use, s in account.totals.items() if s
    ]
    uses.append(["together", duration(whole), percent(1.0)])
    tables = [Table("Where the time went", ("use", "time", "share"), uses)]
    causes = [
        [
            row.label,
            row.group,
            f"{row.count:,}",
            percent(row.count / len(account.interruptions)),
            duration(row.lost),
            *(
                f"{duration(median)} / {duration(worst)}"
                for median, worst in (row.detect, row.recover)
            ),
        ]
        for row in accounts.by_cause(account)
    ]
    if causes:
        head = (
            "cause",
            "class",
            "count",
            "share",
            "time lost",
            "found in, median / worst",
            "recovered in",
        )
        more = (
            f"{len(causes) - MOST_ROWS} more causes are not shown. "
            if len(causes) > MOST_ROWS
            else ""
        )
        tables.append(
            Table("Interruptions by cause", head, causes[:MOST_ROWS], note=more + RECOVERED)
        )
    batches = [
        [str(event.facts.get("step")), str(event.facts.get("batches")), event.seen or event.kind]
        for event in account.left_out[-MOST_ROWS:]
    ]
    if batches:
        tables.append(Table("Batches left out", ("after step", "batches", "for"), batches))
    return tables


def _tiles(account: Account) -> list[Tile]:
    faults = [cause for cause in account.interruptions if cause.event.kind != "border"]
    supervised = sum(account.totals.values()) - account.totals["idle"]
    lost = sum(cause.lost for cause in faults)
    tiles = [
        ("Goodput", percent(account.goodput), f"of {duration(supervised)} supervised"),
        (
            "Interruptions",
            f"{len(faults):,}",
            f"one in {duration(supervised / len(faults))}" if faults else "none",
        ),
        ("Lost to them", duration(lost), percent(lost / supervised) if supervised else ""),
    ]
    worst = max((cause.recover for cause in faults if cause.recover is not None), default=math.nan)
    if math.isfinite(worst):
        tiles.append(("Longest recovery", duration(worst), "from the fault to the first new step"))
    return tiles


def timeline(account: Account) -> str:
    """Columns of equal time, split by use; marks above them are interruptions."""
    whole = account.end - account.begin
    unit, scale = next((u for u in UNITS if whole >= 2 * u[1]), UNITS[-1])
    x, y = Axis(0.0, whole / scale, LEFT, WIDTH - RIGHT), Axis(0.0, 100.0, FLOOR, TOP)
    shares = binned(account, BINS)
    tops, wide, drawn = (
        y.start + shares.cumsum(axis=1) * (y.end - y.start),
        (WIDTH - RIGHT - LEFT) / BINS,
        "",
    )
    for group, (_, _, color) in enumerate(GROUPS):
        path = "".join(
            f"M{LEFT + wide * i:.2f}"
            f" {tops[i, group]:.1f}h{wide:.2f}v{share * (y.start - y.end):.1f}h-{wide:.2f}z"
            for i, share in enumerate(shares[:, group])
            if share > 0
        )
        drawn += f'<path class="bar c{color}" d="{path}"/>' if path else ""
    marks = "".join(
        _mark(
            x((cause.event.time - account.begin) / scale),
            f"{cause.label}: {duration(cause.lost)} lost",
        )
        for cause in account.interruptions[-500:]
        if cause.event.kind != "border"
    )
    totals = account.totals
    supervised = max(whole - totals["idle"], 1e-9)
    shares_of = [
        (label, percent(sum(totals[u] for u in uses) / supervised), color)
        for label, uses, color in GROUPS
    ]
    legend = "".join(
        f'<li><i class="key dots c{color}"></i>{escape(a)} <b>{b}</b></li>'
        for a, b, color in shares_of
    )
    legend += '<li><i class="key bad">▾</i>interruption</li>' if marks else ""
    svg = f'{value_axis(y, " %")}<g class="cells">{drawn}</g>{marks}{lower_axis(x, FLOOR, unit)}'
    note = f"A column is {duration(whole / BINS)}; columns without colour were not supervised."
    return figure(
        "Timeline", legend, svg, describe="; ".join(f"{a} {b}" for a, b, _ in shares_of), note=note
    )


def _mark(px: float, words: str) -> str:
    return (
        f'<g class="bad"><title>{escape(words)}</title><path d="M{px - 3.5:.1f} {TOP - 9}h7l-3.5'
        ' 7z"/></g>'
    )


def binned(account: Account, bins: int) -> np.ndarray:
    """[bins, GROUPS]: shares of each column's time; the rest to 1 is time without an agent."""
    whole = account.end - account.begin
    place = {use: i for i, (_, uses, _) in enumerate(GROUPS) for use in uses}
    found, columns = np.zeros((bins, len(GROUPS))), np.arange(bins)
    for piece in account.spans:
        if piece.use in place:
            first = (piece.begin - account.begin) / whole * bins
            last = first + piece.seconds / whole * bins
            found[:, place[piece.use]] += np.maximum(
                np.minimum(last, columns + 1) - np.maximum(first, columns), 0.0
            )
    return np.minimum(found, 1.0)


def account_text(account: Account | None) -> str:
    """The tables in words."""
    if account is None:
        return "No agent has recorded a start here.\n"
    supervised = duration(account.end - account.begin - account.totals["idle"])
    goodput = percent(account.goodput) if math.isfinite(account.goodput) else "not known"
    tables = "\n".join(table.markdown() for table in account_tables(account))
    return f"Goodput {goodput} of {supervised} supervised.\n\n{tables}"
