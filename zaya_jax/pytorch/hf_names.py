"""Maps names and shapes to and from the public PyTorch ZAYA (transformers' `zaya`), one row a
tensor.

Ours are nested dicts with layers stacked on a leading axis and matrices [in, out]; theirs are flat
names, one tensor a layer, matrices [out, in]. The same row converts in both directions.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from zaya_jax.config import Model, Rope, RopeKinds, UserError, check_model, fields, shown, to_dict
from zaya_jax.model import zaya

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # tied: some files repeat the embedding under this name
BALANCE = "mlp.gate.balancing_biases"
EDA = "params.layers.router.eda"  # of layer 0 there is none in theirs
LAYER = "model.layers.{}."  # before their names of a layer's tensors


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """One tensor, or one of each layer: our array, their name (with "{}" for the layer's number),
    and the change of layout between them."""

    array: str
    name: str
    layout: str = "same"  # same | matrix | pair | depthwise | grouped

    @property
    def is_stacked(self) -> bool:
        """Whether our array has all layers."""
        return "{}" in self.name

    def to_torch(self, x: np.ndarray) -> np.ndarray:
        """One of our (un-stacked) arrays in their layout."""
        if self.layout == "matrix":
            return x.swapaxes(-1, -2)
        if self.layout == "pair":  # [E, in, 2, out] -> [E, 2 out, in]
            return x.reshape(*x.shape[:-2], -1).swapaxes(-1, -2)
        if self.layout == "depthwise":  # [t, P] -> [P, 1, t]
            return x.T[:, None]
        if self.layout == "grouped":  # [t, G, in, out] -> [G out, in, t]
            taps, groups, c_in, c_out = x.shape
            return x.transpose(1, 3, 2, 0).reshape(groups * c_out, c_in, taps)
        return x

    def from_torch(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """One of their arrays in our layout; `shape` is ours."""
        if self.layout == "matrix":
            return x.swapaxes(-1, -2)
        if self.layout == "pair":
            return x.swapaxes(-1, -2).reshape(shape)
        if self.layout == "depthwise":
            return x[:, 0].T
        if self.layout == "grouped":
            taps, groups, c_in, c_out = shape
            return x.reshape(groups, c_out, c_in, taps).transpose(3, 0, 2, 1)
        return x


def _linear(path: str, name: str, bias: bool) -> list[TensorRow]:
    rows = [TensorRow(f"{path}.kernel", f"{name}.weight", "matrix")]
    if bias:
        rows.append(TensorRow(f"{path}.bias", f"{name}.bias"))
    return rows


def _join(path: str, name: str) -> list[TensorRow]:
    theirs = {"y": "hidden_states", "h": "residual"}
    return [
        TensorRow(f"{path}.{a}_{b}", f"{name}.{theirs[a]}_{b}")
        for a in "yh"
        for b in ("scale", "bias")
    ]


def _layer_rows(model: Model) -> list[TensorRow]:
    """The parameters of a layer (arrays below `params.layers`, names below `model.layers.I`)."""
    qkv, gate = "self_attn.qkv_proj", "mlp.gate"
    b = model.attention_bias
    return [
        TensorRow("attn_norm.scale", "input_layernorm.weight"),
        *_linear("cca.q", f"{qkv}.q_proj", b),
        *_linear("cca.k", f"{qkv}.k_proj", b),
        *_linear("cca.v_now", f"{qkv}.v_proj_current", b),
        *_linear("cca.v_prev", f"{qkv}.v_proj_delayed", b),
        *_linear("cca.o", "self_attn.o_proj", b),
        TensorRow("cca.conv_depthwise.kernel", f"{qkv}.conv_qk_depthwise.weight", "depthwise"),
        TensorRow("cca.conv_depthwise.bias", f"{qkv}.conv_qk_depthwise.bias"),
        TensorRow("cca.conv_grouped.kernel", f"{qkv}.conv_qk_grouped.weight", "grouped"),
        TensorRow("cca.conv_grouped.bias", f"{qkv}.conv_qk_grouped.bias"),
        TensorRow("cca.temperature", "self_attn.qk_norm.temp"),
        *_join("attn_join", "post_attention_residual_scale"),
        TensorRow("moe_norm.scale", "post_attention_layernorm.weight"),
        *_linear("router.down", f"{gate}.down_proj", True),
        TensorRow("router.eda", f"{gate}.router_states_scale"),
        TensorRow("router.norm.scale", f"{gate}.router_mlp.norm.weight"),
        *_linear("router.fc1", f"{gate}.router_mlp.fc1", True),
        *_linear("router.fc2", f"{gate}.router_mlp.fc2", True),
        *_linear("router.out", f"{gate}.router_mlp.out_proj", False),
        TensorRow("experts.gate_up", "mlp.experts.gate_up_proj", "pair"),
        TensorRow("experts.down", "mlp.experts.down_proj", "matrix"),
        *_join("moe_join", "post_mlp_residual_scale"),
    ]


def all_rows(model: Model) -> list[TensorRow]:
    """The rows of all arrays. The tied head's matrix appears once, as the embedding."""
    rows = [
        TensorRow("params.embed.embedding", EMBEDDING),
        TensorRow("params.embed.bias", "model.input_hidden_states_bias"),
        TensorRow("params.embed.scale", "model.input_hidden_states_scale"),
        TensorRow("params.final_norm.scale", "model.norm.weight"),
    ]
    if model.lm_head_bias:
        rows.append(TensorRow("params.head.bias", "lm_head.bias"))
    rows += [
        TensorRow(f"params.layers.{row.array}", f"{LAYER}{row.name}", row.layout)
        for row in _layer_rows(model)
    ]
    return [*rows, TensorRow("balance.bias", f"{LAYER}{BALANCE}")]


def all_tensors(model: Model) -> Iterator[tuple[str, TensorRow, int | None]]:
    """(their full name, row, layer or None) of every tensor."""
    for row in all_rows(model):
        if not row.is_stacked:
            yield row.name, row, None
            continue
        for layer in range(model.num_hidden_layers):
            if layer or row.array != EDA:
                yield row.name.format(layer), row, layer


def abstract(model: Model) -> dict[str, Any]:
    """The arrays of all rows, as a tree of ShapeDtypeStructs."""
    bias = jax.eval_shape(lambda: zaya.init_balance(model))
    return {"params": zaya.abstract(model), "balance": {"bias": bias}}


# Keys of transformers' ZayaConfig that our Model has too.
MODEL_KEYS = {field.name for field in dataclasses.fields(Model)} - {
    "intermediate_size",
    "layer",
    "router",
}
# Keys that this project only carries over.
_IGNORED = {
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "is_encoder_decoder",
    "auto_map",
    "name_or_path",
    "_attn_implementation_autoset",
}
_THEIR_DEFAULTS = {
    "num_experts_per_tok": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "sliding_window": None,
    "lm_head_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 106,
    "pad_token_id": 0,
    "bos_token_id": 2,
}


def model_from_json(config: dict, where: str) -> Model:
    """The Model of a config.json; UserError on a trait that this project does not have."""
    if config.get("model_type") != "zaya":
        raise UserError(
            f"{where}: model_type is {shown(config.get('model_type'))}; only models of transformers'"
            " 'zaya' can be read, give such a directory"
        )
    unknown = sorted(set(config) - MODEL_KEYS - _IGNORED)
    if unknown:
        raise UserError(
            f"{where}: unknown key {unknown[0]!r}={config[unknown[0]]!r}; this project cannot"
            " honour it"
        )
    known = _THEIR_DEFAULTS | {k: v for k, v in config.items() if k in MODEL_KEYS}
    known["layer_types"] = tuple(config.get("layer_types") or ())
    known["rope_parameters"] = _rope_from_json(config.get("rope_parameters"))
    if isinstance(known["eos_token_id"], list):
        known["eos_token_id"] = known["eos_token_id"][0] if known["eos_token_id"] else None
    with fields.naming(where):
        model = check_model(known, "")
    check_zaya(model, where)
    return model


def check_zaya(model: Model, where: object) -> None:
    """UserError for a model that transformers' `zaya` cannot express."""
    if model.model_type != "zaya":
        raise UserError(
            f"{where} holds a model of model_type={model.model_type!r}; only 'zaya' has a form "
            "that transformers' `zaya` loads"
        )
    if own_class := model.layer or model.router:
        raise UserError(
            f"{where}: {own_class} is of your own, and transformers' `zaya` has no form for it;"
            " read the run as it is, by zj.load"
        )
    if "hybrid_linear" in model.kinds:
        raise UserError(
            f"{where}: layer {model.kinds.index('hybrid_linear')} is hybrid_linear, which PyTorch's"
            " zaya does not have; only models of hybrid and hybrid_sliding layers can be exchanged"
        )


def _rope_from_json(ropes: dict | None) -> dict:
    """A rotary embedding for each layer kind, with their defaults; `check_model` finds what is
    unknown."""
    if ropes is None:
        return dataclasses.asdict(RopeKinds(Rope(rope_theta=5e6), Rope(rope_theta=1e4)))
    defaults = {"rope_type": "default", "partial_rotary_factor": 1.0}
    # some files have one next to the kinds
    kinds = {kind: rope for kind, rope in ropes.items() if kind != "rope_type"}
    return {
        kind: defaults | rope if isinstance(rope, dict) else rope for kind, rope in kinds.items()
    }


def model_to_json(
    model: Model, dtype: str, source: dict | None = None, end_turn: int | None = None
) -> dict:
    """The config.json of a Model; `source`, the one it was imported with, keeps its further keys.

    `end_turn` is the id that ends an answer of a model that was trained on chats: transformers must
    stop at it too.
    """
    ours = to_dict(model)
    ours["layer_types"] = list(model.kinds)
    ours = {key: value for key, value in ours.items() if key in MODEL_KEYS}
    fixed = {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "dtype": dtype,
        "use_cache": True,
    }
    theirs = dict(source or {})
    ends = theirs.get("eos_token_id")
    if isinstance(ends, list) and ends[:1] == [model.eos_token_id]:
        ours["eos_token_id"] = ends
    if end_turn is not None:
        ours["eos_token_id"] = _add_end(ours["eos_token_id"], end_turn)
    theirs.pop("torch_dtype", None)
    return dict(sorted((theirs | ours | fixed).items()))


def generation_json(model: Model, source: dict | None, end_turn: int | None = None) -> dict:
    """The generation_config.json of a Model; `source` is the one it was imported with."""
    ids = {key: getattr(model, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    keys = dict(source or {})
    if not source:
        keys = {"_from_model_config": True, "use_cache": True}
        keys |= {key: number for key, number in ids.items() if number is not None}
    if end_turn is not None:
        keys["eos_token_id"] = _add_end(keys.get("eos_token_id", model.eos_token_id), end_turn)
    return keys


def _add_end(ends: int | list[int] | None, end: int) -> list[int]:
    """The ids that end a generation, with one more."""
    if ends is None:
        return [end]
    before = ends if isinstance(ends, list) else [ends]
    return before if end in before else [*before, end]


def natural(name: str) -> list:
    """Sort key that puts layer 10 after layer 9."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]
