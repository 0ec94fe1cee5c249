"""A document: a title, and sections with tables and pictures, from which one renderer makes
Markdown and a page.

    document = Page("A run", sections=[Section("Loss", tables=[Table("By phase", head, rows)])])
    document.markdown()                for a terminal too, and for files next to the page
    write_page(target, document.html)  one HTML file without scripts, for any browser

Callers pass rows of text; `svg` draws the pictures, which only the page has. `page.html` is the
page, `page.css` how it looks.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jinja2

from zaya_jax.cluster import events
from zaya_jax.config import UserError, files
from zaya_jax.report.text import escape

FOLDER = pathlib.Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER),
    autoescape=True,
    finalize=escape,
    trim_blocks=True,
    lstrip_blocks=True,
)
Tile = tuple[str, str, str]  # a headline figure: its name, its value, a remark
OPEN_ROWS = 24  # a longer table starts folded


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under a title; the first cell names its row. `look`: num or code, as the
    style sheet has them."""

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
    pictures: str = ""  # HTML, on the page alone: figures
    below: str = ""  # HTML, on the page alone: anything else

    def __bool__(self) -> bool:
        return bool(self.tables or self.notes or self.pictures or self.below)

    def markdown(self) -> str:
        """Its words and tables."""
        parts = [f"\n## {self.title}\n"]
        if self.text:
            parts.append(f"{self.text}\n")
        parts += [table.markdown() for table in self.tables]
        return "\n".join([*parts, *map("- {}".format, self.notes)])


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
        return _TEMPLATES.get_template("page.html").render(page=self)


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
