"""The fixture of the report's tests."""

import pytest
from made_run import write_run


@pytest.fixture
def make_run(tmp_path):
    """`write_run` into this test's own folder."""
    return lambda steps, **options: write_run(tmp_path / "run", steps, **options)
