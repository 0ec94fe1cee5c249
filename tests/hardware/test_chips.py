"""Chips' peaks, and what joins them in a cluster; chips that are not here call themselves as real
ones do."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from refusals import check_refused

from pallas_kernels import chip
from zaya_jax.compiled import buffers, launches
from zaya_jax.config import Precision
from zaya_jax.hardware import clusters, sizing, targets
from zaya_jax.hardware.chips import peak_flops

CLUSTER = clusters.CLUSTERS["mi300x_pollara"]


@pytest.mark.parametrize(
    ("kind", "bfloat16", "tf32", "float32"),
    [
        ("AMD Instinct MI300X", 1307.4e12, 653.7e12, 163.4e12),
        ("AMD Instinct MI300X VF", 1307.4e12, 653.7e12, 163.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12, 66.9e12),
        ("NVIDIA H200", 989.4e12, 494.7e12, 66.9e12),
    ],
)
def test_float32_is_tf32_unless_all_its_bits_are_asked_for(kind, bfloat16, tf32, float32):
    for matmul in ("default", "high", "highest"):
        assert peak_flops(kind, Precision(matmul=matmul)) == bfloat16
        expected = float32 if matmul == "highest" else tf32
        assert peak_flops(kind, Precision(compute="float32", matmul=matmul)) == expected


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL"])
def test_an_unknown_chip_or_slower_card_has_no_peak(kind):
    assert peak_flops(kind, Precision()) is None


INSIDE, CARD = CLUSTER.inside, CLUSTER.card


@pytest.mark.parametrize(
    ("devices", "node", "rates"),
    [
        (1, 1, {(0,): INSIDE}),
        (7, 7, {(0, 6): INSIDE}),
        (12, 6, {(0, 1, 2, 3, 4, 5): INSIDE, (5, 6): CARD, tuple(range(12)): 6 * CARD}),
        (14, 7, {(6, 7): CARD}),
        (24, 8, {(7, 8): CARD}),
        (1024, 8, {(0, 3, 7): INSIDE, (0, 8, 16): CARD, (0, 1, 8, 9): 2 * CARD}),
        (1024, 8, {(0, 1, 2, 8): CARD, tuple(range(16)): min(INSIDE, 8 * CARD)}),
    ],
)
def test_nodes_are_alike_and_a_group_gets_the_cards_of_its_fewest_in_one(devices, node, rates):
    """12 devices are two nodes of six, as they are compiled for: no group of eight in one node."""
    cluster = CLUSTER.of_devices(devices)
    assert cluster.node == node
    assert {group: cluster.bandwidth(group) for group in rates} == rates


absent = pytest.mark.skipif(
    not targets.FOLDER.exists(), reason="make setup-targets installs the compilers"
)


@absent
@pytest.mark.parametrize(
    ("name", "kind", "capability"),
    [
        ("mi300x", "AMD Instinct MI300X", "gfx942"),
        ("mi355x", "AMD Instinct MI355X", "gfx950"),
        ("h200", "NVIDIA H200", "9.0"),
        ("h100", "NVIDIA H100 80GB HBM3", "9.0"),
    ],
)
def test_an_absent_chip_is_compiled_for_as_a_real_one(name, kind, capability, monkeypatch):
    """A product of known size has its FLOPs and bytes, and takes the memory that the chip's own
    compiler says."""
    jax.devices("cpu")  # while XLA_FLAGS still asks for eight
    monkeypatch.setenv("XLA_FLAGS", "")  # its value ends with this test
    mesh = Mesh(np.array(targets.devices(name, 2)), ("x",))
    real = chip.chip_of(
        SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    )
    assert mesh.devices[0].device_kind == kind
    assert chip.made_for(mesh) == chip.made_for(mesh.abstract_mesh) == real
    like = [
        jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        for shape, spec in (((512, 1024), ("x", None)), ((1024, 256), ()))
    ]
    lowered = jax.jit(lambda x, w: x @ w, out_shardings=like[0].sharding).lower(*like)
    compiled, memory = buffers.compile_watched(lowered)
    program = launches.read_program(compiled)
    assert program.flops == 2 * 256 * 1024 * 256
    assert program.bytes >= 2 * (256 * 1024 + 1024 * 256 + 256 * 256)
    assert memory.arguments == 2 * (256 * 1024 + 1024 * 256)


def test_a_compiler_takes_what_makes_a_collective_wait():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for _, option, value in sizing.CAUTIOUS:
        lowered.compile(compiler_options={option: value})


WAITING = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.compiled import buffers
from zaya_jax.hardware import sizing, targets

mesh = Mesh(np.array(targets.devices(sys.argv[1], 4)), ("x",))
weights, rows = PartitionSpec(None, "x"), PartitionSpec("x")

def gradient(w, x):
    def layer(h, w):
        whole = jax.lax.all_gather(w, "x", axis=0, tiled=True)
        shifts = [[(i, (i + by) % 4) for i in range(4)] for by in (1, 3)]
        return jnp.tanh(h @ whole) + sum(jax.lax.ppermute(h, "x", to) for to in shifts), None

    return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)

like = [
    jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    for shape, spec in (((6, 256, 256), weights), ((512, 256), rows))
]
step = jax.shard_map(
    gradient, mesh=mesh, in_specs=(weights, rows), out_specs=weights, check_vma=False
)
lowered = jax.jit(step).lower(*like)
no_pass = {"xla_disable_hlo_passes": "no-such-pass"}  # is accepted too
options = [{}, no_pass, *({option: value} for _, option, value in sizing.CAUTIOUS)]
with buffers.uncached():
    programs = [lowered.compile(compiler_options=x).as_text() for x in options]
print([programs.index(x) for x in programs])
"""


@absent
@pytest.mark.parametrize("name", [pytest.param("mi300x", marks=pytest.mark.slow), "h200"])
def test_each_option_that_makes_a_collective_wait_changes_a_program(name):
    """In a process of its own, which begins with a run's flags."""
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-c", WAITING, name]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[-2] == "[0, 0, 2, 3, 4, 5]", done.stderr


def test_a_missing_compiler_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "FOLDER", tmp_path)
    # other tests may have them
    monkeypatch.setattr(xla_client._xla, "pjrt_plugin_loaded", lambda platform: False)
    plugin = tmp_path / "jax_plugins" / "xla_rocm7" / "xla_rocm_plugin.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()  # as an interrupted set-up leaves it
    for platform in ("rocm", "cuda"):
        check_refused("is not installed; run: make setup-targets", targets._register, platform)
    (tmp_path / ".stamp").write_text("jax 0.1.0, made\n")
    check_refused(
        r"for jax 0\.1\.0, this is .*; run: make setup-targets", targets._register, "rocm"
    )
