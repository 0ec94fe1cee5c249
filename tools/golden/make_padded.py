#!/usr/bin/env python3
"""Writes the public PyTorch implementation's generations for the left-padded batches of golden
cases.

    oracle/bin/python tools/golden/make_padded.py base sliding taps mixed

(the environment is make_golden.py's). tests/golden/padded_generation.safetensors then holds, for
each case, CASE.ids and CASE.mask [2,S], whose rows begin with 5 and 11 padding tokens, and
CASE.generated [2,S+12], greedy and cached.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import ZayaForCausalLM

GOLDEN = Path(__file__).resolve().parent.parent.parent / "tests" / "golden"


def main() -> None:
    """Generates for each case named on the command line."""
    written = {}
    for case in sys.argv[1:]:
        model = ZayaForCausalLM.from_pretrained(GOLDEN / case).float().eval()
        weights = load_file(GOLDEN / case / "model.safetensors")
        for i, layer in enumerate(model.model.layers):  # from_pretrained resets the skip expert's
            layer.mlp.gate.balancing_biases.data.copy_(
                weights[f"model.layers.{i}.mlp.gate.balancing_biases"]
            )
        expected = load_file(GOLDEN / case / "expected.safetensors")
        ids, mask = expected["padded_input_ids"].clone(), expected["padded_mask"].clone()
        ids[1, :11], mask[1, :11] = model.config.pad_token_id, 0
        with torch.no_grad():
            generated = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        written |= {f"{case}.ids": ids, f"{case}.mask": mask, f"{case}.generated": generated}
    save_file(written, GOLDEN / "padded_generation.safetensors")


if __name__ == "__main__":
    main()
