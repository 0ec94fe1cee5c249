"""Loss-free balancing: the update against PyTorch-like AdamW written out, its invariants, and its
figures."""

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.optim import balance

L, E = 3, 8


def counts_of(seed, total=1000):
    return np.random.default_rng(seed).multinomial(
        total, np.random.default_rng(9).dirichlet(np.ones(E + 1)), L
    )


def test_update_is_adamw_on_the_load():
    state = balance.init(L, E)
    step = jax.jit(lambda s, c: balance.update(s, c, lr=1e-2))
    bias, mean, square = np.zeros((L, E)), 0.0, 0.0
    for t in range(1, 21):
        counts = counts_of(t)
        gradient = counts[:, :E] / counts.sum(1, keepdims=True) - 1 / E
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        bias = bias - 1e-2 * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.95**t)) + 1e-8)
        bias = bias - bias.mean(1, keepdims=True)
        before = state
        state, figures = step(state, counts)
        np.testing.assert_allclose(state.bias[:, :E], bias, atol=1e-5)
        np.testing.assert_allclose(
            figures["bias_change"], np.abs(state.bias - before.bias).max(1), atol=1e-7
        )
    assert (np.asarray(state.bias[:, E]) == -1).all()
    np.testing.assert_allclose(state.bias[:, :E].mean(1), 0, atol=1e-7)
    assert state.bias.dtype == jnp.float32


def test_imported_skip_bias_is_kept():
    state = balance.init(L, E, skip_bias=-0.37)
    state, _ = balance.update(state, counts_of(0))
    np.testing.assert_array_equal(state.bias[:, E], np.float32(-0.37))


def test_it_balances():
    """Experts' scores fixed and unequal: the biases even the load out, and do so again after a
    shift."""
    random = np.random.default_rng(0)
    state = balance.init(1, E)
    step = jax.jit(lambda s, c: balance.update(s, c, lr=1e-2))
    entropies = []
    for t in range(600):
        favourite = np.linspace(-0.5, 0.5, E) * (1 if t < 300 else -1)
        scores = np.append(favourite, -10.0) + random.gumbel(scale=0.3, size=(512, E + 1))
        choice = np.argmax(scores + np.asarray(state.bias[0]), 1)
        state, figures = step(state, np.bincount(choice, minlength=E + 1)[None])
        entropies.append(float(figures["load_entropy"][0]))
    assert entropies[0] < 0.8 and np.mean(entropies[250:300]) > 0.98
    assert entropies[300] < 0.7 and np.mean(entropies[550:]) > 0.98


def test_figures():
    counts = np.array([[10, 10, 0, 0, 20], [0, 0, 0, 0, 7], [5, 5, 5, 5, 0]])
    _, figures = balance.update(balance.init(3, 4), counts)
    np.testing.assert_allclose(figures["load_entropy"], [0.5, 0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(figures["greatest_share"], [0.5, 0.0, 0.25], atol=1e-6)
    np.testing.assert_allclose(figures["skip_share"], [0.5, 1.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(figures["load"][0], [0.25, 0.25, 0, 0, 0.5], atol=1e-6)


def test_dead_experts_are_those_without_a_token_for_so_many_steps():
    state = balance.init(1, 3)
    dead = []
    for step in range(6):
        state, figures = balance.update(
            state, np.array([[5, 0 if step else 1, 5 if step == 4 else 0, 0]]), dead_after=3
        )
        dead.append(int(figures["dead_experts"][0]))
    assert dead == [0, 0, 1, 2, 1, 1]


def test_switched_off_or_skipped():
    state, _ = balance.update(balance.init(L, E), counts_of(0))
    off, figures = balance.update(state, counts_of(1), enabled=False)
    assert np.array_equal(off.bias, state.bias) and int(off.steps) == int(state.steps)
    assert not figures["bias_change"].any() and figures["load_entropy"].all()
    kept, _ = jax.jit(lambda s, c, k: balance.update(s, c, keep=k))(state, counts_of(1), np.False_)
    assert jax.tree.all(jax.tree.map(np.array_equal, kept, state))


def test_counts_of_a_full_batch_are_exact():
    """16.8M tokens per layer: shares are right to float32's last place, from integers."""
    counts = np.full((1, 17), 4096 * 4096 // 17)
    counts[0, 0] += 4096 * 4096 - counts.sum()
    _, figures = balance.update(balance.init(1, 16), counts)
    np.testing.assert_allclose(figures["load"][0], counts[0] / counts.sum(), rtol=2e-7)
