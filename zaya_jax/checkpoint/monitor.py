"""The picture of where checkpoints' time goes: per stage a heat map of processes over saves, and the last load.

It shows a slow host as a dark row and a slow moment of the storage as a dark column.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import look, writing
from zaya_jax.config import StorageError, UserError
from zaya_jax.report.heat import Scale, columns, heat_map
from zaya_jax.report.script import SCRIPT
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import Line, escape, line_chart, section

ROWS = 64  # more processes are shown in groups
TITLES = {
    "copy": "Copy (device to snapshot: all that the step waits for)",
    "serialise": "Serialise (cut into chunks, checksums)",
    "write": "Write",
    "commit": "Commit (until all have written, and the name is given)",
}


def write_page(workdir: str | Path, target: str | Path | None = None) -> Path:
    """Writes the page, by default WORKDIR/checkpoints.html."""
    target = Path(target) if target else Path(workdir) / "checkpoints.html"
    page = render(Path(workdir))
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise UserError(f"--html={target} cannot be written ({error.strerror})") from None
    return target


def render(workdir: Path) -> str:
    """The page as one string."""
    times = look.read_times(workdir)
    saves = look.last_saves(times)
    seen = []
    for step in writing.steps_in(workdir / "checkpoints"):
        try:
            seen.append(look.see(workdir, step))
        except StorageError:
            continue
    if not seen and not saves:
        raise UserError(f"--workdir={workdir} has no checkpoint and no times of any; train first")
    body = (
        _head(workdir, seen, saves)
        + _course(saves)
        + _stages(saves)
        + _balance(saves)
        + _load(times)
        + _steps(seen)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(workdir.name)}: checkpoints</title><style>{style_sheet()}</style></head>\n<body><main>\n{body}"
        "<footer>Drawn from checkpoint_times.jsonl and the checkpoints of the workdir. Point at a picture to read its "
        f"values.</footer>\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _head(workdir: Path, seen: Sequence[look.Seen], saves: dict[int, list[dict]]) -> str:
    tiles = []
    if seen:
        newest = seen[-1]
        tiles.append(("Newest complete step", f"{newest.step:,}", f"{newest.meta.get('tokens', 0):,} tokens"))
        parts = ", ".join(f"{name} {look.size_text(size)}" for name, size in newest.part_bytes().items())
        tiles.append(("Size", look.size_text(newest.bytes), parts))
    if saves:
        copies = [_slowest(lines, "copy") for lines in saves.values()]
        totals = [_total(lines) for lines in saves.values()]
        processes = len(next(reversed(saves.values())))
        tiles.append(("Saves", f"{len(saves):,}", f"by {processes} process{'es' if processes > 1 else ''}"))
        tiles.append(
            ("Copy", _seconds(statistics.median(copies)), f"median; longest {_seconds(max(copies))}")
        )
        tiles.append(
            ("Whole save", _seconds(statistics.median(totals)), f"median; longest {_seconds(max(totals))}")
        )
    cells = "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>" for a, b, c in tiles
    )
    return f'<header><h1>{escape(workdir.name)} <span>checkpoints</span></h1><dl class="tiles">{cells}</dl></header>\n'


def _course(saves: dict[int, list[dict]]) -> str:
    if len(saves) < 2:
        return ""
    lines, most = [], 0.0
    for color, (label, value) in enumerate((("whole save", _total), ("copy", lambda s: _slowest(s, "copy")))):
        points = [(float(step), value(entries)) for step, entries in saves.items()]
        most = max(most, *(y for _, y in points))
        lines.append(Line(label, points, color, "line" if len(points) > 12 else "dots"))
    chart = line_chart(
        "Seconds a save", lines, x_range=(min(saves), max(saves)), y_range=(0, most * 1.08 or 1), unit=" s",
        describe="The slowest process's time of each save, and of its copy.",
    )  # fmt: skip
    return section(
        "Over the run",
        "The training waits for the copy alone; the rest runs beside it.",
        chart,
    )


def _stages(saves: dict[int, list[dict]]) -> str:
    pictures = ""
    for stage in look.STAGES:
        rows = _rows(saves, stage)
        if not rows:
            continue
        names, steps, cells = rows
        good = [v for row in cells for v in row if math.isfinite(v)]
        high = max(good)
        note = (
            f"Each row is the slowest of {math.ceil(_processes(saves) / len(names))} processes."
            if _processes(saves) > len(names)
            else ""
        )
        pictures += heat_map(
            TITLES[stage], names, steps, cells, Scale(0.0, high),
            x_range=(min(steps), max(steps)) if len(steps) > 1 else (steps[0] - 1, steps[0] + 1),
            row_name="process", ends=("0 s", _seconds(high)), note=note,
            describe=f"Seconds of {stage} by process and save.",
        )  # fmt: skip
    if not pictures:
        return ""
    text = (
        "Seconds by process and save. A dark row is a slow host, a dark column a slow moment of the storage."
    )
    return section("Where the time goes", text, pictures)


def _rows(
    saves: dict[int, list[dict]], stage: str
) -> tuple[list[str], list[float], list[list[float]]] | None:
    """(names of rows, steps, seconds): processes and saves in groups where there are many, the slowest of each."""
    count = _processes(saves)
    group = math.ceil(count / ROWS)
    starts = range(0, count, group)
    names = [str(s) if group == 1 else f"{s}–{min(s + group, count) - 1}" for s in starts]
    steps = list(saves)
    width = math.ceil(len(steps) / columns(len(names)))
    cells: list[list[float]] = [[] for _ in names]
    shown = []
    for begin in range(0, len(steps), width):
        some = steps[begin : begin + width]
        shown.append(float(some[len(some) // 2]))
        slowest = [-math.inf] * len(names)
        for step in some:
            for line in saves[step]:
                if stage in line["stages"]:
                    row = line["process"] // group
                    slowest[row] = max(slowest[row], line["stages"][stage])
        for row, value in zip(cells, slowest, strict=True):
            row.append(value if value >= 0 else math.nan)
    if not any(math.isfinite(v) for row in cells for v in row):
        return None
    return names, shown, cells


def _balance(saves: dict[int, list[dict]]) -> str:
    if not saves:
        return ""
    lines = next(reversed(saves.values()))
    if len(lines) < 2:
        return ""
    sizes = _grouped([line["bytes"] for line in lines], sum)
    bars = [(name, [("bytes", size)], look.size_text(size)) for name, size in sizes]
    return section(
        "Who wrote how much",
        f"Bytes of the last save, step {lines[0]['step']:,}, by process.",
        _bars(bars, ("bytes",)),
    )


def _load(times: list[dict[str, Any]]) -> str:
    loads = [line for line in times if line["kind"] == "load"]
    if not loads:
        return ""
    last = max(line["time"] for line in loads)
    lines = sorted((line for line in loads if line["time"] == last), key=lambda line: line["process"])
    stages = tuple(dict.fromkeys(stage for line in lines for stage in line["stages"]))
    groups = {
        stage: dict(_grouped([line["stages"].get(stage, 0.0) for line in lines], max)) for stage in stages
    }
    bars = []
    for name in next(iter(groups.values())):
        parts = [(stage, groups[stage][name]) for stage in stages]
        bars.append((name, parts, " + ".join(f"{stage} {_seconds(v)}" for stage, v in parts)))
    size = look.size_text(sum(line["bytes"] for line in lines))
    text = f"Step {lines[0]['step']:,}, {size} in all: verify the files, read, place on the devices."
    return section("The last load", text, _bars(bars, stages))


def _grouped(values: Sequence[float], how: Any) -> list[tuple[str, float]]:
    group = math.ceil(len(values) / ROWS)
    return [
        (str(s) if group == 1 else f"{s}–{min(s + group, len(values)) - 1}", how(values[s : s + group]))
        for s in range(0, len(values), group)
    ]


def _bars(bars: Sequence[tuple[str, list[tuple[str, float]], str]], kinds: Sequence[str]) -> str:
    """Rows of a name, a bar of parts, and a text."""
    most = max(sum(value for _, value in parts) for _, parts, _ in bars) or 1.0
    legend = ""
    if len(kinds) > 1:
        keys = "".join(f'<li><i class="key c{i}"></i>{escape(kind)}</li>' for i, kind in enumerate(kinds))
        legend = f'<ul class="legend">{keys}</ul>'
    rows = []
    for name, parts, text in bars:
        drawn = "".join(
            f'<i class="c{kinds.index(kind)}" style="display:inline-block;height:11px;background:currentColor;'
            f'width:{100 * value / most:.2f}%" title="{escape(kind)}"></i>'
            for kind, value in parts
        )
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td style="width:60%;white-space:nowrap">{drawn}</td>'
            f"<td>{escape(text)}</td></tr>"
        )
    return f'<div class="card">{legend}<table class="wide"><tbody>{"".join(rows)}</tbody></table></div>'


def _steps(seen: Sequence[look.Seen]) -> str:
    if not seen:
        return ""
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("step", "tokens", "size", "files", "processes", "held-out")
    )
    rows = []
    for one in seen:
        loss = one.meta.get("metrics", {}).get("eval/loss")
        cells = (
            f"{one.meta.get('tokens', 0):,}", look.size_text(one.bytes), f"{len(one.files) + 1:,}",
            one.meta.get("processes", 1), f"{loss:.4f}" if loss else "–",
        )  # fmt: skip
        rows.append(
            f'<tr><th scope="row">{one.step:,}</th>{"".join(f"<td>{escape(c)}</td>" for c in cells)}</tr>'
        )
    table = f'<table class="num wide"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return section("Complete checkpoints", "What a run can go on from.", f'<div class="card">{table}</div>')


def _processes(saves: dict[int, list[dict]]) -> int:
    return 1 + max(line["process"] for lines in saves.values() for line in lines)


def _slowest(lines: Sequence[dict], stage: str) -> float:
    return max(line["stages"].get(stage, 0.0) for line in lines)


def _total(lines: Sequence[dict]) -> float:
    """Copy, write and commit follow each other; serialising goes beside writing."""
    return max(sum(v for k, v in line["stages"].items() if k in look.STAGES) for line in lines)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"
