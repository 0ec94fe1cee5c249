"""Every program says what it is for and what its options are; the page of the config's keys is what they are."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from test_architecture import OPTIONS

from zaya_jax import config
from zaya_jax.config import page

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_keys_is_as_it_is_made():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == page.page(), "python -m zaya_jax.config.page > docs/config.md"


def test_page_and_help_have_every_key():
    for key in config.all_keys():
        assert f"| `{key}` |" in page.page()
        assert f"  {key}=" in page.listing()
    assert "schedule.phases[i].tokens" in page.page()


SOME = ("pretrain", "evaluate", "characterize")  # of those with flags, with options, with commands


@pytest.mark.parametrize(
    "programs", [SOME, pytest.param(tuple(OPTIONS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_programs_help(programs):
    commands = [(name, command) for name in programs for command in OPTIONS[name]]
    some = ("inspect", "to_hf", "collectives", "")  # of those that share a parser
    commands = [c for c in commands if c[0] not in ("checkpoint", "characterize") or c[1] in some]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"experiments.{name}", *filter(None, [command, option])],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for (name, command), option in zip(commands, itertools.cycle(("--help", "-h", "--helpfull")), strict=False)
    ]  # fmt: skip
    said = [(process.communicate(timeout=120), process.returncode) for process in started]
    for (name, command), ((out, err), code) in zip(commands, said, strict=True):
        assert (code, err) == (0, ""), name
        expected = [option if option.isupper() else f"--{option}" for option in OPTIONS[name][command]]
        assert all(option in out for option in expected), (name, out)
        assert ("optim.lr=0.001" in out) == (name in ("pretrain", "compile", "plan"))
