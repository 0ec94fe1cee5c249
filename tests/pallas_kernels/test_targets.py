"""Every kernel as the compilers of absent chips see it: with the table's tiles nothing spills, and it
fits; and the readings of their machine code.

At ZAYA1's sizes, since tiles follow from them. The cases are those of `benchmarks.cases`: a new
kernel needs one there.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from rows import slow

from benchmarks import absent, candidates, cases, machine_code
from pallas_kernels import chip, table, tiles, trying
from pallas_kernels.candidates import compiled, points, tiles_to_measure
from zaya_jax.hardware import targets

COMPILED = {"gfx942", "sm_90"}  # as docs/compiling.md says
SHARED = {"mi300x": 64 << 10, "h200": 227 << 10}  # bytes that a block may have


@pytest.fixture(scope="module", autouse=True)
def compilers():
    if not targets.FOLDER.exists():
        pytest.skip("make setup-targets installs the compilers")
    with pytest.MonkeyPatch.context() as patch:
        # changes of it end with these tests
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield


def judged() -> list:
    """(chip, case) for all; an operator's first case represents the rest in the default tests."""
    return [
        (pytest.param if number == 0 else slow)(name, case, id=f"{name}, {operator}, {case.label}")
        for operator in chip.OPERATORS
        for number, case in enumerate(all_cases(operator))
        for name in SHARED
    ]


def all_cases(operator) -> list:
    """As a step has them, then those of `benchmarks.cases` that are others."""
    others = [
        trying.tried_call(case, cases.SIZES["4K"], False) for case in cases.of_operator(operator)
    ]
    step = {case.label: case for case in candidates.step_cases(operator)}
    return [*step.values(), *(case for case in others if case.label not in step)]


@pytest.mark.parametrize(("name", "case"), judged())
def test_nothing_spills_and_all_fits(name, case):
    codes = machine_code.read_kernels(candidates.compiled(name, case, {}))
    assert codes, "no kernel of its own"
    for code in codes:
        assert code.spills == 0 and code.shared <= SHARED[name], code


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "sm_90"])
def test_candidates_are_what_the_file_has_and_elsewhere_all_points(architecture):
    known = compiled().get(architecture, {})
    for operator in chip.OPERATORS:
        assert cases.of_operator(operator), f"benchmarks/cases.py has no case of {operator}"
        found = table.rows_of_operators(table.rows(architecture), [operator])
        assert found
        for kernel, row in found.items():
            near = points(row["tile"])
            others = tiles_to_measure(architecture, kernel, row["tile"])
            assert row["tile"] in near and row["tile"] not in others
            if architecture in COMPILED:
                assert others == [tile for tile in near if tile in known[kernel] and tile in others]
            else:
                assert len(others) == len(near) - 1


MOST = {"mi300x": 512, "h200": 255}  # registers of a thread


def product(x, y, *, tile, warps=4):
    """x y, in tiles of so many rows and columns."""

    rows, inner, columns = len(x), len(y), y.shape[1]

    def body(refs, out):
        x, y = refs["x"], refs["y"]
        down, across = (tiles.slice_of(tiles.program_id(dim) * tile, tile) for dim in (0, 1))

        def add(i, total):
            part = tiles.slice_of(i * 64, 64)
            return total + tiles.dot(x[down, part], y[part, across])

        zero = jnp.zeros((tile, tile), jnp.float32)
        out[down, across] = jax.lax.fori_loop(0, inner // 64, add, zero).astype(out.dtype)

    return tiles.call(
        body,
        {"x": x, "y": y},
        name=f"product_{tile}",
        grid=(rows // tile, columns // tile),
        out_shapes=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        work=tiles.Work(2 * rows * inner * columns),
        warps=warps,
    )


@pytest.fixture(scope="module", params=MOST)
def program_of_products(request, compilers):
    """(registers at most, a program with a kernel twice, another of its name's kind, and one whose tile is too
    large)."""

    def f(x):
        y = product(jnp.sin(product(x, x, tile=64)), x, tile=64)

        def again(y, _):
            return product(y, x, tile=256), None

        return jax.lax.scan(again, product(y, x, tile=128), length=3)[0] @ x

    like = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    return MOST[request.param], absent.compiled(request.param, f, like)


def test_registers_spills_and_shared_memory_of_a_compiled_program(program_of_products):
    most, program = program_of_products
    found = machine_code.read_kernels(program)
    assert [c.name for c in found] == ["product_64", "product_128", "product_256"]
    assert len({c.digest for c in found}) == 3
    small, middle, large = found
    for kernel in (small, middle):
        assert kernel.spills == 0 and 64 < kernel.registers <= 256
        assert 0 < kernel.shared <= 64 << 10
    # A tile of 256 x 256 in float32 takes 256 or 512 registers of each thread, for its sum alone.
    assert large.spills > 0 and large.registers == most
