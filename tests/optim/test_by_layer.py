"""Gradients that are reduced as they leave their layer: the same sums at the same owners, and no
stack of them all."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import mesh_helpers
import numpy as np
import optim_helpers
import pytest
from jax.sharding import PartitionSpec
from measured_figures import FAST, SLOW
from meshes import mesh_of
from rows import slow

from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.config import Optim
from zaya_jax.hardware import measured, sizing
from zaya_jax.optim import chain
from zaya_jax.optim.zero import by_layer, matrices
from zaya_jax.parallel.mesh import devices_of_node, make_mesh
from zaya_jax.training import state as states
from zaya_jax.training import step as steps


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(by_layer, "MIN_LAYER_SIZE", 0)
    monkeypatch.setattr(matrices, "SMALL", 0)
    for module in (by_layer, matrices):
        monkeypatch.setattr(module, "WASTE", 1.0)


@pytest.mark.parametrize(
    ("axes", "node", "layers", "experts"),
    [
        (dict(data=8), 1, 5, 4),  # more devices than a layer has matrices, 20 in all
        (dict(data=2, context=2), 1, 3, 8),  # fewer
        (dict(data=8), 4, 3, 1),  # owners of one or none
        (dict(data=7), 1, 5, 4),  # pieces with padding, four a device
        (dict(data=3, context=2), 3, 3, 4),  # each matrix in three, two a device
        slow(dict(data=3), 3, 3, 8),
        slow(dict(data=5), 1, 2, 8),
        slow(dict(data=7), 1, 4, 8),  # the last device's last piece is padding
        slow(dict(data=4, expert=2), 2, 7, 8),
        slow(dict(data=2), 1, 9, 2),
        slow(dict(data=4), 2, 1, 16),
    ],
)
def test_every_owner_gets_the_sum_of_its_matrices(axes, node, layers, experts):
    """Whole numbers, so that sums are exact in any order, in one level or two; the program has them
    in its loop."""
    like = optim_helpers.shapes(L=layers, E=experts, F=24)
    layout = chain.build(
        Optim(), optim_helpers.FLOAT32, like, axes=axes, node=node, two_levels_under=2**60
    ).layout
    rng, devices = np.random.default_rng(0), math.prod(axes.values())
    gradients = {
        f"layers/experts/{name}": rng.integers(-9, 9, (devices, *x.shape)).astype(np.float32)
        for name, x in like["layers"]["experts"].items()
    }

    def body(gradients):
        both = []
        for path, parts in gradients.items():
            way = layout.by_layer[path]
            shares = jax.lax.map(way.share_of_layer, parts[0])
            assert shares.shape == way.shape
            whole = way.bucket.reduce({path: parts[0]})[way.bucket.name]
            both.append((way.to_owners(shares), whole))
        return both

    mesh, everywhere = mesh_of(**axes), PartitionSpec(tuple(axes))
    run = jax.shard_map(body, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    compiled = jax.jit(run).lower(gradients).compile()
    for ours, theirs in compiled(gradients):
        np.testing.assert_array_equal(ours, theirs)
    if layers > 1:
        check_levels(compiled, devices, node)


def check_levels(compiled, devices, node):
    """Every sum in the loop: over all devices, or in each node and then along rails, with a node's
    share of it."""
    found = [c for c in hlo.collectives(compiled) if c.kind == "reduce-scatter" and c.in_loop]
    nodes = np.arange(devices).reshape(-1, node)
    levels = [nodes, nodes.T] if 1 < node < devices else [nodes.reshape(1, -1)]
    groups = [tuple(map(tuple, level.tolist())) for level in levels]
    assert {c.groups for c in found} == set(groups)
    sent = [sum(c.bytes for c in found if c.groups == level) for level in groups]
    assert sent[0] == node * sent[-1] if len(sent) > 1 else sent[0] > 0


@pytest.mark.parametrize("devices", [3, 7, 24, 127, 1000, 1016, 1021, 1024, 16381])
def test_any_number_of_devices_shares_a_layer_evenly(devices):
    """ZAYA1's: less than a five-hundredth is padding."""
    for rows in (2**20, 2**19):
        kept, cut, piece = by_layer._best_pieces(16, rows, devices)
        assert cut * piece >= rows * 8 and devices * kept >= 16 * cut
        assert devices * kept * piece <= 1.002 * 16 * rows * 8


def test_gradients_travel_together_where_they_must(monkeypatch):
    like = optim_helpers.shapes(F=24)
    monkeypatch.setattr(by_layer, "WASTE", 0.01)
    layout = chain.build(Optim(), optim_helpers.FLOAT32, like, axes=dict(data=7)).layout
    assert "layers/experts/gate_up" not in layout.by_layer  # a fiftieth would be padding
    # experts split over devices have their own gradients already
    specs = optim_helpers.expert_specs(like)
    layout = chain.build(
        Optim(), optim_helpers.FLOAT32, like, specs=specs, axes=dict(data=2, expert=4)
    ).layout
    assert not layout.by_layer.keys() & {"layers/experts/gate_up", "layers/experts/down"}


LAYERS = 8
SETTINGS = config.check(
    {
        "model": dict(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=256,
            num_experts=2,
            router_hidden_size=8,
            pad_token_id=None,
        ),
        "precision": {"compute": "float32", "newton_schulz": "float32", "matmul": "highest"},
        "data": {"seq_len": 16},
        "remat": "attention",
    }
)


def program(settings, devices=8):
    """The optimizer, the compiled step, and its arguments."""
    run = mesh_helpers.Run(devices, settings)
    batch = steps.put_batch(run.mesh, mesh_helpers.batch(devices, 16), 1)
    args = run.state, batch, np.float32(1e-3)
    return run.optimizer, run.step.lower(*args).compile(), args


@pytest.mark.slow
@pytest.mark.parametrize("devices", [6, 8])
def test_a_step_is_the_same(devices, monkeypatch):
    """Bit for bit on a CPU, which sums in the order of the devices; a reduce-scatter in the loop
    over layers."""
    optimizer, ours, args = program(SETTINGS, devices)
    reduced = [c for c in hlo.collectives(ours) if c.kind == "reduce-scatter" and c.in_loop]
    sizes = {
        path: math.prod(way.shape) * devices // LAYERS
        for path, way in optimizer.layout.by_layer.items()
    }
    assert {"layers/experts/gate_up", "layers/experts/down"} <= sizes.keys()
    assert sum(c.bytes for c in reduced) == 4 * sum(sizes.values()) and {
        c.times for c in reduced
    } == {LAYERS}
    found = jax.device_get(ours(*args))
    monkeypatch.setattr(by_layer, "MIN_LAYER_SIZE", 2**60)
    optimizer, theirs, args = program(SETTINGS, devices)
    assert not optimizer.layout.by_layer
    jax.tree.map(np.testing.assert_array_equal, found, jax.device_get(theirs(*args)))


@pytest.mark.slow
def test_a_step_in_two_levels_differs_by_rounding_alone(monkeypatch):
    _, one, args = program(SETTINGS, 6)
    expected = jax.device_get(one(*args))
    monkeypatch.setattr(states, "devices_of_node", lambda mesh: 3)
    _, two, args = program(SETTINGS, 6)
    check_levels(two, 6, 3)
    found = jax.device_get(two(*args))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected
    )


def test_small_shares_alone_take_two_levels(monkeypatch):
    monkeypatch.undo()
    base = optim_helpers.shapes(L=2, D=2048, E=16, F=2048)
    for devices, levels in ((64, 1), (1024, 1), (1280, 2), (4096, 2)):
        layout = chain.build(
            Optim(),
            optim_helpers.FLOAT32,
            base,
            axes=dict(data=devices),
            node=8,
            two_levels_under=sizing.value("two levels").value,
        ).layout
        assert {len(way.levels) for way in layout.by_layer.values()} == {levels}


@pytest.mark.parametrize(("figures", "levels"), [(FAST, 2), (SLOW, 1)], ids=["fast", "slow"])
def test_a_run_sums_in_the_levels_that_its_figures_ask_for(figures, levels, tmp_path, monkeypatch):
    monkeypatch.setattr(states, "devices_of_node", lambda mesh: 4)
    (tmp_path / "all.json").write_text(measured.to_json(figures))
    model = dataclasses.replace(SETTINGS.model, hidden_size=512, num_hidden_layers=1)
    hardware = dataclasses.replace(SETTINGS.hardware, figures=str(tmp_path))
    given = dataclasses.replace(SETTINGS, model=model, hardware=hardware)
    found = states.set_up(given, make_mesh(given.mesh)).optimizer.layout.by_layer.values()
    assert {len(way.levels) for way in found} == {levels}
    share = sum(way.per_device * way.piece_size for way in found)
    assert 35_000 < share < 700_000  # between the two files' limits


def test_a_node_is_known_by_its_host_or_its_process():
    def of(hosts, processes):
        devices = [
            SimpleNamespace(slice_index=h, process_index=p)
            for h, p in zip(hosts, processes, strict=True)
        ]
        return devices_of_node(SimpleNamespace(devices=np.array(devices)))

    assert of([0, 0, 0, 1, 1, 1], range(6)) == 3  # a process for each GPU
    assert of([0] * 6, [0, 0, 0, 1, 1, 1]) == 3  # hosts are not told apart
    assert of([0] * 4, [0] * 4) == 4
    assert of([0, 0, 1], range(3)) == of([0, 1, 0, 1], range(4)) == 1  # no equal runs


ALONE = """
import test_by_layer as t
from zaya_jax.optim.zero import by_layer
for by_layer.MIN_LAYER_SIZE in (0, 2**60):
    print(t.program(t.SETTINGS)[1].memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
def test_no_stack_of_all_gradients_is_kept():
    """In a process of its own: after many other tests both programs were seen to take the same."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    taken, before = map(int, done.stdout.split())
    stacks = 4 * LAYERS * 49_664  # numbers of a layer that leave with it
    # the most is in use elsewhere now: where directions come back
    assert taken < before - 0.3 * stacks
