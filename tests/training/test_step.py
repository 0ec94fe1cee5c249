"""The compiled training step: what crosses devices and when, and that pieces of a batch add up to
the batch."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.model import zaya
from zaya_jax.model.layer import Layer
from zaya_jax.model.own_parts import customized
from zaya_jax.model.weights import TokenSum
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

SETTINGS = config.check(
    {
        "model": dict(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
            router_hidden_size=8,
            pad_token_id=None,
        ),
        "precision": {"compute": "float32", "newton_schulz": "float32", "matmul": "highest"},
        "data": {"seq_len": 16},
        "optim": {"newton_schulz_steps": 1},  # five compile longer
    }
)
ROWS, LENGTH = 16, 16


def batch(rng):
    """Rows of documents of uneven lengths, and very uneven numbers of real targets."""
    tokens = rng.integers(0, 64, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = (1 + np.cumsum(rng.random((ROWS, LENGTH)) < 0.15, 1)).astype(np.int32)
    mask = (np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (ROWS, 1))).astype(np.float32)
    mask[3] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments,
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "loss_mask": mask,
    }


class Noted(Layer):
    """With a figure of its own."""

    def __call__(self, h, router_state, balance, rope, placement):
        out = super().__call__(h, router_state, balance, rope, placement)
        real = placement.segments > 0
        self.square = TokenSum(jnp.sum(jnp.mean(jnp.square(out.h), axis=-1) * real))
        return out


@functools.cache
def program(num_devices):
    setup = states.set_up(SETTINGS, make_mesh(SETTINGS.mesh, jax.devices()[:num_devices]))
    noted = dataclasses.replace(SETTINGS, model=customized(SETTINGS.model, layer=Noted))
    return setup, steps.make_train_step(noted, setup)


def run(num_devices, micro_batches):
    setup, step = program(num_devices)
    state = states.init(SETTINGS, setup)
    rng, figures = np.random.default_rng(0), []
    for _ in range(2):
        rows = steps.put_batch(setup.mesh, batch(rng), micro_batches)
        state, found = step(state, rows, np.float32(1e-3))
        figures.append(jax.device_get(found))
    return jax.device_get(state["params"]), figures


@pytest.mark.parametrize(
    ("pieces", "whole"), [((8, 2), (8, 1)), pytest.param((2, 4), (1, 1), marks=pytest.mark.slow)]
)
def test_micro_batches_add_up_to_the_batch(pieces, whole):
    """On the devices, and with the programs, of the tests below; tests/parallel compares devices
    with one."""
    (params, figures), whole = run(*pieces), run(*whole)
    for ours, theirs in zip(figures, whole[1], strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-5)
        np.testing.assert_array_equal(ours["target_tokens"], theirs["target_tokens"])
        np.testing.assert_allclose(ours["load"], theirs["load"], atol=1e-6)
        np.testing.assert_allclose(ours["square"], theirs["square"], rtol=1e-5)
    assert figures[0]["square"].shape == (2,)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(whole[0]), strict=True):
        # AdamW moves by the learning rate however tiny a gradient is, so there rounding shows.
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_shapes_are_known_without_a_program_of_fresh_weights(monkeypatch):
    """That program has a compiler option of its own where XLA_FLAGS has none; a traced one may have
    none."""
    monkeypatch.setenv("XLA_FLAGS", "")
    setup, _ = program(1)
    like, made = states.abstract(SETTINGS, setup), states.init(SETTINGS, setup)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), like) == jax.tree.map(
        lambda x: (x.shape, x.dtype), made
    )


@pytest.fixture(scope="module")
def compiled():
    """(optimizer, the step's program on eight devices by its number of micro-batches): those that
    run above."""
    setup, step = program(8)
    state = states.init(SETTINGS, setup)
    likes = {n: steps.put_batch(setup.mesh, batch(np.random.default_rng(0)), n) for n in (2, 1)}
    return setup.optimizer, {
        n: step.lower(state, x, np.float32(1e-3)).compile() for n, x in likes.items()
    }


def test_every_product_and_every_transfer_says_what_it_belongs_to(compiled):
    found: dict[str, collections.Counter] = {}
    for instructions in hlo.parse(compiled[1][1].as_text()).values():
        for i in instructions:
            scope = hlo.scope_of(i.op_name) if i.op_name else "?"  # the compiler's own
            found.setdefault(scope, collections.Counter())[i.op] += 1
    heavy = {
        "dot",
        "convolution",
        "custom-call",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
    }
    kinds = {scope: {op for op in ops if op in heavy} for scope, ops in found.items()}
    for scope in ("embed", "cca", "router", "experts", "head", "optimizer", "balance"):
        assert any(name.split("/")[0] == scope for name in found), scope
    for scope in ("cca", "router", "experts", "head", "optimizer"):
        assert kinds[scope], scope
    assert {"reduce-scatter", "all-gather", "all-reduce"} <= kinds["optimizer/exchange"]
    # Of the step itself there are the sums of the loss, of the counts and of the number of targets.
    assert kinds[""] <= {"all-reduce"} and found[""]["all-reduce"] <= 3


def test_no_weight_crosses_devices_inside_the_accumulation(compiled):
    optimizer, programs = compiled
    found = {}
    for micro_batches, program in programs.items():
        collectives = hlo.collectives(program)
        assert not [c for c in collectives if c.in_loop and not c.scalar], (
            "a weight is reduced once a micro-batch"
        )
        found[micro_batches] = sorted((c.kind, c.bytes) for c in collectives if not c.scalar)
    # The compiler sums scalars together with other small arrays, and two micro-batches have ten
    # scalars more.
    assert [kind for kind, _ in found[1]] == [kind for kind, _ in found[2]]
    assert all(abs(a - b) < 256 for (_, a), (_, b) in zip(found[1], found[2], strict=True)), found
    # One reduce-scatter and one all-gather a bucket that is not small, and the small ones together
    # in one sum each way.
    travel = [b for b in optimizer.layout.matrices.values() if not b.summed_whole]
    for kind in ("reduce-scatter", "all-gather"):
        assert sum(k == kind for k, _ in found[1]) == len(travel) + 1


def test_a_figure_of_a_layer_is_its_mean_over_the_tokens():
    setup, step = program(8)
    state = states.init(SETTINGS, setup)
    rows = batch(np.random.default_rng(0))
    params, bias = jax.device_get((state["params"], state["balance"].bias))
    out = zaya.apply(
        SETTINGS.model,
        params,
        bias,
        zaya.TokenRows(rows["tokens"], rows["segment_ids"], rows["positions"]),
        precision=SETTINGS.precision,
        trace=True,
    )
    _, figures = step(state, steps.put_batch(setup.mesh, rows, 1), np.float32(1e-3))
    wanted = np.mean(np.square(out.hidden_states), axis=(1, 2, 3))
    np.testing.assert_allclose(figures["square"], wanted, rtol=1e-5)
