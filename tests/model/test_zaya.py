"""The whole model's facts: parameter counts, fresh weights, effects of a layer's kind, memory;
linear attention among its layers; the dense model, whose cache test_rows.py has."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest
from compared import assert_all_close, assert_norms_close
from flax import nnx
from refusals import check_refused
from rows import slow

from experiments.configs import dense_7b
from pallas_kernels import chip
from pallas_kernels.attention.reference import attention
from pallas_kernels.residual_norm.reference import read
from pallas_kernels.rotary import rope_table, rotate
from zaya_jax import config
from zaya_jax.config import Model, Precision, Rope, RopeKinds
from zaya_jax.hardware import chips
from zaya_jax.hardware.chips import model_flops
from zaya_jax.model import zaya
from zaya_jax.model.placement import TokenRows
from zaya_jax.model.stack import pack_vectors

IDS = np.arange(10, dtype=np.int32)[None]


def test_parameter_counts_of_the_full_size_model():
    assert zaya.param_counts(Model()) == {
        "total": 8_840_488_784,
        "without_embedding": 8_303_355_728,
        "active_without_embedding": 753_608_528,
        "active": 1_290_741_584,
    }


def test_every_weight_has_a_float32_shape_and_named_dimensions():
    model = model_helpers.small()
    shapes, axes = zaya.abstract(model), zaya.param_axes(model)
    for shape, names in zip(
        jax.tree.leaves(shapes),
        jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)),
        strict=True,
    ):
        assert shape.dtype == jnp.float32 and len(names) == len(shape.shape)
    assert axes["layers"]["experts"]["down"] == ("layers", "expert", "mlp", "embed")


def test_fresh_weights():
    model = model_helpers.small(hidden_size=64, initializer_range=0.5)
    init = jax.jit(lambda: zaya.init(model, jax.random.key(0)))
    params = init()
    jax.tree.map(np.testing.assert_array_equal, params, init())
    layers = params["layers"]
    assert (layers["cca"]["temperature"] == 1).all() and (layers["router"]["eda"] == 1).all()
    assert (layers["attn_join"]["y_scale"] == 1).all() and (layers["moe_join"]["h_bias"] == 0).all()
    assert (layers["cca"]["q"]["bias"] == 0).all() and (params["head"]["bias"] == 0).all()
    for kernel in (
        layers["cca"]["q"]["kernel"],
        layers["experts"]["gate_up"],
        params["embed"]["embedding"],
    ):
        assert abs(kernel.std() - 0.5) < 0.03 and abs(kernel.mean()) < 0.05
    assert not (layers["cca"]["q"]["kernel"][0] == layers["cca"]["q"]["kernel"][1]).any()
    bias = zaya.init_balance(model)
    assert (bias[:, -1] == -1).all() and (bias[:, :-1] == 0).all()


def test_a_layers_vectors_are_one_input_of_the_scan():
    """On a GPU, by its program; a layer finds the weights that it would find one by one."""
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    whole = nnx.split(zaya.Zaya(nnx.Rngs(0), model, Precision()).layers)[1]
    given, of_layer = pack_vectors(whole, True)
    assert given[0].ndim == 2 and all(x.ndim > 2 for x in jax.tree.leaves(given[1]))
    for i in range(model.num_hidden_layers):
        own, alone = (jax.tree.map(lambda x, i=i: x[i], tree) for tree in (given, whole))
        jax.tree.map(np.testing.assert_array_equal, of_layer(own), alone)
    with chip.making(chip.Chip("cpu", "NVIDIA H200", ())):
        program = jax.make_jaxpr(lambda p: zaya.apply(model, p, bias, TokenRows(IDS)).hidden)(
            params
        )
    assert given[0].shape in [x.aval.shape for e in program.eqns for x in e.invars]


def traced_gradients(remat, kinds=("hybrid", "hybrid_sliding")):
    """The program of a small model's gradients, and its parameters."""
    model = model_helpers.small(layer_types=kinds)
    params, bias = model_helpers.weights(model)

    def objective(p):
        out = zaya.apply(model, p, bias, TokenRows(IDS), precision=model_helpers.EXACT, remat=remat)
        return jnp.sum(out.hidden**2)

    return jax.jit(jax.grad(objective)).trace(params), params


@functools.cache
def gradients(*case):
    traced, params = traced_gradients(*case)
    return traced.lower().compile()(params)


@pytest.mark.parametrize(
    "case",
    [
        ("attention",),
        ("offload",),
        *(
            slow(case)
            for case in (("layer",), ("elementwise",), ("attention", ("hybrid_linear", "hybrid")))
        ),
    ],
)
def test_recomputing_changes_no_gradient(case):
    remat, *kinds = case
    plain = gradients("none", *kinds)
    assert_all_close(gradients(remat, *kinds), plain, atol=1e-3, rtol=1e-4)


def test_elementwise_recomputes_no_product_of_weights():
    def products(remat):
        return str(traced_gradients(remat)[0].jaxpr).count("dot_general")

    # A layer has 12 of them: four of attention's, two of the experts', four of the router's, two of
    # the convolutions.
    assert products("elementwise") <= products("attention") - 8
    assert products("none") <= products("elementwise") <= products("none") + 2


@pytest.mark.slow
def test_the_whole_model_at_32k_tokens_has_no_square_array():
    model = model_helpers.small(
        num_hidden_layers=3, layer_types=("hybrid", "hybrid_sliding", "hybrid")
    )
    length = 32768
    params = zaya.abstract(model)

    def loss(params, bias, ids):
        return jnp.sum(
            zaya.apply(
                model, params, bias, TokenRows(ids), precision=Precision(), remat="layer"
            ).hidden
        )

    bias = jax.ShapeDtypeStruct((3, model.num_experts + 1), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = jax.jit(jax.grad(loss)).lower(params, bias, ids).compile()
    assert f"{length},{length}" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length * 4 / 20


@pytest.mark.slow
def test_layers_written_out_are_the_scan(monkeypatch):
    def run():
        traced, params = traced_gradients("none")
        lowered = traced.lower()
        return lowered.as_text().count("stablehlo.while"), lowered.compile()(params)

    loops, scanned = run()
    monkeypatch.setattr(chip.Chip, "unrolls", lambda *_: True)
    loops_left, written_out = run()
    assert loops_left != loops
    assert_norms_close(scanned, written_out, 3e-6)


EXACT, DENSE = model_helpers.EXACT, model_helpers.DENSE
FULL, SLIDING, LINEAR = config.LAYER_KINDS


MIXED = LINEAR, FULL, LINEAR, SLIDING


def test_a_linear_layer_has_the_weights_of_the_others():
    mixed, full = (model_helpers.of_kinds(kinds) for kinds in (MIXED, 4 * (FULL,)))
    assert zaya.abstract(mixed) == zaya.abstract(full)
    assert zaya.param_counts(mixed) == zaya.param_counts(full)


def test_traces_are_those_of_each_layer_in_turn():
    """The stretches' outputs come back in the order of the layers."""
    model = model_helpers.of_kinds(MIXED)
    params, bias = model_helpers.weights(model)
    ids = np.arange(6)[None]
    run = jax.jit(functools.partial(zaya.apply, precision=EXACT, trace=True), static_argnums=0)
    out = run(model, params, bias, TokenRows(ids))
    assert out.counts.shape == (4, 4)
    below = params | {"layers": jax.tree.map(lambda x: x[:3], params["layers"])}
    part = run(model_helpers.of_kinds(MIXED[:3]), below, bias[:3], TokenRows(ids))
    np.testing.assert_allclose(part.hidden_states, out.hidden_states[:3], atol=1e-5)
    np.testing.assert_array_equal(part.counts, out.counts[:3])


def test_a_stretch_is_traced_whatever_the_number_of_layers():
    def loops(repeats):
        model = model_helpers.of_kinds((LINEAR, FULL) * repeats)
        args = zaya.abstract(model), jnp.zeros((2 * repeats, 4)), jnp.zeros((1, 8), jnp.int32)
        apply = jax.jit(
            lambda p, b, i: zaya.apply(model, p, b, TokenRows(i), precision=EXACT).hidden
        )
        return apply.lower(*args).compile().as_text().count(" while(")

    assert loops(2) == loops(5)


def test_flops_of_linear_attention_do_not_grow_with_the_sequence():
    linear, full = (model_helpers.of_kinds(2 * (kind,)) for kind in (LINEAR, FULL))
    assert chips.model_flops(linear, 1 << 20) == chips.model_flops(linear, 64)
    assert chips.model_flops(full, 1 << 20) > 100 * chips.model_flops(linear, 1 << 20)


@pytest.mark.parametrize("remat", ["none", slow("attention")])
def test_no_second_copy_of_the_weights_is_kept(remat):
    """The gradient's memory besides weights and gradients is less than a copy: on few tokens these
    dominate."""
    model = model_helpers.of_kinds((LINEAR, FULL) * 4, moe_intermediate_size=512, num_experts=8)
    like = zaya.abstract(model, config.Precision())
    bias = jax.ShapeDtypeStruct((8, 9), jnp.float32)

    def total(params, bias):
        return zaya.apply(
            model, params, bias, TokenRows(jnp.zeros((1, 8), jnp.int32)), remat=remat
        ).hidden.sum()

    taken = jax.jit(jax.grad(total)).lower(like, bias).compile().memory_analysis()
    weights = 4 * sum(x.size for x in jax.tree.leaves(like))
    # A stretch of two layers at a time: their weights to compute with, and their gradients.
    assert taken.temp_size_in_bytes < 0.6 * weights


def dense_definition(model, params, ids):
    """The same model of the operators' definitions, layer by layer."""
    eps, channels, positions = model.rms_norm_eps, model.head_dim, jnp.arange(ids.shape[1])
    rope = [(None, rope_table(jnp.broadcast_to(positions, ids.shape), 10_000.0, channels))]

    def norm(x, weights):
        return read(x, weights["scale"], eps, jnp.float32)[0]

    embed = params["embed"]
    h = (embed["embedding"][ids] + embed["bias"]) * embed["scale"]
    for i in range(model.num_hidden_layers):
        layer = jax.tree.map(lambda x, i=i: x[i], params["layers"])
        x, kernels = norm(h, layer["attn_norm"]), layer["attention"]
        q, k, v = ((x @ kernels[n]["kernel"]).reshape(*ids.shape, -1, channels) for n in "qkv")
        out, _ = attention(rotate(rope, q), rotate(rope, k), v, scale=channels**-0.5)
        h = h + out.reshape(*ids.shape, -1) @ kernels["o"]["kernel"]
        x, kernels = norm(h, layer["mlp_norm"]), layer["mlp"]
        gate, up = (x @ kernels[n]["kernel"] for n in ("gate", "up"))
        h = h + (jax.nn.silu(gate) * up) @ kernels["down"]["kernel"]
    return norm(h, params["final_norm"])


def test_it_is_its_definition():
    rope = RopeKinds(Rope(partial_rotary_factor=1.0))
    model = model_helpers.small(**DENSE, layer_types=(), rope_parameters=rope)
    params, bias = model_helpers.weights(model)
    ids = np.random.default_rng(0).integers(0, 32, (2, 11))
    with jax.default_matmul_precision("highest"):
        apply = jax.jit(functools.partial(zaya.apply, model, precision=EXACT))
        out = apply(params, bias, TokenRows(jnp.asarray(ids)))
        expected = dense_definition(model, params, ids)
    np.testing.assert_allclose(out.hidden, expected, atol=2e-5)
    np.testing.assert_array_equal(out.counts, [[22, 0], [22, 0]])


def test_the_7b_shape():
    model = config.check(dense_7b.get_config()).model
    counts = zaya.param_counts(model)
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * model.intermediate_size)
    # norms, and the embedding's two vectors
    assert counts["without_embedding"] == matrices + (2 * 32 + 1 + 2) * 4096
    assert 6.7e9 < counts["total"] < 7.3e9
    assert counts["active"] == counts["total"]
    # Six operations per weight and token, and as many per pair of channels and seen key, on average
    # S / 2 keys.
    assert model_flops(model, 4096) == pytest.approx(
        6 * (matrices + 4096 * model.vocab_size) + 6 * 2 * 32 * 4096 * 4097 / 2, rel=1e-6
    )


@pytest.mark.parametrize(
    "changes", [{"num_experts": 16}, {"layer_types": ("hybrid", "hybrid_linear")}]
)
def test_a_key_that_a_dense_model_has_not_is_refused(changes):
    check_refused(
        rf"config\.model\.model_type='dense' needs {next(iter(changes))}",
        lambda: config.check_model(dataclasses.asdict(model_helpers.small(**DENSE | changes))),
    )
