"""Training parity: the same weights, data and AdamW here and in the public PyTorch implementation, loss by loss.

    .venv/bin/python benchmarks/torch_parity.py --torch-python=ORACLE/bin/python [--case=tests/golden/base] [--steps=30]

ORACLE is a Python 3.11 environment with torch 2.13.0 and transformers 5.23.0. Both sides start from the case's weights,
train in float32 on the same random tokens, without clipping, z-loss or balancing, and decay the same weights.
"""

import argparse
import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np

from zaya_jax.config import Balance, Config, Data, Optim, Precision
from zaya_jax.model import zaya
from zaya_jax.optim import balance, chain
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.pytorch import any_model, hf, hf_names
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

LR, DECAY, B1, B2, EPS = 1e-3, 0.1, 0.9, 0.95, 1e-8
BATCH, LENGTH = 4, 64

TORCH = """
import json, sys, torch
from safetensors.torch import load_file
from transformers import ZayaForCausalLM
case, ids_file, decayed_file, lr, decay, b1, b2, eps = sys.argv[1:]
torch.set_num_threads(2)
model = ZayaForCausalLM.from_pretrained(case, dtype=torch.float32).train()
stored = load_file(case + "/model.safetensors")
for name, buffer in model.named_buffers():  # from_pretrained resets the skip biases
    if name in stored:
        buffer.copy_(stored[name])
decayed = set(json.load(open(decayed_file)))
groups = {True: [], False: []}
for name, p in model.named_parameters():
    groups[name in decayed].append(p)
optimizer = torch.optim.AdamW(
    [{"params": groups[True], "weight_decay": float(decay)}, {"params": groups[False], "weight_decay": 0.0}],
    lr=float(lr), betas=(float(b1), float(b2)), eps=float(eps))
losses = []
for ids in load_file(ids_file)["ids"]:
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
"""


def settings_for(case: str | Path) -> Config:
    """The config of our side."""
    model = hf.Directory(case).model
    return Config(
        model=model,
        data=Data(seq_len=LENGTH - 1, global_batch=BATCH),
        optim=Optim(name="adamw", lr=LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, clip_norm=0.0),
        balance=Balance(enabled=False),
        precision=Precision(compute="float32", router="float32", matmul="highest"),
    )


def tokens(vocab: int, num_steps: int) -> np.ndarray:
    """Ids [steps, B, S] with something to learn: each token mostly decides the next."""
    rng = np.random.default_rng(0)
    follow, ids = rng.permutation(vocab), rng.integers(3, vocab, (num_steps, BATCH, LENGTH))
    for i in range(1, LENGTH):
        ids[..., i] = np.where(rng.random((num_steps, BATCH)) < 0.8, follow[ids[..., i - 1]], ids[..., i])
    return ids


def our_losses(case: str | Path, ids: np.ndarray) -> list[float]:
    """Each step's loss here."""
    settings, (params, bias) = settings_for(case), any_model.find(case).weights()
    mesh = make_mesh(dataclasses.replace(settings.mesh, data=1), jax.devices()[:1])
    optimizer = chain.build(settings.optim, settings.precision, zaya.abstract(settings.model), axes=dict(mesh.shape))
    state = states.init(settings, optimizer, mesh)
    start = balance.init(settings.model.num_hidden_layers, settings.model.num_experts)
    state |= {"params": params, "balance": start._replace(bias=bias)}
    state = jax.device_put(jax.tree.map(np.array, state), states.shardings(settings, optimizer, mesh))
    step, losses = steps.make_train_step(settings, settings.model, optimizer, mesh), []
    for rows in ids.astype(np.int32):
        shape = (BATCH, LENGTH - 1)
        batch = {
            "tokens": rows[:, :-1], "targets": rows[:, 1:], "segment_ids": np.ones(shape, np.int32),
            "positions": np.tile(np.arange(LENGTH - 1, dtype=np.int32), (BATCH, 1)),
            "loss_mask": np.ones(shape, np.float32),
        }  # fmt: skip
        state, figures = step(state, steps.put_batch(mesh, batch, 1), np.float32(LR))
        losses.append(float(figures["loss"]))
    return losses


def decayed_names(case: str | Path) -> list[str]:
    """The PyTorch names of the weights that our table decays."""
    model = hf.Directory(case).model
    shapes = {
        "/".join(k.key for k in path): x.shape
        for path, x in jax.tree_util.tree_flatten_with_path(zaya.abstract(model))[0]
    }
    claims = chain.claim(shapes)
    path = lambda row, layer: "/".join(row.path if layer is None else ("layers", *row.path))  # noqa: E731
    return [name for name, row, layer in hf_names.all_rows(model) if claims[path(row, layer)].decay]


def main() -> None:
    """Both curves, and the greatest distance between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--case", default="tests/golden/base")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", help="JSON file for PyTorch's losses")
    args = parser.parse_args()
    from safetensors.numpy import save_file

    ids = tokens(hf.Directory(args.case).model.vocab_size, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"ids": ids}, f"{folder}/ids.safetensors")
        Path(folder, "decayed.json").write_text(json.dumps(decayed_names(args.case)))
        numbers = [str(x) for x in (LR, DECAY, B1, B2, EPS)]
        command = [args.torch_python, "-c", TORCH, args.case, f"{folder}/ids.safetensors", f"{folder}/decayed.json"]
        done = subprocess.run([*command, *numbers], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = our_losses(args.case, ids)
    print("| step | zaya_jax | PyTorch | difference |\n|---|---|---|---|")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if i % 5 == 4 or i == 0:
            print(f"| {i + 1} | {a:.6f} | {b:.6f} | {a - b:+.1e} |")
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"\nGreatest difference over {args.steps} steps: {worst:.1e}")
    if args.out:
        Path(args.out).write_text(json.dumps({"steps": args.steps, "losses": theirs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
