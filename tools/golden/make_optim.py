"""Writes the expected numbers of tests/optim/test_against_torch.py: 20 steps of PyTorch's Muon and
AdamW.

Run with Python 3.11, torch 2.13.0 and numpy:  python tools/golden/make_optim.py

Matrices and gradients come from NumPy's RandomState, whose streams are frozen, so that only results
are kept. torch's Muon runs its Newton-Schulz iteration in bfloat16; `copy` is the same arithmetic
in a number format of choice, shown here to be the same by running it in bfloat16, where it must
give torch's parameters bit for bit. A float32 iteration is compared with the copy in float32;
torch's distance from that is the measure for a bfloat16 one. Weights here are [out, in], as PyTorch
has them.
"""

import math
import pathlib

import numpy as np

try:
    import torch
except ImportError:  # the test needs the numbers alone
    torch = None

SHAPES = {"tall": (96, 40), "wide": (40, 96), "square": (48, 48)}
STEPS, LR, DECAY = 20, 0.02, 0.1
OUT = (
    pathlib.Path(__file__).resolve().parent.parent.parent
    / "tests"
    / "golden"
    / "optim"
    / "expected.npz"
)


def numbers(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """A start and the gradients of all steps."""
    random = np.random.RandomState(sum(map(ord, name)))
    shape = SHAPES[name]
    start = 0.1 * random.standard_normal(shape)
    # a constant part, so that momentum has something to gather
    drift = random.standard_normal(shape)
    gradients = [drift + random.standard_normal(shape) for _ in range(STEPS)]
    return start.astype(np.float32), [g.astype(np.float32) for g in gradients]


def copy(p, g, buf, adjust: str, dtype, momentum=0.95, abc=(3.4445, -4.7750, 2.0315)) -> None:
    """One step of torch.optim.Muon with the iteration in `dtype`, in place."""
    buf.lerp_(g, 1 - momentum)
    x = g.lerp(buf, momentum).to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = abc
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    rows, columns = p.shape
    scale = (
        0.2 * math.sqrt(max(p.shape))
        if adjust == "match_rms_adamw"
        else math.sqrt(max(1, rows / columns))
    )
    p.mul_(1 - LR * DECAY)
    p.add_(x.T if tall else x, alpha=-LR * scale)


def run(make, start, gradients) -> np.ndarray:
    """The parameter after all steps of an optimizer."""
    p = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([p])
    for g in gradients:
        p.grad = torch.tensor(g)
        optimizer.step()
    return p.detach().numpy()


def run_copy(start, gradients, adjust, dtype) -> np.ndarray:
    """The same of `copy`."""
    p, buf = torch.tensor(start), torch.zeros(start.shape)
    for g in gradients:
        copy(p, torch.tensor(g), buf, adjust, dtype)
    return p.numpy()


def main() -> None:
    """Writes tests/golden/optim/expected.npz."""
    expected = {}
    for name in SHAPES:
        start, gradients = numbers(name)
        for adjust in ("match_rms_adamw", "original"):
            options = dict(
                lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=True, adjust_lr_fn=adjust
            )
            torchs = run(lambda ps, o=options: torch.optim.Muon(ps, **o), start, gradients)
            if not np.array_equal(torchs, run_copy(start, gradients, adjust, torch.bfloat16)):
                raise SystemExit(f"the copy is no copy of torch.optim.Muon: {name}, {adjust}")
            expected[f"{name} {adjust} bfloat16"] = torchs
            expected[f"{name} {adjust} float32"] = run_copy(start, gradients, adjust, torch.float32)
        options = dict(lr=LR, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8)
        expected[f"{name} adamw"] = run(
            lambda ps, o=options: torch.optim.AdamW(ps, **o), start, gradients
        )
    np.savez_compressed(OUT, **expected)


if __name__ == "__main__":
    main()
