"""What `experiments.compile` found, as a line, as Markdown and as a page."""

from collections.abc import Iterable, Sequence
from typing import Any

from zaya_jax.report import svg
from zaya_jax.report.script import SCRIPT
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import escape, number
from zaya_jax.report.tables import as_html, as_markdown

KINDS = (
    "weights", "optimizer", "batch and figures", "gradients", "activations", "exchange", "other temporaries", "gaps",
)  # fmt: skip


def headline(row: dict[str, Any]) -> str:
    """A phase's program in a line."""
    memory, bound = row["memory"], row["bound"]
    of = f" of {_gb(memory['capacity'])}" if memory["capacity"] else ""
    time = f", at least {_seconds(bound['seconds'])} ({bound['binds']} most)" if bound else ""
    return (
        f"peak {_gb(memory['peak'])}{of}, {_gb(row['hbm_bytes'])} of traffic, {row['launches']:,.0f} launches, "
        f"{row['flops'] / 1e12:,.1f} TFLOP, {_of_use(row):.0%} of use{time}"
    )


def text(result: dict[str, Any]) -> str:
    """All phases as Markdown."""
    parts = [f"# {result['config']} compiled for {result['devices']:,} {result['target']}\n", _about(result)]
    for row in result["phases"]:
        parts.append(f"\n## {row['phase']}: {_verdict(row)}\n")
        if "same_as" in row:
            parts.append(f"The same program as {row['same_as']!r}.\n")
            continue
        parts.append(f"{_shape(row)}. {headline(row)}. Compiled in {row['seconds']['compiling']:.0f} s.\n")
        parts += [as_markdown(*table) for table in _tables(row)]
        parts += [f"- {note}" for note in _notes(row)]
    return "\n".join(parts) + "\n"


def render(result: dict[str, Any]) -> str:
    """The page."""
    title = f"{result['config']} compiled for {result['devices']:,} {result['target']}"
    body = [f"<header><h1>{escape(title)}</h1><p class='sub'>{escape(_about(result))}</p></header>"]
    for row in result["phases"]:
        body.append(f"<section><h2>{escape(row['phase'])}: {escape(_verdict(row))}</h2>")
        if "same_as" in row:
            body.append(f"<p>The same program as {escape(row['same_as'])}.</p></section>")
            continue
        body.append(f"<p>{escape(_shape(row))}.</p>{_tiles(row)}{_picture(row)}")
        body += [f'<div class="card"><h3>{escape(t[0])}</h3>{as_html(*t[1:])}</div>' for t in _tables(row)]
        notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(row))
        body.append(f"<ul>{notes}</ul></section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n<body><main>\n{''.join(body)}"
        "<footer>Read from the compiled program; docs/compiling.md says how.</footer>\n"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def _about(result: dict[str, Any]) -> str:
    host = (
        " (the CPU's program: its own algorithms, no account of kernels)" if result["target"] == "cpu" else ""
    )
    return f"{result['date']}, jax {result['jax']}; per device and step{host}"


def _verdict(row: dict[str, Any]) -> str:
    memory = row["memory"]
    if not memory["capacity"]:
        return _gb(memory["peak"])
    if memory["peak"] <= memory["capacity"]:
        return f"fits, {_gb(memory['peak'])} of {_gb(memory['capacity'])}"
    fits = row.get("fits_with")
    way = (
        f"with {', '.join(fits['changes'])} it takes {_gb(fits['memory']['peak'])}"
        if fits
        else "nor did any change tried"
    )
    return f"does NOT fit, {_gb(memory['peak'])} of {_gb(memory['capacity'])}; {way}"


def _shape(row: dict[str, Any]) -> str:
    mesh = (
        " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size is not True and size > 1)
        or "one device"
    )
    switches = "".join(f", {name}" for name, size in row["mesh"].items() if size is True)
    return (
        f"{row['sequences']:,} sequences of {row['seq_len']:,} tokens per step in {row['micro_batches']} micro-batches "
        f"on {mesh}{switches}: {row['tokens_per_device']:,.0f} tokens a device; remat {row['remat']}"
    )


def _tables(row: dict[str, Any]) -> Iterable[tuple[str, Sequence[str], list[list[str]]]]:
    memory = row["memory"]
    yield (
        "Memory where it is highest",
        ("kind", "GB", "share"),
        [[kind, f"{memory[kind] / 1e9:.2f}", f"{memory[kind] / memory['peak']:.1%}"] for kind in KINDS],
    )
    yield (
        "Largest temporaries there",
        ("GB", "array", "kind", "scope", "line"),
        [
            [f"{b['bytes'] / 1e9:.2f}", b["shape"], b["kind"], b["scope"], b["line"]]
            for b in memory["largest"]
        ],
    )
    rows = [
        [
            r["scope"], f"{r['launches']:,.0f}", f"{r['reads'] / 1e9:,.1f}", f"{r['writes'] / 1e9:,.1f}",
            f"{r['flops'] / 1e12:,.2f}", f"{r['flops_of_use'] / r['flops']:.0%}" if r["flops"] else "",
        ]
        for r in row["traffic"]
    ]  # fmt: skip
    total = [sum(r[name] for r in row["traffic"]) for name in ("reads", "writes")]
    rows.append([
        "all", f"{row['launches']:,.0f}", *(f"{x / 1e9:,.1f}" for x in total), f"{row['flops'] / 1e12:,.2f}",
        f"{_of_use(row):.0%}",
    ])  # fmt: skip
    yield "Traffic and work by scope", ("scope", "launches", "GB read", "GB written", "TFLOP", "of use"), rows
    yield "Kernels that move most", ("GB", "times", "scope", "stage", "line", "kernel"), [
        [
            f"{k['times'] * (k['reads'] + k['writes']) / 1e9:,.1f}", f"{k['times']:,.0f}", k["scope"], k["stage"],
            k["line"], k["name"],
        ]
        for k in row["largest"]
    ]  # fmt: skip
    if row["collectives"]:
        yield "Collectives", ("kind", "scope", "MB", "devices", "times", "kernels beside it"), [
            [
                c["kind"], c["scope"], f"{c['bytes'] / 1e6:,.2f}", f"{c['group']:,}",
                "?" if c["times"] is None else str(c["times"]), str(c["kernels_beside"]),
            ]
            for c in row["collectives"]
        ]  # fmt: skip
    if row["bound"]:
        names = {
            "compute": "products at the peak of their format", "memory": "HBM at its bandwidth",
            "launches": "kernels too short for either", "links": "links, exposed", "hidden": "(links, under kernels)",
        }  # fmt: skip
        yield (
            "A bound on the step's time",
            ("bound by", "ms"),
            [[words, f"{1e3 * row['bound'][name]:,.1f}"] for name, words in names.items()]
            + [["all", f"{1e3 * row['bound']['seconds']:,.1f}"]],
        )


def _notes(row: dict[str, Any]) -> list[str]:
    notes = []
    if row["unknown_loops"]:
        loops = ", ".join(row["unknown_loops"])
        notes.append(f"loops whose length nobody says, each counted as one turn: {loops}")
    again = sum(r["flops_by_stage"].get("again", 0) for r in row["traffic"])
    if again:
        notes.append(f"computed again in the backward pass: {again / 1e12:,.1f} TFLOP, none of them of use")
    return notes


def _tiles(row: dict[str, Any]) -> str:
    memory, bound = row["memory"], row["bound"]
    tiles = [
        ("Peak memory", _gb(memory["peak"]), f"of {_gb(memory['capacity'])}" if memory["capacity"] else ""),
        ("HBM traffic", _gb(row["hbm_bytes"]), ""),
        ("Launches", number(row["launches"]), ""),
        ("FLOPs", f"{row['flops'] / 1e12:,.1f} T", f"{_of_use(row):.0%} of use"),
    ]
    if bound:
        tiles.append(("Step, at least", _seconds(bound["seconds"]), f"{bound['binds']} most"))
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>" for a, b, c in tiles
        )
        + "</dl>"
    )


def _picture(row: dict[str, Any]) -> str:
    """Memory over the program, with what the chip has."""
    curve = [(float(at), value / 1e9) for at, value in row["memory"]["curve"]]
    capacity = row["memory"]["capacity"]
    lines = [svg.Line("in use", curve)]
    end = curve[-1][0] if len(curve) > 1 else 1.0
    highest = max(value for _, value in curve)
    if capacity:
        lines.append(svg.Line("the chip's", [(0.0, capacity / 1e9), (end, capacity / 1e9)], color=1))
        highest = max(highest, capacity / 1e9)
    return '<div class="grid2">' + svg.line_chart(
        f"Memory over the program: {row['phase']}", lines, x_range=(0, end), y_range=(0, highest * 1.05),
        unit=" GB", over="instruction",
        describe="Bytes in use at each instruction of the compiled program",
        note="Instructions as they run, each loop's body once: forward, backward, optimizer.",
    ) + "</div>"  # fmt: skip


def _of_use(row: dict[str, Any]) -> float:
    return sum(r["flops_of_use"] for r in row["traffic"]) / max(row["flops"], 1)


def _gb(size: float) -> str:
    return (
        f"{size / 1e12:,.2f} TB"
        if size >= 1e12
        else f"{size / 1e9:,.1f} GB"
        if size >= 1e8
        else f"{size / 1e6:,.1f} MB"
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"
