"""Runs that tests start in this process trace each program once."""

import json

import pytest
import tiny_runs
from traced_once import traced_once

from tools import faults

__all__ = ["traced_once"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program in this process on as many devices as mesh.data says, with faults; without:
    `bad=None`."""
    corpus = tiny_runs.write_corpus(tmp_path / "corpus", 60)

    def call(workdir, bad=None, **keys):
        if bad is not None:
            (tmp_path / "faults.json").write_text(json.dumps(bad))
            monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults.json"))
        keys = tiny_runs.GUARDED | {"data.path": corpus} | keys
        return tiny_runs.train(
            tmp_path / workdir, keys.get("mesh__data", 1), faults.requested(), **keys
        )

    return call
