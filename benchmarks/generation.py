"""Generation here and in transformers: the same exported model, prompts and machine, greedy, in one run.

    .venv/bin/python benchmarks/generation.py --torch-python=ORACLE/bin/python [--sizes small wide] [--rounds=3]

ORACLE is a Python 3.11 environment with torch 2.13.0 and transformers 5.23.0. A model of random weights is written as
a model directory, which both read. Each side runs in a process of its own, on the same cores, one after the other by
turns; what is told is the median of the rounds. Both continue greedily, and the ids are compared.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = {
    # Programs that a few megabytes of weights hardly fill, and one whose weights a token must read from memory.
    "small": {
        "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 8,
        "router_hidden_size": 64,
    },
    "wide": {
        "vocab_size": 32768, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 1024, "num_experts": 8,
        "router_hidden_size": 128,
    },
}  # fmt: skip
CASES = ((1, 128, 64), (16, 128, 64), (1, 2048, 32))  # rows, tokens of each prompt, new tokens
SEED = 0

THEIRS = """
import json, sys, time, torch
from transformers import ZayaForCausalLM
torch.set_num_threads(int(sys.argv[3]))
model = ZayaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
found = []
for case in json.loads(open(sys.argv[2]).read()):
    ids = torch.tensor(case["ids"])
    def run(num):
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False)
        return time.perf_counter() - begin, out[:, ids.shape[1]:].tolist()
    run(2)
    first, _ = run(1)
    whole, new = run(case["num"])
    found.append({"prefill": first, "token": (whole - first) / (case["num"] - 1), "ids": new})
print(json.dumps(found))
"""


def ours(folder: str, cases: list[dict]) -> list[dict]:
    """Seconds to the first token and for each further one, and the ids."""
    from zaya_jax.model import decode
    from zaya_jax.pytorch import hf

    model, found = hf.load(folder), []
    for case in cases:

        def run(num, case=case):
            begin = time.perf_counter()
            new = decode.generate(
                model.model, model.params, model.balance, case["ids"], num, model.precision, room=case["num"]
            )
            return time.perf_counter() - begin, new

        run(2), run(1)
        first, _ = run(1)
        whole, new = run(case["num"])
        found.append({"prefill": first, "token": (whole - first) / (case["num"] - 1), "ids": new})
    return found
