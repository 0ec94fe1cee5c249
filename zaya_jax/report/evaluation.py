"""What `experiments.evaluate` found, as Markdown and as a page; from its plain numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

from zaya_jax.report.script import SCRIPT
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import Line, escape, line_chart
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
        f'<section><h2>{escape(name)}</h2><div class="card">{as_html(head, rows)}</div></section>'
        for name, head, rows in _tables(result)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in result["notes"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1><p class='sub'>{escape(_about(result))}</p>{notes}</header>"
        f"{_curves(result['data'])}{cards}<footer>docs/evaluation.md says what is counted.</footer>\n"
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
    return [name, *figures, f"{found['bits_per_byte']:.4f}", f"{found['accuracy']:.1%}"]


def _curves(data: dict[str, Any]) -> str:
    """The loss by the number of tokens before, by source."""
    found = {name: one["by_position"] for name, one in list(data.items())[:COLORS]}
    points = {
        name: [((bucket["from"] * bucket["to"]) ** 0.5, bucket["loss"]) for bucket in by]
        for name, by in found.items()
        if len(by) > 1
    }
    if not points:
        return ""
    lines = [Line(name, own, color) for color, (name, own) in enumerate(points.items())]
    xs = [x for own in points.values() for x, _ in own]
    ys = [y for own in points.values() for _, y in own]
    left_out = len(data) - len(found)
    note = f"{left_out} further sources are in the table alone." if left_out > 0 else ""
    return "<section>" + line_chart(
        "Loss by place in the document", lines, x_range=(min(xs), max(xs)), y_range=(min(*ys, 0.0), max(ys) * 1.05),
        describe="Mean loss of tokens by how many stand before them, in powers of two", note=note, unit=" nats",
        over="tokens before",
    ) + "</section>"  # fmt: skip
