"""benchmarks.kernels on a CPU: it runs, compares before it times, and says that its figures are of
this host."""

import json

import jax.numpy as jnp
import pytest

from benchmarks import cases, kernels
from pallas_kernels.chip import Chip

HERE = Chip("cpu", "gfx942")


def run(out, operator):
    assert kernels.main(["--out", str(out), "--seconds", "1e-3", "--operators", operator]) == 0
    found = json.loads((out / "kernels.json").read_text())
    return found, {(r["label"], r["direction"], r["implementation"]): r for r in found["rows"]}


@pytest.mark.slow
def test_rows_have_times_rates_and_errors(tmp_path):
    found, of = run(tmp_path, "residual_norm")
    assert (
        found["of_host"]
        and found["platform"] == "cpu"
        and found["product"] > 0
        and found["copy"] > 0
    )
    assert "of no GPU" in (tmp_path / "kernels.md").read_text()
    for name in ("ours", "XLA"):
        row = of["attention's norm", "forward", name]
        assert row["low"] <= row["seconds"] <= row["high"] and row["samples"] >= 5
        assert (
            row["rate"] == pytest.approx(row["bytes"] / row["seconds"]) and 0 < row["error"] < 0.1
        )


def test_what_is_wrong_is_not_timed(monkeypatch):
    others = {
        "half": lambda dtype: lambda h, scale: (0.5 * (h * scale).astype(dtype), h),
        "none": lambda dtype: lambda h, scale: jnp.zeros(3) + h,
    }
    monkeypatch.setattr(kernels, "rivals", lambda *_: others)
    case = cases.of_operator("residual_norm")[-1]
    rows = {row.implementation: row for row in kernels.measure(case, cases.SMALL, HERE, 1e-3)}
    assert rows["half"].seconds is None and "not timed" in rows["half"].note
    assert rows["none"].seconds is None and rows["none"].note.startswith("failed: ")
    assert rows["ours"].seconds and rows["XLA"].seconds
