"""The HBM bytes that each scope of a step cannot do without, whatever kernels compute it.

Weights are read once forward and once backward in the compute format and their gradients written once in float32; a
block reads the stream and writes it, and backward reads stream and gradient and writes one; what lies between two
products is written and read once; scores and logits never leave a chip, and nothing is computed again.
"""

from zaya_jax.plan import traffic
from zaya_jax.plan.case import Case, size

BLOCK = {"x4": 5}  # the stream: 2 forward, 3 backward
BETWEEN = {
    "cca": {
        "c2": 5,
        "p2": 6,
        "q2": 6,
    },  # projections, what the convolutions made, the output; and gradients of all
    "attention": {"c2": 7, "q2": 6},
    "router": {"r4": 7},
    "experts": {"x2": 8, "h2": 4, "f2": 3},  # rows by expert and back
    "mlp": {"h2": 4, "f2": 3},
}


def of(case: Case) -> dict[str, float]:
    """By scope."""
    have, m, mb = traffic.sizes(case), case.model, case.micro_batches
    b = size(case.here.precision.compute)
    each = mb * m.num_hidden_layers
    found = {}
    for scope, between in BETWEEN.items():
        numbers = case.layer.get("cca" if scope == "attention" else scope, 0.0)
        if not numbers or ((scope in ("cca", "attention")) and (scope == "cca") != (m.model_type == "zaya")):
            continue
        units = BLOCK | between
        moved = sum(times * have[name] for name, times in units.items())
        found[scope] = each * (moved + numbers * (2 * b + 4))
    table = m.vocab_size * m.hidden_size
    found["head"] = mb * (3 * have["x4"] + table * (2.0 * b + 4))
    found["embed"] = mb * 4 * have["x4"]
    local = sum(case.numbers.values())
    muon = traffic.muon_numbers(case)
    directions = case.step_bytes * muon + 4.0 * (local - muon)
    share = (4.0 * local + 2 * case.optimizer_bytes * case.devices + directions) / case.devices
    found["optimizer"] = share + 8.0 * local + directions
    if case.devices > 1:
        found["optimizer/exchange"] = 4.0 * local + directions
    return found
