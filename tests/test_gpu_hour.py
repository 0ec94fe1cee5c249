"""A GPU's hour goes on past what fails, says what was left out, and accounts for the time."""

import itertools
import json
import sys

import pytest

from benchmarks import gpu, gpu_step, jax_triton_down
from pallas_kernels.chip import Chip, making
from pallas_kernels.tiles import ProductTile
from zaya_jax.compiled.launches import GpuKernel


def kernel(name, op, op_name, flops, moved):
    return GpuKernel(name, op, op_name, 1.0, moved, 0, flops, False, None)


def test_a_trace_is_accounted_for_by_scope_and_by_kernel():
    ours = kernel("call.1", "custom-call", "jit(step)/experts/flops=8e9/down", 8e9, 4_000_000)
    add = kernel("fusion.2", "fusion", "jit(step)/transpose(jvp())/head/add", 0.0, 2000)
    events = [
        gpu_step.Event("down", "call.1", 0.0, 4e4),
        gpu_step.Event("down", "call.1", 1e5, 4e4),
        gpu_step.Event("loop_add", "fusion.2", 5e4, 2e3),
        gpu_step.Event("MemcpyD2D", "?", 182e3, 18e3),
    ]
    down = "0.040 ms, 80.0%, 1 times, mean 40.0 µs, 200.0 TFLOP/s, 100 GB/s"
    added = "0.001 ms, 2.0%, 0.5 times, mean 2.0 µs, 1 GB/s"
    copied = "0.009 ms, 18.0%, 0.5 times, mean 18.0 µs"
    assert gpu_step.account(events, {"call.1": ours, "fusion.2": add}) == {
        "wall of a step, traced": "0.100 ms",  # of two steps
        "sum of kernels": "0.050 ms",
        "gaps, the wall less the sum": "0.050 ms",
        "kernels under 3 µs": "0.001 ms, 0.5 of 2",
        "scope experts forward": down,
        "scope head backward": added,
        "scope unknown": copied,
        "ours down": down,
        "kernel loop_add": added,
        "kernel MemcpyD2D": copied,
    }


@pytest.fixture
def programs(monkeypatch):
    """Programs that are one line of Python, in the place of `python -m`."""
    monkeypatch.setattr(gpu, "PYTHON", (sys.executable, "-c"))
    monkeypatch.setattr(gpu, "TINY", {"print(6*7)": "", "1/0": "", "open(0).read()": None})
    monkeypatch.setattr(gpu, "here", lambda: ("one card", False))


def test_the_next_part_begins_whatever_became_of_one(programs, tmp_path):
    endless = "print(7,flush=True)or(__import__('time').sleep(60))"
    gpu.TINY[endless] = ""
    parts = {
        "wrong": (9, "1/0", {}),
        "endless": (1.0, endless, {}),
        "right": (9, "print(6*7)", {}),
        "of a GPU": (9, "open(0).read()", {}),
        "beside": (9, "print(6*7) {torch}", {}),
    }
    assert gpu.run_all(parts, tmp_path, tmp_path, tiny=True, torch="") == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    for name in parts:
        del found[name]["seconds"]
    assert found == {
        "device": "one card",
        "wrong": {"fault": "ZeroDivisionError: division by zero"},
        "endless": {"text": "7", "fault": "did not end within 1 s"},
        "right": {"text": "42"},
        "of a GPU": {"skipped": "it needs a GPU"},
        "beside": {"skipped": "no torch here"},
    }
    assert list(found)[1:] == list(parts)
    assert "division by zero" in (tmp_path / "gpu.md").read_text()
    assert gpu.run_all(parts, tmp_path, tmp_path, seconds=0, torch="x") == 0
    assert (tmp_path / "gpu.md").read_text().count("no time was left") == len(parts)


def test_every_part_of_every_hour_has_a_tiny_size():
    parts = [*itertools.chain(*(hour.values() for hour in gpu.HOURS.values()))]
    assert {words.split()[0] for _, words, _ in parts} == gpu.TINY.keys()
    assert min(seconds for seconds, *_ in parts) > 0


@pytest.mark.parametrize("ordered", [False, True])
def test_the_down_product_beside_jax_triton_is_that_of_the_definition(ordered):
    given = jax_triton_down.arguments(200, 64, 5, 3, ordered)
    with making(Chip("cpu", "sm_90")):
        out = jax_triton_down.by_pallas(ProductTile(32, 32, 16, 4, 2), *given)
    assert 0 < jax_triton_down.error(out, *given) < jax_triton_down.MOST
    assert jax_triton_down.error(out[::-1], *given) > 1
