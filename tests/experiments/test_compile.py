"""experiments.compile: it compiles pretrain's own step, and its figures add up."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from refusals import check_refused

from experiments.compile import page
from pallas_kernels import chip
from zaya_jax import config, schedule
from zaya_jax.compiled import measure
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

CONFIG = """
from zaya_jax import config

def get_config():
    c = config.default()
    c.name = "small"
    c.model.update(dict(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        moe_intermediate_size=16, num_experts=4, router_hidden_size=8, max_position_embeddings=64,
    ))
    c.data.seq_len = 32
    c.schedule.phases = (
        config.Phase(name="one", tokens=10_000, global_batch=4, micro_batch=2),
        config.Phase(name="two", tokens=10_000, global_batch=4, micro_batch=2, packing="best_fit"),
    )
    return c
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A config file of two phases, of one program."""
    file = tmp_path_factory.mktemp("compile") / "small.py"
    file.write_text(CONFIG)
    return file


def run(*options):
    command = [sys.executable, "-m", "experiments.compile", *map(str, options)]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_it_says_which_kernels_and_tiles_the_program_has():
    """Of a chip that is not here, and of the CPU, which has its own algorithms."""
    mi300x, cpu = types.SimpleNamespace(platform="rocm", device_kind="gfx942"), jax.devices()[0]
    given = config.check(config.default())
    every = f"kernels: ours for {', '.join(chip.OPERATORS)}, otherwise XLA's; tiles: 21 modelled"
    assert page._kernels(given, mi300x) == every
    assert page._kernels(given, cpu) == "kernels: a CPU's own algorithms"
    one, none = (dataclasses.replace(given, kernels=(name,)) for name in ("cca_mix", "none"))
    assert page._kernels(one, mi300x).endswith("otherwise XLA's; tiles: 4 modelled")
    assert page._kernels(none, mi300x) == "kernels: ours for nothing, otherwise XLA's"


def test_phases_of_one_name_are_all_compiled():
    phases = tuple(config.Phase(name=name, tokens=2**34, seq_len=4096) for name in "aba")
    given = config.Config(schedule=config.Schedule(phases=phases))
    for name, expected in ((None, [0, 1, 2]), ("a", [0, 2])):
        assert [segment.phase_index for segment in page._segments(given, name)] == expected
    check_refused("not a phase of .*; it has 'a', 'b', 'a'", page._segments, given, "c")


def test_it_compiles_the_step_that_pretrain_runs(small):
    """The program for arrays as `pretrain` has them is the one for their shapes, to the letter."""
    whole = config.read_config(str(small))
    segment = schedule.make_plan(whole).segments[0]
    phase = schedule.phase_config(whole, segment.phase)
    mesh = make_mesh(config.Mesh(), jax.devices()[:2])
    setup = states.set_up(phase, mesh)
    rows = dict.fromkeys(
        ("tokens", "targets", "segment_ids", "positions"), np.zeros((4, 32), np.int32)
    )
    batch = steps.put_batch(
        mesh, {**rows, "loss_mask": np.ones((4, 32), np.float32)}, segment.micro_batches
    )
    step = steps.make_train_step(phase, setup)
    theirs = step.lower(states.init(phase, setup), batch, np.float32(1e-3))
    ours = measure.lower(phase, setup, segment.sequences, segment.micro_batches)
    assert ours.as_text() == theirs.as_text()


@pytest.mark.slow
def test_what_it_writes_adds_up(small, tmp_path):
    out, unused = tmp_path / "out", "--config.run.beta=0.3"
    done = run(f"--config={small}", "--target=cpu", "--devices=2", f"--out={out}", unused)
    assert done.returncode == 0, done.stderr
    assert "config.run.beta=0.3 has no effect: run.preference is none" in done.stdout
    assert "two: the same program as 'one'" in done.stdout
    one, two = json.loads((out / "compile.json").read_text())["phases"]
    assert (one["sequences"], one["micro_batches"], one["tokens_per_device"]) == (4, 2, 64)
    assert two == {**one, "phase": "two", "same_as": "one"}
    memory, traffic = one["memory"], one["traffic"]
    kinds = ("weights", "optimizer", "batch and figures", "gradients", "activations", "exchange")
    assert sum(memory[kind] for kind in (*kinds, "other temporaries", "gaps")) == memory["peak"]
    sums = [sum(row[name] for row in traffic) for name in ("launches", "flops", "reads", "writes")]
    whole = [one["launches"], one["flops"], one["hbm_bytes"]]
    assert [*sums[:2], sums[2] + sums[3]] == pytest.approx(whole)
    assert all(0 <= row["flops_of_use"] <= row["flops"] for row in traffic)
    assert {"cca", "router", "experts", "head", "optimizer"} <= {row["scope"] for row in traffic}
    assert any(c["kind"] == "reduce-scatter" for c in one["collectives"])
    html = (out / "compile.html").read_text()
    assert "Memory where it is highest" in html and html.count("<section>") == 2
    assert (out / "compile.md").read_text().count("## ") >= 2


def test_what_cannot_be_is_told_before_anything_is_compiled(small, tmp_path):
    out = tmp_path / "out"
    done = run(f"--config={small}", "--target=cpu", "--devices=8", f"--out={out}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not out.exists()
    assert "a micro-batch of 2 sequences" in done.stderr and "or give --at_once=N" in done.stderr
