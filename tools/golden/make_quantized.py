#!/usr/bin/env python3
"""Writes one small ZAYA whose matrices of experts compressed-tensors has quantized.

Needs Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0 and compressed-tensors 0.20.0; the
environment of `make_golden.py` with one package more:

    oracle/bin/pip install compressed-tensors==0.20.0
    oracle/bin/python tools/golden/make_quantized.py OUT_DIR SCHEME [--dtype bfloat16]

(the cases of the tests lie in tests/golden/quantized; SCHEME is one of compressed-tensors' presets:
FP8_DYNAMIC in float32, FP8_DYNAMIC in bfloat16 with `--strategy tensor`, MXFP4A16 in bfloat16)

OUT_DIR then holds
    config.json, model.safetensors   the model, each expert's matrices for themselves, as the library
                                     compresses modules and names its tensors
    expected.safetensors             NAME: transformers' fused tensor of experts before,
                                     NAME.decoded: as the library decompresses it
"""

import argparse
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from make_golden import randomise
from safetensors.torch import save_file
from transformers import ZayaConfig, ZayaForCausalLM

SMALL = dict(
    vocab_size=40,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=32,
    num_experts=2,
    router_hidden_size=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
)
TARGETS = [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"]


class OneExpert(torch.nn.Module):
    """An expert as most mixtures have it: a module with three linear maps."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor):
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
            self.add_module(name, linear)


def observe(module: torch.nn.Module) -> None:
    """Sets a module's scale by its least and greatest numbers, as llm-compressor's default does."""
    args, x = module.quantization_scheme.weights, module.weight
    if args.strategy == "group":
        x = x.unflatten(-1, (-1, args.group_size))
    x = x.flatten() if args.strategy == "tensor" else x
    keep = args.strategy == "channel"
    scale, _ = calculate_qparams(x.amin(-1, keepdim=keep), x.amax(-1, keepdim=keep), args)
    module.weight_scale = torch.nn.Parameter(scale.to(module.weight.dtype), requires_grad=False)


def main() -> None:
    """Makes the model, has it compressed, and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("scheme")
    parser.add_argument("--strategy", help="of the scales, in place of the scheme's")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    model = ZayaForCausalLM(ZayaConfig(**SMALL)).float()
    randomise(model, torch.Generator().manual_seed(0))
    model = model.to(dtype)
    model.tie_weights()
    expected = {}
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            x = getattr(experts, name).detach()
            # a row of zeros and one of tiny numbers, whose scales are the library's edges
            x[0, 0], x[0, 1] = 0, x[0, 1] * 1e-30
            expected[f"model.layers.{i}.mlp.experts.{name}"] = x.clone()
        pairs = zip(experts.gate_up_proj, experts.down_proj, strict=True)
        layer.mlp.experts = torch.nn.ModuleList([OneExpert(*pair) for pair in pairs])

    scheme = preset_name_to_scheme(args.scheme, TARGETS)
    if args.strategy:
        scheme.weights.strategy = args.strategy
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    linears = [m for m in model.modules() if getattr(m, "quantization_scheme", None)]
    for linear in linears:
        observe(linear)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)

    decompressor = BaseCompressor.get_value_from_registry(compressor.quantization_config.format)
    for i, layer in enumerate(model.model.layers):
        parts = {name: [] for name in ("gate_proj", "up_proj", "down_proj")}
        for expert in layer.mlp.experts:
            for name, found in parts.items():
                linear = getattr(expert, name)
                state = decompressor.decompress(
                    dict(linear.state_dict()), linear.quantization_scheme
                )
                found.append(state["weight"].detach())
        gate, up, down = (torch.stack(found) for found in parts.values())
        at = f"model.layers.{i}.mlp.experts"
        expected[f"{at}.gate_up_proj.decoded"] = torch.cat([gate, up], 1)
        expected[f"{at}.down_proj.decoded"] = down

    args.out.mkdir(parents=True, exist_ok=True)
    model.config.dtype = dtype
    model.config.save_pretrained(args.out)
    compressor.update_config(args.out)
    tensors = {k: v.clone().contiguous() for k, v in model.state_dict().items()}
    tensors.pop("lm_head.weight")
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v.contiguous() for k, v in expected.items()}, args.out / "expected.safetensors")
    print((args.out / "config.json").read_text())
    print({k: (v.dtype, tuple(v.shape)) for k, v in tensors.items() if ".0.mlp.experts.0." in k})


if __name__ == "__main__":
    main()
