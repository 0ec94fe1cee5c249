"""Generation here and in transformers: the same exported model, prompts and machine, greedy, in one
run.

    python -m benchmarks.generation --torch-python=ORACLE/bin/python [--sizes small wide] [--rounds=3]
    python -m benchmarks.generation --torch-python=PYTHON --device=gpu --sizes=slice

ORACLE is a Python 3.11 environment with torch 2.13.0 and transformers 5.23.0. A model of random
weights is written as a model directory, which both read. Each side runs in a process of its own on
the same single core, by turns, and the result is the least CPU time of the rounds, which on a
shared machine is reproducible, while wall time depends on the other users. Both continue greedily
in float32, and the ids are compared. On a GPU it is wall time, in float32 and in bfloat16.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
    "tiny": {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "router_hidden_size": 24,
    },
    # of ZAYA1-base, for a GPU: fewer words, since PyTorch keeps the logits of all in float32
    "slice": {"vocab_size": 65536, "num_hidden_layers": 8},
}
DRAWN = 1_000_003  # numbers of a weight at most, repeated: a prime, so that no two rows are alike
ON_GPU = ((1, 128, 128), (16, 128, 128))
CASES = ((1, 128, 64), (16, 128, 64), (1, 2048, 32))  # rows, tokens of each prompt, new tokens
SEED = 0

THEIRS = """
import json, sys, time, torch
from transformers import ZayaForCausalLM
on_gpu = sys.argv[3] == "gpu"
device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
clock = time.perf_counter if on_gpu else time.process_time
how = dict(attn_implementation="sdpa", experts_implementation="grouped_mm") if on_gpu else {}
if not on_gpu:
    torch.set_num_threads(1)
model = ZayaForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[4]), **how).to(device).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
found = []
for case in json.loads(open(sys.argv[2]).read()):
    ids = torch.tensor(case["ids"]).to(device)
    def run(num):
        begin = clock()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False)
        new = out[:, ids.shape[1]:].tolist()
        return clock() - begin, new
    run(2)
    first, _ = run(1)
    whole, new = run(case["num"])
    found.append({"prefill": first, "token": (whole - first) / (case["num"] - 1), "ids": new})
print(json.dumps(found))
"""


def ours(folder: str, cases: list[dict], device: str, dtype: str) -> list[dict]:
    """Seconds to the first token and for each further one, and the ids."""
    import zaya_jax as zj
    from zaya_jax.hardware import sizing
    from zaya_jax.model import decode

    sizing.set_for_platform()
    model, found = zj.load(folder, dtype=dtype), []
    clock = time.perf_counter if device == "gpu" else time.process_time
    decoder = decode.Decoder(
        model.config.model, model.params, model.balance, model.config.precision
    )
    for case in cases:

        def run(num, case=case):
            begin = clock()
            new = decode.generate(decoder, case["ids"], num)
            return clock() - begin, new

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
        some = rng.standard_normal(min(math.prod(shape), DRAWN), np.float32)
        x = np.resize(some, shape)
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
    parser.add_argument("--torch-python", help="without it, our side alone")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "wide"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    # this program as the process of our side
    parser.add_argument("--ours", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        folder, file, *how = args.ours
        print(json.dumps(ours(folder, json.loads(Path(file).read_text()), *how)))
        return
    cpu = args.device == "cpu"
    if cpu:  # those that are started have it too
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    where = "one core" if cpu else "one GPU"
    print(f"{where}, Python {platform.python_version()}, {args.rounds} rounds\n")
    print(
        "| model | rows | prompt | | zaya_jax | transformers | ratio | same ids"
        " |\n|---|---|---|---|---|---|---|---|"
    )
    sizes = CASES if cpu else ON_GPU
    for size in args.sizes:
        keys = SIZES[size]
        with tempfile.TemporaryDirectory() as made:
            folder, rng = Path(made), np.random.default_rng(SEED)
            weights = write_model(folder, keys)
            cases = [
                {"ids": rng.integers(3, keys["vocab_size"], (rows, length)).tolist(), "num": num}
                for rows, length, num in sizes
            ]
            (folder / "cases.json").write_text(json.dumps(cases))
            for dtype in ("float32",) if cpu else ("float32", "bfloat16"):
                given = [str(folder), str(folder / "cases.json"), args.device, dtype]
                program = [sys.executable, "-m", "benchmarks.generation", "--ours"]
                commands = [[*program, *given], [args.torch_python, "-c", THEIRS, *given]]
                commands = commands[: 2 if args.torch_python else 1]
                about = f"{size}, {weights / 1e6:,.0f}M" + ("" if cpu else f", {dtype}")
                compare(commands, args.rounds, about, sizes)


def compare(commands: list[list[str]], count: int, about: str, sizes: Any) -> None:
    """Runs the sides by turns, and prints the rows of a model."""
    rounds: list[list] = [[] for _ in commands]
    for _ in range(count):
        for command, found in zip(commands, rounds, strict=True):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    for i, (rows, length, num) in enumerate(sizes):
        pairs = zip(rounds[0][0][i]["ids"], rounds[-1][0][i]["ids"], strict=True)
        same = np.mean([a == b for a, b in pairs])
        for what, unit in (("prefill", "ms"), ("token", "ms a token")):
            best = [min(found[i][what] for found in side) * 1e3 for side in rounds]
            cells = [f"{ms:,.1f} {unit}" for ms in best]
            if len(best) == 2:
                cells += [f"{best[1] / best[0]:.2f}", f"{same:.0%} of rows, {num} tokens"]
            print(f"| {about} | {rows} | {length} | {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
