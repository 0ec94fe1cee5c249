"""Sizing from the command line: a process of its own, which finds the corpus in no cache."""

import json
import subprocess
import sys

import pytest

from zaya_jax.text import shard_format


@pytest.mark.slow
def test_storage_is_sized_by_a_prepared_directory(tmp_path, prepare_text):
    data = prepare_text("web", 6000, bundle_bytes=65536, longest=3000, shards=1)
    (tmp_path / "s").mkdir()
    before, old = tmp_path / "s" / "storage.json", tmp_path / "old.json"
    before.write_text("before")
    old.hardlink_to(before)  # a file that is written in place changes under its other name too
    command = [
        sys.executable,
        "-m",
        "experiments.characterize",
        "storage",
        f"--data={data}",
        f"--out={tmp_path / 's'}",
        "--iops_budget=70000",
        "--seconds=0.3",
        "--rows=2",
        "--seq_len=512",
    ]
    sized = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert sized.returncode == 0, sized.stderr
    assert "break-even" in sized.stdout and "70,000" in sized.stdout
    assert "Page reads a second by step time" in (tmp_path / "s" / "storage.html").read_text()
    figures = json.loads((tmp_path / "s" / "storage.json").read_text())
    cold, warm = figures["readings"]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    # Of a short time many bundles are read that the next rows would have shared: only what was
    # counted can be held.
    asked = (cold["bytes_read"] / shard_format.PAGE_BYTES + cold["reads"]) / (
        cold["bytes_ideal"] / shard_format.PAGE_BYTES
    )
    factor = json.loads((data / "manifest.json").read_text())["storage_factor"]
    assert 1 < factor < 1.2 and figures["need"]["sigma"] == pytest.approx(max(asked, factor))
    assert old.read_text() == "before"  # a kill finds the old file or the new one
