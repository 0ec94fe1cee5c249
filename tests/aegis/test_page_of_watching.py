"""docs/watching.md is what the rules, limits and metrics are."""

from pathlib import Path

from zaya_jax.aegis import accounts, page, rules
from zaya_jax.aegis.limits import LIMITS
from zaya_jax.aegis.prometheus import TABLE

PAGE = Path(page.__file__).parents[2] / "docs" / "watching.md"


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text() == page.page(), "python -m zaya_jax.aegis.page > docs/watching.md"


def test_everything_stands_on_it():
    text = PAGE.read_text()
    names = {rule.name for kind in rules.KINDS for rule in rules.load(kind)} | {
        limit.name for limit in LIMITS
    }
    assert all(f"| {name} |" in text for name in names)
    assert all(f"`{row.name}`" in text for row in TABLE)
    assert page.MEANINGS.keys() == set(accounts.USES)
