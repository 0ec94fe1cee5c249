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
from zaya_jax.pytorch.hf_names import natural
from zaya_jax.pytorch.tensor_files import TensorFile

SIGNS = (
    "activation_func",
    "zaya_mlp_expansion",
    "zaya_layers",
    "swa_layers",
    "num_query_groups",
    "ffn_hidden_size",
)
# The only values that this model has; a key that is absent has them.
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
}
KEPT = (
    "vocab_size",
    "hidden_size",
    "cca_time0",
    "cca_time1",
    "attention_bias",
    "lm_head_bias",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "model_type",
    "transformers_version",
    "sliding_window",
)
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
    """The present config.json; UserError on what this model does not have."""
    for key, value in MUST.items():
        if key in given and given[key] != value:
            raise UserError(
                f"{where}: {key}={shown(given[key])} in the older layout; only {value!r} can be"
                " read"
            )
    first, window = "model.layers.0.", given.get("sliding_window")
    has = tensors.tensors
    size = lambda name, dim: has[first + name].shape[dim] if first + name in has else 0  # noqa: E731
    head = given.get("head_dim") or given.get("kv_channels") or 128
    windows = [int(one) for one in given.get("swa_layers") or [0] * tensors.layers]
    windows = windows[::2] if len(windows) == tensors.layers else windows
    rotary = given.get("partial_rotary_factor", given.get("rope_pct", 0.5))
    bases = {
        "hybrid": given.get("rope_theta", 5e6),
        "hybrid_sliding": given.get("swa_rotary_base", 1e4),
    }
    return {key: given[key] for key in KEPT if key in given} | {
        "num_hidden_layers": tensors.layers // 2,
        "head_dim": head,
        "num_attention_heads": size("self_attn.qkv_proj.q_proj.weight", 0) // head,
        "num_key_value_heads": size("self_attn.qkv_proj.k_proj.weight", 0) // head,
        "num_experts": size("mlp.experts.down_proj", 0),
        "moe_intermediate_size": size("mlp.experts.down_proj", 2),
        "router_hidden_size": size("mlp.gate.down_proj.weight", 0),
        "rms_norm_eps": given.get("norm_epsilon", given.get("rms_norm_eps", 1e-5)),
        "layer_types": ["hybrid_sliding" if one else "hybrid" for one in windows],
        # There it counts the tokens before the query; here the query too.
        "sliding_window": (
            window if window is not None else max(windows) + 1 if any(windows) else None
        ),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": rotary}
            for kind, base in bases.items()
        },
    }
