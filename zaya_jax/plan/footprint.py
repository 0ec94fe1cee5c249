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
from zaya_jax.plan.case import COPY_BYTES, StepCase, itemsize

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
    arrays, spread = work.array_bytes(case), case.spread
    several, compute = case.micro_batches > 1, itemsize(case.config.precision.compute)
    x4, kept = arrays["x4"], case.model.num_hidden_layers * work.saved_bytes(case)
    # In float32: a device's weights, those outside the table, the whole table, one layer.
    weights4 = 4.0 * sum(case.numel.values())
    local4 = weights4 - 4.0 * case.numel["embed/embedding"]
    table4 = 4.0 * case.model.vocab_size * case.model.hidden_size
    layer4 = 4.0 * sum(case.layer_numel.values())
    chunk, chunks = work.head_chunks(case)
    logits = chunk * case.model.vocab_size
    # Weights that other devices hold: the table, and this layer's and the next one's, float32 and
    # to compute with.
    table = gathered = gathered_again = 0.0
    if spread.fsdp:
        table = table4
    if spread.fsdp or spread.tsp:
        gathered = layer4 * (1 + compute / 4) + local4 / 8
        gathered_again = layer4
    # Of gradients that leave with their layer, the share stays.
    left4 = 4.0 * case.early_numel * (1 / case.devices - 1)
    sums, gradients4 = 0.0, local4 + left4
    if several:
        # Sums over micro-batches, into which each adds its own; the table's are added at the end
        # of one.
        sums = gradients4 = weights4
    head_gradients = sums
    if chunks > 1:
        head_gradients += 2 * table4 if several and not spread.fsdp else table4
    # Of a head in one piece, the table's gradient is computed last of all.
    late = compute * logits if chunks == 1 and not several else 0.0
    # Until the last micro-batch's gradients are there.
    copies = COPY_BYTES * work.rounded_numel(case)
    moments = {
        "head": {
            "activations": kept,
            "working set": (4.0 + compute) * logits + table4 * compute / 4 + 3 * x4 + copies,
            "exchange": table + gathered,
            "gradients": head_gradients,
        },
        "backward": {
            # a layer's rows of experts, their gradients, the stream
            "activations": kept,
            "gradients": gradients4 + table4,
            "working set": 8 * x4 + 2 * arrays["h2"] + late + copies,
            "exchange": table + gathered + gathered_again,
        },
        "end of backward": {
            "activations": kept if late else 0.0,
            "gradients": gradients4 + (2 if late else 3) * table4,
            "working set": late + 2 * x4 + (copies if several else 0.0),
            "exchange": table,
        },
    }
    if case.devices > 1:
        share, embedding4 = weights4 / case.devices, weights4 - local4
        # and received ones
        to_owners = 8.0 * sum(way.buffer_size for way in case.early_buckets.values())
        moments["sums"] = {
            "gradients": weights4 + left4,
            "exchange": share + embedding4 + to_owners,
        }
    weights = weights4 - (4 - COPY_BYTES) * sum(case.copied_numel.values())
    return Footprint({"weights": weights, "optimizer": float(case.optimizer_bytes)}, moments)
