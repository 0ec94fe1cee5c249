"""Runs the tutorial's commands in order in an empty folder, and compares their output with the
page.

225 s on one core while another program ran (23 November 2026).
"""

import json
import re

import commands
import pytest

ROOT = commands.ROOT
PAGE = ROOT / "docs" / "tutorial.md"
NUMBER = r"(?<![A-Za-z_])[+-]?\d[\d,.]*(?:e[+-]?\d+)?(?:m\d+s|[ms])?"


def shape(line: str) -> str:
    """A line without its numbers and the width of its columns: a machine has its own."""
    return re.sub(r"\s+", " ", re.sub(NUMBER, "#", line)).replace("eta ?", "eta #").strip()


def missing(shown: str, printed: str) -> list[str]:
    """The lines that the page shows and the program did not print, numbers apart; ... is for
    any."""
    shapes = {shape(line) for line in printed.splitlines()}
    wanted = [shape(line) for line in shown.splitlines() if line.strip() != "..."]
    return [
        line
        for line in wanted
        if not (
            line in shapes
            or (line.endswith(" ...") and any(s.startswith(line[:-4]) for s in shapes))
        )
    ]


def test_every_block_of_the_tutorial_can_be_run():
    found = commands.blocks(PAGE.read_text(encoding="utf-8"), "docs/tutorial.md")
    assert not [
        block.place
        for block in found
        if block.needs or block.language not in ("sh", "python", "text")
    ]
    languages = [block.language for block in found if block.language != "text"]
    assert languages == sorted(languages, reverse=True), (
        "Python comes after all commands: it is run as one"
    )
    assert languages.count("sh") >= 8 and languages.count("python") >= 2


@pytest.mark.slow
def test_the_tutorial_from_beginning_to_end(tmp_path):
    reader, printed = commands.Reader(tmp_path), ""
    found = commands.blocks(PAGE.read_text(encoding="utf-8"), "docs/tutorial.md")
    of_python = "".join(block.text for block in found if block.language == "python")
    for block in found:
        if block.language == "sh":
            printed = reader.types(block.text)
        elif block.language == "python":
            printed = reader.runs(str(reader.python), "-c", of_python) if of_python else printed
            of_python = ""  # once: no command comes after it
        elif "def main(" in block.text:  # a model's text is that of its machine
            assert printed.startswith("def main(") and len(printed) > 30
        else:
            assert not missing(block.text, printed), (
                block.place,
                missing(block.text, printed),
                printed,
            )
    assert (tmp_path / "runs" / "small_bpe" / "report.html").stat().st_size > 10_000
    figures = json.loads((tmp_path / "evaluation" / "small_bpe" / "evaluation.json").read_text())
    rows = {name: row["bits_per_byte"] for name, row in figures["data"].items()}
    code, prose = rows["experiments/pretrain.py"], rows["docs/data.md"]
    assert 1 < code < 5 and 1 < prose < 6
