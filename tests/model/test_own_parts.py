"""The parts of benchmarks.ablations: each lacks what it says, and a run of every variant takes a
step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rows import slow

import zaya_jax as zj
from benchmarks import ablations, own_parts
from zaya_jax.model import zaya
from zaya_jax.model.layer import Experts
from zaya_jax.model.own_parts import customized

SMALL = dict(hidden_size=16, num_hidden_layers=2, head_dim=4, moe_intermediate_size=8)
WIDTH, TOKENS = 24, 40


@pytest.fixture(scope="module")
def config():
    full = ablations.settings("zaya")
    return dataclasses.replace(full, model=dataclasses.replace(full.model, **SMALL))


@pytest.fixture
def asked():
    """(product of the norm, stream from below, balancing biases) for a router."""
    keys = jax.random.split(jax.random.key(1), 3)
    return tuple(
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(TOKENS, WIDTH)] * 2 + [(9,)], strict=True)
    )


def router(config, kind):
    """One with weights large enough that no two classes are near each other; the same for every
    kind with an MLP."""
    made = kind(nnx.Rngs(0), config.model, config.precision)
    graph, weights = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(lambda x: 20 * x, weights))


def test_a_router_alone_does_not_hear_the_one_below(config, asked):
    seen, stream, balance = asked
    alone, usual = router(config, own_parts.Alone), router(config, zj.Router)
    found, expected = alone(*asked), usual(seen, 0 * stream, balance)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.abs(found[2] - usual(*asked)[2]).max() > 0.1


def test_without_a_skip_class_the_gate_is_of_the_experts_alone(config, asked):
    # ZAYA's would skip every token
    seen, stream, balance = (asked[0], asked[1], asked[2].at[-1].set(100.0))
    choice, gate, _, _ = router(config, own_parts.NoSkip)(seen, stream, balance)
    usual = router(config, zj.Router)(seen, stream, balance)
    assert (np.asarray(usual[0]) == 8).all()
    p = jax.nn.softmax(usual[2][:, :8])
    np.testing.assert_array_equal(choice, jnp.argmax(p + balance[:8], axis=-1))
    np.testing.assert_allclose(gate, p[np.arange(TOKENS), choice], rtol=1e-5)


def test_the_auxiliary_loss_has_its_gradient_and_leaves_the_gate(config, asked):
    seen, stream, balance = asked
    usual, auxiliary = router(config, zj.Router), router(config, own_parts.Auxiliary)
    np.testing.assert_array_equal(auxiliary(*asked)[1], usual(*asked)[1])

    def written_out(seen):
        choice, gate, logits, _ = usual(seen, stream, balance)
        p, share = jax.nn.softmax(logits), np.bincount(choice, minlength=9) / TOKENS
        return jnp.sum(gate**2) + 0.01 * 8 * jnp.sum(share * p.mean(0))

    found = jax.grad(lambda seen: jnp.sum(auxiliary(seen, stream, balance)[1] ** 2))(seen)
    np.testing.assert_allclose(found, jax.grad(written_out)(seen), rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_plain_sum_is_what_residual_scaling_begins_with(config):
    ids = np.random.default_rng(0).integers(0, 256, (2, 16))
    usual, plain = zj.create(config, 0), zj.create(config, 0, layer=own_parts.Unscaled)
    assert usual.params["layers"].keys() - plain.params["layers"].keys() == {
        "attn_join",
        "moe_join",
    }
    layers = {name: usual.params["layers"][name] for name in plain.params["layers"]}
    plain.params = usual.params | {"layers": layers}
    assert plain.loss(ids, ids) == pytest.approx(usual.loss(ids, ids), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ablations.VARIANTS)
def test_every_variant_takes_a_step(name, monkeypatch):
    full = ablations.settings(name)
    small = dataclasses.replace(full, model=dataclasses.replace(full.model, **SMALL))
    monkeypatch.setattr(ablations, "settings", lambda name: small)
    monkeypatch.setattr(ablations, "BATCH", 2)
    monkeypatch.setattr(ablations, "LENGTH", 16)
    found = ablations.run(name, ablations.RATE, seed=0, last=1)
    assert abs(found["loss"] - np.log(264)) < 1 and abs(found["held_out"] - np.log(264)) < 1


class NormedExperts(Experts):
    """Their matrices have a mean square of 1/4, whatever the weights are."""

    def __call__(self, x, choice, gate, placement):
        graph, weights = nnx.split(self)
        half = lambda w: w / (2 * jnp.sqrt(jnp.mean(w**2, axis=(1, 2), keepdims=True)))  # noqa: E731
        return Experts.__call__(
            nnx.merge(graph, jax.tree.map(half, weights)), x, choice, gate, placement
        )


class Normed(zj.Layer):
    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        self.experts = NormedExperts(rngs, model, precision)


class AroundExperts(zj.Layer):
    """The usual class of experts, called with other weights than its own."""

    def __call__(self, h, router_state, balance, rope, placement):
        self.experts.down[...] = self.experts.down[...] * 3
        return super().__call__(h, router_state, balance, rope, placement)


class MlpAlone(zj.Layer):
    """One MLP in place of experts, without a router; it reads its weights in float32."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        del self.experts, self.router
        self.mlp = nnx.Module()
        for name in ("gate", "up", "down"):
            shape = (model.hidden_size,) * 2
            setattr(self.mlp, name, zj.weight(rngs, shape, ("embed", "embed"), 0.2))

    def __call__(self, h, router_state, balance, rope, placement):
        x, h = self.attn_norm.norm_and_stream(h, self.dtype)
        y, cache = self.cca(x, rope, placement)
        h = self.attn_join(y, h)
        x = self.moe_norm(h).astype(jnp.float32)
        up = jax.nn.silu(x @ self.mlp.gate[...]) * (x @ self.mlp.up[...])
        h = self.moe_join(up @ self.mlp.down[...], h, jnp.ones(h.shape[:-1]))
        choice = jnp.zeros(router_state.shape[:1], jnp.int32)
        return h, router_state, choice, jnp.zeros((len(choice), len(balance))), cache


def small(name):
    full = ablations.settings(name)
    return dataclasses.replace(full, model=dataclasses.replace(full.model, **SMALL))


OWN_LAYERS = {"normed": Normed, "around": AroundExperts, "mlp": MlpAlone}
DECODED = [*OWN_LAYERS, "gqa_cache", "no_scaling", "no_skip", "linear", "no_eda", "auxiliary"]


@pytest.mark.parametrize(
    "name", ["normed", "mlp", *(slow(name) for name in DECODED if name not in ("normed", "mlp"))]
)
def test_decoding_gives_the_likeliest_of_the_logits(name):
    variant = ablations.VARIANTS.get(name)
    layer = variant.layer if variant else OWN_LAYERS[name]
    settings = small(name) if variant else small("zaya")
    model = zj.create(settings, 0, layer=layer, router=variant and variant.router)
    draw = np.random.default_rng(0)
    model.params = jax.tree.map(
        lambda x: x + 0.3 * draw.standard_normal(x.shape, np.float32), model.params
    )
    # So that the next token depends on the last one, and is another.
    model.params["embed"]["embedding"] *= 5
    model.params["final_norm"]["scale"] = draw.standard_normal(16).astype(np.float32)
    found = model.generate(draw.integers(0, 256, (2, 5)), 12)
    likeliest = model.logits(found).argmax(-1)
    np.testing.assert_array_equal(found[:, 5:], likeliest[:, 4:-1])
    assert len(set(found[:, 5:].ravel().tolist())) > 2


def test_weights_of_an_own_layer_are_not_rounded_before_decoding(config):
    model = customized(config.model, layer=MlpAlone)
    precision = dataclasses.replace(config.precision, compute="bfloat16")
    found, _ = jax.eval_shape(
        lambda p: zaya.cast_for_products(model, p, precision), zaya.abstract(model)
    )
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
