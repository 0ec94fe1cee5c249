"""experiments.plan as a person runs it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.configs import zaya1_base
from zaya_jax import config as config_lib
from zaya_jax.config import UserError
from zaya_jax.hardware import clusters
from zaya_jax.plan import phases as planned_phases
from zaya_jax.plan import rates

ROOT = Path(__file__).resolve().parents[2]


def plan(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.plan", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_plan_is_written_as_text_numbers_and_page(tmp_path):
    done = plan(
        "--devices=16", "--at_once=1", f"--out={tmp_path}", "--config.model.num_hidden_layers=2"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [p["name"] for p in found["phases"]] == ["pretrain 1", "pretrain 2", "midtrain", "sft"]
    for p in found["phases"]:
        assert sum(p["step"]["by_scope"].values()) == pytest.approx(p["step"]["seconds"])
        assert sum(p["memory"]["at_peak"].values()) == pytest.approx(p["memory"]["peak"])
        seconds = p["steps"] * p["step"]["seconds"]
        ramp = 0.05 if p["name"] == "pretrain 1" else 1e-9  # whose steps are shorter
        assert p["days"] == pytest.approx(seconds / 86_400 / p["saving"]["goodput"], rel=ramp)
        assert p["gpu_hours"] == pytest.approx(p["days"] * 24 * 16)
    text, page = (tmp_path / "plan.md").read_text(), (tmp_path / "plan.html").read_text()
    assert "Where the step goes" in text and text in done.stdout
    assert "What is assumed" in page and "Memory where it is highest" in page


def phases(devices: int, at_once: int = 0, **changes):
    config = dataclasses.replace(config_lib.check(zaya1_base.get_config()), **changes)
    cluster = clusters.CLUSTERS["mi300x_pollara"]
    return planned_phases.plan_run(config, devices, cluster, rates.for_cluster(cluster), at_once)


def test_a_run_without_a_plannable_phase_is_refused_in_one_line():
    with pytest.raises(UserError, match="give --at_once=N") as error:
        phases(24)
    assert "\n" not in str(error.value)


def test_a_phase_for_more_devices_is_a_note():
    found, notes = phases(1, at_once=4)
    assert [p.name for p in found] == ["pretrain 1", "pretrain 2"]
    assert len(notes) == 2 and "phases[2].mesh" in notes[0]


def test_a_config_without_own_kernels_is_a_note():
    _, notes = phases(1024, kernels=("none",))
    assert len(notes) == 1 and "--config.kernels=none" in notes[0]
