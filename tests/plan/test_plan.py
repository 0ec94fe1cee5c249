"""The plan's formulas, of a step, a token and a prompt, against closed forms, their limits, and
what compiled programs take."""

import argparse
import collections
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from measured_figures import FAST, SLOW, figures_of
from refusals import refusal

from benchmarks import plan as compared
from experiments.configs import zaya1_base
from experiments.plan import page
from pallas_kernels.timing import Timing
from zaya_jax import config as config_lib
from zaya_jax.hardware import chips, clusters, measured, targets
from zaya_jax.model import decode, zaya
from zaya_jax.plan import footprint, goodput, network, rates, serving, step_time, work
from zaya_jax.plan import phases as planned_phases
from zaya_jax.plan.case import StepCase
from zaya_jax.plan.rates import Rate

CLUSTER = clusters.CLUSTERS["mi300x_pollara"]
RATES = rates.for_cluster(CLUSTER)


def case(devices: int, **changes) -> StepCase:
    """ZAYA1-base with four layers, four sequences at once, and what differs."""
    return compared.planned(
        devices, 4, 1, {key.replace("__", "."): value for key, value in changes.items()}
    )


def flops(found: StepCase, *stages: str) -> float:
    return sum(p.flops for p in work.list_work(found) if not stages or p.stage in stages)


# GB of memory and traffic of `benchmarks.plan`'s programs, compiled for MI300X on 27 November 2026.
COMPILED = {
    "ZAYA1-base, all 40 layers": (51.74, 663.3),
    "all 40 layers, remat attention": (36.93, 671.6),
    "alone": (24.01, 377.4),
    "8 devices": (16.07, 219.3),
    "12 devices": (15.69, 222.2),
    "1,024 devices, 2 micro-batches": (21.88, 244.2),
    "8 layers, remat elementwise": (20.40, 250.9),
    "64 devices, nothing recomputed": (12.71, 75.0),
    "layers recomputed, 4 micro-batches": (23.05, 470.9),
    "dense": (15.01, 211.7),
    "8 layers, 6 of them linear": (18.38, 206.1),
    "sliding window of 1,024": (15.49, 145.1),
    "fsdp": (17.18, 254.0),
    "fsdp, 2 micro-batches, layers recomputed": (14.09, 294.0),
    "experts over 8": (14.48, 231.7),
    "tensor over 2, 3 micro-batches": (16.10, 229.1),
    "context over 2": (14.06, 188.3),
    "context over 8, 131,072 tokens": (14.62, 193.9),
}


@pytest.mark.parametrize("name", COMPILED)
def test_memory_and_traffic_are_those_of_the_compiled_program(name):
    found, (peak, moved) = compared.planned(*compared.CASES[name]), COMPILED[name]
    assert footprint.estimate(found).peak / 1e9 == pytest.approx(peak, rel=0.10)
    assert sum(p.bytes for p in work.list_work(found)) / 1e9 == pytest.approx(moved, rel=0.15)


def test_useful_flops_are_the_models_but_for_what_kernels_compute_twice():
    found = case(8)
    computed = flops(found, work.FORWARD, work.BACKWARD)
    useful = chips.model_flops(found.model, 4096) * found.tokens_per_device
    # The backward pass computes seven products of scores where the formula has four, and CCA's
    # convolution over heads four times where it has two.
    assert useful < computed < 1.03 * useful


def test_remat_trades_memory_for_work():
    cases = [case(8, remat=remat) for remat in ("none", "elementwise", "attention", "layer")]
    none, elementwise, attention, layer = map(flops, cases)
    assert none == elementwise < attention < layer  # "elementwise" repeats no product
    kept = [footprint.estimate(c).moments["backward"]["activations"] for c in cases]
    assert kept == sorted(set(kept), reverse=True)


def test_the_exchange_sends_a_float32_gradient_and_a_bfloat16_direction_a_number():
    found = case(1024, model__num_hidden_layers=40)
    sent: collections.Counter[str] = collections.Counter()
    for flow in network.flows(found):
        sent[flow.kind] += flow.wire * 1024 / 1023
    weights, muon = sum(found.numel.values()), found.muon_numel
    assert sent["reduce-scatter"] == pytest.approx(4 * weights, rel=0.01)
    assert sent["all-gather"] == pytest.approx(2 * muon + 4 * (weights - muon), rel=0.01)
    assert not network.flows(case(1))


def test_each_second_of_a_step_is_accounted_for():
    found = step_time.estimate(case(1024), CLUSTER, RATES)
    assert sum(found.by_kind.values()) == pytest.approx(found.seconds, rel=0.02)
    assert found.seconds == sum(found.by_scope.values()) > found.ideal
    assert all(0 <= found.exposed[name] <= took for name, took in found.links.items())


def test_the_range_has_each_assumption_at_its_ends():
    found, likely = case(1024), step_time.estimate(case(1024), CLUSTER, RATES).seconds
    between = step_time.seconds_between(found, CLUSTER, RATES)
    assert between.keys() == {
        "grouped",
        "attention",
        "inter_node",
        "overlap",
        "ring",
        "launch",
        "all",
    }
    low, high = zip(*between.values(), strict=True)
    assert max(low) < likely < min(high)
    assert between["all"] == (min(low), max(high))


@pytest.mark.parametrize(("save", "mtbf"), [(1.0, 1e5), (30.0, 3600.0)])
def test_the_best_interval_is_the_one_that_loses_least(save, mtbf):
    best = goodput.best_interval(save, mtbf)
    shares = [goodput.share(best * factor, save, 60.0, mtbf) for factor in (0.8, 1.0, 1.25)]
    assert shares[1] == max(shares) < 1
    assert best == pytest.approx(math.sqrt(2 * save * mtbf), rel=0.1)


def test_without_failures_goodput_is_what_saves_leave():
    assert goodput.share(99.0, 1.0, 0.0, 1e12) == pytest.approx(0.99, rel=1e-6)
    assert goodput.best_interval(10.0, 4.0) == 4.0  # where a save takes twice the time between


def test_the_search_gives_what_fits_fastest_first(monkeypatch):
    monkeypatch.setattr(page, "SIZES", (1, 2))
    config = case(8).config
    tried = list(page.candidates(config, 8, 8, "mi300x"))
    for c in tried:  # no case that a run would refuse
        assert c.model.num_attention_heads % c.spread.tensor == 0
        rows = c.sequences_per_device * c.micro_batches * c.spread.data * c.spread.expert
        assert (c.devices, c.sequences) == (8, rows)
    found = page.fastest(config, 8, 8, CLUSTER, RATES)
    times = [choice.step.seconds for choice in found]
    assert len(found) == 10 and times == sorted(times)
    least = min(footprint.estimate(c).peak for c in tried)
    limit = int((found[0].memory.peak + least) / 2)
    monkeypatch.setattr(targets, "memory_for_jax", lambda name: limit)
    fitting = page.fastest(config, 8, 8, CLUSTER, RATES)
    assert max(choice.memory.peak for choice in fitting) <= limit
    assert fitting[0].step.seconds >= times[0]
    monkeypatch.setattr(targets, "memory_for_jax", lambda name: 1)
    assert page.fastest(config, 8, 8, CLUSTER, RATES) == []


SECOND = Timing(1.0, 1.0, 1.0, 5)
MEASURED = figures_of(
    device="AMD Instinct MI300X",
    collectives=(measured.CollectiveTiming("reduce-scatter", 8, 1, int(2e11), SECOND),),
    products=(measured.Product("dense", "", 10**4, 10**4, 10**6, 1, "bfloat16", SECOND),),
    copies=tuple(measured.MemoryCopy(int(n * 1e12), SECOND) for n in (1.9, 2.0, 2.1)),
)


def test_measured_figures_take_the_place_of_assumptions(tmp_path):
    (tmp_path / "all.json").write_text(measured.to_json(MEASURED))
    found = rates.for_cluster(CLUSTER, tmp_path)
    shares = [found.products.value, found.memory.value, found.intra_node.value]
    assert shares == pytest.approx([2e14 / 1307.4e12, 4e12 / 5.3e12, 2e11 * 7 / 8 / 448e9])
    assert found.inter_node == RATES.inter_node and "measured" in found.memory.source


@pytest.mark.parametrize(("figures", "levels"), [(FAST, 2), (SLOW, 1)], ids=["fast", "slow"])
def test_a_plan_has_the_settings_that_follow_from_figures(figures, levels, tmp_path):
    figures = dataclasses.replace(figures, device="AMD Instinct MI300X")
    (tmp_path / "all.json").write_text(measured.to_json(figures))
    found = case(1280, hardware__figures=str(tmp_path))
    assert {len(way.levels) for way in found.layout.by_layer.values()} == {levels}
    assert rates.for_cluster(CLUSTER, tmp_path).ring.value == pytest.approx(figures.ring_step())


def test_context_across_nodes_uses_the_cards():
    sizes = tuple(case(64, mesh__context=8).axes.items())
    found = [network._links(sizes, ("context",), (), CLUSTER, across) for across in (False, True)]
    assert found == [(CLUSTER.inside, 8, 1), (CLUSTER.card, 8, 8)]


# ################################################################################################
# experiments.plan as a person runs it
# ##################################################################################################


def test_a_plan_is_written_as_text_numbers_and_page(tmp_path):
    few = ("--config.model.num_hidden_layers=2", "--config.run.num_steps=99")
    few += ("--config.model.layer=zaya_jax.model.layer:Layer", "--config.run.beta=0.3")
    command = [sys.executable, "-m", "experiments.plan", "--devices=16", "--at_once=1"]
    done = subprocess.run(
        [*command, f"--out={tmp_path}", *few],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [p["name"] for p in found["phases"]] == ["pretrain 1", "pretrain 2", "midtrain", "sft"]
    for p in found["phases"]:
        assert sum(p["step"]["by_scope"].values()) == pytest.approx(p["step"]["seconds"])
        assert sum(p["memory"]["at_peak"].values()) == pytest.approx(p["memory"]["peak"])
        seconds = p["steps"] * p["step"]["seconds"]
        ramp = 0.05 if p["name"] == "pretrain 1" else 1e-9  # whose steps are shorter
        assert p["days"] == pytest.approx(seconds / 86_400 / p["saving"]["goodput"], rel=ramp)
        assert p["gpu_hours"] == pytest.approx(p["days"] * 24 * 16)
    text, page = (tmp_path / "plan.md").read_text(), (tmp_path / "plan.html").read_text()
    for words in (
        "Where the step goes",
        "is of all 838,044 steps; config.run.num_steps=99 ends the run before",
        "which zaya_jax.model.layer:Layer may cost more than",
        "config.run.beta=0.3 has no effect: run.preference is none",
    ):
        assert words in text, words
    assert text in done.stdout
    assert "What is assumed" in page and "Memory where it is highest" in page


def test_a_fork_is_planned_without_its_parent(tmp_path):
    config = config_lib.check(zaya1_base.get_config())
    fork = dataclasses.replace(config, run=dataclasses.replace(config.run, fork="run@9"))
    args = argparse.Namespace(out=str(tmp_path), config=fork)
    assert "without the parent's" in refusal(page.run, args)


def phases(devices: int, at_once: int = 0, **changes):
    config = dataclasses.replace(config_lib.check(zaya1_base.get_config()), **changes)
    return planned_phases.plan_run(config, devices, CLUSTER, RATES, at_once)


def test_a_run_without_a_plannable_phase_is_refused_in_one_line():
    assert "give --at_once=N" in refusal(phases, 24)


@pytest.mark.parametrize(
    ("given", "planned", "said"),
    [
        # phases for more devices
        ({"devices": 1, "at_once": 4}, 2, ["phases[2].mesh", "phases[3].mesh"]),
        ({"devices": 1024, "kernels": ("none",)}, 4, ["--config.kernels=none"]),
        ({"devices": 1024}, 4, []),
    ],
)
def test_what_a_plan_does_not_know_is_a_note(given, planned, said):
    found, notes = phases(**given)
    names = ["pretrain 1", "pretrain 2", "midtrain", "sft"]
    assert [phase.name for phase in found] == names[:planned]
    assert all(words in note for words, note in zip(said, notes, strict=True)), notes


FREE = dataclasses.replace(RATES, launch=Rate(0.0, "none"))
HBM = chips.CHIPS["mi300x"].bandwidth * RATES.memory.value


@pytest.fixture(scope="module")
def served():
    """ZAYA1-base as it is trained."""
    return compared.planned(1024, 4, 1, {"model.num_hidden_layers": 40})


def test_tokens_reach_one_expert_then_most_and_never_more_than_all():
    reached = [serving.experts_reached(16, tokens) for tokens in (1, 2, 10_000)]
    assert reached == pytest.approx([1, 2 - 1 / 16, 16])


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_token_takes_the_bytes_of_active_weights_of_reached_experts_and_of_the_cache(
    served, rows
):
    counts = zaya.param_counts(served.model)
    experts = 3 * served.model.hidden_size * served.model.moe_intermediate_size * 40
    reached = counts["active"] + (serving.experts_reached(16, rows) - 1) * experts
    cache = decode.cache_bytes(served.model, served.config.precision, 1, 1).per_token * rows * 4096
    expected = (2 * reached + cache) / HBM
    found = serving.seconds(served, FREE, rows, 1, seen=4096)
    # Above are the router's float32 and the tokens' own arrays, which are small.
    assert expected < found < 1.1 * expected


def test_each_layer_s_kernels_take_their_launches(served):
    kernels = sum(work.PASSES[name][work.FORWARD][2] for name, *_ in work.layer_parts(served))
    assert kernels == 33
    slow, fast = (serving.seconds(served, r, 1, 1, seen=4096) for r in (RATES, FREE))
    launches = 40 * kernels + serving.LAUNCHES
    assert slow - fast == pytest.approx(launches * RATES.launch.value)


def test_a_long_prompt_takes_the_flops_of_the_training_step_s_forward_pass(served):
    parts = [p for p in work.list_work(served) if p.stage == work.FORWARD and p.scope != "head"]
    trained = sum(p.flops for p in parts) / served.sequences_per_device  # sequences of 4,096 tokens
    peak = chips.CHIPS["mi300x"].peaks["bfloat16"]
    found = serving.seconds(served, FREE, 1, 4096)
    assert trained / peak < found
    assert serving.seconds(served, FREE, 2, 4096) == pytest.approx(2 * found, rel=0.1)
    # Attention's work grows with the square, all else with the length.
    assert 8 * found < serving.seconds(served, FREE, 1, 32_768) < 64 * found
