#!/usr/bin/env python3
"""Writes one golden case of the public PyTorch ZAYA implementation (transformers' `zaya`).

Needs Python 3.11, torch 2.13.0 (CPU) and transformers 5.23.0:

    python3.11 -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    oracle/bin/python tools/golden/make_golden.py OUT_DIR --seed 0 [--set key=value ...]

(the cases of the tests lie in tests/golden)

OUT_DIR then holds
    config.json, model.safetensors   the model as `save_pretrained` writes it
    expected.safetensors             inputs, and the model's results in float32
        input_ids [B,S], labels [B,S]
        logits [B,S,V], loss []
        hidden_states.I [B,S,D]      the residual stream after decoder layer I
        router_logits.I [B*S,E+1]    layer I's router logits
        grad.NAME                    d loss / d NAME for each parameter
        generated [B,S+N]            greedy decoding with the cache, N new tokens
        padded_input_ids, padded_mask, padded_logits   a left-padded batch
Every parameter is drawn at random (scales, biases and key temperatures too), so that nothing
can be left out without a difference.

A trait of transformers 5.23.0 to know of when an exported model is loaded there: its
`from_pretrained` resets the last balancing bias of each layer, the skip expert's, to -1.
"""

import argparse
import ast
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import ZayaConfig, ZayaForCausalLM

TINY = dict(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=48,
    num_experts=4,
    router_hidden_size=24,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=None,
)


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter and every balancing bias."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        leaf = name.rsplit(".", 1)[-1]
        if leaf.endswith("scale") or ("norm" in name and leaf == "weight"):
            p.data = 1.0 + 0.2 * noise
        elif leaf == "temp":
            p.data = 1.0 + 0.3 * noise
        elif leaf.endswith("bias"):
            p.data = 0.1 * noise
        else:
            fan_in = p[0].numel() if p.ndim > 1 else 1
            if name.endswith(("gate_up_proj", "down_proj")) and p.ndim == 3:
                fan_in = p.shape[-1]
            p.data = noise / fan_in**0.5
    for name, b in model.named_buffers():
        if name.endswith("balancing_biases"):
            b.copy_(0.05 * torch.randn(b.shape, generator=generator))


def main() -> None:
    """Makes the model, runs it and writes the case."""
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("out", type=Path)
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--batch", type=int, default=2)
    args.add_argument("--length", type=int, default=33)
    args.add_argument("--new-tokens", type=int, default=12)
    args.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    a = args.parse_args()

    overrides = {k: ast.literal_eval(v) for k, v in (s.split("=", 1) for s in a.set)}
    config = ZayaConfig(**{**TINY, **overrides})
    g = torch.Generator().manual_seed(a.seed)
    torch.manual_seed(a.seed)
    model = ZayaForCausalLM(config).float()
    randomise(model, g)
    model.tie_weights()
    model.eval()

    ids = torch.randint(3, config.vocab_size, (a.batch, a.length), generator=g)
    residuals = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, i=i: residuals.update({i: out[0]}))
        for i, layer in enumerate(model.model.layers)
    ]
    out = model(ids, labels=ids, output_router_logits=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    out.loss.backward()
    expected = {"input_ids": ids, "labels": ids.clone(), "logits": out.logits, "loss": out.loss}
    expected |= {f"hidden_states.{i}": h for i, h in residuals.items()}
    expected |= {f"router_logits.{i}": r for i, r in enumerate(out.router_logits)}
    expected |= {f"grad.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        expected["generated"] = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=a.new_tokens, do_sample=False
        )
        padded, mask = ids.clone(), torch.ones_like(ids)
        padded[0, :5], mask[0, :5] = config.pad_token_id, 0
        expected |= {
            "padded_input_ids": padded,
            "padded_mask": mask,
            "padded_logits": model(padded, attention_mask=mask, use_cache=False).logits,
        }

    a.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(a.out)
    expected = {k: v.detach().clone().contiguous() for k, v in expected.items()}
    save_file(expected, a.out / "expected.safetensors")
    margins = []
    for layer, logits in zip(model.model.layers, out.router_logits, strict=True):
        top = (logits.softmax(-1) + layer.mlp.gate.balancing_biases).topk(2, -1).values
        margins.append((top[:, 0] - top[:, 1]).min().item())
    print(
        f"least routing margin {min(margins):.1e} (below 1e-4 rounding could flip a token: take"
        " another seed)"
    )
    winners = [r.softmax(-1).argmax(-1) for r in out.router_logits]
    counts = torch.stack([w.bincount(minlength=config.num_experts + 1) for w in winners])
    print(
        f"loss {out.loss.item():.6f}; unbiased argmax per layer and expert (last = skip):\n{counts}"
    )


if __name__ == "__main__":
    main()
