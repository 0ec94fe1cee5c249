"""Microbenchmarks: every program is the one that is meant, and its figures count as nccl-tests'
do."""

import json
import re

import jax
import measured_figures
import numpy as np
import pytest
from measured_figures import figures_of
from multiprocess_runs import start
from refusals import check_error, check_refused

from experiments.characterize import collectives
from experiments.characterize import measure as characterize
from experiments.characterize import rates as device_rates
from experiments.characterize.collectives import AXIS, CollectiveKind
from pallas_kernels import timing
from pallas_kernels.timing import Timing
from zaya_jax.config import Model
from zaya_jax.hardware import measured
from zaya_jax.hardware.measured import CollectiveTiming, MemoryCopy, Product
from zaya_jax.report.text import escape

SECOND = Timing(1.0, 0.5, 2.0, 5)
SMALL = Model(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=24,
    num_experts=4,
    router_hidden_size=16,
    pad_token_id=0,
)


def test_devices_are_taken_in_a_node_and_across():
    nodes = [0] * 8 + [1] * 8 + [2] * 8
    found = collectives.groups(range(24), nodes)
    assert [(len(g.devices), g.num_nodes) for g in found] == [
        (2, 1),
        (4, 1),
        (8, 1),
        (2, 2),
        (16, 2),
        (3, 3),
        (24, 3),
    ]
    assert found[3].devices == (0, 8) and found[5].devices == (0, 8, 16)
    assert [len(g.devices) for g in collectives.groups(range(6), [0] * 6)] == [2, 4, 6]
    assert collectives.groups([0], [0]) == []
    assert collectives.nodes_of(jax.devices()) == [0] * 8  # one process is one node


def test_every_collective_is_alone_in_its_program(monkeypatch, capsys):
    monkeypatch.setattr(timing, "MOST", timing.LEAST)
    found = collectives.measure_collectives(jax.devices()[:3], [0] * 3, 10_000, 10.0, print)
    for count, sizes in ((2, [1024, 4096]), (3, [1020, 4092])):  # that divide
        ours = [c for c in found if c.num_devices == count]
        assert [(c.name, c.bytes) for c in ours] == [
            (name, size) for name in collectives.KINDS for size in sizes
        ]
        assert all(c.seconds.low <= c.seconds.median <= c.seconds.high for c in ours)
    assert "neighbour, 3 devices in 1 node(s): " in capsys.readouterr().out


def test_a_broadcast_gives_all_what_the_first_has():
    """A CPU's is a sum; for GPUs the program has one broadcast, and nothing else that sends."""
    devices = jax.devices()
    kind = collectives.BROADCAST_ON_CPU
    compiled, like = collectives.compile_one("broadcast", kind, devices, 64)
    x = jax.device_put(np.arange(8 * 16, dtype=np.float32), like.sharding)
    np.testing.assert_array_equal(compiled(x), np.tile(np.arange(16, dtype=np.float32), 8))

    mesh = jax.sharding.AbstractMesh((8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(AXIS)
    call = collectives.KINDS["broadcast"].call
    over = jax.shard_map(lambda x: call(x, 8), mesh=mesh, in_specs=spec, out_specs=spec)
    traced = jax.jit(over).trace(jax.ShapeDtypeStruct((8 * 16,), np.float32))
    for platform in ("cuda", "rocm"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        found = re.findall(r"stablehlo\.(\w*(?:collective|all_|reduce_)\w*)", text)
        assert found == ["collective_broadcast"]


def test_a_series_ends_where_calls_take_too_long():
    found = collectives.measure_collectives(
        jax.devices()[:2], [0, 0], 1 << 30, 1e-9, lambda text: None
    )
    assert [c.bytes for c in found] == [1024] * 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, n: x, "became no collective"),
        (lambda x, n: jax.lax.ppermute(x, AXIS, [(0, 1), (1, 0)]), "became collective-permute"),
        (lambda x, n: jax.lax.psum(x[:8], AXIS), "became all-reduce of 32 bytes over 2"),
    ],
)
def test_what_is_not_the_collective_is_never_timed(monkeypatch, call, message):
    monkeypatch.setattr(collectives, "KINDS", {"all-reduce": CollectiveKind("all-reduce", call)})
    monkeypatch.setattr(timing, "sample", lambda *_: pytest.fail("timed"))
    check_error(
        RuntimeError,
        message,
        lambda: collectives.measure_collectives(jax.devices()[:2], [0, 0], 4096, 10.0, print),
    )


def test_bandwidths_are_those_of_nccl_tests():
    """doc/PERFORMANCE.md there: a ring of n moves so much over each link."""
    n, size = 8, 8e9
    bus = {
        name: CollectiveTiming(name, n, 1, int(size), SECOND).bus_bandwidth / 1e9
        for name in measured.BUS
    }
    assert bus == {
        "all-reduce": 14,
        "reduce-scatter": 7,
        "all-gather": 7,
        "all-to-all": 7,
        "neighbour": 8,
        "broadcast": 8,
    }
    assert MemoryCopy(100, SECOND).bandwidth == 200


@pytest.mark.parametrize(
    ("name", "groups", "products"),
    # Gate, up and down: three products of each expert's rows, and twice as many backward.
    [("dense", 1, 1), ("grouped forward", 4, 3 * 4), ("grouped backward", 4, 6 * 4)],
)
def test_a_product_has_its_flops(name, groups, products):
    assert Product(name, "", 2, 3, 5, groups, "float32", SECOND).rate == products * 60


def test_memory_is_copied(monkeypatch):
    monkeypatch.setattr(device_rates, "room", lambda device: 8 << 22)
    found = device_rates.measure_copies(jax.devices()[0], 0.001, lambda text: None)
    assert found and [s.bytes for s in found] == [1 << 20, 1 << 21, 1 << 22][: len(found)]


def test_products_of_a_model_and_its_experts(monkeypatch):
    monkeypatch.setattr(device_rates, "ROWS", {True: (16,)})
    monkeypatch.setattr(device_rates, "ROWS_OF_EXPERTS", {True: (4, 16)})
    found, left_out = device_rates.measure_products(jax.devices()[0], SMALL, 0.1, print)
    shapes = {(p.name, p.label, p.m, p.k, p.n, p.groups) for p in found}
    assert shapes == {
        ("dense", "q, k", 16, 32, 48, 1),
        ("dense", "v", 16, 32, 16, 1),
        ("dense", "o", 16, 32, 32, 1),
        ("dense", "head", 16, 32, 96, 1),
        ("dense", "router", 16, 32, 16, 1),
        *(
            (f"grouped {way}", "experts", m, 32, 24, 4)
            for way in ("forward", "backward")
            for m in (4, 16)
        ),
    }
    assert left_out == 0 and {p.dtype for p in found} == {"float32"}
    monkeypatch.setattr(device_rates, "MODEST", 1.0)
    monkeypatch.setattr(measured.ProductShape, "flops", 1e9)
    none = device_rates.measure_products(jax.devices()[0], SMALL, 0.01, print)
    assert none == ((), len(found))


FULL = figures_of(
    peak=1e12,
    collectives=tuple(
        CollectiveTiming(name, n, nodes, size, Timing(1e-5 + size / rate, 1e-5, 1.0, 9))
        for name in measured.BUS
        for n, nodes in ((2, 1), (8, 1), (16, 2))
        for size, rate in ((1024, 1e9), (1 << 20, 2e9))
    ),
    products=(
        *(Product("dense", label, 64, 96, 32, 1, "float32", SECOND) for label in ("o", "head")),
        *(
            Product("grouped forward", "experts", m, 24, 32, 4, "float32", SECOND)
            for m in (16, 64, 256)
        ),
    ),
    copies=tuple(MemoryCopy(1 << i, Timing(2.0 ** (i - 30), 1e-9, 1e3, 5)) for i in range(20, 25)),
)


def test_figures_are_read_as_they_were_written(tmp_path):
    (tmp_path / "all.json").write_text(measured.to_json(FULL))
    assert measured.load(tmp_path / "all.json") == FULL
    assert FULL.rows_knee() == 256  # the least number at 80% of the best rate
    assert FULL.bytes_near_best(["all-gather"]) == 1 << 20  # at 90%, over the largest set
    assert FULL.product_knee() == pytest.approx(2 * 64 * 96 * 32 / 1e9)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: "[]",
        lambda d: "{",
        lambda d: json.dumps(d | {"format": 99}),
        lambda d: json.dumps(d | {"copies": [{}]}),
        lambda d: json.dumps({k: v for k, v in d.items() if k != "device"}),
    ],
)
def test_what_are_no_figures_is_a_line(tmp_path, change):
    path = tmp_path / "f.json"
    path.write_text(change(json.loads(measured.to_json(FULL))))
    for file in (path, tmp_path / "nowhere.json"):
        check_refused("cannot be read", measured.load, file)


def test_the_page_shows_all_and_says_what_it_is_of():
    html = characterize.document(FULL, [], "nothing", ["storage was left out"]).html()
    assert html.count("<figure") == len(measured.BUS) + 3
    for words in (escape(characterize.HOST), "storage was left out", "16 devices over 2 nodes"):
        assert words in html
    of_gpu = figures_of(platform="cuda", device="NVIDIA H200")
    assert escape(characterize.HOST) not in characterize.document(of_gpu, [], "nothing").html()


def test_the_page_shows_what_a_part_of_a_node_loses():
    page = characterize.document(measured_figures.FAST, [], "nothing").markdown()
    lines = [line.split("|") for line in page.splitlines() if "broadcast" in line]
    assert [line[-2].strip() for line in lines[:3]] == ["14%", "43%", "100%"]
    assert lines[0][-3].strip() == "4 MiB"


@pytest.mark.slow
def test_two_processes_measure_as_one(tmp_path):
    options = [f"--out={tmp_path / 'out'}", "--seconds=0.001"]
    with start(
        ["-m", "experiments.characterize", "collectives", *options], 2, tmp_path / "log", devices=2
    ) as run:
        results = run.wait(200)
    assert [r.code for r in results] == [0, 0], results
    assert "4 x cpu in 1 node(s) of 2 process(es)" in results[0].out and not results[1].out.strip()
    found = measured.load(tmp_path / "out" / "collectives.json")
    assert {c.num_devices for c in found.collectives} == {2, 4} and found.num_processes == 2
    assert {c.name for c in found.collectives} == set(measured.BUS)
