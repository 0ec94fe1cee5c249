"""Layers and routers of one's own: they generate what their logits say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rows import slow

import zaya_jax as zj
from zaya_jax.model import zaya
from zaya_jax.model.layer import Experts
from zaya_jax.model.own_parts import customized

SMALL = {
    "vocab_size": 264,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 8,
    "moe_intermediate_size": 8,
    "router_hidden_size": 9,
}
CONFIG = zj.config.check({"model": SMALL, "precision": {"compute": "float32"}})


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


class LinearRouter(zj.Router):
    """One product of the norm; the config's router width is the number of classes."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        del self.eda, self.norm, self.fc1, self.fc2, self.out

    def __call__(self, projected, stream, balance):
        p = jax.nn.softmax(projected + self.down.bias[...])
        choice = jnp.argmax(p + balance, axis=-1).astype(jnp.int32)
        return choice, jnp.take_along_axis(p, choice[:, None], axis=-1)[:, 0], projected, stream


@pytest.mark.parametrize(
    "own",
    [
        {"layer": Normed, "router": LinearRouter},
        {"layer": MlpAlone},
        slow({"layer": AroundExperts}),
    ],
)
def test_decoding_gives_the_likeliest_of_the_logits(own):
    model = zj.create(CONFIG, 0, **own)
    draw = np.random.default_rng(0)
    model.params = jax.tree.map(
        lambda x: x + 0.3 * draw.standard_normal(x.shape, np.float32), model.params
    )
    # So that the next token depends on the last one, and is another.
    model.params["embed"]["embedding"] *= 5
    model.params["final_norm"]["scale"] = draw.standard_normal(16).astype(np.float32)
    found = model.generate(draw.integers(0, 256, (2, 5)), 12)
    np.testing.assert_array_equal(found[:, 5:], model.logits(found).argmax(-1)[:, 4:-1])
    assert len(set(found[:, 5:].ravel().tolist())) > 2


def test_weights_of_an_own_layer_are_not_rounded_before_decoding():
    model = customized(CONFIG.model, layer=MlpAlone)
    precision = dataclasses.replace(CONFIG.precision, compute="bfloat16")
    found, _ = jax.eval_shape(
        lambda p: zaya.cast_for_products(model, p, precision), zaya.abstract(model)
    )
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
