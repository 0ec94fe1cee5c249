"""The child of `tune` with planted faults: `python -m tests.pallas_kernels.planted
OPERATOR=FAULT[@CASE] ..`.

XLA's implementations take SLOW seconds more than they need, so that ours, interpreted here, are
faster where they are right. OPERATOR's own kernels have the FAULT, in all cases or in those whose
label begins with CASE; `@tiles`: with other tiles than those that ship. Each kernel has one other
tile at most.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chip, trying

SLOW = 0.3


def late(x: Any, seconds: float) -> Any:
    """The same, after so many seconds of the run."""

    def wait(leaf):
        time.sleep(seconds)
        return np.asarray(leaf)

    first, *others = jax.tree.leaves(x)
    first = jax.pure_callback(wait, jax.ShapeDtypeStruct(first.shape, first.dtype), first)
    return jax.tree.unflatten(jax.tree.structure(x), [first, *others])


def wrong(fault: str, plain: Callable, arguments: Any, sums: Any) -> Any:
    """The results with the fault, which may also come while they are traced."""
    if fault == "raises":
        raise NotImplementedError("no such instruction")
    if fault == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hangs":
        time.sleep(1e4)
    (out, gradients), sums = plain(arguments, sums)
    by = {"NaN": jnp.nan, "wrong": 0.5}.get(fault, 0.0)
    first, *others = jax.tree.leaves(gradients)
    if fault == "scaled":  # by less than any limit of the worst place
        first = 1.05 * first
    elif by:
        first = first.at[(0,) * first.ndim].add(by * 10)
    gradients = jax.tree.unflatten(jax.tree.structure(gradients), [first, *others])
    return late((out, gradients), 2 * SLOW if fault == "slow" else 0.0), sums


def with_faults(case: trying.TriedCall, fault: str, xlas: str, dtype: Any) -> Callable:
    plain = case.call(dtype)
    what, _, where = fault.partition("@")

    def run(arguments, sums):
        here = chip.current()
        if case.operator not in here.kernels:
            if xlas and dtype != jnp.float32:
                return wrong(xlas, plain, arguments, sums)
            results, sums = plain(arguments, sums)
            return late(results, SLOW * case.timed), sums
        there = bool(here.tiles) if where == "tiles" else case.label.startswith(where)
        return wrong(what if there else "", plain, arguments, sums)

    return run


def main() -> int:
    faults = dict(argument.split("=") for argument in sys.argv[1:])
    request_cases, tiles_to_measure = trying.request_cases, trying.candidates.tiles_to_measure

    def planted(asked: Mapping[str, Any], operator: str) -> list[trying.TriedCall]:
        both = faults.get(operator, ""), faults.get(f"XLA's {operator}", "")
        return [
            case._replace(call=functools.partial(with_faults, case, *both))
            for case in request_cases(asked, operator)
        ]

    trying.request_cases = planted
    trying.candidates.tiles_to_measure = lambda *given: tiles_to_measure(*given)[
        : int(faults.get("tiles", 0))
    ]
    trying.SAMPLES = 1e-3
    trying.timing.LEAST = 2
    return trying.main()


if __name__ == "__main__":
    sys.exit(main())
