"""Writes a program's results: the figures, and a document of them for people."""

import json
from pathlib import Path
from typing import Any

from zaya_jax.config.files import write
from zaya_jax.report.document import Page


def write_results(out: Path, name: str, result: dict[str, Any], page: Page) -> None:
    """Writes NAME.json, NAME.md and NAME.html, prints the text, and says where they are."""
    out.mkdir(parents=True, exist_ok=True)
    write(out / f"{name}.json", json.dumps(result, indent=1).encode())
    write(out / f"{name}.md", page.markdown().encode())
    write(out / f"{name}.html", page.html().encode())
    print(page.markdown())
    print(f"written: {out}/{name}.md, {name}.json, {name}.html")
