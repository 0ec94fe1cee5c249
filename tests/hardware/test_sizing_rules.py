"""Sizing rules: sizes off a chip's fast path are found, each with a better value, and no others."""

import dataclasses
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from measured_figures import figures_of

from pallas_kernels.timing import Timing
from zaya_jax import config
from zaya_jax.config import UserError
from zaya_jax.hardware import sizing_rules
from zaya_jax.hardware.measured import Product, ProductShape

CONFIGS = Path(__file__).resolve().parents[2] / "experiments" / "configs"


def read(name):
    return config.check(runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]())


def changed(**keys):
    """ZAYA1's model in one phase of 4096 tokens, 16,384 at once on each of eight devices."""
    raw = config.default()
    raw.model.max_position_embeddings = 1 << 20
    raw.data.global_batch, raw.data.micro_batch = 512, 32
    for name, value in keys.items():
        group, key = name.split("__")
        raw[group][key] = value
    return config.check(raw)


def by_rule(found):
    return {f.rule: f for f in found}


def test_zaya1s_own_dimensions_are_on_mi300xs_fast_path():
    """Of its run on 1,024 of them one sequence at a time on each would not be."""
    whole = read("zaya1_base")
    assert "tokens per expert" not in by_rule(sizing_rules.advise(whole, "mi300x", 1024))
    one_at_a_time = dataclasses.replace(
        whole, data=dataclasses.replace(whole.data, micro_batch=1024)
    )
    found = sizing_rules.advise(one_at_a_time, "mi300x", 1024)
    assert not [f for f in found if f.key.startswith("model.")]
    experts = by_rule(found)["tokens per expert"]
    # 4,096 tokens on 16 experts; 1,307 TFLOP/s over the 4.33 TB/s that the paper measured.
    assert (
        "256 tokens per expert" in experts.reason
        and "of 302 " in experts.reason
        and experts.better == 2048
    )


@pytest.mark.parametrize("chip", ["mi300x", "h200"])
@pytest.mark.parametrize(
    ("key", "value", "better", "rule"),
    [
        ("vocab_size", 50_257, 50_304, "multiple of 64"),
        ("hidden_size", 2000, 2048, "multiple of 64"),
        ("moe_intermediate_size", 1424, 1408, "multiple of 64"),
        ("head_dim", 96, 128, "head_dim"),
    ],
)
def test_a_width_off_the_path_is_found_with_a_better_one(chip, key, value, better, rule):
    given = changed(**{f"model__{key}": value})
    found = next(
        f for f in sizing_rules.advise(given, chip, 8) if f.key == f"model.{key}" and f.rule == rule
    )
    assert (found.value, found.better) == (value, better)
    assert str(found).startswith(f"sizing: model.{key}={value:,}: ")
    mended = changed(**{f"model__{key}": better})
    assert not [
        f
        for f in sizing_rules.advise(mended, chip, 8)
        if f.key == f"model.{key}" and f.rule == rule
    ]


def test_a_run_on_the_path_gets_no_advice():
    for name, at_once in (("h200", 32), ("mi300x", 64)):
        assert sizing_rules.advise(changed(data__micro_batch=at_once), name, 8) == []


def test_measured_figures_take_the_place_of_published_ones():
    def grouped(m, rate):
        shape = ("grouped forward", "", m, 2048, 2048, 16)
        return Product(*shape, "bfloat16", Timing(ProductShape(*shape).flops / rate, 1e-9, 1e3, 5))

    products = (grouped(512, 1e14), grouped(2048, 4e14), grouped(4096, 5e14))
    slow = figures_of(device="AMD Instinct MI300X", platform="rocm", products=products)
    found = by_rule(sizing_rules.advise(changed(), "mi300x", 8, slow))["tokens per expert"]
    assert "1,024 tokens per expert" in found.reason and "of 2,048 " in found.reason
    assert found.source == "measured, 2026-11-22" and found.better == 64
    for other in (figures_of(products=products), dataclasses.replace(slow, device="NVIDIA H200")):
        assert "tokens per expert" not in by_rule(
            sizing_rules.advise(changed(), "mi300x", 8, other)
        )


def test_a_run_gets_advice_where_its_chip_is_known():
    given = read("tiny")
    gpu = [SimpleNamespace(device_kind="AMD Instinct MI300X", platform="rocm")] * 8
    notes = sizing_rules.notes(given, gpu)
    assert len(notes) == 4 and all(n.startswith("sizing: ") and "\n" not in n for n in notes)
    assert notes == [str(f) for f in sizing_rules.advise(given, "mi300x", 8)]
    for kind in ("cpu", "NVIDIA A100-SXM4-80GB"):
        assert sizing_rules.notes(given, [SimpleNamespace(device_kind=kind, platform="gpu")]) == []


def test_a_mesh_that_fits_no_phase_is_refused():
    with pytest.raises(UserError, match="there are 3 devices"):
        sizing_rules.advise(read("dense_7b"), "mi300x", 3)
