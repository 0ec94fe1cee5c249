"""Every mesh gives the loss and the gradients of one device, with a CPU's algorithm and with a
GPU's."""

import dataclasses
import functools

import mesh_helpers as helpers
import numpy as np
import pytest
from rows import slow

from pallas_kernels import chip
from zaya_jax import config

ZAYA, DENSE, GROUPED, MIXED = helpers.SETTINGS, helpers.DENSE, helpers.GROUPED, helpers.MIXED
LONG_TAPS = helpers.with_model(cca_time0=3, cca_time1=4)
ONE_TAP = helpers.with_model(cca_time0=1, cca_time1=1)  # only the delayed value looks back


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [
        (8, dict(data=2, expert=2, context=2)),
        slow(4, dict(data=2, tensor=2, fsdp=True)),
        slow(4, dict(context=2, tensor=2, tsp=True)),
    ],
)
def test_pairs_of_answers_are_the_same_on_a_mesh(devices, sizes):
    """Answers lie over several devices, and so do the rows of the head."""
    host, on_mesh = (
        helpers.batch_of_pairs(),
        dataclasses.replace(helpers.PAIRS, mesh=config.Mesh(**sizes)),
    )
    one = helpers.loss_and_gradients(helpers.PAIRS, 1, host)
    assert abs(one[0] - np.log(2)) > 0.01
    helpers.assert_same(helpers.loss_and_gradients(on_mesh, devices, host), one)


@functools.cache
def alone(settings):
    """One device, with a CPU's algorithm."""
    return helpers.loss_and_gradients(settings, 1, helpers.batch())


def over(settings, devices, remat="none", **sizes):
    settings = dataclasses.replace(settings, mesh=config.Mesh(**sizes), remat=remat)
    return helpers.loss_and_gradients(settings, devices, helpers.batch())


@pytest.mark.parametrize(
    ("settings", "devices", "sizes"),
    [
        (LONG_TAPS, 8, dict(data=2, expert=2, context=2)),
        slow(ZAYA, 8, dict(data=2, expert=2, context=2)),
        slow(ZAYA, 1, {}),
        slow(ZAYA, 8, dict(data=2, expert=4, fsdp=True)),
        slow(ZAYA, 4, dict(context=2, tensor=2, ring=True)),
        slow(ZAYA, 8, dict(expert=2, context=2, tensor=2, tsp=True)),
    ],
)
def test_a_mesh_with_a_gpus_algorithm_gives_it_too(settings, devices, sizes):
    # MI300X: a CPU cannot compute as NVIDIA does, by three products of TF32.
    with chip.making(chip.Chip("gpu", "AMD Instinct MI300X", kernels=())):
        ours = over(settings, devices, **sizes)
    helpers.assert_same(ours, alone(settings))


@pytest.mark.parametrize(
    ("settings", "devices", "sizes"),
    [
        slow(ZAYA, 2, dict(tensor=2)),
        (ZAYA, 4, dict(tensor=4)),  # test_collectives.py reads this program
        slow(ZAYA, 8, dict(tensor=8)),
        slow(ZAYA, 4, dict(tensor=4, tsp=True, ring=True)),
        (ZAYA, 4, dict(data=4, fsdp=True)),  # and this one
        slow(ZAYA, 8, dict(data=2, tensor=4, fsdp=True)),
        slow(ZAYA, 8, dict(data=2, context=2, tensor=2)),
        slow(ZAYA, 8, dict(data=2, context=2, tensor=2, fsdp=True)),
        slow(ZAYA, 8, dict(data=2, expert=2, context=2)),
        slow(ZAYA, 8, dict(expert=2, context=2, tensor=2)),
        slow(ZAYA, 8, dict(data=2, expert=2, tensor=2, fsdp=True)),
        # Sequences: full and sliding layers, documents over several chunks; over 8 devices a chunk
        # is as short as the halo.
        slow(ZAYA, 2, dict(context=2)),
        slow(ZAYA, 4, dict(context=4)),
        slow(ZAYA, 8, dict(context=8)),
        slow(ZAYA, 2, dict(context=2, ring=True)),
        slow(ZAYA, 4, dict(context=4, ring=True)),
        slow(ZAYA, 8, dict(context=8, ring=True)),
        slow(ZAYA, 4, dict(context=2, tensor=2, ring=True)),
        slow(ZAYA, 8, dict(data=2, context=4, ring=True, fsdp=True)),
        slow(LONG_TAPS, 2, dict(context=2)),
        slow(LONG_TAPS, 2, dict(context=2, ring=True)),
        slow(LONG_TAPS, 2, dict(tensor=2, tsp=True)),
        slow(ONE_TAP, 8, dict(context=8)),
        # TSP.
        slow(GROUPED, 2, dict(tensor=2, tsp=True)),
        slow(DENSE, 4, dict(tensor=4, tsp=True)),
        slow(DENSE, 8, dict(tensor=8, tsp=True)),
        slow(ZAYA, 4, dict(tensor=4, tsp=True)),
        slow(ZAYA, 8, dict(expert=2, tensor=4, tsp=True)),
        slow(ZAYA, 8, dict(expert=2, context=2, tensor=2, tsp=True)),
        slow(ZAYA, 8, dict(context=2, tensor=4, tsp=True)),
        slow(ZAYA, 8, dict(context=2, tensor=4, tsp=True, ring=True)),
        slow(ZAYA, 8, dict(data=2, tensor=4, tsp=True, fsdp=True)),
        slow(GROUPED, 8, dict(context=2, tensor=4, tsp=True)),
        slow(DENSE, 8, dict(data=2, tensor=4, tsp=True, fsdp=True)),
        slow(DENSE, 4, dict(tensor=4)),
        slow(GROUPED, 8, dict(data=2, context=2, tensor=2, fsdp=True)),
        # Layers of linear attention between others.
        slow(MIXED, 2, dict(context=2)),  # test_context.py has the operator
        slow(MIXED, 8, dict(context=8)),
        slow(MIXED, 4, dict(context=4, ring=True)),
        slow(MIXED, 4, dict(context=2, tensor=2, tsp=True)),
        slow(MIXED, 8, dict(data=2, context=2, tensor=2, fsdp=True)),
        # tests/model/test_zaya.py has these on one device.
        slow(DENSE, 4, dict(tensor=4, tsp=True, remat="layer")),
        slow(DENSE, 4, dict(tensor=4, tsp=True, remat="attention")),
    ],
)
def test_a_mesh_gives_what_one_device_gives(settings, devices, sizes):
    helpers.assert_same(over(settings, devices, **sizes), alone(settings))
