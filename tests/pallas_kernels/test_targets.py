"""Every kernel as the compilers of absent chips see it: with the table's tiles nothing spills, and it
fits.

At ZAYA1's sizes, since tiles follow from them. The cases are those of `benchmarks.cases`: a new
kernel needs one there.
"""

import os

import pytest
from rows import slow

from benchmarks import candidates, cases, machine_code
from pallas_kernels import chip, table
from pallas_kernels.candidates import points, tiles_to_measure
from zaya_jax.hardware import targets

SHARED = {"mi300x": 64 << 10, "h200": 227 << 10}  # bytes that a block may have


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    if not targets.FOLDER.exists():
        pytest.skip("make setup-targets installs the compilers")
    # changes of it end with these tests
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def judged() -> list:
    """(chip, case) for all; an operator's first case represents the rest in the default tests."""
    return [
        (pytest.param if number == 0 else slow)(name, case, id=f"{name}, {operator}, {case.label}")
        for operator in chip.OPERATORS
        for number, case in enumerate(cases.of_operator(operator))
        for name in SHARED
    ]


@pytest.mark.parametrize(("name", "case"), judged())
def test_nothing_spills_and_all_fits(name, case):
    codes = machine_code.read_kernels(candidates.compiled(name, case, {}))
    assert codes, "no kernel of its own"
    for code in codes:
        assert code.spills == 0 and code.shared <= SHARED[name], code


@pytest.mark.parametrize("architecture", ["gfx942", "sm_90"])
def test_every_kernel_of_the_table_has_candidates_which_are_near_its_tile(architecture):
    for operator in chip.OPERATORS:
        assert cases.of_operator(operator), f"benchmarks/cases.py has no case of {operator}"
        found = table.rows_of_operators(table.rows(architecture), [operator])
        assert found
        for kernel, row in found.items():
            others = tiles_to_measure(architecture, kernel, row["tile"])
            assert row["tile"] not in others and all({*x} == {*row["tile"]} for x in others)
            assert len(others) < len(points(row["tile"]))
