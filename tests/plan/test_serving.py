"""The time of a token and of a prompt against closed forms."""

import dataclasses

import pytest

from benchmarks import plan as compared
from zaya_jax.hardware import chips, clusters
from zaya_jax.model import decode, zaya
from zaya_jax.plan import rates, serving, work
from zaya_jax.plan.rates import Rate

RATES = rates.for_cluster(clusters.CLUSTERS["mi300x_pollara"])
FREE = dataclasses.replace(RATES, launch=Rate(0.0, "none"))
HBM = chips.CHIPS["mi300x"].bandwidth * RATES.memory.value


@pytest.fixture(scope="module")
def case():
    """ZAYA1-base as it is trained."""
    return compared.planned(1024, 4, 1, {"model.num_hidden_layers": 40})


def test_tokens_reach_one_expert_then_most_and_never_more_than_all():
    assert serving.experts_reached(16, 1) == pytest.approx(1)
    assert serving.experts_reached(16, 2) == pytest.approx(2 - 1 / 16)
    assert serving.experts_reached(16, 10_000) == pytest.approx(16)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_token_takes_the_bytes_of_active_weights_of_reached_experts_and_of_the_cache(case, rows):
    counts = zaya.param_counts(case.model)
    experts = 3 * case.model.hidden_size * case.model.moe_intermediate_size * 40
    reached = counts["active"] + (serving.experts_reached(16, rows) - 1) * experts
    cache = decode.cache_bytes(case.model, case.config.precision, 1, 1).per_token * rows * 4096
    expected = (2 * reached + cache) / HBM
    found = serving.seconds(case, FREE, rows, 1, seen=4096)
    # Above are the router's float32 and the tokens' own arrays, which are small.
    assert expected < found < 1.1 * expected


def test_each_layer_s_kernels_take_their_launches(case):
    kernels = sum(work.PASSES[name][work.FORWARD][2] for name, *_ in work.layer_parts(case))
    slow, fast = (serving.seconds(case, r, 1, 1, seen=4096) for r in (RATES, FREE))
    launches = (40 * kernels + serving.LAUNCHES) * RATES.launch.value
    assert kernels == 33
    assert slow - fast == pytest.approx(launches)


def test_a_long_prompt_takes_the_flops_of_the_training_step_s_forward_pass(case):
    parts = [p for p in work.list_work(case) if p.stage == work.FORWARD and p.scope != "head"]
    trained = sum(p.flops for p in parts) / case.sequences_per_device  # sequences of 4,096 tokens
    peak = chips.CHIPS["mi300x"].peaks["bfloat16"]
    found = serving.seconds(case, FREE, 1, 4096)
    assert trained / peak < found
    assert serving.seconds(case, FREE, 2, 4096) == pytest.approx(2 * found, rel=0.1)
    # Attention's work grows with the square, all else with the length.
    assert 8 * found < serving.seconds(case, FREE, 1, 32_768) < 64 * found


def test_a_window_of_texts_reads_what_it_has_seen(case):
    near, far = (serving.seconds(case, FREE, 64, 1, seen=n) for n in (4096, 32_768))
    cache = decode.cache_bytes(case.model, case.config.precision, 1, 1).per_token * 64 * 28_672
    assert far - near == pytest.approx(cache / HBM, rel=0.05)
