"""Writes a program's results: the figures, and a document of them for people."""

import json
from pathlib import Path
from typing import Any

from zaya_jax.config.files import write
from zaya_jax.report.document import Page
from zaya_jax.report.text import counted


def write_results(out: Path, name: str, result: dict[str, Any], page: Page) -> None:
    """Writes NAME.json, NAME.md and NAME.html, prints the text, and says where they are."""
    out.mkdir(parents=True, exist_ok=True)
    write(out / f"{name}.json", json.dumps(result, indent=1).encode())
    write(out / f"{name}.md", page.markdown().encode())
    write(out / f"{name}.html", page.html().encode())
    print(page.markdown())
    print(f"written: {out}/{name}.md, {name}.json, {name}.html")


def shape_of_step(row: dict[str, Any]) -> str:
    """The batch and the mesh of a phase, in words, from the plain numbers of a plan or a compiled
    program."""
    mesh = " x ".join(f"{axis} {n}" for axis, n in row["mesh"].items() if n is not True and n > 1)
    switches = "".join(f", {name}" for name, size in row["mesh"].items() if size is True)
    return (
        f"{row['sequences']:,} sequences of {row['seq_len']:,} tokens per step in"
        f" {counted(row['micro_batches'], 'micro-batch', 'es')} on"
        f" {mesh or 'one device'}{switches}: {row['tokens_per_device']:,.0f} tokens a device; remat"
        f" {row['remat']}"
    )
