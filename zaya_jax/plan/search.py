"""Which mesh, micro-batch and remat a phase should have on so many devices: all that a run would accept, by time."""

import dataclasses
import itertools
from collections.abc import Iterator

from zaya_jax import config as config_lib
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import targets
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.parallel import rules
from zaya_jax.parallel import spread as spread_lib
from zaya_jax.plan import memory, step
from zaya_jax.plan.case import Case
from zaya_jax.plan.rates import Rates
from zaya_jax.plan.step import Step

SIZES = (1, 2, 4, 8)  # of expert, context and tensor, which should stay within a node
REMATS = ("none", "elementwise", "attention", "layer")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a phase."""

    case: Case
    step: Step
    memory: memory.Memory


def best(
    here: Config, devices: int, sequences: int, cluster: Cluster, rates: Rates, number: int = 10
) -> list[Choice]:
    """The fastest that fit the chip's memory, fastest first; [] where nothing fits."""
    capacity = targets.usable(cluster.chip)
    assert capacity is not None
    found = []
    for case in candidates(here, devices, sequences, cluster.chip):
        needs = memory.of(case)
        if needs.peak <= capacity:
            found.append(Choice(case, step.of(case, cluster, rates), needs))
    return sorted(found, key=lambda choice: (choice.step.seconds, choice.memory.peak))[:number]


def candidates(here: Config, devices: int, sequences: int, chip: str) -> Iterator[Case]:
    """Every mesh, micro-batch and remat that `pretrain` would not refuse."""
    lengths = {"config.data.seq_len": here.data.seq_len}
    for expert, context, tensor, fsdp in itertools.product(SIZES, SIZES, SIZES, (False, True)):
        data, rest = divmod(devices, expert * context * tensor)
        rows = data * expert
        if rest or not data or (fsdp and data == 1) or sequences % rows:
            continue
        mesh = config_lib.Mesh(data=data, expert=expert, context=context, tensor=tensor, fsdp=fsdp)
        spread = spread_lib.of(mesh, {"data": data, "expert": expert, "context": context, "tensor": tensor})
        mine = dataclasses.replace(here, mesh=mesh)
        try:
            rules.check(mine, spread, lengths=lengths, rows=sequences)
        except UserError:
            continue
        each = sequences // rows
        for at_once in (n for n in range(1, each + 1) if each % n == 0):
            for remat in REMATS:
                yield Case(dataclasses.replace(mine, remat=remat), spread, chip, sequences, each // at_once)
