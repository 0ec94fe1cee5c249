"""A document: a title, and sections with tables and pictures, from which one renderer makes
Markdown and a page.

    document = Page("A run", sections=[Section("Loss", tables=[Table("By phase", head, rows)])])
    document.markdown()                for a terminal too, and for files next to the page
    write_page(target, document.html)  one HTML file without scripts, for any browser

Callers pass rows of text; `svg` draws the pictures, which only the page has.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from zaya_jax.cluster import events
from zaya_jax.config import UserError, files
from zaya_jax.report.style import style_sheet
from zaya_jax.report.text import escape, wrapped

Tile = tuple[str, str, str]  # a headline figure: its name, its value, a remark
OPEN_ROWS = 24  # a longer table starts folded


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under a title; the first cell names its row. `look`: num or code, as `style`
    has them."""

    title: str
    head: Sequence[object]
    rows: Sequence[Sequence[object]]
    look: str = "num"
    note: str = ""
    folded: bool | None = None  # on a page; None: not foldable

    def markdown(self) -> str:
        """The table in Markdown, its columns aligned for a terminal; a cell ends no cell and no
        row."""
        lines = [[_markdown_cell(cell) for cell in row] for row in (self.head, *self.rows)]
        first, *others = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        align, end = str.rjust, ":"
        if self.look == "code":
            align, end = str.ljust, "-"
        lines.insert(1, ["-" * first, *("-" * (width - 1) + end for width in others)])
        text = f"### {self.title}\n\n"
        for name, *cells in lines:
            text += f"| {' | '.join([name.ljust(first), *map(align, cells, others)])} |\n"
        return text

    def html(self) -> str:
        """The table on a page: a card, or a fold; a wide one scrolls."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.head)
        rows = ""
        for name, *cells in self.rows:
            values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            rows += f'<tr><th scope="row">{escape(name)}</th>{values}</tr>'
        table = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
        content = wrapped('<p class="note">', escape(self.note), "</p>")
        content += f'<div class="scroll"><table class="{self.look}">{table}</table></div>'
        if self.folded is None:
            return f'<div class="card"><h3>{escape(self.title)}</h3>{content}</div>\n'
        start = "<details>" if self.folded else "<details open>"
        summary = escape(f"{self.title} ({len(self.rows):,})")
        return f"{start}<summary>{summary}</summary>{content}</details>\n"


def _markdown_cell(cell: object) -> str:
    """A cell's text, which must end neither the cell nor the row."""
    return events.printable(" ".join(str(cell).split()).replace("|", "\\|"))


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a document; the page omits one that has only a title."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    pictures: str = ""  # HTML, on the page alone: figures
    below: str = ""  # HTML, on the page alone: anything else

    def __bool__(self) -> bool:
        return bool(self.tables or self.notes or self.tiles or self.pictures or self.below)

    def markdown(self) -> str:
        """Its words and tables."""
        parts = [f"\n## {self.title}\n"]
        if self.text:
            parts.append(f"{self.text}\n")
        parts += [table.markdown() for table in self.tables]
        return "\n".join([*parts, *map("- {}".format, self.notes)])

    def html(self) -> str:
        """Its words, figures, pictures and tables."""
        text = wrapped("<p>", escape(self.text), "</p>")
        grid = wrapped('<div class="grid2">', self.pictures, "</div>")
        tables = "".join(table.html() for table in self.tables)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        notes = wrapped("<ul>", notes, "</ul>")
        content = f"{text}{_tiles(self.tiles)}{grid}{tables}{notes}{self.below}"
        return f"<section><h2>{escape(self.title)}</h2>{content}</section>\n"


@dataclasses.dataclass(frozen=True)
class Page:
    """The whole."""

    title: str
    kind: str = ""  # shown after the title
    about: str = ""
    sections: Sequence[Section] = ()
    tiles: Sequence[Tile] = ()
    warnings: Sequence[str] = ()
    footer: str = ""

    def markdown(self) -> str:
        """Without the pictures."""
        parts = [f"# {self.title}\n", f"{self.about}\n", *map("- {}".format, self.warnings)]
        parts += [section.markdown() for section in self.sections if section]
        return "\n".join(parts) + "\n"

    def html(self) -> str:
        """One page, complete in itself, light or dark as the reader has it."""
        kind = wrapped(" <span>", escape(self.kind), "</span>")
        about = wrapped('<p class="sub">', escape(self.about), "</p>")
        warnings = "".join(f"<p>{escape(warning)}</p>" for warning in self.warnings)
        warnings = wrapped('<div class="warn">', warnings, "</div>")
        header = f"<h1>{escape(self.title)}{kind}</h1>{about}{_tiles(self.tiles)}{warnings}"
        body = "".join(section.html() for section in self.sections if section)
        window = escape(f"{self.title} {self.kind}".strip())
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{window}</title><style>{style_sheet()}</style></head>\n<body><main>\n"
            f"<header>{header}</header>\n{body}"
            f"<footer>{escape(self.footer)}</footer>\n</main></body></html>\n"
        )


def _tiles(tiles: Sequence[Tile]) -> str:
    cells = ""
    for name, value, remark in tiles:
        cells += f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
        cells += f"<dd>{escape(remark)}</dd></div>"
    return wrapped('<dl class="tiles">', cells, "</dl>")


def write_page(target: str | os.PathLike, page: Callable[[], str]) -> pathlib.Path:
    """Writes a page atomically; UserError if something cannot be read or written."""
    target = pathlib.Path(target)
    try:
        files.write(target, page().encode("utf-8", errors="replace"))
    except OSError as error:
        where, reason = error.filename or target, error.strerror or error
        raise UserError(
            f"no report: {str(where)!r}: {reason}; the folder must be readable and {target.name}"
            " replaceable"
        ) from error
    return target


def write_results(out: pathlib.Path, name: str, result: dict[str, Any], page: Page) -> None:
    """Writes NAME.json, NAME.md and NAME.html, prints the text, and says where they are."""
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / f"{name}.json", json.dumps(result, indent=1).encode())
    files.write(out / f"{name}.md", page.markdown().encode())
    files.write(out / f"{name}.html", page.html().encode())
    print(page.markdown())
    print(f"written: {out}/{name}.md, {name}.json, {name}.html")
