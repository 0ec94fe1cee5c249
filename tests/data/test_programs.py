"""The data programs from the command line, and worker processes: what only a process of its own shows."""

import json
import subprocess
import sys

import pytest


def run(*arguments):
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " + "word " * (i * 37 % 600)}) + "\n" for i in range(6000)))
    return path


@pytest.mark.slow
def test_prepare_verify_and_size(tmp_path, source):
    out = tmp_path / "out"
    made = run("experiments.prepare_data", f"--input={source}", f"--out={out}", "--processes=2")
    assert made.returncode == 0, made.stderr
    totals = json.loads((out / "manifest.json").read_text())["totals"]
    assert sum(t["documents"] for t in totals.values()) == 6000
    again = run("experiments.prepare_data", f"--input={source}", f"--out={out}")
    assert again.returncode == 0 and "complete already" in again.stdout
    (tmp_path / "s").mkdir()
    before, old = tmp_path / "s" / "storage.json", tmp_path / "old.json"
    before.write_text("before")
    old.hardlink_to(before)  # a file that is written in place changes under its other name too
    sized = run(
        "experiments.characterize", "storage", f"--data={out}", f"--out={tmp_path / 's'}", "--iops_budget=70000",
        "--seconds=0.3", "--rows=2", "--seq_len=512",
    )  # fmt: skip
    assert sized.returncode == 0, sized.stderr
    assert "break-even" in sized.stdout and "70,000" in sized.stdout
    assert "Page reads a second by step time" in (tmp_path / "s" / "storage.html").read_text()
    figures = json.loads((tmp_path / "s" / "storage.json").read_text())
    assert [r["cache"] for r in figures["readings"]] == ["cold", "warm"]
    assert 1 < figures["need"]["sigma"] < 1.2
    assert old.read_text() == "before"  # a kill finds the old file or the new one
