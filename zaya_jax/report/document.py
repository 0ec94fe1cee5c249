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

from zaya_jax.config import UserError, files
from zaya_jax.report.style import style_sheet
from zaya_jax.report.text import escape, printable

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
        lines = [
            [printable(" ".join(str(cell).splitlines()).replace("|", "\\|")) for cell in row]
            for row in (self.head, *self.rows)
        ]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        sides = ["<" if self.look == "code" or not place else ">" for place in range(len(widths))]
        texts = [
            [f"{cell:{s}{w}}" for cell, s, w in zip(line, sides, widths, strict=True)]
            for line in lines
        ]
        texts.insert(
            1,
            [
                "-" * (w - 1) + ("-" if s == "<" else ":")
                for s, w in zip(sides, widths, strict=True)
            ],
        )
        return "\n".join([f"### {self.title}\n", *(f"| {' | '.join(row)} |" for row in texts), ""])

    def html(self) -> str:
        """The table on a page: a card, or a fold; a wide one scrolls."""
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.head)
        rows = "".join(
            "<tr><th"
            f' scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
            for name, *cells in self.rows
        )
        table = (
            "<table"
            f' class="{self.look}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        )
        content = f'{note}<div class="scroll">{table}</div>'
        if self.folded is None:
            return f'<div class="card"><h3>{escape(self.title)}</h3>{content}</div>\n'
        return fold(f"{self.title} ({len(self.rows):,})", content, opened=not self.folded)


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
        tables = [table.markdown() for table in self.tables]
        text = [f"{self.text}\n"] if self.text else []
        return "\n".join([f"\n## {self.title}\n", *text, *tables, *map("- {}".format, self.notes)])

    def html(self) -> str:
        """Its words, figures, pictures and tables."""
        text = f"<p>{escape(self.text)}</p>" if self.text else ""
        grid = f'<div class="grid2">{self.pictures}</div>' if self.pictures else ""
        notes = (
            f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in self.notes)}</ul>"
            if self.notes
            else ""
        )
        tables = "".join(table.html() for table in self.tables)
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
        head = [f"# {self.title}\n", f"{self.about}\n", *map("- {}".format, self.warnings)]
        return (
            "\n".join([*head, *(section.markdown() for section in self.sections if section)]) + "\n"
        )

    def html(self) -> str:
        """One page, complete in itself, light or dark as the reader has it."""
        kind = f" <span>{escape(self.kind)}</span>" if self.kind else ""
        about = f'<p class="sub">{escape(self.about)}</p>' if self.about else ""
        warnings = "".join(f"<p>{escape(warning)}</p>" for warning in self.warnings)
        warn = f'<div class="warn">{warnings}</div>' if warnings else ""
        body = "".join(section.html() for section in self.sections if section)
        window = escape(f"{self.title} {self.kind}".strip())
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{window}</title><style>{style_sheet()}</style></head>\n<body><main>\n"
            f"<header><h1>{escape(self.title)}{kind}</h1>{about}{_tiles(self.tiles)}{warn}</header>\n{body}"
            f"<footer>{escape(self.footer)}</footer>\n</main></body></html>\n"
        )


def fold(summary: str, content: str, opened: bool = False) -> str:
    """HTML that folds away."""
    start = "<details open>" if opened else "<details>"
    return f"{start}<summary>{escape(summary)}</summary>{content}</details>\n"


def _tiles(tiles: Sequence[Tile]) -> str:
    cells = "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>"
        for a, b, c in tiles
    )
    return f'<dl class="tiles">{cells}</dl>' if tiles else ""


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


def check_target(target: pathlib.Path, option: str) -> pathlib.Path:
    """The page's file from an option; UserError for a folder or another kind of file."""
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"{option}={target} does not end in .html; the page is HTML, and other files must not"
            " be lost"
        )
    if target.is_dir():
        raise UserError(f"{option}={target} is a folder; give the name of a file in it")
    return target


def write_results(out: pathlib.Path, name: str, result: dict[str, Any], page: Page) -> None:
    """Writes NAME.json, NAME.md and NAME.html, prints the text, and says where they are."""
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / f"{name}.json", json.dumps(result, indent=1).encode())
    files.write(out / f"{name}.md", page.markdown().encode())
    files.write(out / f"{name}.html", page.html().encode())
    print(page.markdown())
    print(f"written: {out}/{name}.md, {name}.json, {name}.html")
