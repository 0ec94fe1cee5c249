"""The collectives that an axis adds to the compiled program, their bytes, and the memory that it
saves; sizes that a mesh cannot divide are refused."""

import dataclasses
import functools
import re

import formulas
import jax
import mesh_helpers as helpers
import pytest
from refusals import check_refused, refusal
from rows import slow

from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.config import Config, Mesh
from zaya_jax.model import zaya
from zaya_jax.parallel import mesh as meshes
from zaya_jax.parallel import sharding
from zaya_jax.parallel.spread import Spread, spread_of

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


# ################################################################################################
# TSP
# ##################################################################################################


DENSE, GROUPED = helpers.DENSE, helpers.GROUPED


def from_shapes(settings, devices, rows=helpers.ROWS, length=helpers.LENGTH, remat="none", **sizes):
    """The program of loss and gradients, from shapes alone."""
    settings = dataclasses.replace(settings, mesh=config.Mesh(**sizes), remat=remat)
    _, run = helpers.program(settings, devices)
    model = settings.model
    bias = jax.ShapeDtypeStruct((model.num_hidden_layers, model.num_experts + 1), "float32")
    batch = {
        name: jax.ShapeDtypeStruct((1, rows, length), x.dtype)
        for name, x in helpers.batch(length=64).items()
    }
    return run.lower(zaya.abstract(model, settings.precision), bias, batch).compile()


def moved(program):
    """Bytes that come in at a device in the loops over layers, by kind of collective."""
    found = {}
    for c in hlo.collectives(program):
        if c.in_loop:
            found[c.kind] = found.get(c.kind, 0) + c.wire_bytes * c.times
    return found


@pytest.mark.parametrize(("settings", "devices"), [slow(DENSE, 8), (GROUPED, 4)])
def test_what_travels_is_the_formula(settings, devices):
    model, layers = settings.model, settings.model.num_hidden_layers
    found = moved(from_shapes(settings, devices, tensor=devices, tsp=True))
    expected = formulas.of_tsp(model, helpers.ROWS, helpers.LENGTH, devices, size=4)
    assert sum(found.values()) == pytest.approx(
        layers * (expected["forward"] + expected["backward"]), rel=1e-9
    )
    mlp = 3 * model.hidden_size * model.intermediate_size
    # Twice the shards, once their gradients, by permutes alone; and no activation is summed.
    assert found["collective-permute"] == pytest.approx(
        layers * 3 * 4 * mlp * (devices - 1) / devices, rel=1e-9
    )
    assert "all-reduce" not in found


@pytest.mark.slow
def test_zaya_fetches_q_and_o_and_gathers_keys_and_values_of_all_heads():
    """Read from the program that test_axes.py compares with one device; each of two groups has half
    of the rows."""
    model = helpers.SETTINGS.model
    settings = dataclasses.replace(helpers.SETTINGS, mesh=config.Mesh(expert=2, tensor=4, tsp=True))
    program = helpers.compiled(settings, 8)
    found = [(c.kind, c.bytes, c.times) for c in hlo.collectives(program) if c.in_loop]
    heads = model.num_attention_heads * model.head_dim
    kv = 2 * helpers.ROWS // 2 * helpers.LENGTH * model.num_key_value_heads * model.head_dim
    for weight in (model.hidden_size * heads, heads):  # q's and o's kernel, q's bias
        assert ("all-gather", 4 * weight, model.num_hidden_layers) in found
        assert ("reduce-scatter", 4 * weight, model.num_hidden_layers) in found
    assert ("all-gather", 4 * kv, model.num_hidden_layers) in found
    assert not [kind for kind, size, _ in found if kind == "all-reduce" and size > 1024], (
        "activations are summed"
    )


@pytest.mark.slow
def test_weights_tokens_and_what_the_backward_pass_keeps_are_parts():
    """Against one device: of weights and of activations each of eight holds an eighth, and nothing
    of full size."""
    wide = helpers.with_model(
        model_type="dense",
        num_experts=1,
        hidden_size=128,
        head_dim=16,
        intermediate_size=512,
        attention_bias=False,
        num_key_value_heads=8,
        layer_types=(),
        num_hidden_layers=4,
    )
    whole, parted = (
        from_shapes(wide, n, 1, 4096, "layer", tensor=n, tsp=n > 1).memory_analysis()
        for n in (1, 8)
    )
    inputs = 5 * 4 * 4096 + 4 * wide.model.vocab_size * 128
    assert parted.argument_size_in_bytes - inputs < 0.15 * whole.argument_size_in_bytes
    assert parted.temp_size_in_bytes < 0.25 * whole.temp_size_in_bytes


ZAYA, LARGE = helpers.SETTINGS, Config()
TWELVE_HEADS = dataclasses.replace(
    LARGE, model=dataclasses.replace(ZAYA.model, num_attention_heads=12, num_key_value_heads=4)
)
NARROW = dataclasses.replace(
    helpers.DENSE, model=dataclasses.replace(helpers.DENSE.model, intermediate_size=50)
)


@pytest.mark.parametrize(
    ("settings", "spread", "seq_len", "words"),
    [
        (
            ZAYA,
            Spread(expert=3),
            64,
            r"num_experts=8 does not divide over config\.mesh\.expert=3; .* divisor of 8",
        ),
        (
            ZAYA,
            Spread(expert=4, tensor=4, tsp=True),
            64,
            r"num_experts=8 .*mesh\.expert x tensor=16; ",
        ),
        (ZAYA, Spread(data=2, tensor=3), 64, r"num_attention_heads=8 .*mesh\.tensor=3; "),
        (
            ZAYA,
            Spread(data=5, fsdp=True),
            64,
            r"hidden_size=32 .*mesh\.data=5; .*set config\.mesh\.fsdp=False",
        ),
        (
            TWELVE_HEADS,
            Spread(tensor=6),
            64,
            r"tensor=6 neither divides nor is a multiple of .*num_key_value_heads=4",
        ),
        (
            LARGE,
            Spread(context=4),
            60,
            r"seq_len=60 does not divide into 2 x 4 pieces .*; .*set seq_len=64",
        ),
        (
            LARGE,
            Spread(context=8),
            16,
            r"pieces of 1 tokens, but the convolutions look 2 .*; .*set seq_len=32",
        ),
        (
            LARGE,
            Spread(context=2, tensor=8),
            36,
            r"seq_len=36 over 2 devices does not divide by config\.mesh\.tensor=8",
        ),
        (
            helpers.DENSE,
            Spread(tensor=3, tsp=True),
            96,
            r"num_key_value_heads=8 .*mesh\.tensor=3; .* divisor of 8",
        ),
        (
            helpers.DENSE,
            Spread(expert=2),
            64,
            r"mesh\.expert=2, but a dense model has no experts; set .*expert=1",
        ),
        (
            helpers.DENSE,
            Spread(context=2, tensor=2, tsp=True, ring=True),
            64,
            r"set config\.mesh\.ring=False",
        ),
        (
            NARROW,
            Spread(tensor=4),
            64,
            r"intermediate_size=50 does not divide over config\.mesh\.tensor=4",
        ),
    ],
)
def test_what_does_not_divide_is_refused(settings, spread, seq_len, words):
    said = refusal(sharding.check, settings, spread, lengths={"seq_len": seq_len})
    assert re.search(words, said), said


def test_a_batch_that_does_not_divide_names_the_nearest_that_does():
    sharding.check_batch(Spread(data=2, expert=2), (12, 24), 4)
    check_refused(
        r"6 sequences .* over 4 devices .*; set config\.data\.micro_batch=4",
        lambda: sharding.check_batch(Spread(data=2, expert=2), (12,), 6),
    )
    check_refused(
        r"over 5 devices .*neither does a step's batch of 12 sequences; .* divide 12",
        lambda: sharding.check_batch(Spread(data=5), (12,), 6),
    )


def test_context_goes_over_nodes_where_it_is_asked_to(monkeypatch):
    monkeypatch.setattr(meshes, "_node_size", lambda devices: 4)
    asked = Mesh(context=2, tensor=2, across=True)
    mesh = meshes.make_mesh(asked)
    numbers = [[jax.devices().index(d) for d in row] for row in mesh.devices.reshape(-1, 2)]
    assert numbers == [[0, 1], [4, 5], [2, 3], [6, 7]]  # data x context, with tensor inside
    assert spread_of(asked, mesh.shape) != spread_of(Mesh(context=2, tensor=2), mesh.shape)
    check_refused(
        "there are 2 nodes of 4 devices; context must divide",
        lambda: meshes.make_mesh(Mesh(context=4, across=True)),
    )


def test_a_ring_goes_wherever_devices_share_a_sequence():
    """With TSP the tensor axis splits it, too; a dense model's keys do not go round then."""
    sizes = dict(data=1, expert=1, context=1, tensor=2)
    both = spread_of(Mesh(tensor=2, tsp=True, ring=True), sizes)
    assert both.ring and not spread_of(Mesh(tensor=2, ring=True), sizes).ring
    check_refused("a few heads at a time", sharding.check, helpers.DENSE, both)


def test_a_process_without_a_device_is_told():
    mesh = meshes.make_mesh(Mesh(data=2), jax.devices()[:2])
    check_refused("process 1 has no device of the mesh", meshes.rows_of_process, mesh, process=1)
