"""Runs the commands of README.md and docs/, page by page in one folder; the tutorial has its own
test.

Long runs are shortened. Blocks that state needs, and set-up commands, are skipped.
"""

import functools
import re

import commands
import pytest

STEPS = {
    "runs/wider": 12,
    "runs/spread": 4,
    "runs/four": 6,
    "runs/eight_devices": 4,
    "runs/long": 3,
}
SETS_UP = re.compile(r"^ *make (?:test|setup\S*)\b.*$", re.M)


def shorter(text: str) -> str:
    """A block's commands without set-up, and with fewer steps of long runs."""
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
