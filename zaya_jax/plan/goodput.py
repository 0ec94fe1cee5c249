"""Computes how often to save and the share of time left for training, by Daly's formula.

    best = goodput.best_interval(save=2.0, mtbf=3 * 3600)
    goodput.share(best, save=2.0, restart=600, mtbf=3 * 3600)

A save every T seconds costs `save` seconds of stall. A failure, each `mtbf` seconds on average,
costs a restart and the work since the last save. Young: T = sqrt(2 save mtbf); Daly's higher order
holds where that is not small.
"""

import dataclasses
import math

from zaya_jax.hardware.clusters import Cluster
from zaya_jax.plan.case import StepCase, itemsize
from zaya_jax.plan.rates import ASSUMED, Rate

MTBF_HOURS = Rate(
    54 * 24 * 16_384 / 419,
    "419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783)",
)
RESTART = Rate(
    300.0,
    f"{ASSUMED}: five minutes until a failure is seen and the processes run again, state not read",
)
SAVE = Rate(
    1.0,
    f"{ASSUMED}: a second for the processes' agreement and the plan, on top of the copy to the"
    " host",
)
HOST_LINK = Rate(
    25e9, f"{ASSUMED}: to the host, where PCIe 5 carries 64 GB/s; writing overlaps training"
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
    """Daly's: seconds of computing between saves for the least time lost; `mtbf` where a save takes
    twice that."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def share(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Computing over all time, failures coming by chance (Daly's model of the whole run)."""
    period = interval + save
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(period / mtbf))


def saving(case: StepCase, cluster: Cluster, mtbf_hours: float = MTBF_HOURS.value) -> Saving:
    """Checkpoints of a case: weights and the optimizer's state, each number once."""
    each = {"muon": 4 + itemsize(case.config.precision.momentum), "adamw": 12}
    state = sum(math.prod(w.shape) * each[w.method] for w in case.layout.weights)
    stall = SAVE.value + state / case.devices / HOST_LINK.value
    written = state / cluster.storage
    mtbf = 3600 * mtbf_hours / case.devices
    restart = RESTART.value + written
    interval = max(best_interval(stall, mtbf), written)
    return Saving(
        state, stall, written, mtbf, restart, interval, share(interval, stall, restart, mtbf)
    )
