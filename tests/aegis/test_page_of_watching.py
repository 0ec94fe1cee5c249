"""docs/watching.md is what the rules and limits are."""

from pathlib import Path

from tools import watching_page
from zaya_jax.aegis import accounts

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text() == watching_page.page(), "python -m tools.watching_page > docs/watching.md"
    assert watching_page.MEANINGS.keys() == set(accounts.USES)
