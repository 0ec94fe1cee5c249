"""ZAYA1's own published step, 2.5 s for 16.8M tokens on 1,024 MI300X, accounted for by published or
assumed numbers.

    python -m benchmarks.published

That program is not public. The account estimates the step of a program written kernel by kernel for
the same work: the same layers with everything recomputed, one sequence at a time, nothing fused by
a compiler.
"""

import dataclasses

import jax

from experiments.configs import zaya1_base
from zaya_jax import config as config_lib
from zaya_jax.hardware import chips
from zaya_jax.hardware.clusters import CLUSTERS, Cluster
from zaya_jax.plan import phases as planned_phases
from zaya_jax.plan import rates as rates_lib
from zaya_jax.plan import step_time, work
from zaya_jax.plan.case import Case
from zaya_jax.plan.rates import Rate, Rates

SECONDS, DEVICES = 2.5, 1024  # arXiv:2511.17127
EAGER = 6e-6  # seconds from one kernel's start to the next, started from Python
# In place of one pass and one kernel of our own, attention's aside: XLA makes 2.4 passes over HBM
# and 1.5 kernels (layers of a step of 1,179 GB and 10,298 launches against 789 and 8,493); without
# any fusion twice as many.
PASSES, KERNELS = 2 * 2.4, 2 * 1.5


def account(case: Case, cluster: Cluster, rates: Rates) -> list[tuple[str, float, str]]:
    """The published step, part by part, and the unexplained rest: (part, seconds, reason)."""
    each = case.rows * case.micro_batches
    theirs = dataclasses.replace(
        case, here=dataclasses.replace(case.here, remat="layer"), micro_batches=each
    )
    found = step_time.estimate(theirs, cluster, rates)
    parts = work.parts(theirs)
    peak = chips.CHIPS["mi300x"].peaks["bfloat16"]
    hbm = chips.CHIPS["mi300x"].bandwidth * rates.memory.value
    useful = found.flops / peak
    products = found.by_kind["products"]
    others = sum(
        p.others for p in parts if p.scope not in ("optimizer/exchange", "stacks", "other")
    )
    started = KERNELS * sum(p.launches for p in parts)
    waiting = sum(
        max(
            KERNELS * p.launches * EAGER - PASSES * p.others / hbm - (seconds - p.others / hbm), 0.0
        )
        for p, seconds in step_time.estimate(
            theirs, cluster, dataclasses.replace(rates, launch=Rate(0.0, ""))
        ).parts
    )
    moving = PASSES * others / hbm
    rows = [
        (
            "useful products at the chip's peak",
            useful,
            f"{found.flops / 1e12:,.0f} TFLOP at {peak / 1e12:,.0f} TFLOP/s",
        ),
        (
            "products at the rates that kernels reach, and the forward pass once more",
            products - useful,
            (
                f"{rates.products.value:.0%} of the peak, experts {rates.grouped.value:.0%};"
                " recomputing assumed"
            ),
        ),
        (
            "all other kernels",
            moving,
            (
                f"{PASSES * others / 1e12:.1f} TB at {hbm / 1e12:.2f} TB/s: this model's passes,"
                f" {PASSES:g} times as many where nothing fuses them (2.4 as XLA compiles them,"
                " twice that assumed)"
            ),
        ),
        (
            "waiting for launches",
            waiting,
            (
                f"{started:,.0f} kernels of one sequence at a time, {1e6 * EAGER:.0f} us each"
                " (assumed), where longer than their work"
            ),
        ),
        (
            "gradients out and weights back",
            sum(found.links.values()),
            "float32 gradients and bfloat16 updates over Pollara, nothing overlapped (assumed)",
        ),
    ]
    explained = sum(seconds for _, seconds, _ in rows)
    left = (
        "stragglers, uneven experts, the host, data"
        if explained <= SECONDS
        else "the assumptions are too slow by it"
    )
    return [*rows, ("not explained", SECONDS - explained, left)]


def main() -> None:
    """Prints the account and the step as planned here."""
    jax.config.update("jax_platforms", "cpu")  # shapes alone are asked of JAX
    cluster = CLUSTERS["mi300x_pollara"]
    rates = rates_lib.for_cluster(cluster)
    phases, _ = planned_phases.phases(
        config_lib.check(zaya1_base.get_config()), DEVICES, cluster, rates
    )
    print("| part | s | because |\n|---|---|---|")
    for part, seconds, because in account(phases[0].case, cluster, rates):
        print(f"| {part} | {seconds:.2f} | {because} |")
    print("\n| the same step as planned here | s |\n|---|---|")
    for scope, seconds in phases[0].step.by_scope.items():
        print(f"| {scope} | {seconds:.2f} |")
    print(f"| all | {phases[0].step.seconds:.2f} |")


if __name__ == "__main__":
    main()
