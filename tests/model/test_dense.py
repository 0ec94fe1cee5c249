"""The dense model: its definition and its sizes; test_rows.py has its cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import EXACT, weights
from refusals import check_refused

from experiments.configs import dense_7b
from zaya_jax import config
from zaya_jax.config import Model, Rope, RopeKinds
from zaya_jax.hardware.chips import model_flops
from zaya_jax.model import zaya
from zaya_jax.model.placement import TokenRows


def small(**changes):
    return Model(
        **{
            "model_type": "dense",
            "vocab_size": 32,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 24,
            "num_experts": 1,
            "pad_token_id": None,
            "rope_parameters": RopeKinds(Rope(partial_rotary_factor=1.0)),
            **changes,
        }
    )


def run(model, params, bias, *rows):
    with jax.default_matmul_precision("highest"):
        apply = jax.jit(functools.partial(zaya.apply, model, precision=EXACT))
        return apply(params, bias, TokenRows(*rows))


def definition(model, params, ids):
    """The same model written plainly, one sequence of float64 at a time."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    h_num, k_num, c = model.num_attention_heads, model.num_key_value_heads, model.head_dim

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.rms_norm_eps) * scale

    def turn(x):
        angles = np.arange(len(x))[:, None] / 10_000.0 ** (np.arange(0, c, 2) / c)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., : c // 2], x[..., c // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = (p["embed"]["embedding"][ids] + p["embed"]["bias"]) * p["embed"]["scale"]
    layers, causal = p["layers"], np.tril(np.ones((len(ids), len(ids)), bool))
    for i in range(model.num_hidden_layers):
        y = norm(x, layers["attn_norm"]["scale"][i])
        kernels = {n: layers["attention"][n]["kernel"][i] for n in "qkvo"}
        q, k, v = (
            (y @ kernels[n]).reshape(len(ids), num, c)
            for n, num in (("q", h_num), ("k", k_num), ("v", k_num))
        )
        q, k, v = turn(q), np.repeat(turn(k), h_num // k_num, 1), np.repeat(v, h_num // k_num, 1)
        scores = np.where(causal, np.einsum("ihc,jhc->hij", q, k) / np.sqrt(c), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hij,jhc->ihc", scores / scores.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(ids), -1) @ kernels["o"]
        y = norm(x, layers["mlp_norm"]["scale"][i])
        gate, up, down = (layers["mlp"][n]["kernel"][i] for n in ("gate", "up", "down"))
        x = x + (y @ gate / (1 + np.exp(-(y @ gate))) * (y @ up)) @ down
    return norm(x, p["final_norm"]["scale"])


def test_it_is_its_definition():
    model = small()
    params, bias = weights(model)
    ids = np.random.default_rng(0).integers(0, 32, (2, 11))
    out = run(model, params, bias, jnp.asarray(ids))
    for row, expected in zip(out.hidden, ids, strict=True):
        np.testing.assert_allclose(row, definition(model, params, expected), atol=2e-5)
    np.testing.assert_array_equal(out.counts, [[22, 0], [22, 0]])


def test_packed_documents_are_documents_alone():
    model = small(layer_types=("hybrid", "hybrid_sliding"), sliding_window=3)
    params, bias = weights(model)
    ids = jax.random.randint(jax.random.key(1), (1, 12), 0, 32)
    segments = jnp.asarray([[1] * 5 + [2] * 7])
    positions = jnp.asarray([[*range(5), *range(7)]])
    packed = run(model, params, bias, ids, segments, positions).hidden
    alone = [run(model, params, bias, ids[:, a:b]).hidden for a, b in ((0, 5), (5, 12))]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=2e-6)


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
        rf"config\.model\.{next(iter(changes))}.* model_type='dense'",
        lambda: config.check_model(dataclasses.asdict(small(**changes))),
    )
