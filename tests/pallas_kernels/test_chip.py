"""The chip that a program is made for: named, a mesh's, or the default device's; seen wherever code
is traced."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice  # in jax.sharding from 0.12 on
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from pallas_kernels import chip, table, tiles
from pallas_kernels.rows import Tile

H200, MI300X, CPU = (
    chip.Chip("cuda", "NVIDIA H200"),
    chip.Chip("rocm", "gfx942"),
    chip.Chip("cpu", "cpu"),
)


def abstract_mesh(of: chip.Chip) -> AbstractMesh:
    device = AbstractDevice(of.kind, 1, of.platform)
    return AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=device)


def traced_for(wrap, around) -> dict[str, chip.Chip]:
    """The chips that a function sees where it is wrapped so and differentiated: forward and
    backward."""
    seen = {}

    @jax.custom_vjp
    def f(x):
        return x

    def forward(x):
        seen["forward"] = chip.current()
        return x, None

    def backward(_, d):
        seen["backward"] = chip.current()
        return (d,)

    f.defvjp(forward, backward)

    def gradient(x):
        with around:
            return jax.grad(lambda x: wrap(f)(x).sum())(x)

    jax.jit(gradient).trace(jnp.ones(2))
    return seen


WRAPPED = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "a scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "a checkpoint": jax.checkpoint,
    "a checkpoint in a scan": lambda f: WRAPPED["a scan"](jax.checkpoint(f)),
    "a choice": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, f, x),
    "vmap": jax.vmap,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_the_named_chip_is_seen_forward_and_backward(wrap):
    assert traced_for(wrap, chip.making(MI300X)) == {"forward": MI300X, "backward": MI300X}
    assert chip.current() == CPU


@pytest.mark.parametrize(
    ("platform", "kind", "architecture", "expected"),
    [
        ("gpu", "AMD Instinct MI300X", "gfx942", ("gfx942", "rocm")),
        ("gpu", "AMD Radeon Pro W7900", "gfx1100", ("gfx1100", "rocm")),
        ("gpu", "AMD Instinct MI300X", "gfx942:sramecc+:xnack-", ("gfx942", "rocm")),
        ("gpu", "AMD Instinct MI300X", None, ("gfx942", "rocm")),  # an abstract mesh's
        # an absent one
        ("gpu", "AMD Instinct MI355X", "<unknown compute-capability>", ("gfx950", "rocm")),
        ("gpu", "AMD Radeon Pro W7900", None, ("AMD Radeon Pro W7900", "rocm")),
        ("rocm", "gfx942", None, ("gfx942", "rocm")),
        ("gpu", "NVIDIA H200", "9.0", ("NVIDIA H200", "cuda")),
        ("cpu", "cpu", None, ("cpu", "cpu")),
    ],
)
def test_a_device_is_known_by_its_architecture_where_amd_made_it(
    platform, kind, architecture, expected
):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    if architecture:
        device.compute_capability = architecture
    of = chip.chip_of(device)
    assert (of.kind, of.maker) == expected


@pytest.mark.parametrize(
    ("kind", "capability", "own"),
    [
        ("AMD Instinct MI300X", "gfx942", True),
        ("AMD Instinct MI355X", "gfx950", False),
        ("NVIDIA H200", "9.0", False),
    ],
)
def test_a_mesh_of_real_devices_gives_the_program_that_is_measured(kind, capability, own):
    """CDNA3 alone has our rounding to bfloat16 in its kernels: asked of the devices, and of the
    mesh in a program."""

    class Device:
        platform, device_kind, compute_capability, process_index = "gpu", kind, capability, 0

    mesh = Mesh(np.array([Device(), Device()], dtype=object), ("x",), axis_types=(AxisType.Auto,))
    assert chip.made_for(mesh) == chip.made_for(abstract_mesh(chip.Chip("gpu", kind)))
    with chip.making(chip.made_for(mesh)):
        program = jax.make_jaxpr(lambda x: tiles.narrow(x, jnp.bfloat16))(1.0)
    assert ("bitcast" in str(program)) is own


def test_another_chip_is_another_trace():
    seen = []
    f = jax.jit(lambda x: seen.append(chip.current()) or x)
    for of in (H200, MI300X, H200):
        with chip.making(of):
            f(1.0)
    f(1.0)
    assert seen == [H200, MI300X, CPU]


def test_a_program_over_a_mesh_is_for_its_devices_unless_another_is_named():
    everywhere = PartitionSpec("x")

    def seen():
        mapped = jax.shard_map(
            lambda x: found.append(chip.current()) or x,
            mesh=abstract_mesh(MI300X),
            in_specs=everywhere,
            out_specs=everywhere,
        )
        found = []
        jax.jit(mapped).trace(jnp.ones(2))
        return found

    assert seen() == [MI300X]
    with chip.making(H200):
        assert seen() == [H200]


def test_whom_a_program_is_made_for():
    real = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mesh = abstract_mesh(MI300X)
    assert [chip.made_for(x) for x in (mesh, real, {"a": jnp.ones(2)}, {}, {"a": 1})] == [
        MI300X,
        *[CPU] * 4,
    ]
    assert chip.made_for(AbstractMesh((2,), ("x",), (AxisType.Auto,))) == CPU
    with chip.making(H200):
        assert {chip.made_for(x) for x in (mesh, real, {"a": jnp.ones(2)})} == {H200}
    with jax.default_device(jax.devices()[3]):
        assert chip.current() == CPU
    # traced arrays are on no device yet
    jax.jit(lambda x: x * (chip.made_for({"a": x}) == CPU))(1.0)


def test_the_chips_own_implementation_is_chosen_and_otherwise_xlas():
    for of, chosen in ((CPU, 2), (H200, 1), (MI300X, 3)):
        with chip.making(of):
            assert chip.choose("attention", {"xla": 1, "cpu": 2, "rocm": 3}) == chosen


def test_which_operators_have_kernels_of_ours_and_with_which_tiles(monkeypatch):
    """The config's, on architectures that the table knows; and what `tune` found on this card."""
    monkeypatch.setattr(chip, "_used", {})
    assert H200.taking(("auto",)) == H200.taking(("all",)) == H200
    assert H200.taking(("attention",)).kernels == ("attention",)
    unknown = chip.Chip("cuda", "NVIDIA B200")
    assert unknown.taking(("auto",)).kernels == () and unknown.taking(("all",)) == unknown
    assert CPU.taking(("auto",)) == CPU
    tile = {"rows": 64, "keys": 32, "warps": 4, "stages": 1}
    chip.use("NVIDIA B200", {"kernels": ["attention"], "tiles": {"attention_keys": {"tile": tile}}})
    found = unknown.taking(("auto",))
    assert found.kernels == ("attention",) and hash(found) != hash(unknown)
    with chip.making(found):
        assert Tile.of("attention_keys", 128, jnp.bfloat16) == Tile(**tile)
        assert Tile.of("attention_queries", 128, jnp.bfloat16) == Tile(32, 32)
    assert H200.taking(("auto",)) == H200
    chip.use("NVIDIA B200", None)
    assert unknown.taking(("auto",)).kernels == ()


@pytest.mark.parametrize(
    ("kind", "maker", "architecture", "known"),
    [
        ("Tesla V100-SXM2-16GB", "cuda", "sm_70", False),
        ("Tesla T4", "cuda", "sm_75", False),
        ("NVIDIA A100-SXM4-80GB", "cuda", "sm_80", False),
        ("NVIDIA A10", "cuda", "sm_86", False),
        ("NVIDIA GeForce RTX 4090", "cuda", "sm_89", False),
        ("NVIDIA L40S", "cuda", "sm_89", False),
        ("NVIDIA RTX 2000 Ada Generation", "cuda", "sm_89", False),
        ("Quadro RTX 5000", "cuda", "sm_75", False),
        ("NVIDIA TITAN RTX", "cuda", "sm_75", False),
        ("NVIDIA GeForce GTX 1660", "cuda", "sm_75", False),
        ("NVIDIA H100 80GB HBM3", "cuda", "sm_90", True),
        ("NVIDIA B200", "cuda", "sm_100", False),
        ("NVIDIA X9000", "cuda", "sm", False),
        ("gfx908", "rocm", "gfx908", False),
        ("gfx942", "rocm", "gfx942", True),
        ("gfx950", "rocm", "gfx950", True),
        ("gfx1100", "rocm", "gfx1100", False),
        ("AMD Instinct MI999", "rocm", "gfx", False),
    ],
)
def test_what_a_chip_has_follows_from_its_name(kind, maker, architecture, known):
    of = chip.Chip("gpu", kind)
    assert (of.maker, of.architecture) == (maker, architecture)
    assert table.has(architecture) is known
    assert ("bfloat16" in of.formats) == (architecture not in ("sm_70", "sm_75"))
    assert of.lanes == (
        64 if architecture.startswith(("gfx9", "gfx")) and architecture != "gfx1100" else 32
    )
