"""The collectives that an axis adds to the compiled program, their bytes, and the memory that it
saves."""

import dataclasses
import functools

import jax
import mesh_helpers as helpers

from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.model import zaya
from zaya_jax.parallel import sharding

MODEL = helpers.SETTINGS.model
LAYERS, D = MODEL.num_hidden_layers, MODEL.hidden_size
TOKENS = helpers.ROWS * helpers.LENGTH


@functools.cache
def compiled(num_devices, **sizes):
    """The program of loss and gradients."""
    return helpers.compiled(
        dataclasses.replace(helpers.SETTINGS, mesh=config.Mesh(**sizes)), num_devices
    )


def in_layers(program):
    """(kind, bytes of one, how often) of the collectives inside the loops over layers."""
    return [(c.kind, c.bytes, c.times) for c in hlo.collectives(program) if c.in_loop]


def test_more_devices_than_key_value_heads_also_sum_the_queries_of_a_group():
    means = 4 * TOKENS * MODEL.num_key_value_heads * MODEL.head_dim
    found = sorted(in_layers(compiled(4, tensor=4)), key=lambda x: x[1])
    assert (
        found == [("all-reduce", means, LAYERS)] * 2 + [("all-reduce", 4 * TOKENS * D, LAYERS)] * 4
    )


def test_fsdp_gathers_each_layer_forward_and_again_backward_and_scatters_its_gradient():
    axes = jax.tree.leaves(zaya.param_axes(MODEL)["layers"], is_leaf=lambda x: isinstance(x, tuple))
    shapes = jax.tree.leaves(zaya.abstract(MODEL)["layers"])
    matrices = [
        4 * x.size // LAYERS
        for x, names in zip(shapes, axes, strict=True)
        if sharding.is_matrix(names) and "embed" in names
    ]
    found = in_layers(compiled(4, data=4, fsdp=True))
    for kind, times in (("all-gather", 2), ("reduce-scatter", 1)):
        assert sorted(size for k, size, _ in found if k == kind) == sorted(matrices * times)
    assert len(found) == 3 * len(matrices)


def test_fsdp_keeps_a_part_of_the_weights():
    weights = sum(4 * x.size for x in jax.tree.leaves(zaya.abstract(MODEL)))
    assert compiled(4, data=4, fsdp=True).memory_analysis().argument_size_in_bytes < 0.5 * weights
