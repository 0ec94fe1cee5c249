"""Every program describes its purpose and options; the page of the config's keys agrees with
them."""

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_no_program_imports_jax_to_print_its_help():
    code = (
        "import sys; from tools import reference as r; [r.parser_of(name).format_help() for name in"
        " r.names()]; "
    )
    subprocess.run(
        [sys.executable, "-c", code + "assert 'jax' not in sys.modules"],
        cwd=ROOT,
        check=True,
        timeout=60,
    )


def test_options_are_whole_words_with_underscores():
    names = {
        name for own in reference.options().values() for options in own.values() for name in options
    }
    assert not [name for name in names if "-" in name]


@pytest.mark.parametrize("name", ["pretrain", "compile", "plan"])
def test_the_help_of_a_program_with_a_config_has_its_keys(name):
    assert "optim.lr=0.001" in reference.parser_of(name).format_help()
