"""Muon against AdamW with a tuned learning rate: 200 steps of the embedded tiny run, same data and
seed for all.

    python benchmarks/muon_adamw.py train --out=DIR    the grid (runs that are complete are not repeated)
    python benchmarks/muon_adamw.py draw --out=DIR     the table, and benchmarks/muon_adamw.png
    python benchmarks/muon_adamw.py time               seconds per step and an update of each, in turns

Every run is `experiments.pretrain` on experiments/configs/tiny.py with 8 sequences a step in place
of 16, 200 steps and a warm-up of 20 (short warm-ups are Muon's advantage). Muon's rows of the
optimizer's table go to AdamW in AdamW's runs; all else is equal. `time` has tiny's own 16
sequences.
"""

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.configs import tiny
from zaya_jax import cli
from zaya_jax import config as config_lib
from zaya_jax.config import UserError
from zaya_jax.data import pipeline
from zaya_jax.hardware import host
from zaya_jax.hardware.chips import model_flops
from zaya_jax.model import zaya
from zaya_jax.optim import chain, muon
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.run import train as train_run
from zaya_jax.text import tokenizers
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

GRID = {"adamw": (1e-3, 2e-3, 4e-3, 8e-3), "muon": (1.5e-3, 3e-3, 6e-3, 1.2e-2)}
COLORS = {"adamw": "tab:red", "muon": "tab:blue"}
ROUNDS, TURN = 8, 3  # of `time`: rounds, steps of each in a round
HERE = pathlib.Path(__file__).parent


def settings(name: str, lr: float) -> ConfigDict:
    """The config of a run."""
    c = tiny.get_config()
    c.name = f"{name}_{lr:g}"
    c.optim.name, c.optim.lr = name, lr
    c.data.global_batch = 8
    c.run.num_steps = 200
    c.schedule.warmup_fraction = 0.1
    c.eval.every = 50
    c.checkpoint.every_steps = 10_000  # only the last
    return c


def train(out: pathlib.Path) -> None:
    """All runs, one after another."""
    for name, rates in GRID.items():
        for lr in rates:
            config = config_lib.check(settings(name, lr))
            if not (out / config.name / "report.html").exists() and train_run(
                config, out / config.name
            ):
                sys.exit(f"{config.name} did not end well")


def draw(out: pathlib.Path) -> None:
    """Prints the table and draws the picture of the runs that are there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    print(
        "| optimizer | peak lr | train loss, last 20 steps | held-out after 50 / 100 / 150 / 200"
        " steps |"
    )
    print("|---|---|---|---|")
    curves, final = {}, {}
    for name, rates in GRID.items():
        for lr in rates:
            text = (out / f"{name}_{lr:g}" / "metrics.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            loss = np.array([line["loss"] for line in lines])
            held_out = [line["eval/loss"] for line in lines if "eval/loss" in line]
            curves[name, lr], final[name, lr] = loss, held_out[-1]
            shown = " / ".join(f"{x:.3f}" for x in held_out)
            print(f"| {name} | {lr:g} | {loss[-20:].mean():.3f} | {shown} |")
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), layout="constrained", width_ratios=(2, 1)
    )
    for name, rates in GRID.items():
        best = min(rates, key=lambda lr: final[name, lr])
        for lr in rates:
            smooth = np.convolve(curves[name, lr], np.ones(9) / 9, "valid")
            look = (
                dict(lw=2, label=f"{name}, lr {lr:g} (its best)")
                if lr == best
                else dict(lw=0.8, alpha=0.5)
            )
            left.plot(np.arange(5, 5 + len(smooth)), smooth, color=COLORS[name], **look)
        right.plot(rates, [final[name, lr] for lr in rates], "o-", color=COLORS[name], label=name)
    left.set(
        title="Train loss (mean of 9 steps)", xlabel="step", ylabel="nats per byte", ylim=(None, 4)
    )
    right.set(title="Held-out loss after 200 steps", xlabel="peak learning rate", xscale="log")
    right.set_xticks((1e-3, 2e-3, 4e-3, 8e-3), ("0.001", "0.002", "0.004", "0.008"))
    right.minorticks_off()
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(HERE / "muon_adamw.png", dpi=100)


def time_both() -> None:
    """Prints seconds per step and per update of each, and the formula's estimate of the
    difference."""
    programs = {name: program(name) for name in GRID}
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_ in range(ROUNDS + 1):  # the first compiles
        for name, parts in programs.items():
            for part, run in parts.items():
                begun = time.perf_counter()
                for _ in range(TURN):
                    run()
                if round_:
                    seconds.setdefault((name, part), []).append(
                        (time.perf_counter() - begun) / TURN
                    )
    print("| optimizer | step, ms | update alone, ms |")
    print("|---|---|---|")
    for name in programs:
        step, update = (1e3 * statistics.median(seconds[name, part]) for part in ("step", "update"))
        print(f"| {name} | {step:.0f} | {update:.1f} |")
    config = config_lib.check(tiny.get_config())
    weights = chain.build(
        config.optim, config.precision, zaya.abstract(config.model)
    ).layout.weights
    newton_schulz = sum(muon.newton_schulz_flops(w.shape) for w in weights if w.method == "muon")
    tokens = config.data.global_batch * config.data.seq_len
    model = model_flops(config.model, config.data.seq_len) * tokens
    print(
        f"\nBy formula: Newton-Schulz {newton_schulz / 1e9:.1f} GFLOP per step, the model"
        f" {model / 1e9:.1f} GFLOP ({newton_schulz / model:.0%})"
    )


def program(name: str) -> dict[str, Callable[[], None]]:
    """One training step, and one update alone, of tiny with this optimizer; each carries its own
    state."""
    raw = tiny.get_config()
    raw.optim.name = name
    config = config_lib.check(raw)
    mesh = make_mesh(config.mesh)
    optimizer = states.build_optimizer(config, mesh)
    carried = states.init(config, optimizer, mesh)
    host = next(pipeline.train_stream(config, tokenizers.load(config.data.tokenizer)))
    batch = steps.put_batch(mesh, host, 1)
    train_step = steps.make_train_step(config, config.model, optimizer, mesh)
    alone = chain.build(config.optim, config.precision, zaya.abstract(config.model))
    grads = jax.tree.map(lambda x: x + 0.01, carried["params"])
    state = alone.init()
    update = jax.jit(lambda state, params: alone.update(grads, state, params, lr=1e-3))

    def run_step() -> None:
        nonlocal carried
        carried, _ = jax.block_until_ready(train_step(carried, batch, np.float32(1e-3)))

    def run_update() -> None:
        jax.block_until_ready(update(state, carried["params"]))

    return {"step": run_step, "update": run_update}


def main() -> int:
    """One of the three commands."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument("command", choices=("train", "draw", "time"))
    parser.add_argument("--out", type=pathlib.Path, help="the directory of the runs")
    options = parser.parse_args()
    host.keep_memory()
    if options.command == "time":
        host.keep_compiled()
        time_both()
        return cli.DONE
    if options.out is None:
        raise UserError(f"{options.command} needs --out, the directory of the runs")
    {"train": train, "draw": draw}[options.command](options.out)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
