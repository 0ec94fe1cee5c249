"""Checkpoints from mesh to mesh: written on each, read on each other, trained on as if nothing had happened."""

import functools

import jax
import numpy as np
import pytest
from mesh_helpers import Run

from zaya_jax.checkpoint import layout, pieces
from zaya_jax.checkpoint.store import Store
from zaya_jax.hardware import hlo

MESHES = {
    "one": (1, dict()),
    "data x expert": (8, dict(data=2, expert=4)),
    "data, ZeRO-1": (8, dict(data=8)),
    "data x context": (8, dict(data=4, context=2)),
    "data x expert x tensor": (8, dict(data=2, expert=2, tensor=2)),
    "fsdp": (8, dict(data=8, fsdp=True)),
}
FAST = [("one", "data x expert x tensor"), ("data x expert x tensor", "fsdp"), ("fsdp", "fsdp")]
PAIRS = [
    pytest.param(a, b, 3 if (a, b) in FAST else 20, marks=() if (a, b) in FAST else pytest.mark.slow)
    for a in MESHES
    for b in MESHES
]


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_BYTES", 256)  # else a model this small is not cut for saving
        run.cache_clear(), written.cache_clear()
        yield
        run.cache_clear(), written.cache_clear()


@functools.cache
def run(name):
    return Run(*MESHES[name])


@functools.cache
def written(folder, name, steps):
    """(store, the logical state on the host, the losses that follow) of two steps on a mesh, saved."""
    here = run(name)
    here.restart()
    here.train(range(2))
    store = Store(folder / f"{name}-{steps}")
    store.save(2, here.to_logical(here.state), {"step": 2, "tokens": 2})
    store.wait()
    logical = here.logical()
    return store, logical, here.train(range(2, 2 + steps))


@pytest.mark.parametrize(("source", "target", "steps"), PAIRS)
def test_any_mesh_reads_what_any_mesh_wrote(tmp_path_factory, source, target, steps):
    store, logical, losses = written(tmp_path_factory.getbasetemp(), source, steps)
    there = run(target)
    there.state, meta = store.restore(2, there.like, there.from_logical)
    assert meta["step"] == 2
    for a, b in zip(jax.tree.leaves(there.logical()), jax.tree.leaves(logical), strict=True):
        np.testing.assert_array_equal(a, b)
    reader = pieces.Reader(store.root.parent, 2)  # what to_hf reads with
    path = ("params", "layers", "experts", "gate_up")
    np.testing.assert_array_equal(reader.read(path, 1), logical["params"]["layers"]["experts"]["gate_up"][1])
    again = there.train(range(2, 2 + steps))
    if source == target:
        assert again == losses
    np.testing.assert_allclose(again[0], losses[0], rtol=1e-6)
    np.testing.assert_allclose(again, losses, rtol=1e-4)


def test_each_device_holds_its_part_alone():
    here = run("data x expert x tensor")
    snapshot = here.to_logical(here.state)
    held = sum(shard.data.nbytes for x in jax.tree.leaves(snapshot) for shard in x.addressable_shards)
    size = sum(x.nbytes for x in jax.tree.leaves(snapshot))
    # What is too small to cut is on all devices.
    assert size <= held < 1.6 * size
    plan = layout.make_plan(snapshot)
    assert sum(plan.bytes.values()) == size


@pytest.mark.parametrize("name", ["data, ZeRO-1", "data x context", "fsdp"])
def test_parameters_are_cut_where_they_lie(name):
    here = run(name)
    shardings = jax.tree.map(lambda x: x.sharding, here.like["params"])
    cut = jax.jit(lambda params: jax.tree.map(lambda x: x + 0, params), out_shardings=shardings)
    compiled = cut.lower(here.state["params"]).compile()
    assert hlo.collectives(compiled) == []
    parts = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(here.like["params"])]
    assert any(part != x.shape for part, x in zip(parts, jax.tree.leaves(here.like["params"]), strict=True))
