"""Readings of the machine code of compiled kernels: registers, spills, shared memory, occupancy,
the inner loop."""

import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks import absent, machine_code
from benchmarks.machine_code import CORES, Code
from pallas_kernels import tiles
from zaya_jax.hardware import chips, targets

ARCH = {"mi300x": "gfx942", "h200": "sm_90"}


def code(arch="gfx942", registers=64, shared=0, threads=256, **more) -> Code:
    fixed = dict(name="k", grid=(1, 1, 1), spills=0, private=0, scalar_spills=0, times=1, elf=b"")
    return Code(arch=arch, registers=registers, shared=shared, threads=threads, **{**fixed, **more})


@pytest.mark.parametrize(
    ("of", "occupancy"),
    [
        (code(registers=64), 8),
        (code(registers=65), 7),  # 72 are given
        (code(registers=64, shared=16 << 10), 4),
        (code(registers=64, shared=(32 << 10) + 1), 1),
        (code(registers=64, shared=(64 << 10) + 1), 0),
        (code(registers=512, threads=512), 0),
        (code("gfx950", registers=64, shared=(64 << 10) + 1), 2),
        (code("sm_90", registers=168, threads=128), 3),
        (code("sm_90", registers=64, threads=128, shared=227 << 10), 1),
        (code("sm_90", registers=64, threads=128, shared=(227 << 10) + 1), 0),
    ],
)
def test_how_many_warps_fit(of, occupancy):
    assert of.occupancy == occupancy


@pytest.mark.parametrize(
    ("arch", "cores", "clock"),
    [("gfx942", 304, 2.1e9), ("gfx950", 256, 2.4e9), ("sm_90", 132, 1.83e9)],
)
def test_a_core_of_the_model_has_the_rate_of_the_data_sheet(arch, cores, clock):
    sheet = chips.CHIPS[{"gfx942": "mi300x", "gfx950": "mi355x", "sm_90": "h200"}[arch]].peaks[
        "bfloat16"
    ]
    assert CORES[arch].flops * cores * clock == pytest.approx(sheet, rel=0.002)


def product(x, y, *, tile, warps=4):
    """x y, in tiles of so many rows and columns."""

    def body(x, y, out):
        def add(i, total):
            part = tiles.slice_of(i * 64, 64)
            return total + tiles.dot(x[:, part], y[part, :])

        zero = jnp.zeros(out.shape, jnp.float32)
        out[...] = jax.lax.fori_loop(0, x.shape[1] // 64, add, zero).astype(out.dtype)

    rows, inner, columns = len(x), len(y), y.shape[1]
    return tiles.call(
        body,
        x,
        y,
        name=f"product_{tile}",
        grid=(rows // tile, columns // tile),
        blocks=(
            (
                tiles.block((tile, inner), lambda i, j: (i, 0)),
                tiles.block((inner, tile), lambda i, j: (0, j)),
            ),
            tiles.block((tile, tile), lambda i, j: (i, j)),
        ),
        out_shapes=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        work=tiles.Work(2 * rows * inner * columns),
        warps=warps,
    )


@pytest.fixture(scope="module", params=ARCH)
def compiled(request):
    """(chip, a program with a kernel twice, another of its name's kind, and one whose tile is too
    large)."""
    if not targets.FOLDER.exists():
        pytest.skip("make setup-targets installs the compilers")
    with pytest.MonkeyPatch.context() as patch:
        # changes of it end with these tests
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))

        def f(x):
            y = product(jnp.sin(product(x, x, tile=64)), x, tile=64)

            def again(y, _):
                return product(y, x, tile=256), None

            return jax.lax.scan(again, product(y, x, tile=128), length=3)[0] @ x

        like = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
        yield ARCH[request.param], absent.compiled(request.param, f, like)


def test_registers_spills_and_shared_memory_of_a_compiled_program(compiled):
    arch, program = compiled
    found = machine_code.read_kernels(program)
    assert [(c.name, c.arch, c.times) for c in found] == [
        ("product_64", arch, 2),
        ("product_128", arch, 1),
        ("product_256", arch, 1),
    ]
    small, middle, large = found
    assert (small.grid, middle.grid, large.grid) == ((8, 8, 1), (4, 4, 1), (2, 2, 1))
    for kernel in (small, middle):
        assert kernel.warps == 4 and kernel.spills == kernel.private == 0
        assert 64 < kernel.registers <= 256 and kernel.occupancy >= 2
        assert 0 < kernel.shared <= kernel.core.a_block
    # A tile of 256 x 256 in float32 takes 256 or 512 registers of each thread, for its sum alone.
    assert large.spills > 0 and large.private > 0 and large.registers == large.core.most_registers
