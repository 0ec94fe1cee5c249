"""A supervised run's interruptions: a timeline, goodput, and tables by use and by cause.

Reads WORKDIR/aegis; empty without an agent's events. `aegis.accounts` assigns a use to each second.
The run's page and `python -m experiments.supervise report` show the same tables.
"""

import numpy as np

from zaya_jax.aegis import accounts
from zaya_jax.aegis.accounts import LABELS, Account
from zaya_jax.cluster import events
from zaya_jax.report.document import Section, Table
from zaya_jax.report.read import Workdir
from zaya_jax.report.svg import HeatMap
from zaya_jax.report.text import UNITS, counted, duration, percent

BINS = 96  # columns of the timeline
ROWS = {  # of the timeline, and the uses of each
    "training": ("step",),
    "starting": ("start", "compile", "end"),
    "evaluate": ("evaluate",),
    "saving": ("save",),
    "again": ("recomputed",),
    "faults": ("undetected", "stopping", "recovering"),
    "unknown": ("unrecorded",),
}
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


def supervised_section(run: Workdir) -> Section:
    """The section; empty if the run was not supervised."""
    account = accounts.account_of(events.read(run.path))
    if account is None or account.end <= account.begin:
        return Section("Interruptions")
    text = f"{_summary(account)} {INTRO}"
    return Section("Interruptions", text, account_tables(account), pictures=timeline(account))


def account_tables(account: Account) -> list[Table]:
    """The uses of the time, and the interruptions by cause."""
    whole = max(account.end - account.begin, 1e-9)
    uses = []
    for use, seconds in account.totals.items():
        if seconds:
            uses.append([LABELS[use], duration(seconds), percent(seconds / whole)])
    uses.append(["together", duration(whole), percent(1.0)])
    tables = [Table("Where the time went", ("use", "time", "share"), uses)]
    causes = []
    for row in accounts.by_cause(account):
        cells = [
            row.label,
            row.group,
            f"{row.count:,}",
            percent(row.count / len(account.interruptions)),
            duration(row.lost),
            " / ".join(map(duration, row.detect)),
            " / ".join(map(duration, row.recover)),
        ]
        causes.append(cells)
    if causes:
        tables.append(Table("Interruptions by cause", HEAD, causes, note=RECOVERED))
    return tables


def _summary(account: Account) -> str:
    """Goodput, and what faults cost."""
    parts = [f"Goodput {percent(account.goodput)} of {duration(account.supervised)} supervised"]
    faults = [cause for cause in account.interruptions if cause.event.kind != "border"]  # planned
    if faults:
        lost = duration(sum(cause.lost for cause in faults))
        parts.append(f"{counted(len(faults), 'interruption')} took {lost}")
    recoveries = [cause.recover for cause in faults if cause.recover is not None]
    if recoveries:
        parts.append(f"the longest recovery {duration(max(recoveries))}")
    return f"{'; '.join(parts)}."


def timeline(account: Account) -> str:
    """Columns of equal time: the share of each that every use had."""
    whole = account.end - account.begin
    unit, scale = next((unit for unit in UNITS if whole >= 2 * unit[1]), UNITS[-1])
    middles = (np.arange(BINS) + 0.5) / BINS * whole / scale
    return HeatMap(
        "Timeline",
        middles.tolist(),
        binned(account),
        (0.0, 1.0),
        (0.0, whole / scale),
        ("0 %", "100 % of the time"),
        f"A column is {duration(whole / BINS)}; in one without colour nothing was supervised.",
        list(ROWS),
        unit,
    ).draw()


def binned(account: Account) -> np.ndarray:
    """[ROWS, BINS]: shares of each column's time; NaN where there are none."""
    whole = account.end - account.begin
    row_of = {use: row for row, uses in enumerate(ROWS.values()) for use in uses}
    shares, columns = np.zeros((len(ROWS), BINS)), np.arange(BINS)
    for piece in account.spans:
        if piece.use in row_of:
            first = (piece.begin - account.begin) / whole * BINS
            last = first + piece.seconds / whole * BINS
            inside = np.minimum(last, columns + 1) - np.maximum(first, columns)
            shares[row_of[piece.use]] += np.maximum(inside, 0.0)
    return np.where(shares > 0, shares, np.nan)


def account_text(account: Account | None) -> str:
    """The same as text."""
    if account is None:
        return "No agent has recorded a start here.\n"
    tables = "\n".join(table.markdown() for table in account_tables(account))
    return f"{_summary(account)}\n\n{tables}"
