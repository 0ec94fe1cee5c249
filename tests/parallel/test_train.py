"""Whole training steps, Muon and ZeRO-1 included, on meshes that cut weights; and states that go
from mesh to mesh."""

import functools

import jax
import numpy as np
import pytest
from mesh_helpers import Run
from rows import fast_alone

MESHES = {
    "one": (1, dict()),
    "tensor": (4, dict(data=2, tensor=2)),
    "fsdp": (4, dict(data=4, fsdp=True)),
    "expert": (8, dict(data=2, expert=4)),
    "fsdp and tensor": (8, dict(data=2, tensor=4, fsdp=True)),
    "data, expert and context": (8, dict(data=2, expert=2, context=2)),
    # as test_checkpoints.py has it
    "data, expert and tensor": (8, dict(data=2, expert=2, tensor=2)),
    "expert, tensor and fsdp": (8, dict(data=2, expert=2, tensor=2, fsdp=True)),
    "tsp": (8, dict(data=2, expert=2, tensor=2, tsp=True)),
}


@functools.cache
def reference():
    run = Run(*MESHES["one"])
    return run.train(range(4)), run.logical()


@pytest.mark.parametrize(
    "name", fast_alone(["data, expert and tensor"], [name for name in MESHES if name != "one"])
)
def test_training_on_a_mesh_is_training_on_one_device(name):
    run = Run(*MESHES[name])
    losses = run.train(range(2))
    # Into a copy and out of it again, like a checkpoint.
    run.state = run.snapshots.to_state(run.snapshots.on_devices(run.state))
    compiled: list[str] = []

    def listen(event: str, seconds: float, **about) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    losses += run.train(range(2, 4))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == [], "a run that goes on needs no other program than one that begins"
    np.testing.assert_allclose(losses, reference()[0], rtol=2e-6)
    for part in ("params", "balance"):
        for a, b in zip(
            jax.tree.leaves(run.logical()[part]), jax.tree.leaves(reference()[1][part]), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=2e-5)
