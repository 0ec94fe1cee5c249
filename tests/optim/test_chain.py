"""The table claims each weight once; clipping, decay, learning rates, skipping and figures work as
documented. Loss-free balancing: the update against AdamW written out, its invariants and
figures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optim_helpers
import pytest
from refusals import check_refused

from zaya_jax.config import Optim, Precision
from zaya_jax.optim import balance, chain, skip


@pytest.fixture(scope="module")
def like():
    return optim_helpers.shapes(L=2, D=8, H=2, K=1, C=4, E=2, F=4, R=4, V=6)


@pytest.fixture(scope="module")
def params(like):
    """Of each kind of weight one or two: all of them compile four times as long."""
    layers = {name: like["layers"][name] for name in ("attn_norm", "experts")}
    layers["router"] = {"out": like["layers"]["router"]["out"]}
    return random_tree({"embed": like["embed"], "layers": layers}, 0)


def random_tree(like, seed):
    """NumPy arrays of these shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), like)


def updated(optim, params, grads, lr=0.1):
    """What a first step adds to the parameters, and the state after it."""
    # five steps of Newton-Schulz compile four times as long; nothing here is of them
    optim = dataclasses.replace(optim, newton_schulz_steps=1)
    optimizer = chain.build(optim, optim_helpers.FLOAT32, params)

    @jax.jit
    def step(grads):
        return optimizer.apply(grads, optimizer.init(), params, lr=lr)

    new, state = step(grads)
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, new, params), state


def norm_of(tree):
    """The norm of all numbers together; on the host, where no shape needs a program of its own."""
    return float(
        np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))
    )


def test_table_gives_matrices_to_muon_and_nothing_else(like):
    claims = chain.build(Optim(), Precision(), like).rules
    assert len(claims) == len(jax.tree.leaves(like))
    to_muon = {path for path, row in claims.items() if row.method == "muon"}
    assert to_muon == {
        *(f"layers/cca/{name}/kernel" for name in ("q", "k", "v_now", "v_prev", "o")),
        *(f"layers/router/{name}/kernel" for name in ("down", "fc1", "fc2", "out")),
        "layers/experts/gate_up",
        "layers/experts/down",
    }
    assert {path for path, row in claims.items() if row.decay} == to_muon
    # With biases in attention the same rows still claim each weight once.
    chain.match_rules(
        {f"layers/cca/{name}/bias": (2, 8) for name in ("q", "k", "v_now", "v_prev", "o")}
    )


def test_a_weight_that_no_row_or_two_rows_claim_is_named(like):
    check_refused(
        r"no rule .* matches the weight layers/mixer/a_log \[2, 4\]",
        lambda: chain.build(
            Optim(),
            Precision(),
            like
            | {
                "layers": (
                    like["layers"]
                    | {"mixer": {"a_log": like["embed"]["bias"].update(shape=(2, 4))}}
                )
            },
        ),
    )
    twice = (*chain.TABLE, chain.WeightRule(r".*/temperature", "vectors", "adamw", False))
    check_refused(
        r"the rules '.*' and '.*/temperature' .* match the weight layers/cca/temp",
        lambda: chain.build(Optim(), Precision(), like, table=twice),
    )
    check_refused(
        r"optim.rows has 'head/\(=adamw', whose path is not a regular expression",
        lambda: chain.build(Optim(rows=("head/(=adamw",)), Precision(), like),
    )
    check_refused(
        r"weight head/bias \[6\] with Muon, but it is no matrix",
        lambda: chain.match_rules(
            {"head/bias": (6,)}, (chain.WeightRule(".*", "all", "muon", True),)
        ),
    )


def test_decay_uses_the_learning_rate_alone_and_only_its_mask(params):
    zeros = jax.tree.map(np.zeros_like, params)
    for name, factor in (("muon", 1.0), ("adamw", 0.5)):
        optim = Optim(name=name, weight_decay=0.2, adamw_lr_factor=factor)
        updates, _ = updated(optim, params, zeros, lr=1.0)
        claims = chain.build(optim, Precision(), params).rules
        for (path, u), p in zip(
            jax.tree_util.tree_flatten_with_path(updates)[0], jax.tree.leaves(params), strict=True
        ):
            row = claims[jax.tree_util.keystr(path, simple=True, separator="/")]
            expected = -factor * 0.2 * p if row.decay else np.zeros_like(p)
            np.testing.assert_allclose(u, expected, rtol=1e-6, err_msg=str(path))


def test_learning_rates(params):
    grads, zeros = random_tree(params, 1), jax.tree.map(np.zeros_like, params)
    optim = Optim(weight_decay=0.0)
    one, _ = updated(optim, zeros, grads, lr=0.1)
    two, _ = updated(dataclasses.replace(optim, adamw_lr_factor=0.25), zeros, grads, lr=0.2)
    np.testing.assert_allclose(
        two["layers"]["experts"]["down"], 2 * one["layers"]["experts"]["down"], rtol=1e-5
    )
    np.testing.assert_allclose(
        two["embed"]["embedding"], 0.5 * one["embed"]["embedding"], rtol=1e-5
    )


def test_gate_and_up_are_one_matrix_of_muon(params):
    """They get the update of a weight [L, E, D, 2 F] with the same numbers."""
    x = params["layers"]["experts"]["gate_up"]
    pair = {"layers": {"experts": {"gate_up": x}}}
    plain = {"layers": {"experts": {"down": x.reshape(*x.shape[:3], -1)}}}
    (ours, _), (theirs, _) = updated(Optim(), pair, pair), updated(Optim(), plain, plain)
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    np.testing.assert_array_equal(ours[0].reshape(theirs[0].shape), theirs[0])


def test_clipping_is_by_the_norm_of_all_weights(params):
    grads = random_tree(params, 1)
    norm = norm_of(grads)
    for limit, clipped in ((norm / 4, 1), (norm * 4, 0), (0.0, 0)):
        _, state = updated(Optim(clip_norm=limit), params, grads)
        assert float(state.figures["clipped"]) == clipped
        np.testing.assert_allclose(state.figures["grad_norm"], norm, rtol=1e-6)
        factor = min(1, limit / norm) if limit else 1
        arrays = chain.build(Optim(), Precision(), params).arrays(state)
        momentum = arrays["momentum"]["layers/router/out/kernel"]
        np.testing.assert_allclose(
            momentum, 0.05 * factor * grads["layers"]["router"]["out"]["kernel"], rtol=1e-4
        )
        np.testing.assert_allclose(
            arrays["mean"]["embed/bias"], 0.1 * factor * grads["embed"]["bias"], rtol=1e-4
        )


def test_figures(params):
    grads = random_tree(params, 1)
    updates, state = updated(Optim(), params, grads)
    groups = {row.group for row in chain.build(Optim(), Precision(), params).rules.values()}
    for name, tree in (("grad_norm", grads), ("update_norm", updates), ("param_norm", params)):
        np.testing.assert_allclose(state.figures[name], norm_of(tree), rtol=1e-5)
        total = sum(float(state.figures[f"{name}/{group}"]) ** 2 for group in groups)
        np.testing.assert_allclose(total, float(state.figures[name]) ** 2, rtol=1e-5)
    expected = norm_of(grads["layers"]["experts"])
    np.testing.assert_allclose(state.figures["grad_norm/experts"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        state.figures["grad_norm/embedding"], np.linalg.norm(grads["embed"]["embedding"]), rtol=1e-5
    )


def test_skipped_update_leaves_no_trace(params):
    grads = random_tree(params, 1)
    bad = jax.tree.map(np.copy, grads)
    bad["embed"]["bias"][0] = np.nan
    optimizer = chain.build(Optim(), optim_helpers.FLOAT32, params, skip_update="nonfinite")
    step = jax.jit(lambda g, s: optimizer.apply(g, s, params, lr=0.1))
    _, before = step(grads, jax.jit(optimizer.init)())
    kept, after = step(bad, before)
    assert jax.tree.all(jax.tree.map(np.array_equal, kept, params))
    assert float(after.figures["skipped"]) == 1 and float(before.figures["skipped"]) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, after[:3], before[:3]))
    found, _ = step(grads, after)
    expected, _ = step(grads, before)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    never, _ = updated(Optim(), params, bad)
    assert np.isnan(never["embed"]["embedding"]).any()


def test_numbers_of_the_formats(params):
    optimizer = chain.build(Optim(), Precision(momentum="bfloat16"), params)
    state = jax.eval_shape(optimizer.init)
    arrays = optimizer.arrays(state)
    assert {x.dtype for x in jax.tree.leaves(arrays["momentum"])} == {jnp.bfloat16.dtype}
    assert {x.dtype for x in jax.tree.leaves((arrays["mean"], arrays["square"]))} == {
        np.dtype("float32")
    }
    assert optimizer.state_from_arrays(arrays, state.figures) == state
    new, _ = jax.eval_shape(lambda g, s: optimizer.apply(g, s, g, lr=0.1), params, state)
    assert {x.dtype for x in jax.tree.leaves(new)} == {np.dtype("float32")}


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_products_copy_the_experts_weights_once_a_step_whatever_trains_them(like, name):
    precision = Precision(weights="compute", compute="bfloat16")
    copied = chain.build(Optim(name=name), precision, like).layout.copy_dtypes
    assert copied["layers/experts/gate_up"] == copied["layers/experts/down"] == "bfloat16"
    assert not any(path.startswith("layers/router/") and "kernel" in path for path in copied)


def test_the_update_copies_no_weights():
    """It updates donated weights in place: all reads of the old ones come before the writes."""
    like = optim_helpers.shapes(L=2, D=64, H=2, K=1, C=32, E=4, F=64, R=16, V=512)
    optimizer = chain.build(Optim(name="adamw"), optim_helpers.FLOAT32, like)

    def step(params, state, grads):
        return optimizer.apply(grads, state, params, lr=0.1)

    arguments = (like, jax.eval_shape(optimizer.init), like)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().as_text()
    large = [line for line in program.splitlines() if " copy(" in line and "f32[2,4,64," in line]
    # the experts' weights, so that the search can find something
    assert "f32[2,4,64,2,64]" in program
    assert not large, large


def run(rule, norms, deviations=6.0):
    step = jax.jit(lambda norm, state: skip.decide(rule, norm, state, deviations))
    state, kept = skip.init(), []
    for norm in norms:
        keep, state = step(np.float32(norm), state)
        kept.append(bool(keep))
    return kept, state


NOISY = 1 + 0.1 * np.random.default_rng(0).standard_normal(200)


@pytest.mark.parametrize(
    ("rule", "norms", "kept"),
    [
        ("never", [np.nan, np.inf, 1e30], [True] * 3),
        ("nonfinite", [np.nan, np.inf, 1e30], [False, False, True]),
        ("spike", [100.0, 50.0, 1.0, 30.0], [True] * 4),  # nothing is one at first
        ("spike", [1.0] * 100 + [1.2], [True] * 101),  # nor a small change of a steady norm
        ("spike", [*NOISY, 10.0, 1.0, np.nan, 1.5], [True] * 200 + [False, True, False, True]),
        ("spike", [*NOISY, 1.8], [True] * 200 + [False]),
    ],
)
def test_which_updates_are_left_out(rule, norms, kept):
    assert run(rule, norms)[0] == kept


def test_a_lasting_rise_is_accepted_and_a_spike_hardly_counts():
    kept, state = run("spike", [*NOISY, 10.0])
    assert 0.9 < float(state.mean) < 1.1 and 0.05 < float(state.variance) ** 0.5 < 0.2
    assert run("spike", [*NOISY, 1.8], deviations=20.0)[0][-1]
    kept, _ = run("spike", [*NOISY, *(5 * NOISY[:100])])
    assert not kept[200] and all(kept[-40:])


L, E = 3, 8


def counts_of(seed, total=1000):
    return np.random.default_rng(seed).multinomial(
        total, np.random.default_rng(9).dirichlet(np.ones(E + 1)), L
    )


def test_update_is_adamw_on_the_load():
    """The skip class keeps its bias, as of an imported model."""
    state = balance.init(L, E, skip_bias=-0.37)
    step = jax.jit(lambda s, c: balance.update(s, c, lr=1e-2))
    bias, mean, square = np.zeros((L, E)), 0.0, 0.0
    for t in range(1, 21):
        counts, before = counts_of(t), state
        gradient = counts[:, :E] / counts.sum(1, keepdims=True) - 1 / E
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        bias = bias - 1e-2 * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.95**t)) + 1e-8)
        bias = bias - bias.mean(1, keepdims=True)
        state, figures = step(state, counts)
        np.testing.assert_allclose(state.bias[:, :E], bias, atol=1e-5)
        change = np.abs(state.bias - before.bias).max(1)
        np.testing.assert_allclose(figures["bias_change"], change, atol=1e-7)
    np.testing.assert_array_equal(state.bias[:, E], np.float32(-0.37))
    np.testing.assert_allclose(state.bias[:, :E].mean(1), 0, atol=1e-7)
    assert state.bias.dtype == jnp.float32


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


def test_figures_of_balance():
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
