"""What `experiments.plan` found, as a line, as Markdown and as a page; from its plain numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

from zaya_jax.report import svg
from zaya_jax.report.bars import bar_chart
from zaya_jax.report.script import SCRIPT
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import escape
from zaya_jax.report.tables import as_html, as_markdown

Table = tuple[str, Sequence[str], list[list[str]]]


def headline(phase: dict[str, Any]) -> str:
    """A phase in a line."""
    memory = phase["memory"]
    fits = "fits" if memory["peak"] <= memory["capacity"] else "does NOT fit"
    return (
        f"{seconds(phase['step']['seconds'])} a step, {phase['tokens_per_second'] / 1e6:,.2f}M tokens/s, MFU "
        f"{phase['step']['mfu']:.1%}, {gb(memory['peak'])} of {gb(memory['capacity'])} ({fits}), "
        f"{phase['days']:,.1f} days"
    )


def text(result: dict[str, Any]) -> str:
    """All as Markdown."""
    parts = [f"# {_title(result)}\n", f"{_about(result)}\n"]
    parts += [as_markdown(*table) for table in _summary(result)]
    parts += [f"- {note}" for note in result["notes"]]
    for phase in result["phases"]:
        parts.append(f"\n## {phase['name']}: {headline(phase)}\n\n{_shape(phase)}.\n")
        parts += [as_markdown(*table) for table in _tables(phase)]
    parts += ["\n## The whole\n", *(as_markdown(*table) for table in _closing(result))]
    parts += [f"- {stop['text']}" for stop in result["scaling"]["stops"]]
    return "\n".join(parts) + "\n"


def render(result: dict[str, Any]) -> str:
    """The page."""
    body = [f"<header><h1>{escape(_title(result))}</h1><p class='sub'>{escape(_about(result))}</p></header>"]
    notes = "".join(f"<p>{escape(note)}</p>" for note in result["notes"])
    body.append(f"<section><h2>Phases</h2>{notes}{_cards(_summary(result))}</section>")
    body.append(_pictures(result))
    for phase in result["phases"]:
        head = f"{phase['name']}: {headline(phase)}"
        body.append(
            f"<section><h2>{escape(head)}</h2><p>{escape(_shape(phase))}.</p>{_cards(_tables(phase))}</section>"
        )
    stops = "".join(f"<li>{escape(stop['text'])}</li>" for stop in result["scaling"]["stops"])
    body.append(f"<section><h2>The whole</h2><ul>{stops}</ul>{_cards(_closing(result))}</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(_title(result))}</title><style>{style_sheet()}</style></head>\n<body><main>\n{''.join(body)}"
        "<footer>Formulas, nothing was compiled or run; docs/planning.md says what they assume.</footer>\n"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def _title(result: dict[str, Any]) -> str:
    return f"{result['config']} planned for {result['devices']:,} devices of {result['cluster']}"


def _about(result: dict[str, Any]) -> str:
    return f"{result['date']}; per device and step unless it says otherwise. {result['source']}"


def _shape(phase: dict[str, Any]) -> str:
    mesh = " x ".join(
        f"{axis} {size}" for axis, size in phase["mesh"].items() if size is not True and size > 1
    )
    switches = "".join(f", {name}" for name, size in phase["mesh"].items() if size is True)
    return (
        f"{phase['sequences']:,} sequences of {phase['seq_len']:,} tokens per step in {phase['micro_batches']} "
        f"micro-batches on {mesh or 'one device'}{switches}: {phase['tokens_per_device']:,.0f} tokens a device; remat "
        f"{phase['remat']}"
    )


def _summary(result: dict[str, Any]) -> Iterable[Table]:
    yield (
        "Phase by phase",
        ("phase", "step", "tokens/s", "MFU", "memory", "days", "GPU-hours", "page reads/s", "save every", "goodput"),
        [
            [
                p["name"], seconds(p["step"]["seconds"]), f"{p['tokens_per_second'] / 1e6:,.2f}M",
                f"{p['step']['mfu']:.1%}", gb(p["memory"]["peak"]), f"{p['days']:,.1f}", f"{p['gpu_hours']:,.0f}",
                f"{p['data']['pages_per_second']:,.0f}", seconds(p["saving"]["interval"]),
                f"{p['saving']['goodput']:.2%}",
            ]
            for p in result["phases"]
        ],
    )  # fmt: skip


def _tables(phase: dict[str, Any]) -> Iterable[Table]:
    step, memory, saving = phase["step"], phase["memory"], phase["saving"]
    yield (
        "Where the step goes",
        ("scope", "ms", "share"),
        [[n, f"{1e3 * s:,.1f}", f"{s / step['seconds']:.1%}"] for n, s in step["by_scope"].items()]
        + [["all", f"{1e3 * step['seconds']:,.1f}", ""]],
    )
    yield (
        "What binds it",
        ("bound by", "ms", "share"),
        [[n, f"{1e3 * s:,.1f}", f"{s / step['seconds']:.1%}"] for n, s in step["by_kind"].items()],
    )
    yield (
        f"Memory where it is highest: {memory['place']}",
        ("kind", "GB", "share"),
        [[n, f"{x / 1e9:,.2f}", f"{x / memory['peak']:.1%}"] for n, x in memory["at_peak"].items()],
    )
    yield (
        "Work by scope",
        ("scope", "launches", "GB", "at least", "TFLOP", "of use"),
        [
            [
                w["scope"], f"{w['launches']:,.0f}", f"{w['bytes'] / 1e9:,.1f}", f"{w['least'] / 1e9:,.1f}",
                f"{w['flops'] / 1e12:,.2f}", f"{w['useful'] / w['flops']:.0%}" if w["flops"] and w["useful"] else "",
            ]
            for w in phase["work"]
        ],
    )  # fmt: skip
    if step["links"]:
        yield (
            "Network",
            ("for", "kind", "GB sent", "over", "times", "ms"),
            [
                [
                    f["what"], f["kind"], f"{f['wire'] / 1e9:,.3f}", " x ".join(f["axes"]), f"{f['times']:,.0f}",
                    f"{1e3 * f['seconds']:,.2f}",
                ]
                for f in phase["flows"]
            ],
        )  # fmt: skip
        yield (
            "Communication",
            ("for", "ms on the links", "exposed"),
            [[n, f"{1e3 * s:,.1f}", f"{1e3 * step['exposed'][n]:,.1f}"] for n, s in step["links"].items()]
            + [["gradients under the last backward pass would save", f"{1e3 * step['overlapped']:,.1f}", ""]],
        )
    yield (
        "Checkpoints",
        ("what", "value"),
        [
            ["state", gb(saving["state"])],
            ["a save stands in the way", seconds(saving["stall"])],
            ["and is on the storage after", seconds(saving["written"])],
            ["a failure every", seconds(saving["mtbf"])],
            ["best interval", f"{seconds(saving['interval'])}, {saving['steps']:,.0f} steps"],
            ["goodput", f"{saving['goodput']:.2%}"],
        ],
    )
    if phase["search"]:
        yield (
            "The fastest ways that fit",
            ("mesh", "micro-batches", "remat", "step", "MFU", "memory", "exposed"),
            [
                [
                    s["mesh"], str(s["micro_batches"]), s["remat"], seconds(s["seconds"]), f"{s['mfu']:.1%}",
                    gb(s["peak"]), seconds(s["links"]),
                ]
                for s in phase["search"]
            ],
        )  # fmt: skip


def _closing(result: dict[str, Any]) -> Iterable[Table]:
    if result["published"]:
        rows = [[r["what"], f"{r['seconds']:.2f}", r["because"]] for r in result["published"]]
        yield "ZAYA1's published step of 2.5 s, accounted for", ("part", "s", "because"), rows
        ours = result["phases"][0]["step"]
        rows = [[name, f"{value:.2f}"] for name, value in ours["by_scope"].items()]
        yield "The same step as planned here", ("part", "s"), [*rows, ["all", f"{ours['seconds']:.2f}"]]
    counts = [n for n, *_ in max((way["points"] for way in result["scaling"]["ways"]), key=len, default=[])]
    yield (
        f"Weak scaling of {result['scaling']['phase']}: ms a step (exposed communication)",
        ("way", *(f"{n:,}" for n in counts)),
        [
            [way["name"], *(next((f"{1e3 * s:,.0f} ({1e3 * e:,.0f})" for m, s, e in way["points"] if m == n), "-")
            for n in counts)]
            for way in result["scaling"]["ways"]
        ],
    )  # fmt: skip
    yield (
        "What is assumed",
        ("rate", "value", "source"),
        [[n, f"{v:.3g}", s] for n, v, s in result["assumed"]],
    )


def _pictures(result: dict[str, Any]) -> str:
    phases = result["phases"]
    names = [p["name"] for p in phases]
    scopes = list(dict.fromkeys(scope for p in phases for scope in p["step"]["by_scope"]))
    parts = [(scope, [p["step"]["by_scope"].get(scope, 0.0) for p in phases]) for scope in scopes]
    bars = bar_chart(
        "Each second of a step", names, _few(parts), name="phase", unit=" s", text=seconds,
        describe="Seconds of a step by scope, a column a phase", note="links: communication that nothing covers.",
    )  # fmt: skip
    kinds = list(phases[0]["memory"]["at_peak"])
    parts = [(kind, [p["memory"]["at_peak"].get(kind, 0.0) for p in phases]) for kind in kinds]
    parts.append(("free", [max(p["memory"]["capacity"] - p["memory"]["peak"], 0.0) for p in phases]))
    memory = bar_chart(
        "Memory of a device", names, parts, name="phase", unit=" GB", text=gb, scale=1e9,
        describe="Bytes by component where they are most, a column a phase",
    )  # fmt: skip
    scaling = _scaling(result["scaling"])
    return f'<section><h2>Pictures</h2><div class="grid2">{bars}{memory}{scaling}</div></section>'


def _scaling(scaling: dict[str, Any]) -> str:
    """Seconds over the number of devices; a dot where a way stops paying."""
    ways = [way for way in scaling["ways"] if way["points"]]
    if not ways:
        return ""
    lines = [svg.Line(way["name"], [(n, s) for n, s, _ in way["points"]], i) for i, way in enumerate(ways)]
    exposed = [(n, e) for n, _, e in ways[0]["points"]]
    lines.append(svg.Line(f"{ways[0]['name']}: exposed", exposed, len(ways), look="raw"))
    counts = sorted({n for line in lines for n, _ in line.points})
    x = svg.Axis(counts[0], counts[-1], svg.LEFT, svg.WIDTH - svg.RIGHT, log=True)
    most = max(value for line in lines for _, value in line.points)
    y = svg.Axis(0.0, 1.05 * most, svg.HEIGHT - svg.BOTTOM, svg.TOP)
    labels = "".join(
        f'<path class="axis" d="M{x(n):.1f} {y.start}v4"/>'
        f'<text x="{x(n):.1f}" y="{y.start + 18}" text-anchor="middle">{n:,}</text>'
        for n in counts[:: -(-len(counts) // 6)]
    )
    dots = ""
    for stop in scaling["stops"]:
        for line in lines:
            at = dict(line.points).get(stop["devices"])
            if line.label == stop["name"] and at is not None:
                place = f'cx="{x(stop["devices"]):.1f}" cy="{y(at):.1f}"'
                title = f"<title>{escape(stop['text'])}</title>"
                dots += f'<circle class="dot c{line.color}" {place} r="4">{title}</circle>'
    legend = "".join(
        f'<li><i class="key {line.look} c{line.color}"></i>{escape(line.label)} '
        f"<b>{seconds(line.points[-1][1])}</b></li>"
        for line in lines
    )
    picture = (
        svg.open_svg(
            "Weak scaling", "Seconds of a step over devices, at constant tokens a device", svg.HEIGHT, ""
        )
        + svg.value_axis(y, x.start, x.end, " s")
        + f'<path class="axis" d="M{x.start} {y.start}H{x.end}"/>{labels}'
        + "".join(svg.draw(line, x, y) for line in lines)
        + f"{dots}</svg>"
    )
    note = "Over the number of devices. A dot is where a way stops paying: " + "; ".join(
        stop["text"] for stop in scaling["stops"]
    )
    return svg.figure("Weak scaling", f'<ul class="legend">{legend}</ul>', picture, f"{note}.")


def _few(parts: list[tuple[str, list[float]]], most: int = 7) -> list[tuple[str, list[float]]]:
    """The largest parts, the others as one."""
    order = sorted(parts, key=lambda part: -max(part[1]))
    rest = [sum(values) for values in zip(*(values for _, values in order[most:]), strict=True)]
    return order[:most] + ([("rest", rest)] if rest else [])


def _cards(tables: Iterable[Table]) -> str:
    return "".join(f'<div class="card"><h3>{escape(t[0])}</h3>{as_html(*t[1:])}</div>' for t in tables)


def gb(size: float) -> str:
    """Bytes."""
    return f"{size / 1e12:,.2f} TB" if size >= 1e12 else f"{size / 1e9:,.1f} GB"


def seconds(value: float) -> str:
    """A time."""
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"
