"""Muon's mathematics and coefficients; twenty steps of Muon and AdamW against PyTorch 2.13's
(tools/golden/make_optim.py), through the real chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.golden import make_optim
from zaya_jax.config import Optim, Precision
from zaya_jax.optim import chain, muon


@pytest.fixture(scope="module")
def expected(golden_dir):
    return np.load(golden_dir / "optim" / "expected.npz")


def trained(optim, method, precision="float32", stack=()):
    """{name: weight [out, in]} after the script's steps; with `stack`, as the last matrix of such a
    stack."""
    start, gradients = {}, [{} for _ in range(make_optim.STEPS)]
    random = np.random.RandomState(1)

    def stacked(x):
        others = random.standard_normal((np.prod(stack, dtype=int) - 1, *x.T.shape)).astype(
            np.float32
        )
        return np.concatenate([others, x.T[None]]).reshape(*stack, *x.T.shape)

    for name in make_optim.SHAPES:
        first, steps = make_optim.numbers(name)
        start[name] = stacked(first)
        for tree, g in zip(gradients, steps, strict=True):
            tree[name] = stacked(g)
    table = (chain.WeightRule(".*", "matrices", method, True),)
    optimizer = chain.build(optim, Precision(newton_schulz=precision), start, table=table)

    @jax.jit
    def step(params, state, grads):
        return optimizer.apply(grads, state, params, lr=make_optim.LR)

    params, state = start, optimizer.init()
    for grads in gradients:
        params, state = step(params, state, grads)
    last = (-1,) * len(stack)
    return {name: np.asarray(p)[last].T if stack else np.asarray(p).T for name, p in params.items()}


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


SCALES = {"match_rms_adamw": "match_rms_adamw", "spectral": "original"}  # ours: torch's


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("stack", [(1,), (3,), (2, 2)])
def test_muon_float32(expected, scale, stack):
    optim = Optim(muon_scale=scale, weight_decay=make_optim.DECAY, clip_norm=0.0)
    for name, weight in trained(optim, "muon", stack=stack).items():
        assert distance(weight, expected[f"{name} {SCALES[scale]} float32"]) < 1e-5, name


@pytest.mark.parametrize("scale", SCALES)
def test_muon_bfloat16(expected, scale):
    """As near to the float32 result as torch's own bfloat16 iteration is."""
    optim = Optim(muon_scale=scale, weight_decay=make_optim.DECAY, clip_norm=0.0)
    for name, weight in trained(optim, "muon", "bfloat16").items():
        exact = expected[f"{name} {SCALES[scale]} float32"]
        bound = distance(expected[f"{name} {SCALES[scale]} bfloat16"], exact)
        assert 1e-4 < bound < 2e-2
        assert 0 < distance(weight, exact) < 1.1 * bound, name


def test_adamw(expected):
    optim = Optim(name="adamw", b2=0.95, weight_decay=make_optim.DECAY, clip_norm=0.0)
    for method in ("adamw", "muon"):  # optim.name turns every row to AdamW
        for name, weight in trained(optim, method).items():
            assert distance(weight, expected[f"{name} adamw"]) < 1e-6, name


def singular_values_after(polynomials, s):
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return s


def test_keller_jordan_ends_between_two_thirds_and_six_fifths():
    s = singular_values_after(muon.coefficients("keller_jordan", 5), np.linspace(0.01, 1, 10_000))
    assert s.min() > 0.67 and s.max() < 1.21


def test_polar_express():
    # The published coefficients of the first steps and of the last, before the head room.
    bare = [
        (a * 1.01, b * 1.01**3, c * 1.01**5) for a, b, c in muon.coefficients("polar_express", 9)
    ]
    np.testing.assert_allclose(bare[0], (8.28721, -23.59589, 17.30039), atol=1e-5)
    np.testing.assert_allclose(bare[1], (4.10706, -2.94785, 0.54484), atol=1e-5)
    np.testing.assert_allclose(bare[4], (2.30065, -1.66890, 0.41881), atol=1e-5)
    np.testing.assert_allclose(bare[8], (1.875, -1.25, 0.375), atol=1e-5)
    # It does converge, which Keller Jordan's does not, and the head room costs little. So no
    # coefficient between them is wrong.
    s = np.geomspace(1e-3, 1, 10_000)
    assert np.abs(singular_values_after(bare, s) - 1).max() < 1e-6
    for steps, off in ((5, 0.3), (7, 0.02)):
        ends = singular_values_after(muon.coefficients("polar_express", steps), s)
        assert np.abs(ends - 1).max() < off


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum(nesterov):
    random = np.random.default_rng(0)
    transformation = muon.scale_by_muon(
        0.9, nesterov, muon.coefficients("keller_jordan", 5), jnp.float32
    )
    state, buf = transformation.init({"w": np.zeros((6, 4), np.float32)}), np.zeros((6, 4))
    for _ in range(5):
        g = random.standard_normal((6, 4)).astype(np.float32)
        got, state = transformation.update({"w": g}, state)
        buf = 0.9 * buf + 0.1 * g
        u = 0.1 * g + 0.9 * buf if nesterov else buf
        np.testing.assert_allclose(state["w"], buf, atol=1e-6)
        expected = muon.orthogonalize(
            jnp.asarray(u, jnp.float32), muon.coefficients("keller_jordan", 5), jnp.float32
        )
        np.testing.assert_allclose(got["w"], expected, atol=1e-4)


def test_bfloat16_momentum_stays_near():
    random, polynomials = np.random.default_rng(0), muon.coefficients("keller_jordan", 5)
    kinds = [
        muon.scale_by_muon(0.95, True, polynomials, jnp.float32, momentum_dtype=dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    ]
    states = [kind.init(np.zeros((16, 24), np.float32)) for kind in kinds]
    assert [s.dtype for s in states] == [jnp.float32, jnp.bfloat16]
    drift = random.standard_normal((16, 24))
    for _ in range(50):
        g = (drift + random.standard_normal((16, 24))).astype(np.float32)
        (_, a), (_, b) = (kind.update(g, state) for kind, state in zip(kinds, states, strict=True))
        states = [a, b]
    a, b = (np.asarray(s, np.float32) for s in states)
    assert 0 < np.linalg.norm(a - b) < 0.02 * np.linalg.norm(a)


def test_flops_are_the_dots_of_the_program():
    shape = (3, 16, 40)
    lowered = jax.jit(
        lambda x: muon.orthogonalize(x, muon.coefficients("keller_jordan", 5), jnp.float32)
    ).lower(jax.ShapeDtypeStruct(shape, jnp.float32))
    counted = 0
    for line in lowered.as_text().splitlines():
        if "stablehlo.dot_general" in line:
            (n, i, k), (_, _, j) = (
                [int(d) for d in part.split("xf32")[0].split("x")]
                for part in (line.split("(tensor<")[1], line.split("-> tensor<")[1])
            )
            counted += 2 * n * i * j * k
    assert counted == muon.newton_schulz_flops(shape, 5) == muon.newton_schulz_flops((3, 40, 16), 5)
