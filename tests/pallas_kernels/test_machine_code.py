"""Readings of the machine code of compiled kernels: registers, spills, shared memory."""

import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks import absent, machine_code
from pallas_kernels import tiles
from zaya_jax.hardware import targets

MOST = {"mi300x": 512, "h200": 255}  # registers of a thread


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


@pytest.fixture(scope="module", params=MOST)
def compiled(request):
    """(registers at most, a program with a kernel twice, another of its name's kind, and one whose tile is too
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
        yield MOST[request.param], absent.compiled(request.param, f, like)


def test_registers_spills_and_shared_memory_of_a_compiled_program(compiled):
    most, program = compiled
    found = machine_code.read_kernels(program)
    assert [c.name for c in found] == ["product_64", "product_128", "product_256"]
    assert len({c.digest for c in found}) == 3
    small, middle, large = found
    for kernel in (small, middle):
        assert kernel.spills == 0 and 64 < kernel.registers <= 256
        assert 0 < kernel.shared <= 64 << 10
    # A tile of 256 x 256 in float32 takes 256 or 512 registers of each thread, for its sum alone.
    assert large.spills > 0 and large.registers == most
