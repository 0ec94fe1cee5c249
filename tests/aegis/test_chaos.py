"""A run that is hurt on purpose: each fault is found and rightly named, and the bits are those of a run left alone."""

import pytest

from tools import chaos


@pytest.mark.slow
def test_everything_at_once(tmp_path, capsys):
    found = chaos.Chaos(tmp_path / "chaos", 1, print)
    assert found.run(10) == 75, capsys.readouterr().out
    assert found.same_bits()[0] and found.well(), found.table()
