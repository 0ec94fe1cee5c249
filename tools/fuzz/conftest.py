"""The search for inputs that break a program's promises: generated options, config keys and damaged
files.

    python -m pytest tools/fuzz                      about half an hour; an example that fails is printed, with its seed
    EXAMPLES=100 python -m pytest tools/fuzz         as many examples of each search

It is run by hand, before a release or after a change to how programs read their input. Its finds
are mended, and kept as a row of tests/fuzz/test_found.py, which every test run tries.
"""

import runpy
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2] / "tests"
runpy.run_path(str(TESTS / "conftest.py"))  # the environment of the tests: eight devices of a CPU


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of golden cases."""
    return TESTS / "golden"
