"""Faults on purpose, for tests: ZAYA_FAULTS names a file of them, which may change while the run
goes on.

    [{"kind": "data", "first": 40, "last": 60},                       batches of noise, by their place in the order
     {"kind": "slow", "process": 1, "seconds": 0.5, "first": 3},      a process sleeps in each step
     {"kind": "flip", "device": 2, "times": 1},                       a bit of a device's gradient
     {"kind": "nonfinite", "device": 0, "first": 9, "last": 12}]      its gradient is no number

`first` and `last` are steps, both included; without them always. `times`: so often in all;
`passing`: not when they are computed again, to be compared (`replay`). Without the variable nothing
of this is in any program. The hook in a program is made when it is traced; it asks the file
whenever it runs.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

VARIABLE = "ZAYA_FAULTS"

_step = 0  # that the loop has come to
_done: dict[str, int] = {}  # how often those with `times` have struck


def asked() -> bool:
    """Whether there may be any."""
    return bool(os.environ.get(VARIABLE))


def _now(kind: str, step: int) -> list[dict[str, Any]]:
    try:
        every = json.loads(Path(os.environ[VARIABLE]).read_text())
    except (KeyError, OSError, ValueError):
        return []
    return [
        one
        for one in every
        if one["kind"] == kind and one.get("first", 0) <= step <= one.get("last", 1 << 62)
    ]


def in_step(step: int) -> None:
    """Runs in the host's loop, before each step."""
    global _step
    _step = step
    if asked():
        for one in _now("slow", step):
            if one["process"] == jax.process_index():
                time.sleep(one["seconds"])


def of_data(
    batch: dict[str, np.ndarray], step: int, left_out: list[list[int]]
) -> dict[str, np.ndarray]:
    """A step's batch on the host; requested steps are noise, by their place in the data's order."""
    if not asked():
        return batch
    behind = max((i + 1 for i, (at, _) in enumerate(left_out) if at < step), default=0)
    position = step + sum(batches for _, batches in left_out[:behind])
    if not _now("data", position):
        return batch
    targets = batch["targets"]
    noise = np.random.default_rng(position).integers(0, targets.max() + 1, targets.shape)
    return batch | {"targets": noise.astype(targets.dtype)}


def given() -> "Faults | None":
    """The hook that a program hands to its run; None where no faults are asked for."""
    return Faults() if asked() else None


class Faults:
    """The faults as the `faults` of `zaya_jax.run.train`."""

    def before_step(self, number: int) -> None:
        """Runs in the host's loop. `strike` runs on the devices, which may be a step behind: they
        are waited for."""
        jax.effects_barrier()
        in_step(number)

    def batch(
        self, batch: dict[str, np.ndarray], number: int, left_out: list[list[int]]
    ) -> dict[str, np.ndarray]:
        """The batch that a step is trained on."""
        return of_data(batch, number, left_out)

    def gradients(self, mesh: jax.sharding.Mesh, again: bool = False) -> Any:
        """The change of a device's gradients."""
        return hook(mesh.axis_names, mesh.devices.shape, again)


def hook(axes: Sequence[str], sizes: Sequence[int], again: bool = False) -> Any:
    """The change of a device's gradients before anything is summed; None where no faults are asked
    for.

    Devices go by their places in a mesh of these axes. `again`: of gradients that are computed
    again, to be compared.
    """
    if not asked():
        return None

    def strike(device: Any) -> np.ndarray:
        """(bits to flip in the first number, the number to add to it)"""
        flip, add = 0, 0.0
        for kind in ("flip", "nonfinite"):
            for one in _now(kind, _step):
                if again and one.get("passing"):
                    continue
                key = json.dumps(one)
                if one["device"] == int(device) and _done.get(key, 0) < one.get("times", 1 << 62):
                    _done[key] = _done.get(key, 0) + 1
                    flip, add = (1 << 22, add) if kind == "flip" else (flip, np.nan)
        return np.array([flip, np.array(add, np.float32).view(np.uint32)], np.uint32)

    def spoil(gradients: Any) -> Any:
        place = jnp.zeros((), jnp.int32)
        for axis, size in zip(axes, sizes, strict=True):
            place = place * size + jax.lax.axis_index(axis)
        flip, add = io_callback(strike, jax.ShapeDtypeStruct((2,), jnp.uint32), place)
        leaves, treedef = jax.tree.flatten(gradients)
        first = leaves[0].ravel()
        bits = jax.lax.bitcast_convert_type(first[0].astype(jnp.float32), jnp.uint32) ^ flip
        value = jax.lax.bitcast_convert_type(bits, jnp.float32) + jax.lax.bitcast_convert_type(
            add, jnp.float32
        )
        leaves[0] = first.at[0].set(value.astype(first.dtype)).reshape(leaves[0].shape)
        return jax.tree.unflatten(treedef, leaves)

    return spoil
