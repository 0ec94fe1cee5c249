"""Searches other ways to run a phase: the fastest meshes, micro-batches and remat that fit.

Only cases count that a run would accept (`parallel.sharding.check`) and that fit the chip's memory.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from zaya_jax.config import Config, Mesh, UserError
from zaya_jax.hardware import targets
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.parallel.spread import spread_of
from zaya_jax.plan import footprint, step_time
from zaya_jax.plan.case import Case
from zaya_jax.plan.phases import PlannedStep
from zaya_jax.plan.rates import Rates

SIZES = (1, 2, 4, 8)  # of expert, context and tensor, which should stay within a node
BEST = 10  # ways that are given
REMATS = ("none", "elementwise", "attention", "layer")


def best(here: Config, devices: int, sequences: int, cluster: Cluster, rates: Rates) -> list[PlannedStep]:
    """The fastest that fit the chip's memory, fastest first; [] where nothing fits."""
    capacity = targets.memory_for_jax(cluster.chip)
    found = [
        PlannedStep(case, step_time.estimate(case, cluster, rates), memory)
        for case in candidates(here, devices, sequences, cluster.chip)
        if (memory := footprint.estimate(case)).peak <= capacity
    ]
    return sorted(found, key=lambda choice: (choice.step.seconds, choice.memory.peak))[:BEST]


def candidates(here: Config, devices: int, sequences: int, chip: str) -> Iterator[Case]:
    """Every mesh, micro-batch and remat that `pretrain` would not refuse."""
    for expert, context, tensor, fsdp in itertools.product(SIZES, SIZES, SIZES, (False, True)):
        data, rest = divmod(devices, expert * context * tensor)
        rows = data * expert
        if rest or not data or (fsdp and data == 1) or sequences % rows:
            continue
        mesh = Mesh(data=data, expert=expert, context=context, tensor=tensor, fsdp=fsdp)
        mine, spread = dataclasses.replace(here, mesh=mesh), spread_of(mesh, shape_of(mesh, devices))
        try:
            sharding.check(mine, spread, lengths={"config.data.seq_len": here.data.seq_len})
        except UserError:
            continue
        each = sequences // rows
        for at_once in (n for n in range(1, each + 1) if each % n == 0):
            for remat in REMATS:
                yield Case(dataclasses.replace(mine, remat=remat), spread, chip, sequences, each // at_once)
