"""The commands of the documentation. The tutorial's run in order in an empty folder, their output
compared with the page (225 s on one core while another program ran, 23 November 2026); those of
README.md and docs/ page by page in one folder: long runs are shortened, and blocks that state
needs, and set-up commands, are skipped.
"""

import json
import re

import commands
import pytest

ROOT = commands.ROOT
TUTORIAL = [block for block in commands.BLOCKS if block.page == "docs/tutorial.md"]
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
    assert {(block.language, block.needs) for block in TUTORIAL} == {
        ("sh", ""),
        ("python", ""),
        ("text", ""),
    }
    languages = [block.language for block in TUTORIAL if block.language != "text"]
    assert languages == sorted(languages, reverse=True), (
        "Python comes after all commands: it is run as one"
    )
    assert languages.count("sh") >= 8 and languages.count("python") >= 2


@pytest.mark.slow
def test_the_tutorial_from_beginning_to_end(tmp_path):
    reader, printed = commands.Reader(tmp_path), ""
    of_python = "".join(block.text for block in TUTORIAL if block.language == "python")
    for block in TUTORIAL:
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


STEPS = {"wider": 12, "spread": 4, "four": 6, "eight_devices": 4, "long": 3}
SETS_UP = re.compile(r"^ *make (?:test|one|setup\S*)\b.*$", re.M)
LINE = r"(?:[^\n\\]|\\\n)*"  # and those that continue it
TRAINS = re.compile(
    rf"experiments\.(?:pretrain|supervise){LINE}--workdir=runs/({'|'.join(STEPS)})\b{LINE}"
)


def shorter(text: str) -> str:
    """A block's commands without set-up and tests, and with fewer steps of long runs."""
    text = SETS_UP.sub("", text)
    text = re.sub(r"\bmake pretrain\b", ".venv/bin/python -m experiments.pretrain", text)
    return TRAINS.sub(with_few_steps, text)


def with_few_steps(command: re.Match) -> str:
    """A training command with its number of steps inserted or replaced."""
    text = re.sub(r" +--config\.run\.num_steps=\d+", "", command[0])
    steps = f" --config.run.num_steps={STEPS[command[1]]}"
    return text.replace(f"--workdir=runs/{command[1]}", f"--workdir=runs/{command[1]}{steps}")


@pytest.mark.slow
def test_every_command_that_needs_nothing_ends_well(tmp_path):
    compilers = ROOT / ".venv-targets"
    reader = commands.Reader(tmp_path)
    (tmp_path / ".venv-targets").symlink_to(compilers)
    for block in commands.BLOCKS:
        if block.language != "sh" or block.needs or block in TUTORIAL:
            continue
        text = shorter(block.text)
        if "experiments.compile" in text and not compilers.is_dir():
            print(block.place, "is left out: make setup-targets has not run")
        elif text.strip():
            print(block.place)
            reader.types(text)
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file()
