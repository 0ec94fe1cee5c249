"""Writes the low-rank updates of a run (`run.lora`) apart from their base, in the format of PEFT
(0.21.2).

adapter_config.json and adapter_model.safetensors, which `PeftModel.from_pretrained(base, DIR)` puts
onto transformers' `zaya`. A linear map's factors are matrices [out, in]. Those of the experts, a
parameter of three dims, lie side by side: A [experts x rank, in], B [out, rank x experts]; PEFT
nests the second such parameter's around the first's.
"""

import os
from pathlib import Path

import jax
import numpy as np

from zaya_jax.checkpoint import merged
from zaya_jax.checkpoint.run import claims
from zaya_jax.checkpoint.source import model_differences
from zaya_jax.config import Model, UserError
from zaya_jax.pytorch import any_model, card, hub, tensor_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.pytorch.card import UNPUBLISHED, Publication
from zaya_jax.training.workdir import write_json

# What PEFT calls the parameters that it wraps without a module of their own.
PEFT_NAMES = {
    "params.layers.experts.gate_up": f"{names.LAYER}mlp.experts.base_layer",
    "params.layers.experts.down": f"{names.LAYER}mlp.experts",
}


def to_peft(name: str, out: str | os.PathLike, publication: Publication = UNPUBLISHED) -> Path:
    """Writes a run's adapters; UserError if it has none, or if the base with them is not the run's
    model."""
    model = any_model.find(name)
    names.check_zaya(model.model, model.name)
    source = model.source
    if not isinstance(source, merged.MergedSource):
        raise UserError(f"{model.name} has no low-rank updates (run.lora); leave --adapters out")
    source.require_same_base()
    if source.biases_changed():
        raise UserError(
            f"{model.name} has moved the balancing biases, for which PEFT has no place; leave"
            " --adapters out, or train with --config.balance.enabled=False"
        )
    if changed := model_differences(source.base.model, model.model):
        raise UserError(
            f"{model.name} computes otherwise than its base {source.base_name}"
            f" ({'; '.join(changed)}), so its updates do not fit that; leave --adapters out"
        )
    base = card.base_of(model, publication) or source.base_name
    if publication.repository != card.PLACEHOLDER and not hub.REPOSITORY.fullmatch(base):
        raise UserError(
            f"{model.name} names its base by a path of this machine, {base}; give its name on the hub"
            " by --base_model=OWNER/NAME"
        )
    target = claims.require_new_folder(out)
    tensors = _tensors(model.model, source.factors)
    rank = next(x.shape[-1] for name, x in source.factors.items() if name.endswith(".a"))
    with claims.whole_or_nothing(target) as part:
        specs = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in tensors.items()}
        tensor_files.write_sharded(part, specs, tensors.__getitem__, 1 << 62)
        (part / tensor_files.SINGLE).rename(part / hub.ADAPTER_WEIGHTS)
        write_json(part / hub.ADAPTER_CONFIG, _config(model.model, rank, base))
        card.write(part, model, publication, adapters=True)
    return target


def _rows(model: Model) -> list[names.TensorRow]:
    parts = ("params.layers.cca.", "params.layers.experts.")
    return [
        row
        for row in names.all_rows(model)
        if row.layout in ("matrix", "pair") and row.array.startswith(parts)
    ]


def _tensors(model: Model, factors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {}
    for row in _rows(model):
        peft_name = PEFT_NAMES.get(row.array, row.name.removesuffix(".weight"))
        for layer in range(model.num_hidden_layers):
            a = factors[f"{row.array}.a"][layer]
            b = factors[f"{row.array}.b"][layer]
            if a.ndim == 3:  # of experts, side by side
                a = a.swapaxes(0, 1).reshape(a.shape[1], -1)
                b = b.swapaxes(0, 1).reshape(-1, b.shape[2])
            prefix = f"base_model.model.{peft_name.format(layer)}"
            tensors[f"{prefix}.lora_A.weight"] = a.T
            tensors[f"{prefix}.lora_B.weight"] = b.T
    return dict(sorted(tensors.items(), key=lambda item: names.natural(item[0])))


def _config(model: Model, rank: int, base: str) -> dict:
    rows = _rows(model)
    parameters = [row for row in rows if row.array in PEFT_NAMES]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [row.name.split(".")[-2] for row in rows if row not in parameters],
        "target_parameters": [row.name.removeprefix(names.LAYER) for row in parameters],
    }
