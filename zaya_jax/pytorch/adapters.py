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
from zaya_jax.checkpoint.source import differing
from zaya_jax.config import Model, UserError
from zaya_jax.pytorch import any_model, tensor_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.training.workdir import write_json

INSIDE = {
    "mlp.experts.gate_up_proj": "mlp.experts.base_layer",
    "mlp.experts.down_proj": "mlp.experts",
}


def to_peft(name: str, out: str | os.PathLike) -> Path:
    """Writes a run's adapters; UserError where it has none, or where the base with them is not the
    run's model."""
    found = any_model.find(name)
    names.check_zaya(found.model, found.name)
    if not isinstance(found.source, merged.Merged):
        raise UserError(f"{found.name} has no low-rank updates (run.lora); leave --adapters out")
    source = found.source
    found.check()
    pairs, moved = source.adapters()
    if moved:
        raise UserError(
            f"{found.name} has moved the balancing biases, for which PEFT has no place; leave"
            " --adapters out, or train with --config.balance.enabled=False"
        )
    if changed := differing(source.base.model, found.model):
        raise UserError(
            f"{found.name} computes otherwise than its base {source.base_name}"
            f" ({'; '.join(changed)}), so its updates do not fit that; leave --adapters out"
        )
    target = claims.new_folder(out)
    tensors = _tensors(found.model, pairs)
    rank = next(iter(pairs.values())).shape[-1]
    with claims.whole_or_nothing(target) as part:
        specs = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in tensors.items()}
        tensor_files.write_sharded(part, specs, tensors.__getitem__, 1 << 62)
        (part / tensor_files.SINGLE).rename(part / "adapter_model.safetensors")
        write_json(part / "adapter_config.json", _config(found.model, rank, source.base_name))
    return target


def _rows(model: Model) -> list[names.TensorRow]:
    return [
        row
        for row in names.layer_rows(model)
        if row.layout in ("matrix", "pair") and row.path[0] in ("cca", "experts")
    ]


def _tensors(model: Model, pairs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {}
    for row in _rows(model):
        a, b = (pairs[f"params.layers.{'.'.join(row.path)}.{factor}"] for factor in "ab")
        for layer in range(model.num_hidden_layers):
            at = f"base_model.model.model.layers.{layer}.{INSIDE.get(row.name, row.name.removesuffix('.weight'))}"
            one, two = a[layer], b[layer]
            if one.ndim == 3:
                one, two = (
                    one.swapaxes(0, 1).reshape(one.shape[1], -1),
                    two.swapaxes(0, 1).reshape(-1, two.shape[2]),
                )
            found[f"{at}.lora_A.weight"], found[f"{at}.lora_B.weight"] = one.T, two.T
    return dict(sorted(found.items(), key=lambda item: names.natural(item[0])))


def _config(model: Model, rank: int, base: str) -> dict:
    rows = _rows(model)
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
        "target_modules": [row.name.split(".")[-2] for row in rows if row.name not in INSIDE],
        "target_parameters": [row.name for row in rows if row.name in INSIDE],
    }
