"""Runs that tests start in this process trace each program once."""

import json

import pytest
import tiny_runs
from traced_once import traced_once

from tools import faults

__all__ = ["traced_once"]


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Asks for faults, and gives their hooks."""

    def ask(*wanted):
        path = tmp_path / "faults.json"
        path.write_text(json.dumps(wanted))
        monkeypatch.setenv(faults.VARIABLE, str(path))
        return faults.requested()

    return ask


@pytest.fixture
def run(tmp_path, faulty):
    """Runs the program in this process on as many devices as mesh.data says, with these faults."""
    corpus = tiny_runs.write_corpus(tmp_path / "corpus", 60)

    def call(workdir, bad=(), **keys):
        keys = tiny_runs.GUARDED | {"data.path": corpus} | keys
        devices = keys.get("mesh__data", 1)
        return tiny_runs.train(tmp_path / workdir, devices, faulty(*bad), **keys)

    return call
