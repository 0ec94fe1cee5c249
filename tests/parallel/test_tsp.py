"""TSP: the loss and gradients of one device, what crosses devices, and what each keeps."""

import dataclasses
import functools

import mesh_helpers as helpers
import pytest

from zaya_jax import config
from zaya_jax.config import Rope, RopeKinds

DENSE = helpers.with_model(
    model_type="dense", num_experts=1, intermediate_size=48, attention_bias=False, num_key_value_heads=8,
    rope_parameters=RopeKinds(Rope(partial_rotary_factor=1.0)),
)  # fmt: skip
GROUPED = helpers.with_model(
    model_type="dense", num_experts=1, intermediate_size=48, attention_bias=False, num_attention_heads=16,
    num_key_value_heads=4,
)  # fmt: skip


@functools.cache
def alone(settings):
    return helpers.loss_and_gradients(settings, 1, helpers.batch())


def on(settings, devices, remat="none", **sizes):
    settings = dataclasses.replace(settings, mesh=config.Mesh(**sizes), remat=remat)
    return helpers.loss_and_gradients(settings, devices, helpers.batch())


@pytest.mark.parametrize(
    ("devices", "settings", "sizes"),
    [
        (2, GROUPED, dict(tensor=2, tsp=True)),
        (4, DENSE, dict(tensor=4, tsp=True)),
        (8, DENSE, dict(tensor=8, tsp=True)),
        (8, GROUPED, dict(context=2, tensor=4, tsp=True)),
        (8, DENSE, dict(data=2, tensor=4, tsp=True, fsdp=True)),
        (4, DENSE, dict(tensor=4)),
        (8, GROUPED, dict(data=2, context=2, tensor=2, fsdp=True)),
    ],
)
def test_a_mesh_gives_what_one_device_gives(devices, settings, sizes):
    helpers.assert_same(on(settings, devices, **sizes), alone(settings))


@pytest.mark.parametrize("remat", ["layer", "attention"])
def test_remat_changes_nothing(remat):
    helpers.assert_same(on(DENSE, 4, remat, tensor=4, tsp=True), alone(DENSE))
