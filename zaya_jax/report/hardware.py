"""What `experiments.characterize` measured, as a page: pictures over size, tables beside them, the sizing rules."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zaya_jax.hardware.measure.figures import BUS, MOVED, Collective, Figures, Product, Stream
from zaya_jax.hardware.measure.timing import Timing
from zaya_jax.hardware.sizing_rules import Finding
from zaya_jax.report import svg
from zaya_jax.report.bars import bar_chart
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import Axis, Line, escape, number

HOST = (
    "These figures are of this host's CPU, whose virtual devices share its cores and memory. They say nothing of an "
    "accelerator, a network or a cluster."
)


class Rate(NamedTuple):
    """A point of a line and its band."""

    x: float
    median: float
    low: float
    high: float


def render(figures: Figures, findings: Sequence[Finding], rules_for: str, remarks: Sequence[str] = ()) -> str:
    """The whole page; `rules_for` says which model, chip and number of devices the sizing rules are for."""
    nodes = "one node" if figures.num_nodes == 1 else f"{figures.num_nodes} nodes"
    processes = "" if figures.num_processes == 1 else f" · {figures.num_processes} processes"
    about = (
        f"{figures.num_devices} x {figures.device} in {nodes}{processes} · jax {figures.jax} · {figures.date}"
    )
    warnings = [HOST] if figures.of_host else []
    if figures.num_nodes == 1 and figures.collectives:
        warnings.append("All devices are in one node: nothing was measured across nodes.")
    warn = "".join(f"<p>{escape(w)}</p>" for w in [*warnings, *remarks])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(figures.device)}: figures</title><style>{style_sheet()}</style></head>\n<body><main>\n"
        f'<header><h1>{escape(figures.device)} <span>measured figures</span></h1><p class="sub">{escape(about)}</p>'
        f"{f'<div class="warn">{warn}</div>' if warn else ''}</header>\n"
        + _rules(findings, rules_for)
        + _collectives(figures)
        + _products(figures)
        + _memory(figures)
        + "<footer>Lines are medians, bands the 10th to 90th of 100 samples. docs/hardware.md says how it was "
        "measured.</footer>\n</main></body></html>\n"
    )


def size(count: float) -> str:
    """So many bytes for a person."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.4g} {unit}"
    return f"{count:g} B"


def _rules(findings: Sequence[Finding], rules_for: str) -> str:
    rows = [
        (
            f.rule, f"{f.key}={f.value:,}", f.reason, "–" if f.better is None else f"{f.better:,}",
            f"{f.parameters:+,}" if f.parameters else "0", f"{f.cost:.1%}", f.source,
        )
        for f in findings
    ]  # fmt: skip
    head = ("rule", "key", "reason", "better", "parameters", "of a step, at most", "by")
    return _section(
        "Sizing rules",
        f"Dimensions off the fast path: {rules_for}.",
        "",
        _table(head, rows) if rows else '<div class="card"><p>None.</p></div>',
    )


def _collectives(figures: Figures) -> str:
    if not figures.collectives:
        return ""
    pictures, rows = "", []
    for name in BUS:
        lines, series = [], [s for group in figures.groups() if (s := figures.over(name, *group))]
        for color, points in enumerate(series):
            lines.append(_line(_where(points[0]), color, _bus_points(points)))
            best = max(points, key=lambda c: c.bus_bandwidth)
            knee = figures.message_knee(name, best.num_devices, best.num_nodes)
            rows.append(
                (
                    name, best.compiled, _where(best), _seconds(points[0].seconds.median),
                    number(best.bus_bandwidth / 1e9), number(best.algorithm_bandwidth / 1e9), size(best.bytes),
                    size(knee or 0),
                )
            )  # fmt: skip
        pictures += _chart(f"{name}, bus bandwidth", lines, "GB/s", x_text=size)
    head = (
        "collective", "in the program", "devices", f"{figures.collectives[0].bytes:,} B take", "best bus GB/s",
        "algorithm GB/s", "there", "knee",
    )  # fmt: skip
    floor = (
        ""
        if figures.start_seconds is None
        else f" A program that does nothing takes {_seconds(figures.start_seconds)}: less is not to be seen here."
    )
    text = (
        "Over the size of the message, by the definitions of nccl-tests. Knee: the least message at 80% of the best "
        f"bus bandwidth.{floor}"
    )
    return _section("Collectives", text, pictures, _table(head, rows))


def _bus_points(points: Iterable[Collective]) -> list[Rate]:
    return [_rate(c.bytes, c.bus_bandwidth / 1e9, c.seconds) for c in points]


def _where(c: Collective) -> str:
    return f"{c.num_devices} devices" + ("" if c.num_nodes == 1 else f" over {c.num_nodes} nodes")


def _products(figures: Figures) -> str:
    if not figures.products:
        return ""
    dense = [p for p in figures.products if p.groups == 1]
    own = [p for p in dense if p.label and not p.label.startswith("width")]
    odd = sorted((p for p in dense if p.label.startswith("width")), key=lambda p: p.n)
    grid: dict[tuple[int, int], list[Product]] = {}
    for p in dense:
        if not p.label:
            grid.setdefault((p.n, p.k), []).append(p)
    square = [(n, k) for n, k in grid if n == k]
    lines = [
        _line(f"[M, {k}] x [{k}, {n}]", i, _rates(grid[n, k])) for i, (n, k) in enumerate(sorted(square))
    ]
    pictures = _chart("Dense products over rows M", lines, "TFLOP/s", x_text=lambda m: f"{m:,.0f}")
    grouped = [
        _line(name, i, _rates([p for p in figures.products if p.name == name]))
        for i, name in enumerate(("grouped forward", "grouped backward"))
    ]
    knee = figures.rows_knee()
    note = "" if knee is None else f"Knee of the forward pass, at 80% of the best seen: {knee:,} tokens."
    pictures += _chart(
        "Experts: over tokens an expert", grouped, "TFLOP/s", x_text=lambda m: f"{m:,.0f}", note=note
    )
    if odd:
        pictures += bar_chart(
            f"Widths that are no multiples: [{odd[0].m}, {odd[0].k}] x [{odd[0].k}, width]",
            [str(p.n) for p in odd], [("rate", [p.rate for p in odd])], name="width", unit="", scale=1e12,
            text=lambda v: f"{number(v / 1e12)} TFLOP/s",
            note=", ".join(f"{p.n}: {number(p.rate / 1e12)}" for p in odd),
        )  # fmt: skip
    head = ["product", "M", "K", "N", "experts", "a call", "TFLOP/s"]
    head += ["of the peak"] if figures.peak else []
    chosen = [*own, *(p for p in figures.products if p.groups > 1), *(p for p in dense if not p.label)]
    rows = [
        (
            f"{p.label or 'grid'} ({p.name}, {p.dtype})", f"{p.m:,}", f"{p.k:,}", f"{p.n:,}", f"{p.groups}",
            _seconds(p.seconds.median), number(p.rate / 1e12),
            *([f"{p.rate / figures.peak:.1%}"] if figures.peak else []),
        )
        for p in chosen
    ]  # fmt: skip
    text = "On one device. The model's own shapes come first in the table; M are the tokens at once."
    return _section("Matrix products", text, pictures, _table(head, rows))


def _rates(products: Iterable[Product]) -> list[Rate]:
    return [_rate(p.m, p.rate / 1e12, p.seconds) for p in sorted(products, key=lambda p: p.m)]


def _memory(figures: Figures) -> str:
    if not figures.streams:
        return ""
    lines, rows = [], []
    for color, name in enumerate(MOVED):
        points = sorted((s for s in figures.streams if s.name == name), key=lambda s: s.bytes)
        if points:
            lines.append(_line(name, color, _bandwidths(points)))
            best, last = max(points, key=lambda s: s.bandwidth), points[-1]
            rows.append(
                (
                    name, number(best.bandwidth / 1e9), size(best.bytes), number(last.bandwidth / 1e9),
                    size(last.bytes),
                )
            )  # fmt: skip
    cache = figures.cache_bytes()
    note = (
        "No cache shows." if cache is None else f"Up to {size(cache)} a copy is faster than memory: a cache."
    )
    picture = _chart("Bandwidth over the size of an array", lines, "GB/s", x_text=size, note=note)
    head = ("pass", "best GB/s", "there", "largest GB/s", "there")
    text = "Of one device; bytes read and bytes written count alike."
    return _section("Memory", text, picture, _table(head, rows))


def _bandwidths(points: Iterable[Stream]) -> list[Rate]:
    return [_rate(s.bytes, s.bandwidth / 1e9, s.seconds) for s in points]


def _rate(x: float, median: float, seconds: Timing) -> Rate:
    """A size, the rate there in the median, and that of the 90th and the 10th of 100 samples."""
    return Rate(x, median, median * seconds.median / seconds.high, median * seconds.median / seconds.low)


def _line(label: str, color: int, points: Sequence[Rate]) -> Line:
    return Line(
        label, [(x, y) for x, y, _, _ in points], color, band=[(x, low, high) for x, _, low, high in points]
    )


def _chart(title: str, lines: Sequence[Line], unit: str, x_text, note: str = "") -> str:
    """Lines over a size, both axes logarithmic; the legend has each line's best."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    x = Axis(xs[0], xs[-1], svg.LEFT, svg.WIDTH - svg.RIGHT, log=True)
    y = Axis(min(ys) / 1.3, max(ys) * 1.3, svg.HEIGHT - svg.BOTTOM, svg.TOP, log=True)
    shown = xs[:: -(-len(xs) // 6)]
    labels = "".join(
        f'<path class="axis" d="M{x(v):.1f} {y.start}v4"/>'
        f'<text x="{x(v):.1f}" y="{y.start + 18}" text-anchor="middle">{x_text(v)}</text>'
        for v in shown
    )
    clip = svg.picture_id(title) + "c"
    box = f'x="{svg.LEFT}" y="{svg.TOP - 4}" width="{svg.WIDTH - svg.LEFT}" height="{y.start - svg.TOP + 4}"'
    legend = "".join(
        f'<li><i class="key line c{line.color}"></i>{escape(line.label)} '
        f"<b>{number(max(v for _, v in line.points))} {unit}</b></li>"
        for line in lines
    )
    drawn = "".join(svg.draw(line, x, y) for line in lines)
    picture = (
        svg.open_svg(title, f"{unit}, {len(lines)} lines", svg.HEIGHT, "")
        + f'<clipPath id="{clip}"><rect {box}/></clipPath>'
        + svg.value_axis(y, x.start, x.end, "")
        + f'<path class="axis" d="M{x.start} {y.start}H{x.end}"/>{labels}'
        + f'<g clip-path="url(#{clip})">{drawn}</g></svg>'
    )
    return svg.figure(f"{title}, {unit}", f'<ul class="legend">{legend}</ul>', picture, note)


def _section(title: str, text: str, pictures: str, table: str) -> str:
    grid = f'<div class="grid2">{pictures}</div>' if pictures else ""
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{grid}{table}</section>\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="card"><table class="wide"><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>'


def _seconds(value: float) -> str:
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
