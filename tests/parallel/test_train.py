"""Whole training steps, Muon and ZeRO-1 included, on meshes that cut weights; and states that go from mesh to mesh."""

import dataclasses
import functools

import jax
import mesh_helpers as helpers
import numpy as np
import pytest

from zaya_jax import config
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.train import step as steps

MESHES = {
    "one": (1, dict()),
    "tensor": (4, dict(data=2, tensor=2)),
    "fsdp": (4, dict(data=4, fsdp=True)),
    "expert": (8, dict(data=2, expert=4)),
    "fsdp and tensor": (8, dict(data=2, tensor=4, fsdp=True)),
    "data, expert and context": (8, dict(data=2, expert=2, context=2)),
    "expert, tensor and fsdp": (8, dict(data=2, expert=2, tensor=2, fsdp=True)),
    "tsp": (8, dict(data=2, expert=2, tensor=2, tsp=True)),
}
SLOW = pytest.mark.slow


class Run:
    """A training run on one of the meshes, step by step."""

    def __init__(self, name):
        devices, sizes = MESHES[name]
        self.settings = dataclasses.replace(helpers.SETTINGS, mesh=config.Mesh(**sizes))
        self.mesh = make_mesh(self.settings.mesh, jax.devices()[:devices])
        self.optimizer = steps.build_optimizer(self.settings, self.mesh)
        self.step = steps.make_train_step(self.settings, self.settings.model, self.optimizer, self.mesh)
        self.to_logical, self.from_logical, self.like = steps.codecs(self.settings, self.optimizer, self.mesh)
        self.state = steps.init_state(self.settings, self.optimizer, self.mesh)

    def train(self, seeds):
        """The losses of a step for each seed."""
        spread, losses = steps.spread_of(self.settings, self.mesh), []
        for seed in seeds:
            batch = steps.put_batch(self.mesh, helpers.batch(seed=seed), 2, spread)
            self.state, figures = self.step(self.state, batch, np.float32(1e-3))
            losses.append(float(figures["loss"]))
        return losses

    def logical(self):
        """The state as a checkpoint holds it, on the host."""
        return jax.device_get(self.to_logical(self.state))


@functools.cache
def reference():
    run = Run("one")
    return run.train(range(4)), run.logical()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tensor", marks=SLOW),
        pytest.param("fsdp", marks=SLOW),
        pytest.param("expert", marks=SLOW),
        "fsdp and tensor",
        "data, expert and context",
        pytest.param("expert, tensor and fsdp", marks=SLOW),
        pytest.param("tsp", marks=SLOW),
    ],
)
def test_training_on_a_mesh_is_training_on_one_device(name):
    run = Run(name)
    losses = run.train(range(2))
    # Out of the mesh's layout and into it again: what a checkpoint does.
    between = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), run.logical(), run.like)
    run.state = run.from_logical(between)
    losses += run.train(range(2, 4))
    np.testing.assert_allclose(losses, reference()[0], rtol=2e-6)
    for part in ("params", "balance"):
        for a, b in zip(
            jax.tree.leaves(run.logical()[part]), jax.tree.leaves(reference()[1][part]), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=2e-5)


@SLOW
def test_a_state_goes_to_another_mesh():
    source, target = Run("tensor"), Run("fsdp")
    losses = source.train(range(2))
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), source.logical(), target.like)
    target.state = target.from_logical(placed)
    for a, b in zip(jax.tree.leaves(source.logical()), jax.tree.leaves(target.logical()), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(losses + target.train(range(2, 4)), reference()[0], rtol=2e-6)
