"""Rows of a table of cases that only `make test-all` runs."""

from collections.abc import Collection, Iterable

import pytest


def slow(*case, id=None):
    """A row that is left out of the default run."""
    return pytest.param(*case, id=id, marks=pytest.mark.slow)


def fast_alone(fast: Collection, rows: Iterable) -> list:
    """All rows, those that are not among the fast ones marked as slow."""
    return [
        row if row in fast else slow(*(row if isinstance(row, tuple) else (row,))) for row in rows
    ]
