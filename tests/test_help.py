"""Every program says what it is for and what its options are; the page of the config's keys is what they are."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from test_architecture import OPTIONS

from tools import config_page, reference
from zaya_jax import config
from zaya_jax.config import page

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_keys_is_as_it_is_made():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_page.page(), "python -m tools.config_page > docs/config.md"


def test_page_and_help_have_every_key():
    for key in config.all_keys():
        assert f"| `{key}` |" in config_page.page()
        assert f"  {key}=" in page.listing()
    assert "schedule.phases[i].tokens" in config_page.page()


def below(parser, command=""):
    """{command: parser} of a program."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found = {} if inner and not OPTIONS[parser.prog.split(".")[-1]].get("") else {command: parser}
    return found | {name: x for action in inner for name, x in action.choices.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_program_s_help_has_its_options(name):
    parsers = below(reference.parser_of(name))
    for command, options in OPTIONS[name].items():
        said = parsers[command].format_help()
        assert all((o if o.isupper() else f"--{o}") in said for o in options), (name, said)
        assert ("optim.lr=0.001" in said) == (name in ("pretrain", "compile", "plan"))


def test_a_program_says_its_help():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plan", "-h"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "") and "--mtbf_hours H" in done.stdout
