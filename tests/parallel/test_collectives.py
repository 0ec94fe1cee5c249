"""The collectives that an axis adds to the compiled program, their bytes, and the memory that it
saves; sizes that a mesh cannot divide are refused; experts spread over devices are equal to all of
them on one."""

import dataclasses
import functools
import re

import formulas
import jax
import jax.numpy as jnp
import mesh_helpers as helpers
import numpy as np
import pytest
from compared import assert_norms_close
from jax import lax
from jax.sharding import PartitionSpec
from meshes import mesh_of
from refusals import check_refused, refusal
from rows import slow

from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.config import Config, Mesh
from zaya_jax.model import experts, zaya
from zaya_jax.parallel import dispatch, sharding
from zaya_jax.parallel import mesh as meshes
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
    on_mesh = dataclasses.replace(settings, mesh=config.Mesh(tensor=devices, tsp=True))
    found = moved(helpers.compiled(on_mesh, devices))
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
    found = in_layers(program)
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
        helpers.compiled(
            dataclasses.replace(wide, mesh=config.Mesh(tensor=n, tsp=n > 1), remat="layer"),
            n,
            helpers.batch(1, 4096),
        ).memory_analysis()
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
            r"seq_len=60 does not divide into 2 x 4 pieces .*; set seq_len=64",
        ),
        (
            LARGE,
            Spread(context=8),
            16,
            r"into 2 x 8 pieces of at least 2 tokens, .*; set seq_len=32",
        ),
        (
            LARGE,
            Spread(context=2, tensor=8),
            36,
            r"seq_len=36 does not divide .* over 8 that share its loss .*context=2, tensor=8",
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


E, DIM, F = 8, 16, 12
OVER_TOKENS, EXPERTS = PartitionSpec(("data", "expert")), PartitionSpec("expert")
ARGUMENTS = (OVER_TOKENS, OVER_TOKENS, OVER_TOKENS, EXPERTS, EXPERTS)


def gated(mlp, num_experts=E):
    """An `expert_mlp` times the gates, as the join multiplies them."""

    def run(x, choice, gate, gate_up, down):
        return mlp(x, choice, gate_up, down) * jnp.where(choice < num_experts, gate, 0.0)[:, None]

    return run


def on_devices(spread, part=slice(None), num_experts=E):
    """The function of whole arrays and its gradients: each device's of its part of the loss, then
    summed over data. Or only a part of these results."""
    mlp = gated(
        functools.partial(dispatch.expert_mlp, dtype=jnp.float32, spread=spread), num_experts
    )

    def run(x, choice, gate, gate_up, down, d_out):
        y, pull = jax.vjp(lambda *a: mlp(a[0], choice, *a[1:]), x, gate, gate_up, down)
        dx, d_gate, *d_weights = pull(d_out)
        if spread.data > 1:
            d_weights = [lax.psum(d, "data") for d in d_weights]
        return (y, dx, d_gate, *d_weights)[part]

    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh_of(data=spread.data, expert=spread.expert),
            in_specs=(*ARGUMENTS, OVER_TOKENS),
            out_specs=ARGUMENTS[part],
            check_vma=False,
        )
    )


@jax.jit
def on_one(x, choice, gate, gate_up, down, d_out):
    mlp = gated(functools.partial(experts.expert_mlp, dtype=jnp.float32))
    y, pull = jax.vjp(lambda *a: mlp(a[0], choice, *a[1:]), x, gate, gate_up, down)
    return y, *pull(d_out)


def choices(who, key, num):
    """Mixed: every device's own mixture. Uneven: a few experts for most tokens, of some devices
    only."""
    mixed = jax.random.randint(key, (num,), 0, E + 1)
    return {
        "mixed": mixed,
        "uneven": jnp.where(jnp.arange(num) < num // 2, jnp.minimum(mixed, 3), E - 1),
        "all one": jnp.full((num,), E - 2),
        "all skip": jnp.full((num,), E),
    }[who].astype(jnp.int32)


@pytest.mark.parametrize(
    ("spread", "num"),
    [(Spread(data=2, expert=4), 30), slow(Spread(expert=8), 13)],
    ids=["2x4", "1x8"],
)
def test_equal_to_one_device_whatever_the_router_chose(spread, num):
    run = on_devices(spread)
    num *= spread.data * spread.expert
    keys = jax.random.split(jax.random.key(0), 6)
    x, d_out = (jax.random.normal(key, (num, DIM)) for key in keys[:2])
    gate = jax.random.uniform(keys[2], (num,))
    weights = jax.random.normal(keys[3], (E, DIM, 2 * F)), jax.random.normal(keys[4], (E, F, DIM))
    with jax.default_matmul_precision("highest"):
        for who in ("mixed", "uneven", "all one", "all skip"):
            args = (x, choices(who, keys[5], num), gate, *weights, d_out)
            assert_norms_close(run(*args), on_one(*args), 1e-6)


def test_one_round_up_to_twice_the_even_load_and_no_more_than_stated_beyond():
    devices, num = 8, 32
    needed = jax.shard_map(
        lambda counts: dispatch.Rounds(counts, num, ("expert",)).needed,
        mesh=mesh_of(expert=devices),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    def rounds(sizes):
        return needed(jnp.asarray(sizes, jnp.int32).reshape(devices, devices, -1))

    even = np.full((devices, E), num // E)
    assert rounds(even) == 1
    double = np.zeros((devices, E))
    double[:, ::2] = 2 * num // E
    assert rounds(double) == 1
    to_one = np.zeros((devices, E))
    to_one[:, 3] = num
    assert rounds(to_one) == dispatch.most_rounds(num, devices) == 4
    assert rounds(0 * even) == 0


@pytest.mark.parametrize(
    ("devices", "num", "dim", "width", "num_experts"),
    [(8, 1024, 128, 128, 16), slow(2, 500, 128, 128, 8), slow(4, 500, 128, 32, 8)],
)
def test_traffic_and_memory_of_a_round(devices, num, dim, width, num_experts):
    """One program serves every load, so its traffic per round and its memory are the same too."""
    rows = 4 * dim * devices * dispatch.slot_rows(num, devices)
    counts = 4 * devices * num_experts
    # Of each round forward there and back; backward cotangents there and back, and later rounds'
    # tokens once more. What the forward pass does is in both programs, since the gate's gradient
    # needs its result.
    shapes = (devices * num, dim), (num_experts, dim, 2 * width), (num_experts, width, dim)
    x, gate_up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    choice, gate = (jax.ShapeDtypeStruct(x.shape[:1], dtype) for dtype in (jnp.int32, jnp.float32))
    for backward, first, later in ((False, 2, 2), (True, 4, 5)):
        part = slice(1, None) if backward else slice(1)
        run = on_devices(Spread(expert=devices), part, num_experts)
        program = run.lower(x, choice, gate, gate_up, down, x).compile()
        found = [(c.kind, c.bytes, c.times) for c in hlo.collectives(program)]
        assert sorted(x[:2] for x in found if x[2] is None) == [("all-to-all", rows)] * (
            later if devices > 2 else 0
        )
        once = [("all-gather", counts, 1)] + [("all-to-all", rows, 1)] * first
        assert sorted(x for x in found if x[2] is not None) == once
        own = num_experts // devices
        bound = formulas.most_temporaries(num, devices, dim, width, own, 4, backward)
        assert 0.5 * bound < program.memory_analysis().temp_size_in_bytes <= bound
