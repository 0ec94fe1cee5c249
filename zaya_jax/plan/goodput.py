"""How often to save, and what of the time is left for training: Young's and Daly's formulas.

    best = goodput.best_interval(save=2.0, mtbf=3 * 3600)
    goodput.share(best, save=2.0, restart=600, mtbf=3 * 3600)

A save every T seconds costs `save` seconds of stall. A failure, each `mtbf` seconds on average, costs what was computed
since the last save and a restart. Young: T = sqrt(2 save mtbf); Daly's higher order holds where that is not small.
"""

import dataclasses
import math

from zaya_jax.hardware.clusters import Cluster
from zaya_jax.plan.case import Case

# 419 unexpected interruptions in 54 days on 16,384 H100: Llama 3, arXiv:2407.21783.
MTBF_HOURS = 54 * 24 * 16_384 / 419
MTBF_SOURCE = "419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783)"
# Noticing a failure, starting the processes again, compiling from the cache.
RESTART = 300.0
RESTART_SOURCE = (
    "assumed: five minutes until a failure is seen and the processes run again, and reading the state"
)
# Of each save, whatever its size: the processes' agreement, plan and commit.
SAVE = 1.0
SAVE_SOURCE = "assumed: a second for the processes' agreement and the plan, on top of the copy to the host"
# Device to host: what a save stands in the step's way, the rest being written beside training.
HOST_LINK = 25e9
HOST_LINK_SOURCE = (
    "assumed: 25 GB/s from a device to its host, where PCIe 5 carries 64; writing runs beside training"
)


@dataclasses.dataclass(frozen=True)
class Saving:
    """Checkpoints of a run on a cluster."""

    state: float  # bytes, all devices together
    stall: float  # seconds that a save stands in the way
    written: float  # seconds until it is on the shared storage
    mtbf: float  # seconds, of the cluster
    restart: float  # seconds, reading the state included
    interval: float  # seconds between saves: the best, but no less than one takes to be written
    goodput: float  # share of the time in which new steps are computed


def best_interval(save: float, mtbf: float) -> float:
    """Daly's: seconds of computing between saves for the least time lost; `mtbf` where a save takes twice that."""
    if save >= 2 * mtbf:
        return mtbf
    root = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(root) / 3 + root / 9) - save


def young(save: float, mtbf: float) -> float:
    """Young's: the same where saves are short."""
    return math.sqrt(2 * save * mtbf)


def share(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Computing over all time, failures coming by chance (Daly's model of the whole run)."""
    period = interval + save
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(period / mtbf))


def saving(case: Case, cluster: Cluster, mtbf_hours: float = MTBF_HOURS) -> Saving:
    """Checkpoints of a case: weights and the optimizer's state, each number once."""
    model = sum(
        math.prod(w.shape) * (4 + (size_of_momentum(case) if w.method == "muon" else 8))
        for w in case.layout.weights
    )
    each = model / case.devices
    stall = SAVE + each / HOST_LINK
    written = model / cluster.storage
    mtbf = 3600 * mtbf_hours / case.devices
    restart = RESTART + written
    interval = max(best_interval(stall, mtbf), written)
    return Saving(model, stall, written, mtbf, restart, interval, share(interval, stall, restart, mtbf))


def size_of_momentum(case: Case) -> int:
    """Bytes of a number of Muon's momentum."""
    return 2 if case.here.precision.momentum == "bfloat16" else 4
