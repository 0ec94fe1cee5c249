"""The picture of where checkpoints' time goes: per stage a heat map of processes over saves, and the last load.

It shows a slow host as a dark row and a slow moment of the storage as a dark column. Many processes and many saves are
drawn in groups by their slowest, which the page then says.
"""

import contextlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zaya_jax.checkpoint import look, times, writing
from zaya_jax.checkpoint.times import Event
from zaya_jax.config import StorageError, UserError, files
from zaya_jax.report.bars import bar_chart, grouped
from zaya_jax.report.heat import Scale, columns, heat_map
from zaya_jax.report.saves import WAITS, save_curves
from zaya_jax.report.script import SCRIPT
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import escape, section

TITLES = {
    "copy": "Copy (to the snapshot)",
    "serialise": "Serialise (chunks, checksums)",
    "write": "Write",
    "commit": "Commit (wait for all, then the name)",
}
TYPICAL = 3  # times the median: where a scale may end although there is worse
SLOW = 1.5  # times the others' median: a process that is named as slow
FEWEST_SAVES, FEWEST_PROCESSES = 3, 3  # to name one
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def write_page(workdir: str | Path, target: str | Path | None = None) -> Path:
    """Writes the page, by default WORKDIR/checkpoints.html."""
    target = Path(target) if target else Path(workdir) / "checkpoints.html"
    page = render(Path(workdir))
    try:
        files.write(target, page.encode())
    except OSError as error:
        raise UserError(
            f"--html={target} cannot be written ({error.strerror}); give a file in a folder that can"
        ) from None
    return target


def render(workdir: Path) -> str:
    """The page as one string."""
    events = times.read(workdir)
    saves = list(events.get("save", {}).values())
    seen = []
    for step in writing.steps_in(workdir / "checkpoints"):
        with contextlib.suppress(StorageError):
            seen.append(look.see(workdir, step))
    if not seen and not saves:
        raise UserError(f"--workdir={workdir} has no checkpoint and no times of any; train first")
    load = max(events.get("load", {}).values(), key=lambda event: event.time, default=None)
    body = (
        _head(workdir, seen, saves)
        + section("Over the run", WAITS, save_curves(saves))
        + _stages(saves)
        + section("By process", "", _balance(saves) + _load(load))
        + _steps(seen, {save.step: save for save in saves})
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(workdir.name)}: checkpoints</title><style>{style_sheet()}</style></head>\n<body><main>\n{body}"
        "<footer>Drawn from checkpoint_times.jsonl and the checkpoints of the workdir. Point at a picture to read its "
        f"values.</footer>\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _head(workdir: Path, seen: Sequence[look.Seen], saves: Sequence[Event]) -> str:
    tiles = []
    if seen:
        newest = seen[-1]
        tiles.append(("Newest complete step", f"{newest.step:,}", f"{newest.meta.get('tokens', 0):,} tokens"))
        parts = ", ".join(f"{name} {look.size_text(size)}" for name, size in newest.part_bytes().items())
        tiles.append(("Size", look.size_text(newest.bytes), parts))
    warning = ""
    if saves:
        processes = saves[-1].processes
        tiles.append(("Saves", f"{len(saves):,}", f"by {processes} process{'es' if processes > 1 else ''}"))
        for title, values in (
            ("Copy", [save.slowest("copy") for save in saves]),
            ("Whole save", [save.whole() for save in saves]),
        ):
            good = [v for v in values if math.isfinite(v)]
            if good:
                longest = f"median; longest {seconds_text(max(good))}"
                tiles.append((title, seconds_text(statistics.median(good)), longest))
        slow = "".join(f"<p>{escape(text)}</p>" for text in slow_processes(saves))
        warning = f'<div class="warn">{slow}</div>' if slow else ""
    cells = "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>" for a, b, c in tiles
    )
    name = escape(workdir.resolve().name)
    return (
        f'<header><h1>{name} <span>checkpoints</span></h1><dl class="tiles">{cells}</dl>{warning}</header>\n'
    )


def slow_processes(saves: Sequence[Event]) -> list[str]:
    """Sentences on processes whose stages took much longer than the others', by medians over the saves."""
    saves = [save for save in saves if save.processes == saves[-1].processes]
    if len(saves) < FEWEST_SAVES or saves[-1].processes < FEWEST_PROCESSES:
        return []
    told = []
    for stage in ("copy", "serialise", "write"):  # the commit waits for others
        own = _medians(np.stack([save.of(stage) for save in saves], axis=1))
        usual = float(np.nanmedian(own)) if np.isfinite(own).any() else math.nan
        worst = np.argsort(-np.nan_to_num(own))[:3]
        names = [i for i in worst if own[i] > SLOW * usual and own[i] - usual > 0.05]
        told += [
            f"Process {i} is slow: its {stage} takes {seconds_text(own[i])}, the others' {seconds_text(usual)} "
            f"(medians of {len(saves):,} saves)."
            for i in names
        ]
    return told


def _stages(saves: Sequence[Event]) -> str:
    pictures = ""
    for stage in times.STAGES:
        rows = stage_rows(saves, stage)
        if not rows:
            continue
        names, steps, cells, notes = rows
        good = cells[np.isfinite(cells)]
        longest = high = float(good.max())
        typical = max(float(np.quantile(good, 0.98)), TYPICAL * float(np.median(good)))
        if longest > 1.5 * typical > 0:  # otherwise one bad moment would hide all that is usual
            high = typical
            notes = [*notes, f"The longest, {seconds_text(longest)}, is beyond the colours."]
        # Cells reach half-way to their neighbours, the outer ones as far outwards.
        first, last = (steps[1] - steps[0], steps[-1] - steps[-2]) if len(steps) > 1 else (0.8, 0.8)
        pictures += heat_map(
            TITLES[stage], names, steps, cells.tolist(), Scale(0.0, high or 1.0),
            x_range=(steps[0] - first / 2, steps[-1] + last / 2), row_name="process", unit=" s",
            ends=("0 s", ("≥ " if high < longest else "") + seconds_text(high)), note=" ".join(notes),
            describe=f"Seconds of {stage} by process and save, from {seconds_text(float(good.min()))} to "
            f"{seconds_text(longest)}.",
        )  # fmt: skip
    text = (
        "Seconds by process and save. A dark row is a slow host, a dark column a slow moment of the storage."
    )
    return section("Where the time goes", text, pictures)


def stage_rows(
    saves: Sequence[Event], stage: str
) -> tuple[list[str], list[float], np.ndarray, list[str]] | None:
    """(names of rows, steps, seconds [rows, columns], notes): in groups where there are many, the slowest of each."""
    if not any(stage in save.stages for save in saves):
        return None
    count = max(save.processes for save in saves)
    cells = np.full((count, len(saves)), np.nan)
    for column, save in enumerate(saves):
        cells[: save.processes, column] = save.of(stage)
    notes = []
    if count > 1 and bool(((cells == cells[0]) | np.isnan(cells)).all()):
        cells, notes = cells[:1], ["One row: the same in all processes, as process 0 commits."]
        starts, names = [0], ["all"]
    else:
        starts, names = grouped(count)
        if len(starts) < count:
            notes = [f"Each row is the slowest of {starts[1]} processes."]
    begins = range(0, len(saves), math.ceil(len(saves) / columns(len(names))))
    if begins.step > 1:
        notes.append(f"Each column is the slowest of {begins.step} saves.")
    cells = np.fmax.reduceat(np.fmax.reduceat(cells, starts, axis=0), list(begins), axis=1)
    steps = [float(saves[min(b + begins.step // 2, len(saves) - 1)].step) for b in begins]
    return names, steps, cells, notes


def _balance(saves: Sequence[Event]) -> str:
    if not saves or saves[-1].processes < 2:
        return ""
    last = saves[-1]
    starts, names = grouped(last.processes)
    sizes = np.fmax.reduceat(np.nan_to_num(last.bytes), starts)
    unit, scale = _unit(float(sizes.max()))
    return bar_chart(
        f"Bytes written, step {last.step:,}", names, [("bytes", sizes.tolist())], name="process", unit=f" {unit}",
        scale=scale, text=look.size_text, note=_groups_note(starts, "greatest"),
        describe=f"From {look.size_text(float(sizes.min()))} to {look.size_text(float(sizes.max()))} a process.",
    )  # fmt: skip


def _load(load: Event | None) -> str:
    if load is None or not load.stages:
        return ""
    starts, names = grouped(load.processes)
    parts = [
        (stage, np.fmax.reduceat(np.nan_to_num(load.of(stage)), starts).tolist()) for stage in load.stages
    ]
    size = look.size_text(float(np.nansum(load.bytes)))
    note = f"{size} onto all processes: the files verified, read, placed on the devices. "
    return bar_chart(
        f"The last load, step {load.step:,}", names, parts, name="process", unit=" s", text=seconds_text,
        note=note + _groups_note(starts, "slowest"),
        describe="; ".join(f"{stage} at most {seconds_text(max(values))}" for stage, values in parts),
    )  # fmt: skip


def _groups_note(starts: Sequence[int], which: str) -> str:
    return f"Each bar is the {which} of {starts[1]} processes." if len(starts) > 1 and starts[1] > 1 else ""


def _steps(seen: Sequence[look.Seen], saves: dict[int, Event]) -> str:
    if not seen:
        return ""
    titles = ("step", "tokens", "size", "processes", "held-out", "copy", "save")
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    rows = []
    for one in seen:
        save = saves.get(one.step)
        cells = (
            f"{one.meta.get('tokens', 0):,}", look.size_text(one.bytes), one.meta.get("processes", 1),
            look.loss_text(one) or "–",
            seconds_text(save.slowest("copy")) if save else "–", seconds_text(save.whole()) if save else "–",
        )  # fmt: skip
        rows.append(
            f'<tr><th scope="row">{one.step:,}</th>{"".join(f"<td>{escape(c)}</td>" for c in cells)}</tr>'
        )
    table = f'<table class="num wide"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    card = f'<div class="card" style="margin:0;max-height:340px;overflow:auto">{table}</div>'
    return section("Complete checkpoints", "What a run can go on from.", _sizes(seen) + card)


def _sizes(seen: Sequence[look.Seen]) -> str:
    """The parts of each checkpoint's state."""
    kinds = list(dict.fromkeys(part for one in seen for part in one.part_bytes()))
    kinds.sort(key=lambda kind: -seen[-1].part_bytes().get(kind, 0))
    starts, _ = grouped(len(seen))
    parts = [(kind, [seen[s].part_bytes().get(kind, 0) for s in starts]) for kind in kinds]
    unit, scale = _unit(max(map(sum, zip(*(values for _, values in parts), strict=True))))
    return bar_chart(
        "Size of parts", [f"{seen[s].step}" for s in starts], parts, name="step", unit=f" {unit}", scale=scale,
        text=look.size_text, note=f"One of {starts[1]} checkpoints." if len(starts) < len(seen) else "",
        describe="; ".join(f"{kind} {look.size_text(values[-1])}" for kind, values in parts),
    )  # fmt: skip


def _medians(cells: np.ndarray) -> np.ndarray:
    """Of each row that has a value; NaN of others."""
    out = np.full(len(cells), np.nan)
    for i, row in enumerate(cells):
        good = row[np.isfinite(row)]
        out[i] = np.median(good) if good.size else np.nan
    return out


def _unit(size: float) -> tuple[str, float]:
    return next((unit for unit in UNITS if size >= unit[1]), UNITS[-1])


def seconds_text(value: float) -> str:
    """2.4 s or 35 ms."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.3g} s" if value >= 0.1 or not value else f"{1e3 * value:.3g} ms"
