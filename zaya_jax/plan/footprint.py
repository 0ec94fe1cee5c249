"""Estimates a device's memory over a step, by component, from shapes.

    found = footprint.estimate(case)
    found.peak, found.at_peak, found.bytes_by_moment

The state is always there. The rest is largest at one of four moments: the head (a chunk's logits),
the backward pass (all gradients, kept activations, a layer's working set), its end (the table's
gradients from both sides), or the sums over devices. Each is a sum of arrays as the compiled
program has them.
"""

import dataclasses

from zaya_jax.plan import work
from zaya_jax.plan.case import COPY, StepCase, itemsize

KINDS = ("weights", "optimizer", "gradients", "activations", "working set", "exchange")


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of a device, by component: the state, which is always there, and what each moment adds."""

    state: dict[str, float]  # weights, optimizer
    moments: dict[str, dict[str, float]]

    @property
    def bytes_by_moment(self) -> dict[str, float]:
        """All that is in use at each moment."""
        state = sum(self.state.values())
        return {name: state + sum(found.values()) for name, found in self.moments.items()}

    @property
    def peak_moment(self) -> str:
        """The moment of the peak."""
        return max(self.bytes_by_moment, key=lambda name: self.bytes_by_moment[name])

    @property
    def peak(self) -> float:
        """The highest memory of a step."""
        return max(self.bytes_by_moment.values())

    @property
    def at_peak(self) -> dict[str, float]:
        """The peak by component."""
        return dict.fromkeys(KINDS, 0.0) | self.state | self.moments[self.peak_moment]


def estimate(case: StepCase) -> Footprint:
    """The memory of a step."""
    have, spread = work.array_bytes(case), case.spread
    compute, several = itemsize(case.config.precision.compute), case.micro_batches > 1
    chunk, chunks = work.head_chunks(case)
    vocab, x4, kept = (
        case.model.vocab_size,
        have["x4"],
        case.model.num_hidden_layers * work.saved_bytes(case),
    )
    weights4, table4 = 4.0 * sum(case.numel.values()), 4.0 * vocab * case.model.hidden_size
    local4 = weights4 - 4.0 * case.numel["embedding"]
    layer4 = 4.0 * sum(case.layer_numel.values())
    logits4, logits2 = 4.0 * chunk * vocab, compute * chunk * vocab
    # Weights that other devices hold: the table, and this layer's and the next one's, float32 and
    # to compute with.
    fetched = spread.fsdp or spread.tsp
    table = table4 if spread.fsdp else 0.0
    gathered = table + (layer4 * (1 + compute / 4) + local4 / 8 if fetched else 0.0)
    # Sums over micro-batches, into which each adds its own; the table's are added at the end of
    # one.
    sums = weights4 if several else 0.0
    # Of gradients that leave with their layer, the share stays.
    left4 = 4.0 * case.early_numel * (1 / case.devices - 1)
    held = sums if several else local4 + left4
    # Until the last micro-batch's gradients are there.
    copies = COPY * work.rounded_numel(case)
    # the table's gradient is computed last of all
    late = logits2 if chunks == 1 and not several else 0.0
    moments = {
        "head": {
            "activations": kept,
            "working set": logits4 + logits2 + table4 * compute / 4 + 3 * x4 + copies,
            "exchange": gathered,
            "gradients": (
                sums + (table4 * (2 if several and not spread.fsdp else 1) if chunks > 1 else 0.0)
            ),
        },
        "backward": {
            # a layer's rows of experts, their gradients, the stream
            "activations": kept,
            "gradients": held + table4,
            "working set": 8 * x4 + 2 * have["h2"] + late + copies,
            "exchange": gathered + (layer4 if fetched else 0.0),
        },
        "end of backward": {
            "activations": kept if late else 0.0,
            "gradients": held + (2 if late else 3) * table4,
            "working set": late + 2 * x4 + (copies if several else 0.0),
            "exchange": table,
        },
    }
    if case.devices > 1:
        share, embedding4 = weights4 / case.devices, weights4 - local4
        # and received ones
        to_owners = 8.0 * sum(way.sent / way.stages for way in case.early_buckets.values())
        moments["sums"] = {
            "gradients": weights4 + left4,
            "exchange": share + embedding4 + to_owners,
        }
    weights = weights4 - (4 - COPY) * sum(case.copied_numel.values())
    return Footprint({"weights": weights, "optimizer": float(case.optimizer_bytes)}, moments)
