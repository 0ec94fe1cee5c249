"""The older layout of the hub's ZAYA checkpoints, read as the present one: ZAYA1-base,
ZAYA1-8B-legacy and others.

There attention and experts are layers of their own (an even one is attention), each with the
residual scale before it, and each expert is a tensor. Sizes are those of the tensors: the config
spells several in more than one way.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from zaya_jax.config import UserError, shown
from zaya_jax.pytorch.hf_names import MODEL_KEYS
from zaya_jax.pytorch.tensor_files import Tensor

OLDER_KEYS = (
    "activation_func",
    "zaya_mlp_expansion",
    "zaya_layers",
    "swa_layers",
    "num_query_groups",
    "ffn_hidden_size",
)
# The only values that this model has; a key that is absent, or null, has them.
REQUIRED_VALUES = {
    "activation_func": "swiglu",
    "normalization": "RMSNorm",
    "cca": True,
    "zaya_use_mod": True,
    "zaya_use_eda": True,
    "scale_residual_merge": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "moe_router_topk": 1,
    "clamp_temp": False,
    "residual_in_fp32": True,
    "zaya_high_prec": True,
    "rope_parameters": {},
}
KEYS_READ = (  # by `config_of`, under these names
    "head_dim",
    "kv_channels",
    "num_hidden_layers",
    "zaya_layers",
    "num_attention_heads",
    "cca_num_q_heads",
    "num_key_value_heads",
    "num_query_groups",
    "num_query_groups_list",
    "num_experts",
    "moe_intermediate_size",
    "ffn_hidden_size",
    "ffn_hidden_size_list",
    "router_hidden_size",
    "zaya_mlp_expansion",
    "rms_norm_eps",
    "norm_epsilon",
    "layer_types",
    "swa_layers",
    "sliding_window",
    "rope_theta",
    "rotary_base",
    "swa_rotary_base",
    "partial_rotary_factor",
    "rope_pct",
)
KEYS_IGNORED = (  # how other programs compute the same, or train
    "auto_map",
    "_attn_implementation",
    "activation_func_fp8_input_store",
    "apply_rope_fusion",
    "bias_activation_fusion",
    "fused_add_norm",
    "load_balance_coeff",
    "mamba_cache_dtype",
    "use_grouped_mm",
)
PREFIXES = (
    ("self_attn.qkv.conv_qk.0.", "self_attn.qkv_proj.conv_qk_depthwise."),
    ("self_attn.qkv.conv_qk.1.", "self_attn.qkv_proj.conv_qk_grouped."),
    ("self_attn.qkv.temp", "self_attn.qk_norm.temp"),
    ("self_attn.qkv.linear_q.", "self_attn.qkv_proj.q_proj."),
    ("self_attn.qkv.linear_k.", "self_attn.qkv_proj.k_proj."),
    ("self_attn.qkv.val_proj1.", "self_attn.qkv_proj.v_proj_current."),
    ("self_attn.qkv.val_proj2.", "self_attn.qkv_proj.v_proj_delayed."),
    ("zaya_block.router.rmsnorm_eda.", "mlp.gate.router_mlp.norm."),
    ("zaya_block.router.router_mlp.0.", "mlp.gate.router_mlp.fc1."),
    ("zaya_block.router.router_mlp.2.", "mlp.gate.router_mlp.fc2."),
    ("zaya_block.router.router_mlp.4.", "mlp.gate.router_mlp.out_proj."),
    ("zaya_block.router.", "mlp.gate."),
    ("final_norm.", "norm."),
)
LAYER = re.compile(r"model\.(?:layers\.(\d+)\.)?(.+)")
EXPERT = re.compile(r"zaya_block\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
FC = {"1": "gate_up_proj", "2": "down_proj"}


def is_older(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this layout."""
    return any(key in config for key in OLDER_KEYS)


def rename(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under their present names."""
    num_half_layers = _num_layers(stored)
    return {_present_name(name, num_half_layers): tensor for name, tensor in stored.items()}


def _num_layers(names: Iterable[str]) -> int:
    matches = [LAYER.match(name) for name in names]
    return 1 + max((int(match[1]) for match in matches if match and match[1]), default=0)


def _present_name(name: str, num_half_layers: int) -> str:
    """The present name of a tensor; the old name if it is unknown.

    Old layer 2 k is the attention of layer k, old layer 2 k + 1 its experts. The residual scale
    before an old layer is the one after the half layer before it: of old layer 0 the input's, and
    of the model, after the last one, that of the last experts.
    """
    match = LAYER.fullmatch(name)
    if not match:
        return name
    old = int(match[1] or num_half_layers)
    rest = match[2]
    if rest.startswith("res_scale."):
        scale = rest.removeprefix("res_scale.")
        if old == 0:
            return f"model.input_{scale}"
        half = "post_attention" if old % 2 else "post_mlp"
        return f"model.layers.{(old - 1) // 2}.{half}_residual_scale.{scale}"
    prefix = f"model.layers.{old // 2}." if match[1] else "model."
    if rest.startswith("input_norm."):
        half = "post_attention" if old % 2 else "input"
        return f"{prefix}{half}_layernorm.{rest.removeprefix('input_norm.')}"
    if expert := EXPERT.fullmatch(rest):
        return f"{prefix}mlp.experts.{expert[1]}.{FC[expert[2]]}.weight"
    for theirs, ours in PREFIXES:
        if rest.startswith(theirs):
            return f"{prefix}{ours}{rest.removeprefix(theirs)}"
    return f"{prefix}{rest}"


def config_of(config: dict[str, Any], tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """The present config.json; UserError on what this model does not have, or the tensors have not.

    Keys that are not known here go into it, where those with a meaning are refused.
    """
    config = {key: value for key, value in config.items() if value is not None}
    for key, value in REQUIRED_VALUES.items():
        if config.get(key, value) != value:
            raise UserError(
                f"{where}: {key}={shown(config[key])} in the older layout; only {value!r} can be"
                " read"
            )

    def first(default: Any, *keys: str) -> Any:
        return next((config[key] for key in keys if key in config), default)

    def size(name: str, dim: int, *keys: str, unit: int = 1) -> int:
        """A size read from layer 0's tensors, in units of `unit`. The first of `keys` present in
        the config must agree; later ones may be leftovers of another program and are ignored."""
        tensor = tensors.get(f"model.layers.0.{name}")
        width = tensor.shape[dim] // unit if tensor else 0
        recorded = first(width, *keys)
        # Some say it for each half layer: nothing, or attention, where it has no such size.
        for value in recorded if isinstance(recorded, list) else [recorded]:
            if value not in ("a", 0, width):
                raise UserError(
                    f"{where}: {' or '.join(keys)} is {shown(recorded)}, but the tensors have"
                    f" {width}"
                )
        return width

    num_layers = _num_layers(tensors)
    attention = "self_attn.qkv_proj"
    head = max(size(f"{attention}.conv_qk_grouped.weight", 1, "head_dim", "kv_channels"), 1)
    # Only compared: half of it is the experts' width.
    size("mlp.experts.gate_up_proj", 1, "ffn_hidden_size_list", "ffn_hidden_size")
    kinds, window = _attention(config, num_layers, where)
    bases = {
        "hybrid": first(None, "rope_theta", "rotary_base"),
        "hybrid_sliding": first(1e4, "swa_rotary_base"),
    }
    if bases["hybrid"] is None:
        raise UserError(f"{where} has no rope_theta; write the model's own into it")
    fraction = first(0.5, "partial_rotary_factor", "rope_pct")
    ropes = {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction}
        for kind, base in bases.items()
    }
    query_keys = ("cca_num_q_heads", "num_attention_heads")
    group_keys = ("num_query_groups_list", "num_query_groups", "num_key_value_heads")
    router_keys = ("router_hidden_size", "zaya_mlp_expansion")
    known = (*KEYS_READ, *REQUIRED_VALUES, *KEYS_IGNORED)
    rest = {
        key: value
        for key, value in config.items()
        if key not in known and (value or key in MODEL_KEYS)
    }
    return rest | {
        "num_hidden_layers": num_layers,
        "head_dim": head,
        "num_attention_heads": size(f"{attention}.q_proj.weight", 0, *query_keys, unit=head),
        "num_key_value_heads": size(f"{attention}.k_proj.weight", 0, *group_keys, unit=head),
        "num_experts": size("mlp.experts.down_proj", 0, "zaya_layers", "num_experts"),
        "moe_intermediate_size": size("mlp.experts.down_proj", 2, "moe_intermediate_size"),
        "router_hidden_size": size("mlp.gate.down_proj.weight", 0, *router_keys),
        "rms_norm_eps": first(1e-5, "norm_epsilon", "rms_norm_eps"),
        "layer_types": kinds,
        "sliding_window": window,
        "rope_parameters": ropes,
    }


def _attention(config: dict[str, Any], num_layers: int, where: str) -> tuple[list[str], int | None]:
    """(the kind of each layer, the window), by swa_layers: the tokens before the query that each
    layer, or each half layer, sees; 0 is all."""
    widths = config.get("swa_layers") or [0] * num_layers
    if len(widths) == 2 * num_layers and not any(widths[1::2]):  # experts have none
        widths = widths[::2]
    sizes = {width for width in widths if width}
    other_forms = config.get("layer_types") or config.get("sliding_window")
    if other_forms or len(widths) != num_layers or len(sizes) > 1:
        raise UserError(
            f"{where}: windows of the older layout are read from swa_layers alone, with one width"
            f" in {num_layers} layers; given are swa_layers={shown(widths)} and"
            f" {shown(other_forms)}"
        )
    kinds = ["hybrid_sliding" if width else "hybrid" for width in widths]
    return kinds, sizes.pop() + 1 if sizes else None
