"""Finds the commands in README.md and docs/ and checks them with the programs' own parsers.

Each code block has a language. `sh` is commands: all are parsed, and the slow tests run them. A
block that cannot run as it stands, because it has a name to fill in (DIR, ROOT) or needs a GPU or a
cluster, states its needs on the last line before it: `*Needs: ...*`. `python` must compile. `text`
is output, or a usage with options in [], whose names are checked.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
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
# Programs of the system, whose options are their own.
PLAIN = {
    "cat",
    "cd",
    "cp",
    "curl",
    "cut",
    "docker",
    "export",
    "git",
    "head",
    "hf",
    "kubectl",
    "ls",
    "mkdir",
    "open",
    "pip",
    "rm",
    "source",
    "tail",
    "transformers",
}
SCRIPTS = {"launch/slurm.sbatch": "pretrain", "launch/prepare.sbatch": "prepare_data"}
WORDS_OF_LOOPS = {"do", "then", "else", "done", "fi"}


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str
    needs: str  # the line that says so, or ""

    @property
    def place(self) -> str:
        """Where it is, for a message."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, page: str) -> list[Block]:
    """All code blocks of a page."""
    found = []
    for match in FENCE.finditer(text):
        before = [line for line in text[: match.start()].splitlines() if line.strip()]
        needs = before[-1].strip() if before and NEEDS.match(before[-1].strip()) else ""
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match["language"].strip(), match["body"], needs))
    return found


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
    cut."""
    # a heredoc is a file
    text = re.sub(r"<<'?(\w+)'?([^\n]*)\n.*?^\1$", r"\2", text, flags=re.M | re.S)
    text = re.sub(r"\$\(\(.*?\)\)|\$\{?\w+\}?", "1", text.replace("\\\n", " "))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                words = without_redirections(words)
                while words and (words[0] in WORDS_OF_LOOPS or re.match(r"\w+=", words[0])):
                    words = words[1:]
                if words and words[0] not in ("for", "while", "if"):
                    yield words
                words = []
            else:
                words.append(word)


def without_redirections(words: list[str]) -> list[str]:
    """A command without the files that it reads from and writes to."""
    kept, skip = [], False
    for word in words:
        if skip or set(word) <= set("<>"):
            skip = not skip and set(word) <= set("<>")
            continue
        kept.append(word)
    return kept


def wrong(words: list[str], needs: bool) -> str:
    """A command's mistake, or ""; with `needs`, words in capitals are names to fill in."""
    try:
        return _wrong(words, needs)
    except UserError as error:
        return str(error)


def _wrong(words: list[str], needs: bool) -> str:
    first, rest = words[0], words[1:]
    if not needs and first != "make":
        found = next((m[0] for word in words for m in [PLACEHOLDER.search(word)] if m), "")
        if found:
            return (
                f"{found} is for the reader to put in: say so in a line before the block, *Needs:"
                " ...*"
            )
    if first in PYTHONS:
        if rest[:1] == ["-m"] and len(rest) > 1:
            return of_module(rest[1], rest[2:], needs)
        return "" if rest and (ROOT / rest[0]).is_file() else f"{' '.join(words)}: no such script"
    if first.startswith("zaya-"):
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        if first not in scripts:
            return f"{first} is no command of pyproject.toml"
        return of_program(first.removeprefix("zaya-").replace("-", "_"), rest, needs)
    if first == "make":
        return of_make(rest, needs)
    if first in ("sbatch", "kubectl"):
        if not needs:
            return f"{first} needs a cluster: say so in a line before the block, *Needs: ...*"
        script = next((i for i, word in enumerate(rest) if word.startswith("launch/")), None)
        if script is None or not (ROOT / rest[script]).is_file():
            return f"{first} is given no file of launch/"
        return (
            of_program(SCRIPTS[rest[script]], rest[script + 1 :], needs)
            if first == "sbatch"
            else ""
        )
    if first.startswith(("tools/", "launch/", "./")):
        return "" if (ROOT / first).is_file() else f"{first} is no file"
    return "" if first in PLAIN else f"{first} is no program that the documentation knows"


def of_module(name: str, args: list[str], needs: bool) -> str:
    """Of `python -m NAME`."""
    if name.startswith("experiments."):
        return of_program(name.removeprefix("experiments."), args, needs)
    path = ROOT / (name.replace(".", "/") + ".py")
    if path.with_suffix("").is_dir():
        path = path.with_suffix("") / "__main__.py"
    if name.split(".")[0] in ("benchmarks", "tools", "zaya_jax"):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        given = [arg.split("=")[0] for arg in args if arg.startswith("--")]
        unknown = [a for a in given if f'"{a}"' not in text]
        return f"{name} has no {unknown[0]}" if unknown else "" if text else f"{name} is no module"
    known = ("http.server", "mkdocs", "pip", "pytest", "venv")
    return "" if name in known else f"{name} is no module that is known"


def of_make(args: list[str], needs: bool) -> str:
    """Commands of make: its targets, their arguments, and the programs that receive these."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    given = dict(arg.split("=", 1) for arg in args if "=" in arg)
    names = [arg for arg in args if "=" not in arg]
    for name in names:
        if name not in targets:
            return f"make has no target {name}"
    for name in given:
        if name not in ("ARGS", "EXTRAS", "PYTHON", "T"):
            return f"make is given {name}; it knows ARGS, EXTRAS, PYTHON and T"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in filter(None, given.get("EXTRAS", "").split(",")):
        if extra not in extras:
            return f"{extra} is no extra of pyproject.toml"
        if extra in ("cuda", "rocm") and not needs:
            return f"EXTRAS={extra} needs a GPU: say so in a line before the block, *Needs: ...*"
    if names == ["pretrain"]:
        return wrong(
            ["python", "-m", "experiments.pretrain", *shlex.split(given.get("ARGS", ""))], needs
        )
    return ""


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
        if "zaya1_" in file and name == "pretrain" and "--describe" not in args and not needs:
            return f"{file} trains on GPUs alone: say so in a line before the block, *Needs: ...*"
        # A run that is not here, and a file of the reader's, are read as the default: the keys are
        # the same.
        default = run or (needs and not (ROOT / file).is_file())
        own = [] if default or not given else [f"--config={ROOT / file}"]
        args = own + [arg for arg in args if arg != given]
    parser(name).parse_args(args)
    return ""


@functools.cache
def parser(name: str):
    """A program's parser."""
    return reference.parser_of(name)
