"""Finds the commands in README.md and docs/ and checks them with the programs' own parsers.

Each code block has a language. `sh` is commands: all are parsed, and the slow tests run them. A
block that cannot run as it stands, because it has a name to fill in (DIR, ROOT) or needs a GPU or a
cluster, states its needs on the last line before it: `*Needs: ...*`. `python` must compile. `text`
is output, or a usage with options in [], whose names are checked.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools import reference
from zaya_jax.config import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS = reference.options()
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.M | re.S
)
NEEDS = re.compile(r"^\*Needs: [^*\n]+\.\*$")
BEGINS = rf"experiments\.(?!NAME\b|configs\b)|zaya-(?!NAME\b|JOBID\b)|(?=(?:{'|'.join(OPTIONS)}) )"
# `python -m experiments.plan ...`, `experiments.plan ...`, `zaya-plan ...`, `plan --search`
INLINE = re.compile(rf"`(?:\S*python -m )?(?:{BEGINS})([\w-]+)([^`]*)`")
PLACEHOLDER = re.compile(r"(?<![\w$])[A-Z][A-Z_]+(?![\w=])")
PYTHONS = ("python", "python3", ".venv/bin/python")
SCRIPTS = {"launch/slurm.sbatch": "pretrain", "launch/prepare.sbatch": "prepare_data"}
BEFORE_A_COMMAND = re.compile(r"do|then|else|done|fi|\w+=.*")  # words of loops, variables


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    place: str  # the page and its line, for a message
    language: str
    text: str
    needs: str  # the line that says so, or ""


def pages() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, page: str) -> list[Block]:
    """All code blocks of a page."""
    found = []
    for match in FENCE.finditer(text):
        before = [line for line in text[: match.start()].splitlines() if line.strip()]
        needs = before[-1].strip() if before and NEEDS.match(before[-1].strip()) else ""
        place = f"{page}:{text.count('\n', 0, match.start()) + 1}"
        found.append(Block(page, place, match["language"].strip(), match["body"], needs))
    return found


BLOCKS = [
    block
    for page in pages()
    for block in blocks(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
]


class Reader:
    """Runs the commands of a page in a folder that is like a clone."""

    def __init__(self, folder: Path):
        self._folder, self._begun = folder, time.perf_counter()
        for name in ("docs", "experiments", "launch", "tools"):
            (folder / name).symlink_to(ROOT / name)
        self.python = folder / ".venv" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        self.python.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "XLA_FLAGS": "",  # the tests ask for eight devices
        }

    def runs(self, *command: str) -> str:
        """Runs a command that must succeed; returns its output."""
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=3600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        seconds = time.perf_counter() - self._begun
        print(f"{seconds:6.0f} s after", command[-1].strip().splitlines()[0][:80])
        return done.stdout + done.stderr

    def types(self, text: str) -> str:
        """Runs a block whose commands must all succeed; returns their output."""
        return self.runs("bash", "-euo", "pipefail", "-c", text)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command: lines joined, variables and comments gone, loops opened, pipes
    cut, without the files that it reads from and writes to."""
    # a heredoc is a file
    text = re.sub(r"<<'?(\w+)'?([^\n]*)\n.*?^\1$", r"\2", text, flags=re.M | re.S)
    text = re.sub(r"\$\(\(.*?\)\)|\$\{?\w+\}?", "1", text.replace("\\\n", " "))
    text = re.sub(r"(?<= )[0-9]?[<>]+&? *[\w./]\S*", "", text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for is_between, words in itertools.groupby(lexer, lambda word: set(word) <= set("|&;")):
            command = list(itertools.dropwhile(BEFORE_A_COMMAND.fullmatch, words))
            if command and not is_between and command[0] not in ("for", "while", "if"):
                yield command


def wrong(words: list[str], needs: bool) -> str:
    """A command's mistake, or ""; with `needs`, words in capitals are names to fill in."""
    try:
        return _wrong(words, needs)
    except UserError as error:
        return str(error)


def _wrong(words: list[str], needs: bool) -> str:
    first, rest = words[0], words[1:]
    if first == "make":
        return of_make(rest, needs)
    if not needs and (found := PLACEHOLDER.search(" ".join(words))):
        return f"{found[0]} is for the reader to put in: say so before the block, *Needs: ...*"
    if first in PYTHONS and rest[:1] == ["-m"]:
        return of_module(rest[1], rest[2:], needs)
    if first.startswith("zaya-"):
        return of_program(first.removeprefix("zaya-").replace("-", "_"), rest, needs)
    if first in (*PYTHONS, "sbatch", "kubectl"):
        first, *rest = rest[next(i for i, word in enumerate(rest) if "/" in word) :]
    if first in SCRIPTS:
        return of_program(SCRIPTS[first], rest, needs)
    ours = first.startswith(("tools/", "launch/", "./"))
    return f"{first} is no file" if ours and not (ROOT / first).is_file() else ""


def of_module(name: str, args: list[str], needs: bool) -> str:
    """Of `python -m NAME`."""
    if name.startswith("experiments."):
        return of_program(name.removeprefix("experiments."), args, needs)
    if name.split(".")[0] not in ("benchmarks", "tools", "zaya_jax"):
        return ""
    path = ROOT / name.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return f"{name} is no module"
    text, given = path.read_text("utf-8"), re.findall(r"--[\w-]+", " ".join(args))
    text += '"--config"' if "add_config(" in text else ""
    return " ".join(f"{name} has no {option}" for option in given if f'"{option}"' not in text)


def of_make(args: list[str], needs: bool) -> str:
    """Of make: its targets, and the program that receives ARGS."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    given = dict(arg.split("=", 1) for arg in args if "=" in arg)
    names = [arg for arg in args if "=" not in arg]
    if "pretrain" in names:
        return of_program("pretrain", shlex.split(given.get("ARGS", "")), needs)
    return " ".join(f"make has no target {name}" for name in names if name not in targets)


def of_program(name: str, args: list[str], needs: bool) -> str:
    """The fault of a command of experiments/, whose own parser reads the arguments, values and
    all."""
    if name not in OPTIONS:
        return f"experiments.{name} is no program; there are {', '.join(sorted(OPTIONS))}"
    if {"--help", "-h"} & set(args):
        return ""
    if name == "supervise" and "--" in args:
        cut = args.index("--")
        return of_program(name, args[:cut], needs) or of_program("pretrain", args[cut + 1 :], needs)
    if needs:
        args = [re.sub(r"=N$", "=1", arg) for arg in args]
    if "config" in OPTIONS[name].get("", ()):
        given = next((arg for arg in args if arg.startswith("--config=")), "")
        file, _, run = given.removeprefix("--config=").partition(":")
        # A run that is not here, and a file of the reader's, are read as the default: the keys are
        # the same.
        default = run or (needs and not (ROOT / file).is_file())
        own = [] if default or not given else [f"--config={ROOT / file}"]
        args = own + [arg for arg in args if arg != given]
    reference.parser_of(name).parse_args(args)
    return ""
