"""The trial's child with planted faults: `python -m tests.pallas_kernels.planted OPERATOR=FAULT
...`.

XLA's implementations take SLOW seconds more than they need, so that ours, interpreted here, are
faster where they are right. OPERATOR's own kernels have the FAULT.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import trial
from pallas_kernels.chip import Chip

SLOW = 0.1


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def late(x: Any, seconds: float = SLOW) -> Any:
    """The same, after so many seconds of the run."""

    def wait(leaf):
        time.sleep(seconds)
        return np.asarray(leaf)

    first, *others = jax.tree.leaves(x)
    first = jax.pure_callback(wait, jax.ShapeDtypeStruct(first.shape, first.dtype), first)
    return jax.tree.unflatten(jax.tree.structure(x), [first, *others])


late.defvjp(lambda x, seconds: (late(x, seconds), None), lambda seconds, _, d: (d,))


def changed(x: jax.Array, by: float) -> jax.Array:
    return x.at[(0,) * x.ndim].add(by)


def at_a_segments_end(x: jax.Array, ids: jax.Array) -> jax.Array:
    """NaN at the last token of the first document."""
    ends = (ids != jnp.roll(ids, -1, axis=1)) & (ids == ids[:, :1])
    return jnp.where(ends[:, :, None, None], jnp.nan, x)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrong(fault: str, call: Callable, *arguments: Any) -> Any:
    """The operator with the fault, while it is traced or in its result."""
    if fault == "raises":
        raise NotImplementedError("no such instruction")
    if fault == "kills":
        killed()
    if fault == "hangs":
        time.sleep(1e4)
    out = call(*arguments)
    if fault == "slow":
        return late(out, 2 * SLOW)
    if fault == "NaN":
        return at_a_segments_end(out, arguments[3])
    return jax.tree.map(lambda x: changed(x, 0.5), out) if fault == "wrong" else out


def main() -> int:
    faults = dict(argument.split("=") for argument in sys.argv[1:])
    offered = trial.offered

    def planted(case: Any, here: Chip) -> dict:
        found = {}
        for name, (call, target) in offered(case, here).items():
            fault = faults.get(case.operator, "") if name in trial.OURS else "XLA"
            found[name] = functools.partial(_with, fault, call), target
        return {
            name: found[name] for name in ("XLA", *list(trial.OURS)[: int(faults.get("tiles", 1))])
        }

    trial.offered = planted
    trial.SAMPLES = 1e-3
    trial.timing.LEAST = 2
    return trial.main()


def _with(fault: str, call: Callable, dtype: Any) -> Callable:
    plain = call(dtype)
    if fault == "XLA":
        return lambda *arguments: late(plain(*arguments))
    return functools.partial(wrong, fault, plain)


if __name__ == "__main__":
    sys.exit(main())
