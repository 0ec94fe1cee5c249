"""benchmarks.kernels compares before it times."""

import dataclasses
import json

import jax.numpy as jnp

from benchmarks import cases, kernels
from pallas_kernels.chip import Chip

HERE = Chip("cpu", "gfx942")


def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path):
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
    assert not any(row.is_fault for row in rows.values())
    for name in ("half", "none"):
        assert dataclasses.replace(rows[name], implementation="ours").is_fault
    about = {"device": "cpu", "jax": "0", "date": "", "note": "", "product": 1.0, "copy": 1.0}
    kernels.write(tmp_path, about, [*rows.values()])
    written = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert {row["implementation"]: row for row in written}["none"]["error"] is None
