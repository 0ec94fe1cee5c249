"""Whole training steps, Muon and ZeRO-1 included, on meshes that cut weights; and checkpoints from
mesh to mesh: written on each, read on each other, trained on as if nothing had happened."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from compared import assert_all_close
from mesh_helpers import SETTINGS, Run
from rows import fast_alone, slow

from zaya_jax import config, trees
from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.run.store import Store
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.compiled import hlo
from zaya_jax.training import snapshot

MESHES = {
    "one": (1, dict()),
    "data x expert": (8, dict(data=2, expert=4)),
    "data, ZeRO-1": (8, dict(data=8)),
    "data x context": (8, dict(data=4, context=2)),
    "data x expert x tensor": (8, dict(data=2, expert=2, tensor=2)),
    "fsdp": (8, dict(data=8, fsdp=True)),
}
# whose checkpoints are as those of the others
TRAINED = MESHES | {
    "data x tensor": (4, dict(data=2, tensor=2)),
    "fsdp and tensor": (8, dict(data=2, tensor=4, fsdp=True)),
    "data x expert x context": (8, dict(data=2, expert=2, context=2)),
    "fsdp, expert and tensor": (8, dict(data=2, expert=2, tensor=2, fsdp=True)),
    "tsp": (8, dict(data=2, expert=2, tensor=2, tsp=True)),
}
FAST = [
    ("data x expert x tensor", "one", 3),
    ("data x expert x tensor", "data x expert x tensor", 3),
]
PAIRS = FAST + [slow(a, b, 20) for a in MESHES for b in MESHES]


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_BYTES", 256)  # else a model this small is not cut for saving
        run.cache_clear(), written.cache_clear()
        yield
        run.cache_clear(), written.cache_clear()


@functools.cache
def run(name):
    devices, sizes = TRAINED[name]
    return Run(devices, dataclasses.replace(SETTINGS, mesh=config.Mesh(**sizes)))


@functools.cache
def reference():
    here = run("one")
    here.restart()
    return here.train(range(4)), here.logical()


@pytest.mark.parametrize(
    "name", fast_alone(["data x expert x tensor"], [name for name in TRAINED if name != "one"])
)
def test_training_on_a_mesh_is_training_on_one_device(name):
    here = run(name)
    losses = here.train(range(2))
    # Into a copy and out of it again, like a checkpoint.
    here.state = here.snapshots.to_state(here.snapshots.on_devices(here.state))
    compiled: list[str] = []

    def listen(event: str, seconds: float, **about) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    losses += here.train(range(2, 4))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == [], "a run that goes on needs no other program than one that begins"
    np.testing.assert_allclose(losses, reference()[0], rtol=2e-6)
    for part in ("params", "balance"):
        assert_all_close(here.logical()[part], reference()[1][part], atol=2e-5)


@functools.cache
def written(folder, name, steps):
    """(store, the logical state on the host, the losses that follow) of two steps on a mesh,
    saved."""
    here = run(name)
    here.restart()
    here.train(range(2))
    store = Store(folder / f"{name}-{steps}")
    store.save(
        2, here.snapshots.take(here.state), {"step": 2, "tokens": 2}, here.snapshots.locations
    )
    store.wait()
    logical = here.logical()
    return store, logical, here.train(range(2, 2 + steps))


@pytest.mark.parametrize(("source", "target", "steps"), PAIRS)
def test_any_mesh_reads_what_any_mesh_wrote(tmp_path_factory, source, target, steps):
    store, logical, losses = written(tmp_path_factory.getbasetemp(), source, steps)
    there = run(target)
    there.state = store.restore(
        2, there.snapshots.abstract, there.snapshots.locations, there.snapshots.to_state
    )
    jax.tree.map(np.testing.assert_array_equal, there.logical(), logical)
    reader = SealedSource(store.root.parent, 2)  # what to_hf reads with
    np.testing.assert_array_equal(
        reader.read("params.layers.experts.gate_up", 1),
        logical["params"]["layers"]["experts"]["gate_up"][1],
    )
    again = there.train(range(2, 2 + steps))
    if source == target:
        assert again == losses
    np.testing.assert_allclose(again[0], losses[0], rtol=1e-6)
    np.testing.assert_allclose(again, losses, rtol=1e-4)


def test_each_device_holds_its_part_alone():
    here = run("data x expert x tensor")
    copy, held = here.snapshots.take(here.state), here.snapshots.locations
    has = sum(x.nbytes for parts in copy.values() for x in parts.values())
    size = sum(x.nbytes for x in jax.tree.leaves(here.logical()))
    # Arrays too small to cut are on all devices, and buckets have their padding.
    assert size <= has < 2 * size
    assert sum(held.writers().bytes.values()) == size
    assert {name: x.shape for name, x in held.arrays.items()} == {
        name: x.shape for name, x in trees.flat(here.logical()).items()
    }


@pytest.mark.parametrize(
    "name", fast_alone(["data x expert x tensor"], [name for name in MESHES if name != "one"])
)
def test_nothing_travels_for_a_copy(name):
    """No copies of ZeRO-1's buckets or of parameters, which are cut in place; read in the compiled
    program."""
    here = run(name)
    compiled = here.snapshots.program.lower(
        snapshot.checkpoint_arrays(here.optimizer, here.state)
    ).compile()
    assert hlo.collectives(compiled) == []
    parts = [
        x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(here.snapshots.abstract["params"])
    ]
    assert any(
        part != x.shape
        for part, x in zip(parts, jax.tree.leaves(here.state["params"]), strict=True)
    )


@pytest.mark.parametrize("name", [slow("one"), "data x expert x tensor"])
def test_a_copy_on_the_host_is_the_same_and_stays(tmp_path, monkeypatch, name):
    """Where a copy does not fit the devices by their own figures; the next step takes the state's
    memory meanwhile."""
    here, messages = run(name), []
    here.restart()
    here.train(range(2))
    logical = here.logical()
    for free, where in ((10**12, "made there"), (1000, "made on the host, array by array")):
        monkeypatch.setattr(snapshot, "unused_bytes", lambda device, free=free: free)
        snapshots = snapshot.Snapshots(here.optimizer, here.abstract, messages.append)
        copy = snapshots.take(here.state)
        arrays = {type(x) for parts in copy.values() for x in parts.values()}
        assert (arrays == {np.ndarray}) == (free == 1000)
        assert where in messages[-1] and len(messages) == 1 + (free == 1000)
    snapshots.take(here.state)
    assert len(messages) == 2, "it is decided once"
    here.train(range(2, 4))
    store = Store(tmp_path)
    store.save(2, copy, {"step": 2, "tokens": 2}, snapshots.locations)
    store.wait()
    here.state = store.restore(2, snapshots.abstract, snapshots.locations, snapshots.to_state)
    jax.tree.map(np.testing.assert_array_equal, here.logical(), logical)
