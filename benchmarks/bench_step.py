"""Tokens per second of the training step and of the public PyTorch implementation's, in one run.

    .venv/bin/python benchmarks/bench_step.py --torch-python=ORACLE/bin/python [--shape=other] [--rounds=8]

ORACLE is a Python 3.11 environment with torch 2.13.0 and transformers 5.23.0
(tools/golden/make_golden.py says how to make one). Both sides train the same shape with AdamW
(PyTorch's fused) on two threads; they take turns, a few steps each, so that a machine whose speed
drifts slows both. Medians over rounds; the ratio is of neighbouring turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

# Batch, length, model: the one that was tuned for, and one that was not.
SHAPES = {
    "small": (
        8,
        256,
        dict(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            moe_intermediate_size=256,
            num_experts=8,
            router_hidden_size=64,
            max_position_embeddings=256,
        ),
    ),
    "other": (
        2,
        1024,
        dict(
            vocab_size=8192,
            hidden_size=384,
            num_hidden_layers=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            moe_intermediate_size=512,
            num_experts=16,
            router_hidden_size=64,
            max_position_embeddings=1024,
        ),
    ),
}

TORCH = """
import sys, time, torch
from transformers import ZayaConfig, ZayaForCausalLM
torch.set_num_threads(2)
torch.manual_seed(0)
model = ZayaForCausalLM(ZayaConfig(**SHAPE)).float().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
ids = torch.randint(3, SHAPE["vocab_size"], (BATCH, LENGTH))
for line in sys.stdin:
    dtype, steps = line.split()
    begun = time.perf_counter()
    for _ in range(int(steps)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print((time.perf_counter() - begun) / int(steps), loss.item(), flush=True)
"""


def serve(batch_size: int, length: int, shape: dict) -> None:
    """Our side: reads "dtype steps" lines, answers seconds per step and the loss."""
    from zaya_jax import config
    from zaya_jax.hardware.host import keep_memory

    keep_memory()
    import jax
    import numpy as np

    from zaya_jax.model import zaya
    from zaya_jax.optim import chain
    from zaya_jax.parallel.mesh import make_mesh
    from zaya_jax.training import state as states
    from zaya_jax.training import step as steps

    ids = (
        np.random.default_rng(0)
        .integers(3, shape["vocab_size"], (batch_size, length + 1))
        .astype(np.int32)
    )
    given = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": np.ones((batch_size, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (batch_size, 1)),
        "loss_mask": np.ones((batch_size, length), np.float32),
    }

    def program(dtype):
        settings = config.check(
            {
                "model": shape,
                "optim": {"name": "adamw", "clip_norm": 0.0},
                "data": {"seq_len": length},
                "precision": {"compute": dtype, "router": dtype},
            }
        )
        mesh = make_mesh(settings.mesh)
        optimizer = chain.build(
            settings.optim, settings.precision, zaya.abstract(settings.model), axes=mesh.shape
        )
        state = states.init(settings, optimizer, mesh)
        return [
            steps.make_train_step(settings, settings.model, optimizer, mesh),
            state,
            steps.put_batch(mesh, given, 1),
        ]

    programs = {dtype: program(dtype) for dtype in ("float32", "bfloat16")}
    for line in sys.stdin:
        dtype, count = line.split()
        step, state, batch = programs[dtype]
        begun = time.perf_counter()
        for _ in range(int(count)):
            state, figures = step(state, batch, np.float32(1e-4))
        loss = float(jax.block_until_ready(figures)["loss"])
        jax.block_until_ready(state)
        programs[dtype][1] = state
        print((time.perf_counter() - begun) / int(count), loss, flush=True)


def main() -> None:
    """Both sides in turns, and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    batch_size, length, shape = SHAPES[args.shape]
    if args.serve:
        return serve(batch_size, length, shape)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}

    def start(command):
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    ours = start([sys.executable, __file__, "--serve", f"--shape={args.shape}"])
    theirs = start(
        [
            args.torch_python,
            "-c",
            f"SHAPE, BATCH, LENGTH = {shape!r}, {batch_size}, {length}\n{TORCH}",
        ]
    )

    def turn(side, dtype, steps):
        side.stdin.write(f"{dtype} {steps}\n")
        side.stdin.flush()
        return float(side.stdout.readline().split()[0])

    tokens = batch_size * length
    print(
        "| | zaya_jax tok/s | PyTorch tok/s | ratio (median, least to greatest)"
        " |\n|---|---|---|---|"
    )
    for dtype in ("float32", "bfloat16"):
        for side in (ours, theirs):
            turn(side, dtype, 2)
        pairs = [
            (turn(ours, dtype, args.steps), turn(theirs, dtype, args.steps))
            for _ in range(args.rounds)
        ]
        ratios = [b / a for a, b in pairs]
        mine, yours = (tokens / statistics.median(x) for x in zip(*pairs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {dtype} | {mine:,.0f} | {yours:,.0f} | {spread} |", flush=True)
    for side in (ours, theirs):
        side.stdin.close()
        side.wait()
    return None


if __name__ == "__main__":
    main()
