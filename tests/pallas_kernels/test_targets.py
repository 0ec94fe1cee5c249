"""Every kernel as the compilers of absent chips see it: nothing spills, it fits, and products run
on matrix cores.

At ZAYA1's sizes, since tiles follow from them. The cases are those of `benchmarks.cases`: a new
kernel needs one there.
"""

import functools
import os
from pathlib import Path

import pytest
from rows import slow

from benchmarks import cases, inner_loop
from benchmarks import targets as page
from pallas_kernels import chip
from zaya_jax.hardware import targets

SIZE = cases.SIZES["4K"]
ROOT = Path(__file__).parents[2]


def judged(*fast: str) -> list:
    """(chip, case) for all; an operator's first case, on these chips, represents the rest in the
    default tests."""
    return [
        (pytest.param if number == 0 and name in fast else slow)(
            name, case, id=f"{name}, {operator}, {case.label}"
        )
        for operator in chip.OPERATORS
        for number, case in enumerate(cases.of_operator(operator))
        for name in ("mi300x", "h200")
    ]


@pytest.fixture(autouse=True, scope="module")
def compilers():
    if not targets.FOLDER.exists():
        pytest.skip("make setup-targets installs the compilers")
    with pytest.MonkeyPatch.context() as patch:
        # changes of it end with these tests
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield


@functools.cache
def made(name: str, case: cases.Case) -> page.Made:
    direction = "alone" if "alone" in case.directions else "gradients"
    return page.compiled(name, case, direction, SIZE)


@pytest.mark.parametrize(("name", "case"), judged("mi300x", "h200"))
def test_nothing_spills_and_all_fits(name, case):
    codes = made(name, case).codes
    assert codes, "no kernel of its own"
    for code in codes:
        assert (code.arch, code.spills, code.private) == (page.CHIPS[name], 0, 0), code
        assert code.shared <= code.core.a_block and code.occupancy >= 1, code


# NVIDIA's disassembler takes a second or two a kernel
@pytest.mark.parametrize(("name", "case"), judged("mi300x"))
def test_products_run_on_matrix_cores(name, case):
    if missing := inner_loop.missing(page.CHIPS[name]):
        pytest.skip(f"{missing} is not installed")
    found = made(name, case)
    for code in found.codes:
        if any(k.flops for k in found.calls(code.name)):
            loop = inner_loop.read_loop(code)
            assert (
                inner_loop.count(code) if loop is None else loop.matrix and 0 < loop.share <= 1
            ), code


def test_every_operator_with_kernels_has_a_case_and_a_place_on_the_page():
    text = (ROOT / "pallas_kernels" / "TARGETS.md").read_text(encoding="utf-8")
    for operator in chip.OPERATORS:
        assert cases.of_operator(operator), f"benchmarks/cases.py has no case of {operator}"
        assert f"| {operator}" in text, (
            f"{operator} is not on the page; run: python -m benchmarks.targets"
        )
