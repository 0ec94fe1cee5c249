"""Experts against their definition, on the CPU's path and on `ragged_dot`'s: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.model import blocks, experts

E, D, F = 4, 12, 20
SIZES = {
    "uneven": (30, 5, 1, 41),
    "one has all": (0, 77, 0, 0),
    "the last is empty": (40, 30, 7, 0),
    "some rows skipped": (10, 0, 25, 12),
    "all skipped": (0, 0, 0, 0),
}


@pytest.fixture(params=["blocks", "ragged"])
def path(request, monkeypatch):
    """Each implementation in turn, as `of_own_expert` chooses them by backend."""
    if request.param == "ragged":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("num_rows", [77, 300])
def test_grouped_products(sizes, num_rows):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (num_rows, D)), jax.random.normal(keys[1], (E, D, F))
    weight = jax.random.normal(keys[2], (num_rows, F))
    sizes = jnp.asarray(sizes, jnp.int32)

    def run(dot):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.vdot(dot(x, w, sizes), weight), argnums=(0, 1)))(
            x, w
        )

    with jax.default_matmul_precision("highest"):
        ours, theirs = run(experts.grouped_dot), run(experts.reference_grouped_dot)
        y = jax.jit(experts.grouped_dot)(x, w, sizes)
        np.testing.assert_allclose(y, experts.reference_grouped_dot(x, w, sizes), atol=1e-4)
    np.testing.assert_array_equal(y[int(sizes.sum()) :], 0)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("heights", [(8,), (8, 16, 24), blocks.heights(100, E)], ids=str)
def test_blocks_of_any_height(sizes, heights):
    """Many whole blocks, one that fits, and both, each running over into the next expert's rows."""
    keys, num = jax.random.split(jax.random.key(0), 4), sum(sizes)
    rows, weight = (jax.random.normal(key, (num + heights[-1], D)) for key in keys[:2])
    gate_up, down = jax.random.normal(keys[2], (E, D, 2 * F)) / 3, jax.random.normal(keys[3], (E, F, D)) / 3
    sizes = jnp.asarray(sizes, jnp.int32)

    def through_blocks(*args):
        return blocks.swiglu(args[0], sizes, *args[1:], heights)

    def plain(rows, gate_up, down):
        hidden = blocks.gated(experts.reference_grouped_dot(rows, gate_up, sizes))
        return experts.reference_grouped_dot(hidden, down, sizes)

    def run(mlp):
        objective = lambda *args: jnp.vdot(mlp(*args)[:num], weight[:num])  # noqa: E731
        value, (d_rows, *d_weights) = jax.jit(jax.value_and_grad(objective, (0, 1, 2)))(rows, gate_up, down)
        return value, d_rows[:num], d_weights

    with jax.default_matmul_precision("highest"):
        ours, theirs = run(through_blocks), run(plain)
        np.testing.assert_allclose(
            jax.jit(through_blocks)(rows, gate_up, down)[:num], plain(rows, gate_up, down)[:num], atol=1e-4
        )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)


def test_heights_of_blocks():
    assert blocks.heights(2048, 8) == (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
    assert blocks.heights(1, 16) == (8,)  # a decoded token
    assert blocks.heights(20, 2) == (8, 16, 32)  # none above what can be needed
    assert blocks.heights(1 << 20, 16)[-1] == 1024


def test_weight_gradients_of_grouped_products_are_rounded_once():
    """As a GPU computes them: a rounding of each result is all that parts them from float32, however many rows."""
    calls, rows = 16, 256
    keys = jax.random.split(jax.random.key(0), 2)
    # Of one sign, so that sums grow large: added up in bfloat16 they would stop growing after some 256 rows.
    x = jax.random.uniform(keys[0], (calls, rows, D)).astype(jnp.bfloat16)
    dy = jax.random.uniform(keys[1], (calls, rows, F)).astype(jnp.bfloat16)
    sizes = jnp.asarray([rows - 20, 3, 0, 10], jnp.int32)
    w = jnp.zeros((E, D, F), jnp.float32)

    def ours(
        x, dy
    ):  # not jitted: a compiler may leave a rounding out, as XLA's for CPUs does, hipBLASLt's product cannot
        return jax.vjp(lambda w: experts.grouped_dot(x, w, sizes), w)[1](dy)[0]

    ends = np.cumsum(sizes)
    group = (np.arange(rows)[:, None] >= ends).sum(-1)
    wide = [np.asarray(a, np.float64) for a in (x, dy)]
    exact = np.stack(
        [np.stack([x[group == e].T @ dy[group == e] for e in range(E)]) for x, dy in zip(*wide, strict=True)]
    )
    found = np.stack([ours(a, b) for a, b in zip(x, dy, strict=True)])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, found.astype(jnp.bfloat16))  # so the table of formats says
    assert (np.abs(found - exact) <= 2.0**-8 * np.abs(exact)).all()

    def error(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    once, summed = error(found[0], exact[0]), error(found.sum(0), exact.sum(0))
    assert 1e-3 < once < 2e-3
    assert summed < once / 3  # float32 sums of independent roundings
    assert (found.sum(0) != found.sum(0).astype(jnp.bfloat16)).any()


def test_weight_gradients_are_float32_of_bfloat16_rows(path):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (64, D), jnp.bfloat16)
    gate_up, down = jax.random.normal(keys[1], (E, D, 2 * F)) / 3, jax.random.normal(keys[2], (E, F, D)) / 3
    choice = jnp.arange(64, dtype=jnp.int32) % (E + 1)
    y, pull = jax.vjp(lambda *args: experts.of_own_expert(args[0], choice, *args[1:]), x, gate_up, down)
    dx, *d_weights = pull(jnp.ones_like(y))
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert {dw.dtype for dw in d_weights} == {jnp.dtype(jnp.float32)}
    exact = plain_mlp(x.astype(jnp.float32), choice, jnp.ones(64), gate_up, down)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.1)


def plain_mlp(x, choice, gate, gate_up, down):
    """Every token through every expert, then its own is taken."""
    g, u = jnp.split(jnp.einsum("nd,edf->enf", x, gate_up), 2, axis=-1)
    y = jnp.einsum("enf,efd->end", jax.nn.silu(g) * u, down)
    y = jnp.concatenate([y, jnp.zeros_like(y[:1])])
    return jnp.take_along_axis(y, choice[None, :, None], 0)[0] * gate[:, None]


@pytest.mark.parametrize("who", ["mixed", "all one", "all skip"])
def test_the_whole_mlp(path, who):
    keys = jax.random.split(jax.random.key(1), 6)
    n = 60
    choice = {
        "mixed": jax.random.randint(keys[0], (n,), 0, E + 1),
        "all one": jnp.full((n,), 2),
        "all skip": jnp.full((n,), E),
    }[who].astype(jnp.int32)
    args = (
        jax.random.normal(keys[1], (n, D)), jax.random.uniform(keys[2], (n,)),
        jax.random.normal(keys[3], (E, D, 2 * F)) / D**0.5, jax.random.normal(keys[4], (E, F, D)) / F**0.5,
    )  # fmt: skip
    weight = jax.random.normal(keys[5], (n, D))

    def run(mlp):
        objective = lambda x, gate, gate_up, down: jnp.vdot(mlp(x, choice, gate, gate_up, down), weight)  # noqa: E731
        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2, 3)))(*args)

    with jax.default_matmul_precision("highest"):
        ours = run(lambda *a: experts.expert_mlp(*a, dtype=jnp.float32))
        theirs = run(plain_mlp)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    gate_gradient = ours[1][1]
    np.testing.assert_array_equal(gate_gradient[choice == E], 0)  # a skipped token teaches the gate nothing
