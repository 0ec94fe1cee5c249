"""Tokens through their own experts and back, against all experts for every token; with each chip's
algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import slow

from zaya_jax.model import experts

E, D, F = 4, 12, 20


def plain_mlp(x, choice, gate, gate_up, down):
    """Every token through every expert, then its own is taken."""
    g, u = jnp.split(jnp.einsum("nd,edf->enf", x, gate_up), 2, axis=-1)
    y = jnp.einsum("enf,efd->end", jax.nn.silu(g) * u, down)
    y = jnp.concatenate([y, jnp.zeros_like(y[:1])])
    return jnp.take_along_axis(y, choice[None, :, None], 0)[0] * gate[:, None]


def gated_mlp(x, choice, gate, gate_up, down):
    """Ours, times the gates as the join multiplies them."""
    y = experts.expert_mlp(x, choice, gate_up, down, dtype=jnp.float32)
    return y * experts.masked(gate, choice, E)[:, None]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("implementation", ["cpu", "xla", "triton"], indirect=True)
@pytest.mark.parametrize("who", ["mixed", slow("all one"), slow("all skip")])
def test_the_whole_mlp(who):
    keys = jax.random.split(jax.random.key(1), 6)
    n = 60
    choice = {
        "mixed": jax.random.randint(keys[0], (n,), 0, E + 1),
        "all one": jnp.full((n,), 2),
        "all skip": jnp.full((n,), E),
    }[who].astype(jnp.int32)
    args = (
        jax.random.normal(keys[1], (n, D)),
        jax.random.uniform(keys[2], (n,)),
        jax.random.normal(keys[3], (E, D, 2 * F)) / D**0.5,
        jax.random.normal(keys[4], (E, F, D)) / F**0.5,
    )
    weight = jax.random.normal(keys[5], (n, D))

    def run(mlp):
        def objective(x, gate, gate_up, down):
            return jnp.vdot(mlp(x, choice, gate, gate_up, down), weight)

        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2, 3)))(*args)

    with jax.default_matmul_precision("highest"):
        ours = run(gated_mlp)
        theirs = run(plain_mlp)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    gate_gradient = ours[1][1]
    # a skipped token teaches the gate nothing
    np.testing.assert_array_equal(gate_gradient[choice == E], 0)
