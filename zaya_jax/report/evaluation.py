"""What `experiments.evaluate` found, as Markdown and as a page; from its plain numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from zaya_jax.report.script import SCRIPT
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import Line, escape, line_chart, section
from zaya_jax.report.tables import as_html, as_markdown

Table = tuple[str, Sequence[str], list[list[str]]]
COLORS = 6  # curves in a picture


def text(result: dict[str, Any]) -> str:
    """All as Markdown."""
    notes = [f"- {note}" for note in result["notes"]]
    return (
        "\n".join([f"# {result['model']}\n", *(as_markdown(*table) for table in _tables(result)), *notes])
        + "\n"
    )


def render(result: dict[str, Any]) -> str:
    """The page."""
    title = f"Evaluation of {result['model']}"
    cards = "".join(
        f'<section><h2>{escape(name)}</h2><div class="card">{as_html(head, rows, "wide num names")}</div></section>'
        for name, head, rows in _tables(result)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in result["notes"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1><p class='sub'>{escape(_about(result))}</p>{notes}</header>"
        f"{cards}{_curves(result['data'])}<footer>docs/evaluation.md says what is counted.</footer>\n"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def _about(result: dict[str, Any]) -> str:
    return f"{result['date']}, {result['device']}, jax {result['jax']}, {result['seconds']:,.1f} s"


def _tables(result: dict[str, Any]) -> Iterable[Table]:
    if result["data"]:
        head = [
            "data",
            "documents",
            "tokens",
            "loss",
            "perplexity",
            "bits per byte",
            "likeliest token is right",
        ]
        yield "Loss on text", head, [_loss(name, found) for name, found in result["data"].items()]
    if result["tasks"]:
        rows = [
            [task, name, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "–"]
            for task, figures in result["tasks"].items()
            for name, (value, error) in figures.items()
        ]
        yield "Tasks", ["task", "metric", "value", "standard error"], rows


def _loss(name: str, found: dict[str, Any]) -> list[str]:
    figures = [
        f"{found['documents']:,}",
        f"{found['tokens']:,}",
        f"{found['loss']:.4f}",
        f"{found['perplexity']:,.3f}",
    ]
    bits = found["bits_per_byte"]  # None: the tokens stand for no byte, as of answers that are empty
    return [name, *figures, "–" if bits is None else f"{bits:.4f}", f"{found['accuracy']:.1%}"]


def _curves(data: dict[str, Any]) -> str:
    """The loss by the number of tokens before, by source; each bucket stands where it begins."""
    found = {name: one["by_position"] for name, one in list(data.items())[:COLORS]}
    points = {
        name: [(bucket["from"], bucket["loss"]) for bucket in by if math.isfinite(bucket["loss"])]
        for name, by in found.items()
    }
    points = {name: own for name, own in points.items() if len(own) > 1}
    if not points:
        return ""
    lines = [Line(name, own, color) for color, (name, own) in enumerate(points.items())]
    xs = [x for own in points.values() for x, _ in own]
    ys = [y for own in points.values() for _, y in own]
    room = 0.06 * (max(ys) - min(ys))
    left_out = len(data) - len(points)
    notes = ["Place 4 is of tokens with 4 to 7 before them, place 8 of those with 8 to 15, and so on."]
    if left_out:
        notes.append(
            f"In the table alone: {left_out} that have one place, no finite loss, or come after {COLORS}."
        )
    picture = line_chart(
        "Loss by place in the document", lines, x_range=(min(xs), max(xs)), y_range=(min(ys) - room, max(ys) + room),
        describe="Mean loss of tokens by how many stand before them, in powers of two", note=" ".join(notes),
        unit=" nats", over="place", log_x=True,
    )  # fmt: skip
    return section("By place", "How much the model makes of what it has read.", picture)
