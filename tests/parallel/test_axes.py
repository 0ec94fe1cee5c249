"""Every mesh gives the loss and the gradients of one device."""

import dataclasses
import functools

import mesh_helpers as helpers
import pytest

from pallas_kernels import chip
from zaya_jax import config


@functools.cache
def alone():
    """One device, with a CPU's algorithm."""
    return helpers.loss_and_gradients(helpers.SETTINGS, 1, helpers.batch())


def spread_over(**sizes):
    return dataclasses.replace(helpers.SETTINGS, mesh=config.Mesh(**sizes))


SLOW = pytest.mark.slow

GPUS = [
    (8, dict(data=2, expert=2, context=2)),
    pytest.param(1, {}, marks=SLOW),
    pytest.param(8, dict(data=2, expert=4, fsdp=True), marks=SLOW),
    pytest.param(4, dict(context=2, tensor=2, ring=True), marks=SLOW),
    pytest.param(8, dict(expert=2, context=2, tensor=2, tsp=True), marks=SLOW),
]


@pytest.mark.parametrize(("devices", "sizes"), GPUS)
def test_a_mesh_with_a_gpus_algorithm_gives_it_too(devices, sizes):
    with chip.making(chip.Chip("gpu", "NVIDIA H200", kernels=())):
        ours = helpers.loss_and_gradients(spread_over(**sizes), devices, helpers.batch())
    helpers.assert_same(ours, alone())


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [
        pytest.param(2, dict(tensor=2), marks=SLOW),
        pytest.param(4, dict(tensor=4), marks=SLOW),
        pytest.param(8, dict(tensor=8), marks=SLOW),
        (4, dict(data=4, fsdp=True)),  # test_collectives.py reads this program
        pytest.param(8, dict(data=2, tensor=4, fsdp=True), marks=SLOW),
        pytest.param(8, dict(data=2, context=2, tensor=2), marks=SLOW),
        pytest.param(8, dict(data=2, context=2, tensor=2, fsdp=True), marks=SLOW),  # test_linear.py has it
        pytest.param(4, dict(context=2, tensor=2, ring=True), marks=SLOW),
        pytest.param(8, dict(data=2, expert=2, context=2), marks=SLOW),
        pytest.param(8, dict(expert=2, context=2, tensor=2), marks=SLOW),
        pytest.param(8, dict(data=2, expert=2, tensor=2, fsdp=True), marks=SLOW),
        pytest.param(8, dict(expert=2, context=2, tensor=2, tsp=True), marks=SLOW),
    ],
)
def test_a_mesh_gives_what_one_device_gives(devices, sizes):
    helpers.assert_same(helpers.loss_and_gradients(spread_over(**sizes), devices, helpers.batch()), alone())
