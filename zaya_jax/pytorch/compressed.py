"""Quantized tensors as compressed-tensors (0.20) stores them: `float-quantized` (FP8) and
`mxfp4-pack-quantized`.

A quantized matrix NAME.weight [out, in] is two tensors, its codes and NAME.weight_scale
(`model.quantized`, with inputs last). An expert has its matrices for itself, as in most mixtures:
mlp.experts.7.gate_proj, .up_proj and .down_proj. transformers' `zaya` has those of a layer in one.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.config import UserError, shown
from zaya_jax.model import quantized
from zaya_jax.pytorch import tensor_files
from zaya_jax.pytorch.experts import FUSED, PROJECTIONS
from zaya_jax.pytorch.tensor_files import Tensor

VERSION = "0.20.0"
# What a quantization_config may have: of the whole, of a group of either form, of its weights.
WHOLE: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
    "moe_sparsity_config": (None,),
}
GROUP = {"output_activations": (None,)}
FP8 = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": ("tensor", "channel"),
    "symmetric": (True,),
    "actorder": (None,),
}
MXFP4 = FP8 | {"num_bits": (4,), "strategy": ("group",), "group_size": (quantized.GROUP,)}
# The library says naive if no activations are quantized.
WEIGHTS = {"float-quantized": FP8, "naive-quantized": FP8, "mxfp4-pack-quantized": MXFP4}
WRITTEN = {
    "fp8": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "strategy": "group",
            "group_size": quantized.GROUP,
            "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        },
    ),
}


def check(quantization: Mapping[str, Any], where: str) -> str:
    """What is to be said about a model of this quantization_config; UserError if its tensors
    cannot be read."""
    about = ""
    _require(quantization, WHOLE, where)
    for name, group in (quantization.get("config_groups") or {}).items():
        form = str(group.get("format") or quantization.get("format"))
        _require({"format": form}, {"format": WEIGHTS}, where, f"{name}.")
        _require(group, GROUP, where, f"{name}.")
        _require(group.get("weights") or {}, WEIGHTS[form], where, f"{name}.weights.")
        if activations := group.get("input_activations"):
            _require(activations, {"dynamic": (True,)}, where, f"{name}.input_activations.")
            about = "; servers also quantize its activations, this project does not"
    return about


def _require(settings: Any, allowed: Mapping[str, Any], where: str, prefix: str = "") -> None:
    for key, values in allowed.items():
        if settings.get(key) not in values:
            raise UserError(
                f"{where}: quantization_config has {prefix}{key}={shown(settings.get(key))}; what can be"
                " read is compressed-tensors' float-quantized (FP8, a scale for a tensor or an"
                f" output) and mxfp4-pack-quantized (groups of {quantized.GROUP}), symmetric, in"
                " the order of the inputs; save the model unquantized, or in one of these"
            )


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix(Tensor):
    """A matrix of two stored tensors; its dtype is that of its numbers as compressed-tensors decodes
    them."""

    codes: Tensor
    scale: Tensor

    def read(self, part: str = "numbers") -> np.ndarray:
        """Its numbers, "codes" or "scale" in memory."""
        codes = self.codes.read()
        if part == "codes":
            return codes
        scale = self.scale.read()
        if codes.dtype == quantized.E4M3:
            scale = np.broadcast_to(scale.reshape(-1, 1), (len(codes), 1)).astype(np.float32)
        if part == "scale":
            return scale
        return quantized.decode(codes, scale, -1).astype(tensor_files.DTYPES[self.dtype])


def _matrix(name: str, codes: Tensor, scale: Tensor) -> QuantizedMatrix:
    size, groups = math.prod(codes.shape), math.prod(scale.shape)
    if codes.dtype == "F8_E4M3" and groups in (1, codes.shape[0]):
        return QuantizedMatrix(codes.shape, scale.dtype, codes, scale)
    if codes.dtype == scale.dtype == "U8" and groups * quantized.GROUP == 2 * size:
        shape = (codes.shape[0], 2 * codes.shape[1])
        return QuantizedMatrix(shape, "BF16", codes, scale)
    raise UserError(
        f"{name} is {codes.dtype} {list(codes.shape)} with a scale of {scale.dtype}"
        f" {list(scale.shape)}, which is neither FP8 with a scale for the tensor or an output nor"
        f" MXFP4 with one for {quantized.GROUP} inputs; save the model unquantized, or in one of"
        " these"
    )


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantized tensors under their plain names; others as they are."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        plain = name.replace(".weight_packed", ".weight")
        scale = stored.get(f"{plain}_scale")
        if scale:
            tensors[plain] = _matrix(name, tensor, scale)
        elif not name.endswith(".weight_scale"):
            tensors[name] = tensor
    return tensors


class Place(NamedTuple):
    """Of what a stored tensor is a part: a layer's tensor of experts, its codes or scale (0, 1)."""

    name: str
    part: int
    expert: int
    rows: slice


def packed(specs: tensor_files.Specs, form: str) -> tuple[tensor_files.Specs, dict[str, Place]]:
    """(the tensors to store, the places of the experts' among them) of a model whose experts are in
    a form of `quantized`."""
    stored, places = {}, {}
    last_names = ("weight_packed" if form == "mxfp4" else "weight", "weight_scale")
    for name, x in specs.items():
        if not (fused := FUSED.fullmatch(name)):
            stored[name] = x
            continue
        projections, (experts, rows, columns) = PROJECTIONS[fused[2]], x.shape
        height = rows // len(projections)
        parts = quantized.abstract((height, columns, 1), form, -2)
        for expert, i, part in itertools.product(range(experts), range(len(projections)), (0, 1)):
            matrix = f"{fused[1]}.{expert}.{projections[i]}.{last_names[part]}"
            stored[matrix] = jax.ShapeDtypeStruct(parts[part].shape[:2], parts[part].dtype)
            places[matrix] = Place(name, part, expert, slice(i * height, (i + 1) * height))
    return stored, places


def quantization_config(form: str) -> dict[str, Any]:
    """The quantization_config of a model whose experts are stored so; activations are not
    quantized."""
    group = {
        "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"],
        "weights": {"type": "float", "symmetric": True, "dynamic": False} | WRITTEN[form][1],
        "input_activations": None,
        "output_activations": None,
        "format": WRITTEN[form][0],
    }
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": WRITTEN[form][0],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
