"""Twenty steps of Muon and AdamW against PyTorch 2.13's (tools/golden/make_optim.py), through the
real chain."""

import jax
import numpy as np
import pytest

from tools.golden import make_optim
from zaya_jax.config import Optim, Precision
from zaya_jax.optim import chain


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
        updates, state = optimizer.update(grads, state, params, lr=make_optim.LR)
        return jax.tree.map(lambda p, u: p + u, params, updates), state

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
