"""Peak rates of accelerators and the FLOPs of a training step: the two halves of an MFU."""

from zaya_jax.config import Model, Precision

_HOPPER = {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12}  # NVIDIA H100 and H200 data sheets (SXM)
# Dense peak, FLOP/s, by a part of JAX's device_kind; the vendors' data sheets, without sparsity. AMD calls TF32 XF32,
# which MI355X has not.
PEAKS = {
    "MI300X": {"bfloat16": 1307.4e12, "tf32": 653.7e12, "float32": 163.4e12},
    "MI355X": {"bfloat16": 2516.6e12, "tf32": 157.3e12, "float32": 157.3e12},
    "H200": _HOPPER,
    "H100": _HOPPER,
}
# Of HBM, bytes/s, by the same sheets.
BANDWIDTH = {"MI300X": 5.3e12, "MI355X": 8.0e12, "H200": 4.8e12, "H100": 3.35e12}


def of_kind[T](table: dict[str, T], kind: str) -> T | None:
    """A chip's row in one of these tables, by JAX's device_kind or a part of it; None for an unknown chip."""
    return next((row for name, row in table.items() if name.lower() in kind.lower()), None)


def peak(kind: str, precision: Precision) -> float | None:
    """The peak of a chip of this kind for the format of most products; None for an unknown chip.

    Unless `precision.matmul` is "highest", XLA may take TF32 for float32 there.
    """
    dtype = precision.compute
    if dtype == "float32" and precision.matmul != "highest":
        dtype = "tf32"
    peaks = of_kind(PEAKS, kind)
    return peaks[dtype] if peaks else None


def peak_flops(device, precision: Precision) -> float | None:
    """The peak of a device's chip, or None: no guess."""
    return peak(device.device_kind, precision)


def model_flops(model: Model, seq_len: int) -> float:
    """FLOPs a token of one training step (forward, and twice that backward), from the real shapes.

    Attention counts the causal half, and a sliding layer's window; linear attention counts a state written and read a
    token; a token counts one expert, as if none were skipped; norms, softmaxes and what is recomputed count nothing.
    """
    return sum(flops_by_scope(model, seq_len).values())


def flops_by_scope(model: Model, seq_len: int) -> dict[str, float]:
    """The same by the scope (`hlo.SCOPES`) that computes them."""
    d, c = model.hidden_size, model.head_dim
    h, k, r = model.num_attention_heads, model.num_key_value_heads, model.router_hidden_size
    packed, layers = (h + k) * c, len(model.kinds)
    mixing = 0.0
    for kind in model.kinds:
        window = min(model.sliding_window or seq_len, seq_len) if kind == "hybrid_sliding" else seq_len
        # Token i sees min(i + 1, window) keys.
        seen = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
        mixing += (h + k) * c * (c + 1) if kind == "hybrid_linear" else 2 * h * c * seen
    if model.model_type == "dense":
        projections, mlp = 2 * d * packed, 3 * d * model.intermediate_size  # q, o, k, v; gate, up, down
        found = {"attention": layers * projections + mixing, "mlp": layers * mlp}
    else:
        cca = d * (packed + k * c) + h * c * d  # q, k, both halves of v; o
        cca += packed * model.cca_time0 + packed * c * model.cca_time1
        router = d * r + 2 * r * r + r * (model.num_experts + 1)
        expert = 3 * d * model.moe_intermediate_size
        found = {"cca": layers * cca + mixing, "router": layers * router, "experts": layers * expert}
    return {scope: 6.0 * products for scope, products in (found | {"head": d * model.vocab_size}).items()}
