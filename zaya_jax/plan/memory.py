"""Memory of a device over a step, by component, from shapes.

    found = memory.of(case)
    found.peak, found.at_peak, found.phases

The state is there throughout. What comes on top is largest in one of five places: the head (a chunk's logits), the
backward pass (all gradients, what was kept, a layer's working set), its end (the table's gradients from both sides),
the sums over devices, or the directions, gathered again. Each is a sum of arrays as the compiled program has them.
"""

import dataclasses

from zaya_jax.plan import traffic
from zaya_jax.plan.case import Case, size

KINDS = ("weights", "optimizer", "gradients", "activations", "working set", "exchange")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device, by component in each place; the state, as `always`, is a part of all."""

    always: dict[str, float]  # weights, optimizer
    places: dict[str, dict[str, float]]

    @property
    def phases(self) -> dict[str, float]:
        """All that is in use in each place."""
        state = sum(self.always.values())
        return {name: state + sum(found.values()) for name, found in self.places.items()}

    @property
    def place(self) -> str:
        """Where it is most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> float:
        """The most."""
        return max(self.phases.values())

    @property
    def at_peak(self) -> dict[str, float]:
        """By component, there."""
        return dict.fromkeys(KINDS, 0.0) | self.always | self.places[self.place]


def of(case: Case) -> Memory:
    """The memory of a step."""
    have, spread, layers = traffic.sizes(case), case.spread, case.model.num_hidden_layers
    compute = size(case.here.precision.compute)
    numbers, several = case.numbers, case.micro_batches > 1
    chunk, chunks = traffic.head(case)
    vocab = case.model.vocab_size
    x4 = have["x4"]
    activations = traffic.kept(case)
    kept = layers * sum(times * have[name] for name, times in activations.items())
    table4 = 4.0 * vocab * case.model.hidden_size
    table2 = table4 * compute / 4
    local4 = 4.0 * (numbers["layers"] + numbers["rest"])
    layer4 = 4.0 * sum(case.layer.values())
    # Of gradients that leave with their layer, the share; a layer's, and a copy to the next turn of the loop.
    left4, leaving = 4.0 * case.leaving * (1 / case.devices - 1), 2 * 4.0 * case.leaving / layers
    logits4, logits2 = 4.0 * chunk * vocab, compute * chunk * vocab
    # Weights that other devices hold: the table, and this layer's and the next one's, float32 and to compute with.
    fetched = spread.fsdp or spread.tsp
    gathered = (table4 if spread.fsdp else 0.0) + (
        layer4 * (1 + compute / 4) + local4 / 8 if fetched else 0.0
    )
    # Sums over micro-batches, into which each adds its own; the table's are added at the end of one.
    sums = local4 + 4.0 * numbers["embedding"] if several else 0.0
    head = {
        "activations": kept, "working set": logits4 + logits2 + table2 + 3 * x4, "exchange": gathered,
        "gradients": sums + (table4 * (2 if several and not spread.fsdp else 1) if chunks > 1 else 0.0),
    }  # fmt: skip
    # What a layer needs at once: rows of the experts and their gradients, the stream.
    working = 8 * x4 + 2 * have["h2"]
    late = logits2 if chunks == 1 and not several else 0.0  # the table's gradient is computed last of all
    held = sums if several else local4 + left4
    backward = {
        "activations": kept, "gradients": held + table4, "working set": working + late,
        "exchange": gathered + (layer4 if fetched else 0.0) + leaving,
    }  # fmt: skip
    end = {
        "activations": kept if late else 0.0,
        "gradients": held + (2 if late else 3) * table4,
        "working set": late + 2 * x4, "exchange": table4 if spread.fsdp else 0.0,
    }  # fmt: skip
    share = 4.0 * sum(numbers.values()) / case.devices
    gradients = local4 + 4.0 * numbers["embedding"]
    muon = traffic.muon_numbers(case)
    directions = case.step_bytes * muon + 4.0 * (sum(numbers.values()) - muon)
    places = {"head": head, "backward": backward, "its end": end}
    if case.devices > 1:
        to_owners = 2 * 4.0 * sum(way.sent / way.rounds for way in case.ways.values())  # and what came
        places["sums"] = {
            "gradients": gradients + left4, "exchange": share + 4.0 * numbers["embedding"] + to_owners,
        }  # fmt: skip
        places["directions"] = {"gradients": 2 * share, "exchange": directions}
    else:
        places["directions"] = {"gradients": gradients, "working set": directions}
    return Memory({"weights": 4.0 * sum(numbers.values()), "optimizer": float(case.optimizer_bytes)}, places)
