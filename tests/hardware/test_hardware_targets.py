"""Chips that are not here: they call themselves as real ones do, and a missing compiler is reported."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.absent import compiled
from pallas_kernels import chip, tiles
from zaya_jax.config import UserError
from zaya_jax.hardware import buffers, kernels, targets

absent = pytest.mark.skipif(not targets.FOLDER.exists(), reason="make setup-targets installs the compilers")


def rounded(x):
    """A kernel that rounds to bfloat16, which each maker's chips do in their own way."""

    def body(x, out):
        out[...] = tiles.narrow(x[...], jnp.bfloat16)

    whole = tiles.block(x.shape, lambda: (0, 0))
    like = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    return tiles.call(body, x, name="rounded", grid=(), out_shapes=like, blocks=((whole,), whole))


@absent
@pytest.mark.parametrize(
    ("name", "kind", "capability"),
    [
        ("mi300x", "AMD Instinct MI300X", "gfx942"),
        ("mi355x", "AMD Instinct MI355X", "gfx950"),
        ("h200", "NVIDIA H200", "9.0"),
    ],
)
def test_an_absent_chip_gets_the_program_of_a_real_one(name, kind, capability, monkeypatch):
    jax.devices("cpu")  # while XLA_FLAGS still asks for eight
    monkeypatch.setenv("XLA_FLAGS", "")  # its value ends with this test
    (device,) = targets.devices(name, 1)
    real = chip.chip_of(SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability))
    mesh = Mesh(np.array([device]), ("x",))
    assert device.device_kind == kind
    assert chip.made_for(mesh) == chip.made_for(mesh.abstract_mesh) == real
    like = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    texts = []
    for named in (contextlib.nullcontext(), chip.making(real)):
        with named:
            texts.append(compiled(name, rounded, like).as_text())
    assert texts[0] == texts[1] and "rounded" in texts[0]


def test_a_missing_compiler_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "FOLDER", tmp_path)
    monkeypatch.setattr(xla_client._xla, "pjrt_plugin_loaded", lambda platform: False)  # other tests may have them
    for platform in ("rocm", "cuda"):
        with pytest.raises(UserError, match="is not installed; run: make setup-targets"):
            targets._register(platform)
    plugin = tmp_path / "jax_plugins" / "xla_rocm7" / "xla_rocm_plugin.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    (tmp_path / ".stamp").write_text("jax 0.1.0, made\n")
    with pytest.raises(UserError, match=r"for jax 0\.1\.0, this is .*; run: make setup-targets"):
        targets._register("rocm")


@pytest.mark.slow
@absent
@pytest.mark.parametrize("name", ["mi300x", "mi355x", "h200", "h100"])
def test_a_program_for_each_chip(name):
    """A product of known size: its FLOPs and bytes, and the memory that the chip's own compiler says."""
    devices = targets.devices(name, 2)
    mesh = Mesh(np.array(devices), ("x",))
    like = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in (((512, 1024), ("x", None)), ((1024, 256), ()))
    ]
    lowered = jax.jit(lambda x, w: x @ w, out_shardings=like[0].sharding).lower(*like)
    compiled, memory = buffers.compile_watched(lowered)
    program = kernels.read_program(compiled)
    assert program.flops == 2 * 256 * 1024 * 256
    assert program.bytes >= 2 * (256 * 1024 + 1024 * 256 + 256 * 256)
    assert memory.arguments == 2 * (256 * 1024 + 1024 * 256)
