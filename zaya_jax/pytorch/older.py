"""The older layout of the hub's ZAYA checkpoints, read as the present one: ZAYA1-base,
ZAYA1-8B-legacy and others.

There attention and experts are layers of their own (an even one is attention), each with the
residual scale before it, and each expert is a tensor. Sizes are those of the tensors: the config
spells several in more than one way.
"""

import re
from typing import Any

import numpy as np

from zaya_jax.config import UserError, shown
from zaya_jax.pytorch.hf_names import FIELDS, natural
from zaya_jax.pytorch.tensor_files import TensorFile

SIGNS = (
    "activation_func",
    "zaya_mlp_expansion",
    "zaya_layers",
    "swa_layers",
    "num_query_groups",
    "ffn_hidden_size",
)
# The only values that this model has; a key that is absent, or null, has them.
MUST = {
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
READ = (  # by `config_of`, under these names
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
NOTHING = (  # how other programs compute the same, or train
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
KINDS = {"full_attention": "hybrid", "sliding_attention": "hybrid_sliding"}
RENAMED = (
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
EXPERT = re.compile(r"zaya_block\.experts\.local_experts\.\d+\.linear_fc([12])\.weight")


def is_older(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this layout."""
    return any(key in config for key in SIGNS)


class Renamed(TensorFile):
    """The tensors of several files under their present names; experts are stacked as they are
    read."""

    def __init__(self, files: dict[str, TensorFile]):
        self._files, self._old = files, dict[str, list[str]]()
        self.layers = 1 + max(
            (int(old[1]) for name in files if (old := LAYER.match(name)) and old[1]), default=1
        )
        for name in sorted(files, key=natural):  # expert 10 comes after expert 9
            self._old.setdefault(_present(name, self.layers), []).append(name)
        self.tensors = {}
        for name, parts in self._old.items():
            has = files[parts[0]].tensors[parts[0]]
            self.tensors[name] = (
                has._replace(shape=(len(parts), *has.shape)) if EXPERT.search(parts[0]) else has
            )

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory."""
        old = self._old[name]
        if not EXPERT.search(old[0]):
            return self._files[old[0]].read(old[0])
        return np.stack([self._files[one].read(one) for one in old])


def _present(name: str, layers: int) -> str:
    """The present name of a tensor, shared by the experts of a layer; the old name where it is
    unknown."""
    found = LAYER.fullmatch(name)
    if not found:
        return name
    old, rest = int(found[1] or layers), found[2]
    inside = f"model.layers.{old // 2}." if found[1] else "model."
    if rest.startswith("res_scale."):  # before an old layer: after the half layer before it
        what, place = rest.removeprefix("res_scale."), "post_attention" if old % 2 else "post_mlp"
        return (
            f"model.layers.{(old - 1) // 2}.{place}_residual_scale.{what}"
            if old
            else f"model.input_{what}"
        )
    if rest.startswith("input_norm."):
        return f"{inside}{'post_attention' if old % 2 else 'input'}_layernorm.{rest.removeprefix('input_norm.')}"
    if expert := EXPERT.fullmatch(rest):
        return f"{inside}mlp.experts.{'gate_up_proj' if expert[1] == '1' else 'down_proj'}"
    theirs, ours = next((pair for pair in RENAMED if rest.startswith(pair[0])), ("", ""))
    return f"{inside}{ours}{rest.removeprefix(theirs)}"


def config_of(given: dict[str, Any], tensors: Renamed, where: str) -> dict[str, Any]:
    """The present config.json; UserError on what this model does not have, or the tensors have not.

    Keys that are not known here go into it, where those with a meaning are refused.
    """
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in MUST.items():
        if given.get(key, value) != value:
            raise UserError(
                f"{where}: {key}={shown(given[key])} in the older layout; only {value!r} can be"
                " read"
            )

    def first(default: Any, *keys: str) -> Any:
        return next((given[key] for key in keys if key in given), default)

    def size(name: str, dim: int, *keys: str, of: int = 1) -> int:
        """How many times `of` a dim of layer 0's tensors has; the first of these keys that is given
        says it too, and the others may be left over from another program."""
        tensor = tensors.tensors.get(f"model.layers.0.{name}")
        has = tensor.shape[dim] // of if tensor else 0
        told = first(has, *keys)
        # Some say it for each half layer: nothing, or attention, where it has no such size.
        if any(one not in ("a", 0, has) for one in (told if isinstance(told, list) else [told])):
            raise UserError(
                f"{where}: {' or '.join(keys)} is {shown(told)}, but the tensors have {has}"
            )
        return has

    layers, grouped = tensors.layers // 2, "self_attn.qkv_proj.conv_qk_grouped.weight"
    head = max(size(grouped, 1, "head_dim", "kv_channels"), 1)
    size("mlp.experts.gate_up_proj", 1, "ffn_hidden_size_list", "ffn_hidden_size")
    kinds, window = _attention(given, layers, where)
    bases = {
        "hybrid": first(None, "rope_theta", "rotary_base"),
        "hybrid_sliding": first(1e4, "swa_rotary_base"),
    }
    if bases["hybrid"] is None:
        raise UserError(f"{where} has no rope_theta; write the model's own into it")
    rest = {
        key: value
        for key, value in given.items()
        if key not in (*READ, *MUST, *NOTHING) and (value or key in FIELDS)
    }
    return rest | {
        "num_hidden_layers": layers,
        "head_dim": head,
        "num_attention_heads": size(
            "self_attn.qkv_proj.q_proj.weight", 0, "cca_num_q_heads", "num_attention_heads", of=head
        ),
        "num_key_value_heads": size(
            "self_attn.qkv_proj.k_proj.weight",
            0,
            "num_query_groups_list",
            "num_query_groups",
            "num_key_value_heads",
            of=head,
        ),
        "num_experts": size("mlp.experts.down_proj", 0, "zaya_layers", "num_experts"),
        "moe_intermediate_size": size("mlp.experts.down_proj", 2, "moe_intermediate_size"),
        "router_hidden_size": size(
            "mlp.gate.down_proj.weight", 0, "router_hidden_size", "zaya_mlp_expansion"
        ),
        "rms_norm_eps": first(1e-5, "norm_epsilon", "rms_norm_eps"),
        "layer_types": kinds,
        "sliding_window": window,
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": base,
                "partial_rotary_factor": first(0.5, "partial_rotary_factor", "rope_pct"),
            }
            for kind, base in bases.items()
        },
    }


def _attention(given: dict[str, Any], layers: int, where: str) -> tuple[list[str], int | None]:
    """(the kind of each layer, the window), of which several keys say a part."""
    told = {
        key: given[key] for key in ("swa_layers", "layer_types", "sliding_window") if given.get(key)
    }
    try:
        widths = told.get("swa_layers", [0] * layers)
        if len(widths) == 2 * layers and not any(widths[1::2]):  # experts have none
            widths = widths[::2]
        by_width = ["hybrid_sliding" if one else "hybrid" for one in widths]
        kinds = [KINDS.get(one, one) for one in told.get("layer_types", by_width)]
        # There a width counts the tokens before the query; here the query too.
        windows = {told.get("sliding_window"), *(int(one) + 1 for one in widths if one)} - {None}
        # A window that no layer has is left over, but alone it may be meant for all.
        alone = told.keys() == {"sliding_window"}
        fits = len(kinds) == layers and (
            len(windows) == 1 if "hybrid_sliding" in kinds else not alone
        )
        if fits and (kinds == by_width or "swa_layers" not in told):
            return kinds, windows.pop() if windows else None
    except (TypeError, ValueError):
        pass
    raise UserError(
        f"{where}: {shown(told)} do not say for {layers} layers which have a window, and one window"
        " for these; no other form can be read"
    )
