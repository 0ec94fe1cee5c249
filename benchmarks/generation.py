"""Generation here and in transformers: the same exported model, prompts and machine, greedy, in one
run.

    .venv/bin/python benchmarks/generation.py --torch-python=ORACLE/bin/python [--sizes small wide] [--rounds=3]

ORACLE is a Python 3.11 environment with torch 2.13.0 and transformers 5.23.0. A model of random
weights is written as a model directory, which both read. Each side runs in a process of its own on
the same single core, by turns, and the result is the least CPU time of the rounds, which on a
shared machine is reproducible, while wall time depends on the other users. Both continue greedily
in float32, and the ids are compared.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = {
    # Programs that a few megabytes of weights hardly fill, and one whose weights a token must read
    # from memory.
    "small": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "router_hidden_size": 64,
    },
    "wide": {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 1024,
        "num_experts": 8,
        "router_hidden_size": 128,
    },
}
CASES = ((1, 128, 64), (16, 128, 64), (1, 2048, 32))  # rows, tokens of each prompt, new tokens
SEED = 0

THEIRS = """
import json, sys, time, torch
from transformers import ZayaForCausalLM
torch.set_num_threads(1)
model = ZayaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
found = []
for case in json.loads(open(sys.argv[2]).read()):
    ids = torch.tensor(case["ids"])
    def run(num):
        begin = time.process_time()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False)
        return time.process_time() - begin, out[:, ids.shape[1]:].tolist()
    run(2)
    first, _ = run(1)
    whole, new = run(case["num"])
    found.append({"prefill": first, "token": (whole - first) / (case["num"] - 1), "ids": new})
print(json.dumps(found))
"""


def ours(folder: str, cases: list[dict]) -> list[dict]:
    """Seconds to the first token and for each further one, and the ids."""
    import zaya_jax as zj
    from zaya_jax.model import decode

    model, found = zj.load(folder), []
    decoder = decode.Decoder(
        model.config.model, model.params, model.balance, model.config.precision
    )
    for case in cases:

        def run(num, case=case):
            begin = time.process_time()
            new = decode.generate(decoder, case["ids"], num)
            return time.process_time() - begin, new

        run(1), run(case["num"])  # compiled
        first, _ = run(1)
        whole, new = run(case["num"])
        found.append({"prefill": first, "token": (whole - first) / (case["num"] - 1), "ids": new})
    return found


def write_model(folder: Path, keys: dict) -> int:
    """A model directory with random weights; how many there are."""
    from safetensors.numpy import save_file

    from zaya_jax.config import Model
    from zaya_jax.pytorch import hf, hf_names

    model, rng = Model(**keys), np.random.default_rng(SEED)

    def draw(name, shape):
        x = rng.standard_normal(shape, np.float32)
        if name.endswith(hf_names.BALANCE):
            return np.where(np.arange(shape[0]) == shape[0] - 1, -1, 0).astype(np.float32)
        if name.endswith("bias"):
            return 0.02 * x
        if len(shape) == 1:
            return 1 + 0.1 * x
        return x * shape[-1] ** -0.5

    tensors = {name: draw(name, shape) for name, shape in hf.expected_shapes(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_names.model_to_json(model, "float32")))
    return sum(x.size for x in tensors.values())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    # this program as the process of our side
    parser.add_argument("--ours", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(ours(args.ours[0], json.loads(Path(args.ours[1]).read_text()))))
        return
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # those that are started have it too
    print(f"one core, Python {platform.python_version()}, {args.rounds} rounds\n")
    print(
        "| model | rows | prompt | | zaya_jax | transformers | ratio | same ids"
        " |\n|---|---|---|---|---|---|---|---|"
    )
    for size in args.sizes:
        keys = SIZES[size]
        with tempfile.TemporaryDirectory() as made:
            folder, rng = Path(made), np.random.default_rng(SEED)
            weights = write_model(folder, keys)
            cases = [
                {"ids": rng.integers(3, keys["vocab_size"], (rows, length)).tolist(), "num": num}
                for rows, length, num in CASES
            ]
            (folder / "cases.json").write_text(json.dumps(cases))
            given = [str(folder), str(folder / "cases.json")]
            commands = (
                [sys.executable, __file__, "--torch-python", args.torch_python, "--ours", *given],
                [args.torch_python, "-c", THEIRS, *given],
            )
            rounds: list[list] = [[], []]
            for _ in range(args.rounds):
                for command, found in zip(commands, rounds, strict=True):
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode:
                        raise SystemExit(done.stderr)
                    found.append(json.loads(done.stdout.splitlines()[-1]))
            for i, (rows, length, num) in enumerate(CASES):
                same = np.mean(
                    [
                        a == b
                        for a, b in zip(rounds[0][0][i]["ids"], rounds[1][0][i]["ids"], strict=True)
                    ]
                )
                for what, unit in (("prefill", "ms"), ("token", "ms a token")):
                    a, b = (min(found[i][what] for found in side) * 1e3 for side in rounds)
                    print(
                        f"| {size}, {weights / 1e6:,.0f}M | {rows} | {length} | {what} | {a:,.1f}"
                        f" {unit} | {b:,.1f} {unit} | {b / a:.2f} | {same:.0%} of rows, {num}"
                        " tokens |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
