"""The page of checkpoint times: per stage a heat map of processes over saves, the last load, and
each step's figures.

A slow host is a dark row, a slow moment of the storage a dark column. Many processes or saves are
drawn in groups by their slowest member.
"""

import datetime
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zaya_jax.checkpoint.run import look, timings
from zaya_jax.checkpoint.run.timings import StepTiming
from zaya_jax.config import UserError
from zaya_jax.report.document import Page, Section, Table, Tile
from zaya_jax.report.read import Series
from zaya_jax.report.svg import Chart, Curve, HeatMap, columns, grouped
from zaya_jax.report.text import byte_size, counted, duration

TITLES = {
    "copy": "Copy (to the snapshot)",
    "serialise": "Serialise (chunks, checksums)",
    "write": "Write",
    "commit": "Commit (wait for all, then the name)",
}
DARK = (
    "Seconds by process and save. A dark row is a slow host, a dark column a slow moment of the"
    " storage."
)
WAITS = (
    "The training waits for the copy, on a GPU only for its part on the device; the rest overlaps."
)
SAVE_FIGURES = (  # title, label, colour, seconds of a save
    ("Copy", "slowest process", 1, lambda save: save.slowest("copy")),
    ("Whole save", "begin to commit", 0, lambda save: save.total()),
)
POINTS = 480  # of a curve
TYPICAL = 3  # times the median: where a scale may end although there is worse


def checkpoints_document(workdir: Path) -> Page:
    """The page of a run's checkpoints."""
    events = timings.read_timings(workdir)
    saves, loads = (list(events.get(kind, {}).values()) for kind in ("save", "load"))
    seen, _ = look.summarise_all(workdir)
    if not seen and not saves:
        raise UserError(f"{workdir} has no checkpoint and no times of any; train first")
    load = max(loads, key=lambda event: event.time, default=None)
    sections = [
        Section("Over the run", WAITS, pictures=_save_curves(saves)),
        Section(
            "Where the time goes",
            DARK,
            pictures="".join(_stage_map(saves, s) for s in timings.STAGES if saves),
        ),
        Section("The last load", pictures=_load_map(load)),
        Section(
            "Complete checkpoints",
            tables=[steps_table(seen, events.get("save", {}))] if seen else [],
        ),
    ]
    return Page(
        workdir.resolve().name,
        "checkpoints",
        "",
        sections,
        _tiles(seen, saves),
        footer="Drawn from checkpoint_times.jsonl and the checkpoints of the workdir.",
    )


def _tiles(seen: Sequence[look.Summary], saves: Sequence[StepTiming]) -> list[Tile]:
    tiles = []
    if seen:
        newest = seen[-1]
        tiles.append(
            ("Newest complete step", f"{newest.step:,}", f"{newest.meta.get('tokens', 0):,} tokens")
        )
        parts = ", ".join(f"{name} {byte_size(size)}" for name, size in newest.part_bytes().items())
        tiles.append(("Size", byte_size(newest.num_bytes), parts))
    if saves:
        tiles.append(
            ("Saves", f"{len(saves):,}", f"by {counted(saves[-1].processes, 'process', 'es')}")
        )
        for title, _, _, seconds in SAVE_FIGURES:
            if good := [s for s in map(seconds, saves) if math.isfinite(s)]:
                tiles.append(
                    (
                        title,
                        duration(statistics.median(good)),
                        f"median; longest {duration(max(good))}",
                    )
                )
    return tiles


def _save_curves(saves: Sequence[StepTiming]) -> str:
    """Two pictures: the slowest process's copy, and from begin to commit; nothing for a single
    save."""
    if len(saves) < 2:
        return ""
    pictures = ""
    for heading, label, color, seconds in SAVE_FIGURES:
        series = Series.of([save.step for save in saves], [seconds(save) for save in saves])
        if not series.finite.size:
            continue
        bins, note = series.coarse(POINTS), ""
        if len(bins.steps) < len(saves):
            note = "Each point is the slowest of several saves."
        line = Curve(label, list(zip(bins.steps, bins.high.tolist(), strict=True)), color)
        pictures += Chart(heading, [line], zero=True, unit=" s", note=note).draw()
    return pictures


def _stage_map(saves: Sequence[StepTiming], stage: str) -> str:
    names, steps, cells, notes = stage_rows(saves, stage)
    good = cells[np.isfinite(cells)]
    if not good.size:
        return ""
    longest = high = float(good.max())
    typical = max(float(np.quantile(good, 0.98)), TYPICAL * float(np.median(good)))
    if longest > 1.5 * typical > 0:  # otherwise one bad moment would hide all that is usual
        high = typical
        notes = [*notes, f"The longest, {duration(longest)}, is beyond the colours."]
    # Cells reach half-way to their neighbours, the outer ones as far outwards.
    first, last = (steps[1] - steps[0], steps[-1] - steps[-2]) if len(steps) > 1 else (0.8, 0.8)
    return HeatMap(
        TITLES[stage],
        steps,
        cells,
        (0.0, high),
        (steps[0] - first / 2, steps[-1] + last / 2),
        ("0 s", ("≥ " if high < longest else "") + duration(high)),
        " ".join(notes),
        names,
    ).draw()


def stage_rows(
    saves: Sequence[StepTiming], stage: str
) -> tuple[list[str], list[float], np.ndarray, list[str]]:
    """(names of rows, steps, seconds [rows, columns], notes): in groups where there are many, the
    slowest of each."""
    cells = np.full((max(save.processes for save in saves), len(saves)), np.nan)
    for column, save in enumerate(saves):
        cells[: save.processes, column] = save.by_process(stage)
    notes = []
    starts, names = grouped(len(cells))
    if len(starts) < len(cells):
        notes.append(f"Each row is the slowest of {starts[1]} processes.")
    rows = np.fmax.reduceat(cells, starts, axis=0)
    bins = Series.of([save.step for save in saves], rows.T).coarse(columns(len(names)))
    if len(bins.steps) < len(saves):
        notes.append("Each column is the slowest of several saves.")
    return names, bins.steps, bins.high.T, notes


def _load_map(load: StepTiming | None) -> str:
    """Stages over processes."""
    if load is None or not load.stages:
        return ""
    starts, _ = grouped(load.processes)
    cells = np.stack([np.fmax.reduceat(load.by_process(stage), starts) for stage in load.stages])
    longest = float(np.nanmax(np.append(cells, 0.0)))
    note = f"{byte_size(sum(load.sizes.values()))} onto all processes."
    if len(starts) < load.processes:
        note = f"Each column is the slowest of {starts[1]} processes. {note}"
    return HeatMap(
        f"Step {load.step:,} by process",
        [float(s) for s in starts],
        cells,
        (0.0, longest),
        (-0.5, load.processes - 0.5),
        ("0 s", duration(longest)),
        note,
        list(load.stages),
        "process",
    ).draw()


def steps_table(seen: Sequence[look.Summary], saves: dict[int, StepTiming]) -> Table:
    """Each complete checkpoint, with the slowest process's seconds for each stage of its save."""
    rows = []
    for summary in seen:
        save = saves.get(summary.step)
        stages = [duration(save.slowest(stage)) if save else "–" for stage in timings.STAGES]
        rows.append(
            [
                f"{summary.step:,}",
                f"{summary.meta.get('tokens', 0):,}",
                byte_size(summary.num_bytes),
                str(summary.meta.get("processes", 1)),
                look.loss_text(summary) or "–",
                f"{datetime.datetime.fromtimestamp(summary.saved):%Y-%m-%d %H:%M:%S}",
                *stages,
                duration(save.total()) if save else "–",
            ]
        )
    head = ("step", "tokens", "size", "processes", "held-out", "saved at", *timings.STAGES, "whole")
    return Table("By step", head, rows, note="Each stage has the slowest process's time.")
