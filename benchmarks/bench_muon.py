"""Times Muon's update and torch.optim.Muon's, on the same matrices, in turns, in one run.

    python benchmarks/bench_muon.py --torch-python=PATH [--formats bfloat16 float32] [--rounds=7]
    python benchmarks/bench_muon.py --formula

PATH is a Python that has PyTorch 2.13 or later; it runs as a process of its own that waits while
ours steps. Both make the whole update (momentum, Newton-Schulz, decay, the new weights), once with
the iteration in bfloat16, as torch's always is, and once in float32: for that the torch process
turns the one conversion to bfloat16 that torch's Muon makes into none. Printed are medians over the
rounds; "share" is the rate of our whole update, counted by the iteration's products alone, over
that of one batched product of JAX's own of the same shapes and format, measured in the same rounds.

With --formula nothing runs: it prints Muon's FLOPs against the model's, for the full-size model, by
tokens a step and by devices. A device has ceil(n / devices) of the n matrices of each shape, each
of steps · (4 m² n + 2 m³) FLOPs.
"""

import argparse
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zaya_jax.config import Model, Optim, Precision
from zaya_jax.hardware import chips
from zaya_jax.model import zaya
from zaya_jax.optim import chain, muon

TOKENS = (2**15, 2**18, 2**21, 2**24)
DEVICES = (1, 8, 64, 1024)
FORMATS = ("bfloat16", "float32")  # of the iteration
SETS = {
    "64 of 512x512 and 64 of 512x1408": ((64, 512, 512), (64, 512, 1408)),
    "64 of 512x512 and 64 of 1408x512": ((64, 512, 512), (64, 1408, 512)),
}

TORCH = """
import sys, time, torch
device, to_bfloat16 = sys.argv[1], torch.Tensor.bfloat16
def sync():
    if device != "cpu": torch.cuda.synchronize()
print(torch.__version__, torch.get_num_threads(), flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "shapes":
        torch.Tensor.bfloat16 = to_bfloat16 if words[1] == "bfloat16" else torch.Tensor.float
        torch.manual_seed(0)
        sizes = [[int(n) for n in word.split("x")] for word in words[2:]]
        weights = [torch.nn.Parameter(torch.randn(a, b, device=device)) for n, a, b in sizes for _ in range(n)]
        for w in weights: w.grad = torch.randn_like(w)
        optimizer = torch.optim.Muon(weights, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    sync(); start = time.perf_counter(); optimizer.step(); sync()
    print(time.perf_counter() - start, flush=True)
"""


def ours(shapes: tuple[tuple[int, ...], ...], dtype: str) -> Callable[[], float]:
    """A function that makes one update and returns its seconds."""
    random = np.random.default_rng(0)

    def draw():
        return {
            f"w{i}": jnp.asarray(random.standard_normal(s, np.float32))
            for i, s in enumerate(shapes)
        }

    params, grads = draw(), draw()
    table = (chain.Row(".*", "matrices", "muon", True, "a benchmark"),)
    optimizer = chain.build(
        Optim(clip_norm=0.0), Precision(newton_schulz=dtype), params, table=table
    )

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params, lr=0.01)
        return optax.apply_updates(params, updates), state

    step, carried = jax.jit(update, donate_argnums=(0, 1)), [params, optimizer.init()]

    def timed() -> float:
        start = time.perf_counter()
        carried[:] = jax.block_until_ready(step(*carried, grads))
        return time.perf_counter() - start

    return timed


def products(shapes: tuple[tuple[int, ...], ...], dtype: str) -> Callable[[], float]:
    """A function that makes one batched product a shape, as the iteration has them, and returns
    FLOP/s."""
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(
        lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)
    )
    pairs, flops = [], 0
    for n, *sides in shapes:
        small, large = sorted(sides)
        pairs.append((jnp.ones((n, small, small), dtype), jnp.ones((n, small, large), dtype)))
        flops += 2 * n * small * small * large

    def timed() -> float:
        start = time.perf_counter()
        for a, b in pairs:
            jax.block_until_ready(product(a, b))
        return flops / (time.perf_counter() - start)

    return timed


def print_formula() -> None:
    """Prints Muon's FLOPs over the model's on the busiest device: ZAYA1-base at 4K context."""
    model = Model()
    per_token, shapes = chips.model_flops(model, 4096), zaya.abstract(model)
    print("| tokens per step | " + " | ".join(f"{n:,} devices" for n in DEVICES) + " |")
    print("|---|" + "---|" * len(DEVICES))
    for tokens in TOKENS:
        shares = []
        for devices in DEVICES:
            layout = chain.build(Optim(), Precision(), shapes, axes={"data": devices}).layout
            if devices == 1:
                stacks = [w.shape for w in layout.weights if w.method == "muon"]
                work = sum(muon.newton_schulz_flops(s) for s in stacks)
            else:
                work = 5 * int(layout.work.max())  # five steps of the iteration
            shares.append(work / (per_token * tokens / devices))
        print(f"| {tokens:,} | " + " | ".join(f"{share:.2%}" for share in shares) + " |")


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--torch-python", help="a Python interpreter that has PyTorch")
    what.add_argument("--formula", action="store_true", help="print the share of FLOPs instead")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.formula:
        print_formula()
        return
    backend = jax.default_backend()
    device = "cpu" if backend == "cpu" else "cuda"
    command = [options.torch_python, "-c", TORCH, device]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as torch:
        assert torch.stdin is not None and torch.stdout is not None
        version, threads = torch.stdout.readline().split()
        print(
            f"jax {jax.__version__} on {jax.devices()[0].device_kind}, torch {version} ({threads}"
            " threads)"
        )
        print("| matrices | format | ours, ms | torch, ms | ours / torch | ours, GFLOP/s | share |")
        print("|---|---|---|---|---|---|---|")
        for dtype, (name, shapes) in itertools.product(options.formats, SETS.items()):
            ask = f"shapes {dtype} " + " ".join("x".join(map(str, s)) for s in shapes)
            update, rate_of_products = ours(shapes, dtype), products(shapes, dtype)
            times: dict[str, list[float]] = {"ours": [], "torch": [], "products": []}
            for _ in range(options.rounds + 1):  # the first round compiles
                print(ask, file=torch.stdin, flush=True)
                times["torch"].append(float(torch.stdout.readline()))
                ask = "step"
                time.sleep(0.3)  # threads of a pool that still spin would slow the other down
                times["ours"].append(update())
                times["products"].append(rate_of_products())
            a, b, best = (
                statistics.median(times[what][1:]) for what in ("ours", "torch", "products")
            )
            rate = sum(muon.newton_schulz_flops(s) for s in shapes) / a
            print(
                f"| {name} | {dtype} | {a * 1e3:.0f} | {b * 1e3:.0f} | {a / b:.2f} |"
                f" {rate / 1e9:.0f} | {rate / best:.0%} |",
                flush=True,
            )
        torch.stdin.close()


if __name__ == "__main__":
    main()
