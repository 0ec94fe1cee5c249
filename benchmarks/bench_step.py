"""Tokens per second of the training step and of the public PyTorch implementation's, in one run.

    python -m benchmarks.bench_step --torch-python=ORACLE/bin/python [--shape=other] [--rounds=8]
    python -m benchmarks.bench_step --torch-python=PYTHON --device=gpu --shape=slice

ORACLE is a Python 3.11 environment with torch 2.13.0 and transformers 5.23.0
(tools/golden/make_golden.py says how to make one). Both sides train the same weights on the same
batch with AdamW (PyTorch's fused); the losses of the first step must be equal to 1e-2. On a CPU of
two threads they take turns, a few steps each, so that a machine whose speed drifts slows both.
Medians over rounds; the speed relative to the first side is of neighbouring turns.

A GPU holds one side after the other, in bfloat16: ours with our router in float32; PyTorch by
autocast, its attention by SDPA, its experts by grouped products; then the same compiled. Where its
activations do not fit, PyTorch computes its layers again, and the table says so.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.generation import write_model

LOSS = 1e-2  # by which the losses of the first step may differ
DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("bfloat16",)}
# Batch, length, model: the one that was tuned for, and one that was not; a tiny one; a GPU's.
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
    "tiny": (
        2,
        64,
        dict(
            vocab_size=300,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=64,
            num_experts=4,
            router_hidden_size=24,
            max_position_embeddings=256,
        ),
    ),
    # of ZAYA1-base, for a GPU: fewer words, since PyTorch keeps the logits of all in float32
    "slice": (4, 4096, dict(vocab_size=65536, num_hidden_layers=8, max_position_embeddings=4096)),
}

TORCH = """
import sys, time, torch
from safetensors.torch import load_file
from transformers import ZayaForCausalLM
folder, on, rate, how = sys.argv[1:]
device, more = ("cuda" if torch.cuda.is_available() else "cpu"), {}
if on == "gpu":
    more = dict(attn_implementation="sdpa", experts_implementation="grouped_mm")
else:
    device = "cpu"
    torch.set_num_threads(2)
model = ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).to(device).train()
how_optimized = dict(lr=float(rate), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
optimizer = torch.optim.AdamW(model.parameters(), **how_optimized, fused=True)
batches, count = load_file(folder + "/ids.safetensors")["ids"], 0
step, note = torch.compile(model) if how == "compiled" else model, "-"
def train(dtype):
    ids = batches[count % len(batches)].long().to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = step(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
for line in sys.stdin:
    dtype, steps = line.split()
    begun = time.perf_counter()
    for _ in range(int(steps)):
        for _ in range(2):
            try:
                loss = train(dtype)
                break
            except torch.OutOfMemoryError:
                note = "layers-computed-again"
            optimizer.zero_grad()  # once more, without the activations; the error holds no more of them
            torch.cuda.empty_cache()
            model.gradient_checkpointing_enable()
        count += 1
    last = loss.item()
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0
    print((time.perf_counter() - begun) / int(steps), last, peak, note, flush=True)
"""


def serve(folder: str, on: str, rate: str) -> None:
    """Our side: reads "dtype steps" lines, answers seconds per step, the loss, the peak in GB."""
    from zaya_jax import config
    from zaya_jax.hardware import sizing
    from zaya_jax.hardware.host import keep_memory

    sizing.set_for_platform()
    keep_memory()
    import jax

    from benchmarks import one_device
    from zaya_jax.pytorch import hf
    from zaya_jax.training import kernels
    from zaya_jax.training import step as steps

    batches, device = load_file(f"{folder}/ids.safetensors")["ids"], jax.devices()[0]

    def program(dtype):
        settings = config.check(
            {
                "model": hf.Directory(folder).model,
                "optim": {"name": "adamw", "clip_norm": 0.0, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
                | {"weight_decay": 0.0},
                "balance": {"enabled": False},
                "run": {"skip_update": "never"},
                "data": {"seq_len": batches.shape[2]},
                "precision": {"compute": dtype, "router": dtype if on == "cpu" else "float32"},
            }
        )
        kernels.choose_tiles(settings, device)
        return one_device.start(settings, folder)

    programs = {dtype: program(dtype) for dtype in DTYPES[on]}
    count = 0
    for line in sys.stdin:
        dtype, number = line.split()
        step, state, mesh = programs[dtype]
        begun = time.perf_counter()
        for _ in range(int(number)):
            given = steps.put_batch(mesh, one_device.batch_of(batches[count % len(batches)]), 1)
            state, figures = step(state, given, np.float32(rate))
            count += 1
        loss = float(jax.block_until_ready(figures)["loss"])
        jax.block_until_ready(state)
        programs[dtype] = step, state, mesh
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
        print((time.perf_counter() - begun) / int(number), loss, peak, "-", flush=True)


def sides(python: str, folder: str, on: str, rate: float) -> dict[str, list[str]]:
    """The commands of all sides by name."""
    given = [folder, on, str(rate)]
    return {
        "zaya_jax": [sys.executable, "-m", "benchmarks.bench_step", "--serve", *given],
        "PyTorch": [python, "-c", TORCH, *given, "eager"],
        "PyTorch, compiled": [python, "-c", TORCH, *given, "compiled"],
    }


class Side:
    """One side's process."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.losses = list[float]()

    def turn(self, dtype: str, steps: int) -> tuple[float, float, float, str]:
        """Seconds of a step, of so many; the last one's loss; the peak in GB; a note."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{dtype} {steps}\n")
        self.process.stdin.flush()
        words = self.process.stdout.readline().split()
        if not words:
            raise RuntimeError(f"ended with {self.process.wait()}")
        self.losses.append(float(words[1]))
        seconds, loss, peak = map(float, words[:3])
        return seconds, loss, peak, words[3]

    def end(self) -> None:
        """Ends it; a GPU's memory is then free."""
        self.process.kill()
        self.process.wait()


def compare(
    commands: dict[str, list[str]],
    first: dict[str, list[float]],
    on: str,
    tokens: int,
    rounds: int,
    steps: int,
) -> list[float]:
    """Lines of the table for sides that are there at once, and the losses of their first steps. A
    side that fails, as a model that does not compile may, has its line. `first` keeps the seconds
    of the very first side, by format, for all that come later."""
    there = {name: Side(command) for name, command in commands.items()}
    for dtype in DTYPES[on]:
        try:
            for steps_at_first, side in itertools.product((1, 2), there.values()):
                side.turn(dtype, steps_at_first)
            found = [[side.turn(dtype, steps) for side in there.values()] for _ in range(rounds)]
        except (RuntimeError, OSError) as error:
            print(f"| {', '.join(there)} | {dtype} | {error} |" + " |" * 5, flush=True)
            break
        for place, (name, side) in enumerate(there.items()):
            own = [turn[place][0] for turn in found]
            seconds = statistics.median(own)
            beside = first.setdefault(dtype, own)
            ratios = sorted(theirs / ours for theirs, ours in zip(beside, own, strict=True))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            *_, peak, note = found[-1][place]
            print(
                f"| {name} | {dtype} | {tokens / seconds:,.0f} | {1e3 * seconds:,.1f} | {spread} |"
                f" {peak:.1f} | {side.losses[0]:.4f} | {note} |",
                flush=True,
            )
    for side in there.values():
        side.end()
    return [side.losses[0] for side in there.values() if side.losses]


def main() -> None:
    """Both sides, and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*args.serve)
    if args.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    batch_size, length, shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape)
        size = (1, batch_size, length)
        ids = np.random.default_rng(0).integers(3, shape["vocab_size"], size).astype(np.int32)
        save_file({"ids": ids}, f"{folder}/ids.safetensors")
        commands = sides(args.torch_python, folder, args.device, 1e-4)
        print(
            "| | products | tok/s | ms | to the first (least to greatest) | peak GB | loss at first |"
            " |\n" + "|---" * 8 + "|",
            flush=True,
        )
        groups = [{name: command} for name, command in commands.items()]
        if args.device == "cpu":
            groups = [groups[0] | groups[1]]
        how = args.device, batch_size * length, args.rounds, args.steps
        first: dict[str, list[float]] = {}
        losses = [loss for group in groups for loss in compare(group, first, *how)]
    if max(losses) - min(losses) > LOSS:
        print("WRONG: the losses of the first step differ")
    return None


if __name__ == "__main__":
    main()
