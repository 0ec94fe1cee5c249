"""Training parity: the same weights, data and optimizer here and in the public PyTorch
implementation, loss by loss.

    python -m benchmarks.torch_parity --torch-python=ORACLE/bin/python [--case=tests/golden/base] [--steps=30]
    python -m benchmarks.torch_parity --torch-python=PYTHON --curve=DIR --seconds=180     0.3B parameters on a GPU

ORACLE is an environment with torch 2.13.0 and transformers 5.23.0. Both start from the case's
weights, train in float32 with AdamW on the same random tokens, without clipping, z-loss or
balancing, and decay the same weights; PyTorch's losses are stored for a test. The second command
trains both sides of `bench_step` for so many seconds each, one after the other, in bfloat16
products, and draws DIR/seconds.svg: the loss by step and by second.
"""

import argparse
import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from safetensors.numpy import save_file

import zaya_jax as zj
from benchmarks import bench_step
from benchmarks.one_device import batch_of, start
from tools.rehearse import corpus
from zaya_jax.config import Balance, Config, Data, Optim, Precision, Run
from zaya_jax.hardware import host
from zaya_jax.model import zaya
from zaya_jax.optim import chain
from zaya_jax.pytorch import hf, hf_names
from zaya_jax.training import step as steps

LR, DECAY, B1, B2, EPS = 1e-3, 0.1, 0.9, 0.95, 1e-8
BATCH, LENGTH = 4, 64
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "torch_parity"}
TURN = 10  # steps from loss to loss of a timed run
MODEL = dict(
    vocab_size=264,
    hidden_size=96,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=384,
    num_experts=16,
    router_hidden_size=24,
    max_position_embeddings=256,
)
WIDE = dict(  # on a GPU
    hidden_size=1024,
    num_attention_heads=8,
    head_dim=64,
    moe_intermediate_size=1024,
    num_experts=8,
    router_hidden_size=128,
    max_position_embeddings=2048,
)

TORCH = """
import json, sys, torch
from safetensors.torch import load_file
from transformers import ZayaForCausalLM
case, ids_file, rows_file, optim = sys.argv[1:]
optim = json.loads(optim)
model = ZayaForCausalLM.from_pretrained(case, dtype=torch.float32).train()
stored = load_file(case + "/model.safetensors")
for name, buffer in model.named_buffers():  # from_pretrained resets the skip biases
    if name in stored:
        buffer.copy_(stored[name])
rows = json.load(open(rows_file))  # name: whether it is decayed
groups = {}
for name, p in model.named_parameters():
    groups.setdefault(rows[name], []).append(p)
kinds = [dict(params=p, weight_decay=optim["weight_decay"] if decayed else 0.0) for decayed, p in groups.items()]
optimizer = torch.optim.AdamW(kinds, lr=optim["lr"], betas=(optim["b1"], optim["b2"]), eps=optim["eps"])
losses = []
for ids in load_file(ids_file)["ids"]:
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print(len(losses), losses[-1], file=sys.stderr, flush=True)
print(json.dumps(losses))
"""


def windows(*shape: int) -> np.ndarray:
    """Stretches of the standard library's sources from random places, a token a byte."""
    data = np.frombuffer("".join(corpus.code()).encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(data) - shape[-1], (*shape[:-1], 1))
    return data[starts + np.arange(shape[-1])].astype(np.int32)


def settings_for(case: str | Path) -> Config:
    """The config of our side."""
    model = hf.Directory(case).model
    return Config(
        model=model,
        data=Data(seq_len=LENGTH, global_batch=BATCH),
        optim=Optim(name="adamw", lr=LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, clip_norm=0.0),
        balance=Balance(enabled=False),
        run=Run(skip_update="never"),
        precision=Precision(compute="float32", router="float32", matmul="highest"),
    )


def tokens(vocab: int, num_steps: int) -> np.ndarray:
    """Ids [steps, B, S] with something to learn: each token mostly decides the next."""
    rng = np.random.default_rng(0)
    follow, ids = rng.permutation(vocab), rng.integers(3, vocab, (num_steps, BATCH, LENGTH))
    for i in range(1, LENGTH):
        ids[..., i] = np.where(
            rng.random((num_steps, BATCH)) < 0.8, follow[ids[..., i - 1]], ids[..., i]
        )
    return ids


def our_losses(case: str | Path, ids: np.ndarray) -> list[float]:
    """Each step's loss here."""
    step, state, mesh = start(settings_for(case), case)
    losses = []
    for rows in ids:
        batch = steps.put_batch(mesh, batch_of(rows), 1)
        state, figures = step(state, batch, np.float32(LR))
        losses.append(float(figures["loss"]))
    return losses


def decayed(settings: Config) -> dict[str, bool]:
    """Whether our table decays each weight, by its PyTorch name."""
    optimizer = chain.build(settings.optim, settings.precision, zaya.abstract(settings.model))
    found = {}
    for key, row, _ in hf_names.all_tensors(settings.model):
        if row.array.startswith("params."):
            path = row.array.removeprefix("params.").replace(".", "/")
            found[key] = optimizer.rules[path].decay
    return found


def their_losses(python: str, case: str | Path, ids: np.ndarray) -> list[float]:
    """PyTorch's losses."""
    settings = settings_for(case)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"ids": ids}, f"{folder}/ids.safetensors")
        Path(folder, "rows.json").write_text(json.dumps(decayed(settings)))
        files = [f"{folder}/ids.safetensors", f"{folder}/rows.json"]
        optim = json.dumps(dataclasses.asdict(settings.optim))
        command = [python, "-c", TORCH, str(case), *files, optim]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def timed(python: str, out: Path, seconds: float) -> None:
    """Both sides with AdamW from the same weights, each for so many seconds, and the picture."""
    c, small = zj.config.default(), jax.default_backend() == "cpu"
    c.model = MODEL if small else MODEL | WIDE
    shape = (50, BATCH, LENGTH) if small else (3000, 16, 2048)
    c.data.seq_len = shape[2]
    zj.create(c).to_hf(out / "timed")
    save_file({"ids": windows(*shape)}, out / "timed" / "ids.safetensors")
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    print("| | steps | seconds | tok/s | first loss | last |\n" + "|---" * 6 + "|", flush=True)
    sides = bench_step.sides(python, str(out / "timed"), "gpu", LR)
    for name in ("zaya_jax", "PyTorch"):
        side = bench_step.Side(sides[name])
        losses, times = [side.turn("bfloat16", 1)[1]], [0.0]  # the first step compiles
        while times[-1] < seconds:
            took, loss, *_ = side.turn("bfloat16", TURN)
            losses, times = [*losses, loss], [*times, times[-1] + TURN * took]
        side.end()
        count = TURN * (len(times) - 1)
        rate = count * shape[1] * shape[2] / times[-1]
        figures = f"{count} | {times[-1]:.1f} | {rate:,.0f} | {losses[0]:.4f} | {losses[-1]:.4f}"
        print(f"| {name} | {figures} |", flush=True)
        for panel, x in zip(panels, (np.arange(len(times)) * TURN, times), strict=True):
            panel.plot(x, losses, lw=1, label=name)
        panels[0].set(xlabel="step", ylabel="nats per byte")
        panels[1].set(xlabel="seconds from the first step's end")
        panels[1].legend()
        figure.savefig(out / "seconds.svg")


def main() -> None:
    """Losses on both sides, and the greatest distance between them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--case", default="tests/golden/base")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", help="JSON file for PyTorch's losses")
    parser.add_argument("--curve", type=Path, help="the folder of the timed runs")
    parser.add_argument("--device", choices=("gpu",), default="gpu", help="of the timed runs")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each side")
    args = parser.parse_args()
    host.keep_memory()
    if args.curve:
        timed(args.torch_python, args.curve, args.seconds)
        return
    ids = tokens(hf.Directory(args.case).model.vocab_size, args.steps)
    theirs = their_losses(args.torch_python, args.case, ids)
    ours = our_losses(args.case, ids)
    print("| step | zaya_jax | PyTorch | difference |\n|---|---|---|---|")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if i % 5 == 4 or i == 0:
            print(f"| {i + 1} | {a:.6f} | {b:.6f} | {a - b:+.1e} |")
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"\nGreatest difference over {args.steps} steps: {worst:.1e}")
    if args.out:
        Path(args.out).write_text(
            json.dumps({"steps": args.steps, "losses": theirs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
