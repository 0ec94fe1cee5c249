"""The commands of the documentation. The tutorial's run in order in an empty folder, their output
compared with the page (225 s on one core while another program ran, 23 November 2026); those of
README.md and docs/ page by page in one folder: long runs are shortened, and blocks that state
needs, and set-up commands, are skipped.
"""

import functools
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


STEPS = {
    "runs/wider": 12,
    "runs/spread": 4,
    "runs/four": 6,
    "runs/eight_devices": 4,
    "runs/long": 3,
}
SETS_UP = re.compile(r"^ *make (?:test|one|setup\S*)\b.*$", re.M)


def shorter(text: str) -> str:
    """A block's commands without set-up and tests, and with fewer steps of long runs."""
    text = SETS_UP.sub("", text)
    text = re.sub(r"\bmake pretrain\b", ".venv/bin/python -m experiments.pretrain", text)
    for name, steps in STEPS.items():
        to_the_end = r"(?:[^\n\\]|\\\n)*"
        trains = rf"experiments\.(?:pretrain|supervise){to_the_end}--workdir={name}\b{to_the_end}"
        text = re.sub(trains, functools.partial(with_steps, name, steps), text)
    return text


def with_steps(workdir: str, steps: int, command: re.Match) -> str:
    """A training command with its number of steps inserted or replaced."""
    text = re.sub(r" +--config\.run\.num_steps=\d+", "", command[0])
    return text.replace(
        f"--workdir={workdir}", f"--workdir={workdir} --config.run.num_steps={steps}"
    )


def typed() -> list[commands.Block]:
    """The blocks of commands that need nothing, in the order of the pages."""
    found = []
    for page in commands.pages():
        name = str(page.relative_to(commands.ROOT))
        if name != "docs/tutorial.md":
            found += commands.blocks(page.read_text(encoding="utf-8"), name)
    return [block for block in found if block.language == "sh" and not block.needs]


@pytest.mark.slow
def test_every_command_that_needs_nothing_ends_well(tmp_path):
    compilers = (commands.ROOT / ".venv-targets").is_dir()
    reader = commands.Reader(tmp_path)
    if compilers:
        (tmp_path / ".venv-targets").symlink_to(commands.ROOT / ".venv-targets")
    for block in typed():
        text = shorter(block.text)
        if "experiments.compile" in text and not compilers:
            print(block.place, "is left out: make setup-targets has not run")
        elif text.strip():
            print(block.place)
            reader.types(text)
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file()
