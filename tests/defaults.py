"""What the default tests leave out: rows of tables that only `make test-all` runs, and the compiler's fusion."""

from collections.abc import Collection, Iterable

import pytest

# Options of a compiler for programs whose memory or copies are read: conftest.py turns fusion off, which users have.
FUSED: dict = {"xla_disable_hlo_passes": ""}


def slow(*case, id=None):
    """A row that is left out of the default run."""
    return pytest.param(*case, id=id, marks=pytest.mark.slow)


def fast_alone(fast: Collection, rows: Iterable) -> list:
    """All rows, those that are not among the fast ones marked as slow."""
    return [row if row in fast else slow(*(row if isinstance(row, tuple) else (row,))) for row in rows]
