"""Describes the chips that are known, and counts the FLOPs of a training step: the two halves of an
MFU."""

import dataclasses
from collections.abc import Mapping

from zaya_jax.config import Model, Precision


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """A chip by its vendor's data sheet."""

    # dense FLOP/s by format, without sparsity; AMD calls TF32 XF32, which MI355X has not
    peaks: Mapping[str, float]
    bandwidth: float  # of HBM, bytes/s
    measured_bandwidth: float  # as published for a program; the data sheet's where nothing was
    tile: int  # side of the tile that large products are computed in


_HOPPER = {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12}
CHIPS = {
    "mi300x": DataSheet(
        {"bfloat16": 1307.4e12, "tf32": 653.7e12, "float32": 163.4e12}, 5.3e12, 4.33e12, 256
    ),
    "mi355x": DataSheet(
        {"bfloat16": 2516.6e12, "tf32": 157.3e12, "float32": 157.3e12}, 8.0e12, 8.0e12, 256
    ),
    "h200": DataSheet(_HOPPER, 4.8e12, 4.8e12, 128),
    "h100": DataSheet(_HOPPER, 3.35e12, 3.35e12, 128),
}
# "NVIDIA H100 PCIe" and "NVIDIA H100 NVL" have lower peaks than the H100 of the table.
SLOWER_CARDS = ("pcie", "nvl")


def named(kind: str) -> str | None:
    """The name in CHIPS of a chip by JAX's device_kind; None for an unknown chip, and for a card
    that runs a known one slower."""
    kind = kind.lower()
    if any(card in kind for card in SLOWER_CARDS):
        return None
    return next((name for name in CHIPS if name in kind), None)


def peak_flops(kind: str, precision: Precision) -> float | None:
    """The peak of a chip of this kind for the format of most products; None for an unknown chip: no
    guess.

    Unless `precision.matmul` is "highest", XLA may take TF32 for float32 there.
    """
    dtype = precision.compute
    if dtype == "float32" and precision.matmul != "highest":
        dtype = "tf32"
    name = named(kind)
    return CHIPS[name].peaks[dtype] if name else None


def model_flops(model: Model, seq_len: int) -> float:
    """FLOPs a token of one training step (forward, and twice that backward), from the real shapes.

    Attention counts the causal half, and a sliding layer's window; linear attention counts a state
    written and read a token; a token counts one expert, as if none were skipped; norms, softmaxes
    and recomputation count nothing.
    """
    return sum(flops_by_scope(model, seq_len).values())


def flops_by_scope(model: Model, seq_len: int) -> dict[str, float]:
    """The FLOPs of `model_flops`, by the scope (`hlo.SCOPES`) that computes them."""
    d, c = model.hidden_size, model.head_dim
    h, k, r = model.num_attention_heads, model.num_key_value_heads, model.router_hidden_size
    packed, layers = (h + k) * c, len(model.kinds)
    mixing = 0.0
    for kind in model.kinds:
        if kind == "hybrid_linear":
            mixing += packed * (c + 1)
            continue
        window = seq_len
        if kind == "hybrid_sliding":
            window = min(model.sliding_window or seq_len, seq_len)
        # Token i sees min(i + 1, window) keys.
        seen = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
        mixing += 2 * h * c * seen
    products = {}  # of a token: multiplications and additions, forward
    if model.model_type == "dense":
        # q, o, k, v; gate, up, down
        products["attention"] = layers * 2 * d * packed + mixing
        products["mlp"] = layers * 3 * d * model.intermediate_size
    else:
        cca = d * (packed + k * c) + h * c * d  # q, k, both halves of v; o
        cca += packed * model.cca_time0 + packed * c * model.cca_time1
        products["cca"] = layers * cca + mixing
        products["router"] = layers * (d * r + 2 * r * r + r * (model.num_experts + 1))
        products["experts"] = layers * 3 * d * model.moe_intermediate_size
    products["head"] = d * model.vocab_size
    return {scope: 6.0 * count for scope, count in products.items()}
