"""Makes the page of every program's options, from the parsers themselves.

    python -m tools.reference > docs/programs.md

A test compares the page with this program's output.
"""

import argparse
import functools
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
INTRODUCTION = """\
<!-- Made by `python -m tools.reference > docs/programs.md`; edit the programs' parsers. -->

# Programs

Start a program as `python -m experiments.NAME`; `--help` prints its part of this page. An installed package also has
commands: `zaya-pretrain`, `zaya-prepare-data` and so on. See [exit codes](exit_codes.md), and [the config](config.md)
for the keys of `--config.KEY=VALUE`.
"""


class Option(NamedTuple):
    """An option's row."""

    name: str
    default: str
    meaning: str


class _Found(BaseException):
    """Carries a program's parser out of it, before it parses."""


def names() -> list[str]:
    """The names of all programs."""
    modules = [path.stem for path in (ROOT / "experiments").glob("[a-z]*.py")]
    packages = [path.parent.name for path in (ROOT / "experiments").glob("*/__main__.py")]
    return sorted(modules + packages)


def program(name: str) -> ModuleType:
    """A program's module; a package's is its `__main__`."""
    module = importlib.import_module(f"experiments.{name}")
    if hasattr(module, "__path__"):
        return importlib.import_module(f"experiments.{name}.__main__")
    return module


@functools.cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a program, taken where the program would parse with it."""

    def stop(parser, *_):
        raise _Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            program(name).main()
        except _Found as found:
            return found.args[0]
    raise AssertionError(f"experiments.{name} has no parser")


@functools.cache
def options() -> dict[str, dict[str, list[str]]]:
    """The names of every program's options, by subcommand; an argument without dashes is in
    capitals."""
    programs: dict[str, dict[str, list[str]]] = {}
    for name in names():
        programs[name] = {}
        for command, options in _of_parser(parser_of(name)):
            bare = [option.name.partition("=")[0].lstrip("-") for option in options]
            programs[name][command] = bare
    return programs


def page() -> str:
    """docs/programs.md."""
    parts = [INTRODUCTION]
    for name in names():
        parser = parser_of(name)
        parts.append(f"\n## {name}\n\n{_about(program(name).__doc__ or '')}")
        for command, options in _of_parser(parser):
            if command:
                parts.append(f"\n### {name} {command}\n")
            if options:
                parts.append("\n| option | default | meaning |\n|---|---|---|\n")
                parts += [
                    f"| `{o.name}` | {o.default and f'`{o.default}`'} | {o.meaning} |\n"
                    for o in options
                ]
    return "".join(parts)


def _about(doc: str) -> str:
    """A module's docstring with its commands in fences."""

    def fenced(block: re.Match) -> str:
        return f"```text\n{textwrap.dedent(block[0])}\n```"

    return re.sub(r"^    .*(?:\n+    .*)*", fenced, doc.strip(), flags=re.M) + "\n"


def _of_parser(
    parser: argparse.ArgumentParser, command: str = ""
) -> Iterator[tuple[str, list[Option]]]:
    options = list[Option]()
    below = list[tuple[str, list[Option]]]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                below += _of_parser(inner, f"{command} {name}".strip())
        elif not isinstance(action, argparse._HelpAction):
            name = max(action.option_strings, key=len, default=action.dest)
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            if action.option_strings and value and action.nargs != 0:
                name += f"={value}"
            required = "; required" if action.required and action.option_strings else ""
            options.append(
                Option(_cell(name), _default(action.default), _cell(action.help or "") + required)
            )
    if options or not below:
        yield command, options
    yield from below


def _default(value: object) -> str:
    if value is None or value is False or value == [] or value is argparse.SUPPRESS:
        return ""
    return str(value).removeprefix(f"{ROOT}/")


def _cell(text: str) -> str:
    """The text on one line, without the bar that would end a cell, or brackets that would be a
    link."""
    text = " ".join(text.split()).replace("%%", "%").replace("|", " or ").replace("<", "&lt;")
    return text.replace("[", "\\[")


if __name__ == "__main__":
    sys.stdout.write(page())
