"""Bytes that `zaya_jax.parallel` sends and holds, by formulas with which tests compare programs."""

import numpy as np

from pallas_kernels.attention.xla import key_blocks
from zaya_jax.config import Model
from zaya_jax.parallel.context import zigzag
from zaya_jax.parallel.dispatch import most_rounds, slot_rows


def of_context(
    batch: int,
    length: int,
    parts: int,
    num_kv: int,
    channels: int,
    width: int,
    reach: int,
    size: int,
    ring: bool,
) -> dict[str, int]:
    """Bytes that a device sends for one layer's attention, of numbers of `size` bytes.

    kv = 2 B (S / N) K C size are the device's own keys and values, halo = 2 B reach D size;
    gradients of kv are in the same format where they are reduced and scattered, in float32 where
    they go round the ring.

                  gathered                ring
        forward   halo + (N - 1) kv       halo + (N - 1) kv
        backward  halo + (N - 1) kv       halo + (N - 1) kv + N kv 4 / size
        again     halo + (N - 1) kv       halo

    "again" comes on top where the backward pass computes the layer again but for the attention's
    output (remat "attention"). With "layer", which does not keep that either, the ring sends (N -
    1) kv again as well.
    """
    kv = 2 * batch * (length // parts) * num_kv * channels * size
    edges = 2 * batch * reach * width * size
    once = edges + (parts - 1) * kv
    if ring:
        return {"forward": once, "backward": once + parts * kv * 4 // size, "again": edges}
    return {"forward": once, "backward": once, "again": once}


def blocks_visited(length: int, parts: int, block: int, window: int | None = None) -> list[int]:
    """Blocks of scores that each device computes in one layer: its work."""
    starts = zigzag(length, parts).reshape(parts, 2, -1)[:, :, 0]
    side = length // starts.size
    block = min(block, side)
    queries = np.arange(-(-side // block))

    def visited(start):
        first, last = key_blocks(queries, window, start, block, block, -(-length // block))
        return int(np.sum(np.asarray(last - first)))

    return [sum(visited(int(start)) for start in own) for own in starts]


def gathered_bytes(devices: int, batch: int, num_kv: int, channels: int) -> tuple[int, int]:
    """The result of a device's all-gather in `lasp2`, forward and backward."""
    states, numbers = devices * 2 * batch, num_kv * channels * (channels + 1)
    return states * (numbers + 2) * 4, states * numbers * 4


def most_temporaries(
    num_tokens: int, devices: int, dim: int, width: int, experts: int, itemsize: int, backward: bool
) -> int:
    """Bytes that no load needs more of: rows of a round, of the device's tokens, and of its experts
    the gradient.

    That is float32, and there twice where a second round may add to the first's. On CUDA XLA masks
    the rows once for each expert to get the gradient, which this does not count
    (benchmarks/expert.md).
    """
    rows = slot_rows(num_tokens, devices) * devices * itemsize
    if not backward:
        return rows * (4 * dim + 2 * width) + num_tokens * 2 * dim * 4
    gradients = 3 * experts * dim * width * 4 * min(most_rounds(num_tokens, devices), 2)
    return rows * (6 * dim + 7 * width) + num_tokens * 3 * dim * 4 + gradients


def of_tsp(model: Model, batch: int, length: int, parts: int, size: int) -> dict[str, float]:
    """Bytes that come in at a device for one dense layer, numbers of the compute format having
    `size` bytes.

    `length` is the whole sequence's. Where the layer is computed again in the backward pass,
    attention's part of the forward (the MLP's output is not needed) comes in once more.
    """
    d, c = model.hidden_size, model.head_dim
    attention = 2 * d * (model.num_attention_heads + model.num_key_value_heads) * c
    mlp = 3 * d * model.intermediate_size
    kv = 2 * batch * length * model.num_key_value_heads * c
    share = (parts - 1) / parts
    forward = share * size * (attention + mlp + kv)
    return {
        "forward": forward,
        "again": share * size * (attention + kv),
        "backward": forward + share * (size * kv + 4 * (attention + mlp)),
    }
