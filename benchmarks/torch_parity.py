"""Training parity: the same weights, data and optimizer here and in the public PyTorch
implementation, loss by loss.

    python -m benchmarks.torch_parity --torch-python=ORACLE/bin/python [--case=tests/golden/base] [--steps=30]
    python -m benchmarks.torch_parity --torch-python=ORACLE/bin/python --curve=DIR     200 steps of 21M parameters
    python -m benchmarks.torch_parity --torch-python=PYTHON --curve=DIR --device=gpu --seconds=180     0.3B parameters

ORACLE is an environment with torch 2.14.1 and transformers 5.24.0 (or 2.13.0 and 5.23.0 without
--curve). Both start from the case's weights, train in float32 on the same tokens, without clipping,
z-loss or balancing, and decay the same weights. The first command has AdamW and random tokens, and
stores PyTorch's losses for a test; the second draws benchmarks/torch_parity.svg: torch's AdamW and
torch's Muon beside ours, on the standard library's sources, with two more of our runs from other
weights. What DIR has is not run again. The third trains both sides of `bench_step` for so many seconds each, one
after the other, in bfloat16 products, and draws DIR/seconds.svg: the loss by step and by second.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib import pyplot as plt

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
RATES = {"adamw": 1e-3, "muon": 3e-3}  # of the curves
STEPS, LAST, SEEDS = 200, 50, (0, 1, 2)  # of the curves; PyTorch has the first seed's weights
HERE = Path(__file__).parent
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
import json, sys, time, torch
from safetensors.torch import load_file
from transformers import ZayaForCausalLM
case, ids_file, rows_file, optim = sys.argv[1:]
optim = json.loads(optim)
model = ZayaForCausalLM.from_pretrained(case, dtype=torch.float32).train()
stored = load_file(case + "/model.safetensors")
for name, buffer in model.named_buffers():  # from_pretrained resets the skip biases
    if name in stored:
        buffer.copy_(stored[name])
rows = json.load(open(rows_file))  # name: (method, whether it is decayed)
groups, stacks = {}, []
for name, p in model.named_parameters():
    method, decayed = rows[name]
    if method == "muon" and p.ndim == 3:  # torch's Muon takes matrices: views of each expert's
        stacks.append((p, [torch.nn.Parameter(x) for x in p.detach()]))
        groups.setdefault((method, decayed), []).extend(stacks[-1][1])
    else:
        groups.setdefault((method, decayed), []).append(p)
optimizers = []
for (method, decayed), parameters in groups.items():
    kind = dict(params=parameters, lr=optim["lr"], weight_decay=optim["weight_decay"] if decayed else 0.0)
    if method == "muon":
        optimizers.append(torch.optim.Muon(**kind, momentum=optim["momentum"], adjust_lr_fn="match_rms_adamw"))
    else:
        optimizers.append(torch.optim.AdamW(**kind, betas=(optim["b1"], optim["b2"]), eps=optim["eps"]))
losses, begun = [], time.perf_counter()
for ids in load_file(ids_file)["ids"]:
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    for p, pieces in stacks:
        for piece, gradient in zip(pieces, p.grad):
            piece.grad = gradient
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    losses.append(loss.item())
    print(len(losses), losses[-1], file=sys.stderr, flush=True)
print(json.dumps({"losses": losses, "seconds": time.perf_counter() - begun, "torch": torch.__version__}))
"""


@functools.cache
def text(held_out: bool) -> np.ndarray:
    """The bytes of every twentieth source file, or of the others."""
    files = [source.encode() for i, source in enumerate(corpus.code()) if (i % 20 == 0) == held_out]
    return np.frombuffer(b"".join(files), np.uint8)


def windows(data: np.ndarray, generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Stretches of tokens from random places."""
    starts = generator.integers(0, len(data) - shape[-1], (*shape[:-1], 1))
    return data[starts + np.arange(shape[-1])].astype(np.int32)


def settings_for(case: str | Path, name: str = "adamw", lr: float = LR) -> Config:
    """The config of our side."""
    model = hf.Directory(case).model
    return Config(
        model=model,
        data=Data(seq_len=LENGTH, global_batch=BATCH),
        optim=Optim(name=name, lr=lr, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, clip_norm=0.0),
        balance=Balance(enabled=False),
        run=Run(skip_update="never"),
        # torch's Muon iterates in bfloat16
        precision=Precision(
            compute="float32", router="float32", matmul="highest", newton_schulz="bfloat16"
        ),
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


def our_losses(
    case: str | Path, ids: np.ndarray, name: str = "adamw", lr: float = LR
) -> list[float]:
    """Each step's loss here."""
    step, state, mesh = start(settings_for(case, name, lr), case)
    losses = []
    for rows in ids:
        batch = steps.put_batch(mesh, batch_of(rows), 1)
        state, figures = step(state, batch, np.float32(lr))
        losses.append(float(figures["loss"]))
    return losses


def table_rows(case: str | Path, name: str) -> dict[str, tuple[str, bool]]:
    """How our table trains each weight, by its PyTorch name: (method, whether it is decayed)."""
    settings = settings_for(case, name)
    optimizer = chain.build(settings.optim, settings.precision, zaya.abstract(settings.model))
    named = [
        (key, optimizer.rules[row.array.removeprefix("params.").replace(".", "/")])
        for key, row, _ in hf_names.all_tensors(settings.model)
        if row.array.startswith("params.")
    ]
    return {key: (row.method, row.decay) for key, row in named}


def their_losses(
    python: str, case: str | Path, ids: np.ndarray, name: str = "adamw", lr: float = LR
) -> dict[str, Any]:
    """PyTorch's losses, its seconds and its version."""
    from safetensors.numpy import save_file

    optim = dataclasses.asdict(settings_for(case, name, lr).optim)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"ids": ids}, f"{folder}/ids.safetensors")
        Path(folder, "rows.json").write_text(json.dumps(table_rows(case, name)))
        files = [f"{folder}/ids.safetensors", f"{folder}/rows.json"]
        command = [python, "-c", TORCH, str(case), *files, json.dumps(optim)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def once(path: Path, make: Callable[[], Any]) -> Any:
    """What a file holds; it is made first if it is not there."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def curves(python: str, out: Path) -> None:
    """Both optimizers: PyTorch's curve, ours from the same weights, ours from others."""
    c = zj.config.default()
    c.model = MODEL
    c.data.seq_len = LENGTH
    out.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        if not (out / f"weights{seed}").exists():
            model = zj.create(c, seed)
            model.to_hf(out / f"weights{seed}")
            print(f"seed {seed}: {model}")
    generator = np.random.default_rng(0)
    ids = windows(text(False), generator, STEPS, BATCH, LENGTH).astype(np.int64)
    found = {}
    for name, lr in RATES.items():
        ours = [
            once(
                out / f"{name}{seed}.json",
                functools.partial(our_losses, out / f"weights{seed}", ids, name, lr),
            )
            for seed in SEEDS
        ]
        ask = functools.partial(their_losses, python, (out / "weights0").resolve(), ids, name, lr)
        theirs = once(out / f"{name}_torch.json", ask)
        found[name] = np.array(ours), np.array(theirs["losses"])
    compare(found)


def timed(python: str, out: Path, seconds: float) -> None:
    """Both sides with AdamW from the same weights, each for so many seconds, and the picture."""
    from safetensors.numpy import save_file

    c, small = zj.config.default(), jax.default_backend() == "cpu"
    c.model = MODEL if small else MODEL | WIDE
    shape = (50, BATCH, LENGTH) if small else (3000, 16, 2048)
    c.data.seq_len = shape[2]
    zj.create(c).to_hf(out / "timed")
    ids = windows(text(False), np.random.default_rng(0), *shape)
    save_file({"ids": ids}, out / "timed" / "ids.safetensors")
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    print("| | steps | seconds | tok/s | first loss | last |\n" + "|---" * 6 + "|", flush=True)
    sides = bench_step.sides(python, str(out / "timed"), "gpu", RATES["adamw"])
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


def compare(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Prints how far apart the curves are, and draws them.

    Noise is the deviation between our seeds, root mean square over 21 steps around each. Two runs
    of unrelated weights are apart by more than 1.96 √2 times that in one step of twenty.
    """
    figure, panels = plt.subplots(
        2, len(found), figsize=(11, 6), layout="constrained", sharex=True, squeeze=False
    )
    last = f"last {LAST} steps:"
    print(
        f"| optimizer | apart, steps 1 to 10 | to 20 | to 200 | noise | steps beyond it | {last}"
        " ours | PyTorch |"
    )
    print("|---" * 8 + "|")
    for (name, (ours, theirs)), (upper, lower) in zip(found.items(), panels.T, strict=True):
        x, apart = np.arange(1, len(theirs) + 1), np.abs(ours[0] - theirs)
        around = np.lib.stride_tricks.sliding_window_view(
            np.pad(ours.var(axis=0, ddof=1), 10, "reflect"), 21
        )
        noise = np.sqrt(around.mean(axis=1))
        beyond = int((apart > 1.96 * np.sqrt(2) * noise).sum())
        figures = " | ".join(
            f"{v:.1e}" for v in (apart[:10].max(), apart[:20].max(), apart.max(), noise.mean())
        )
        ends = " / ".join(f"{v:.3f}" for v in ours[:, -LAST:].mean(axis=1))
        print(
            f"| {name} | {figures} | {beyond} of {len(x)} | {ends} | {theirs[-LAST:].mean():.3f} |"
        )
        upper.fill_between(
            x, ours.min(axis=0), ours.max(axis=0), alpha=0.3, label=f"ours, {len(ours)} seeds"
        )
        upper.plot(x, ours[0], lw=1.2, label="ours, seed 0")
        upper.plot(x, theirs, "--", lw=1.2, label="PyTorch, the same weights")
        upper.set(title=f"{name}, lr {RATES[name]:g}", ylabel="nats per byte")
        lower.semilogy(x, 1.96 * np.sqrt(2) * noise, lw=1, label="1.96 √2 deviations between seeds")
        lower.semilogy(x, np.maximum(apart, 1e-7), lw=1, label="difference from PyTorch")
        lower.set(xlabel="step", ylabel="nats per byte")
        for panel in (upper, lower):
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    figure.savefig(HERE / "torch_parity.svg", metadata={"Date": None})


def main() -> None:
    """Losses on both sides, and the greatest distance between them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--case", default="tests/golden/base")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", help="JSON file for PyTorch's losses")
    parser.add_argument("--curve", type=Path, help="the directory of the long runs")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each side, on a GPU")
    args = parser.parse_args()
    host.keep_memory()
    if args.curve and args.device == "gpu":
        timed(args.torch_python, args.curve, args.seconds)
        return
    if args.curve:
        host.keep_compiled()
        curves(args.torch_python, args.curve)
        return
    ids = tokens(hf.Directory(args.case).model.vocab_size, args.steps)
    theirs = their_losses(args.torch_python, args.case, ids)["losses"]
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
