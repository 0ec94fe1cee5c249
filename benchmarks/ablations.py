"""What ZAYA1's choices are worth in a small model: each is taken out alone, and the model trained
on the same text.

    nice -n 15 taskset -c 1 python -m benchmarks.ablations train --out=DIR     every run that DIR does not have
    python -m benchmarks.ablations draw --out=DIR                              the table, and benchmarks/ablations.svg

A run is a loop of one's own around the public library: `zj.create` with a layer or router of
own_parts.py, the config's keys, Muon, balancing and the schedule. A finished run is a line of
DIR/runs.jsonl. All runs of one seed see the same windows of the standard library's sources, byte by
byte, and are judged on files that none was trained on.
"""

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.stats

import zaya_jax as zj
from benchmarks import own_parts
from tools.rehearse import corpus
from zaya_jax import cli
from zaya_jax.hardware import host

STEPS, BATCH, LENGTH, SEEDS, RATE = 200, 8, 256, (0, 1, 2), 6e-3


class Variant(NamedTuple):
    """A model that differs in one choice from the one that it is held `against`."""

    asked: str
    keys: Any = ()  # of the config, by name
    layer: type[zj.Layer] | None = None
    router: type[zj.Router] | None = None
    against: str = "zaya"
    skip_bias: float = -1.0
    rates: tuple[float, ...] = (RATE,)


OFF, CLASSES = {"balance.enabled": False}, {"model.router_hidden_size": 9}
VARIANTS = {
    "zaya": Variant("", rates=(RATE, RATE / 2, RATE * 2)),
    "gqa_cache": Variant(
        "CCA, or GQA of an equal cache", {"model.num_attention_heads": 8}, own_parts.Grouped
    ),
    "gqa_flops": Variant(
        "CCA, or GQA of equal FLOPs", {"model.num_key_value_heads": 2}, own_parts.Grouped
    ),
    "no_eda": Variant("depth averaging, or none", router=own_parts.Alone),
    "no_scaling": Variant("residual scaling, or a sum", layer=own_parts.Unscaled),
    "no_skip": Variant("a skip class, or none", router=own_parts.NoSkip),
    "free_skip": Variant("a skip bias of -1, or 0", skip_bias=0.0),
    "linear": Variant(
        "an MLP router, or a linear one", CLASSES, router=own_parts.Linear, against="no_eda"
    ),
    "no_balance": Variant("loss-free balancing, or none", OFF),
    "auxiliary": Variant(
        "loss-free balancing, or an auxiliary loss", OFF, router=own_parts.Auxiliary
    ),
    "adamw": Variant("Muon, or AdamW", {"optim.name": "adamw"}, rates=(2e-3, 1e-3, 4e-3)),
}


def settings(name: str) -> zj.Config:
    """The config of a variant's runs. Its learning rate is 1, which each run multiplies by its
    own."""
    c = zj.config.default()
    c.model.vocab_size, c.model.hidden_size, c.model.num_hidden_layers, c.model.head_dim = (
        264,
        96,
        4,
        12,
    )
    # as in ZAYA1: half the width, an eighth
    c.model.num_attention_heads, c.model.num_key_value_heads = (4, 1)
    c.model.num_experts, c.model.moe_intermediate_size, c.model.router_hidden_size = 8, 96, 24
    c.model.max_position_embeddings, c.model.initializer_range = LENGTH, 0.05  # as in tiny
    c.data.seq_len, c.data.global_batch, c.run.num_steps, c.optim.lr = LENGTH, BATCH, STEPS, 1.0
    c.schedule.warmup_fraction, c.precision.compute = 0.1, "float32"
    c.update_from_flattened_dict(dict(VARIANTS[name].keys))
    return zj.config.check(c)


@functools.cache
def text(held_out: bool) -> np.ndarray:
    """The bytes of every twentieth source file, or of the others."""
    files = [source.encode() for i, source in enumerate(corpus.code()) if (i % 20 == 0) == held_out]
    return np.frombuffer(b"".join(files), np.uint8)


def windows(data: np.ndarray, generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Stretches of tokens from random places."""
    starts = generator.integers(0, len(data) - shape[-1], (*shape[:-1], 1))
    return data[starts + np.arange(shape[-1])].astype(np.int32)


@functools.cache
def programs(name: str) -> tuple[Callable, Callable, Callable]:
    """(fresh model by seed, training step, held-out loss), compiled once for all runs of a
    variant."""
    variant = VARIANTS[name]
    fresh = functools.partial(zj.create, settings(name), layer=variant.layer, router=variant.router)
    config = fresh(0).config
    optimizer = zj.optimizer(config, {"layers/cca/v/kernel": "muon"})  # GQA's

    @jax.jit
    def step(params, state, balance, ids, lr):
        loss = jax.value_and_grad(zj.training_loss, argnums=1, has_aux=True)
        (value, counts), grads = loss(config, params, balance.bias, ids, ids)
        params, state = optimizer.apply(grads, state, params, lr=lr)
        balance, load = zj.balance.update(
            balance, counts, lr=config.balance.lr, enabled=config.balance.enabled
        )
        means = {key: load[key].mean() for key in ("load_entropy", "skip_share")}
        return (params, state, balance), {
            "loss": value,
            **means,
            "dead": load["dead_experts"].sum(),
        }

    def begin(seed):
        model = fresh(seed)
        balance = zj.balance.init(
            config.model.num_hidden_layers, config.model.num_experts, variant.skip_bias
        )
        return model.num_params, (model.params, optimizer.init(), balance)

    return begin, step, jax.jit(functools.partial(zj.loss, config))


def run(name: str, rate: float, seed: int, last: int = STEPS) -> dict[str, Any]:
    """The figures of a run, stopped after step `last`; all but the loss are means of its last 20
    steps."""
    (begin, step, loss), plan = programs(name), zj.schedule.make_plan(settings(name))
    num_params, carried = begin(seed)
    generator, figures = np.random.default_rng(seed), []
    for number in range(1, last + 1):
        ids = windows(text(False), generator, BATCH, LENGTH)
        carried, found = step(*carried, ids, np.float32(rate * plan.step(number).lr))
        figures.append({key: float(x) for key, x in found.items()})
    judged = windows(text(True), np.random.default_rng(0), 16, BATCH, LENGTH)
    held_out = float(np.mean([loss(carried[0], carried[2].bias, ids, ids) for ids in judged]))
    means = {key: float(np.mean([x[key] for x in figures[-20:]])) for key in figures[0]}
    return {
        "variant": name,
        "rate": rate,
        "seed": seed,
        "held_out": held_out,
        "parameters": num_params,
        **means,
    }


def lines(out: pathlib.Path) -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def best(out: pathlib.Path, name: str) -> float:
    """The rate of a variant's least held-out loss with the first seed."""
    return min(
        (x["held_out"], x["rate"])
        for x in lines(out)
        if (x["variant"], x["seed"]) == (name, SEEDS[0])
    )[1]


def train(out: pathlib.Path) -> None:
    """All rates with the first seed, then with the others the common rate and the best one."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "runs.jsonl").touch()
    for seed in SEEDS:
        for name, variant in VARIANTS.items():
            finished = {(x["variant"], x["rate"], x["seed"]) for x in lines(out)}
            for rate in variant.rates:
                wanted = seed == SEEDS[0] or rate in (RATE, best(out, name))
                if wanted and (name, rate, seed) not in finished:
                    with (out / "runs.jsonl").open("a") as file:
                        file.write(json.dumps(run(name, rate, seed)) + "\n")


def draw(out: pathlib.Path) -> None:
    """Prints all runs and comparisons, and draws these; the noise is what each run's and each
    seed's mean leave."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ablations"}
    from matplotlib import pyplot as plt

    rates = {name: best(out, name) if name == "adamw" else RATE for name in VARIANTS}
    runs = {
        (name, rate): [x for x in lines(out) if (x["variant"], x["rate"]) == (name, rate)]
        for name, variant in VARIANTS.items()
        for rate in variant.rates
    }
    print(
        "| run | rate | held-out loss, by seed | parameters | load entropy | dead experts |\n|"
        + "---|" * 6
    )
    for (name, rate), found in runs.items():
        by_seed = " / ".join(f"{x['held_out']:.4f}" for x in found)
        entropy, dead = (np.mean([x[key] for x in found]) for key in ("load_entropy", "dead"))
        print(
            f"| {name} | {rate:g} | {by_seed} | {found[0]['parameters']:,} | {entropy:.3f} |"
            f" {dead:.1f} |"
        )
    losses = {
        key: np.array([x["held_out"] for x in found])
        for key, found in runs.items()
        if len(found) == len(SEEDS)
    }
    table = np.stack([*losses.values()])
    residual = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    margin = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(
        (residual**2).sum() / freedom * 2 / len(SEEDS)
    )
    print(
        f"\nMargin: {margin:.4f}\n\n| the first is ZAYA1's | loss lower by | verdict"
        " |\n|---|---|---|"
    )
    figure, panel = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for i, (name, variant) in enumerate([*VARIANTS.items()][1:]):
        other = (variant.against, best(out, "zaya") if name == "adamw" else RATE)
        gain = losses[name, rates[name]] - losses[other]
        beyond = f"{'better' if gain.mean() > 0 else 'worse'} by more than the noise"
        verdict = beyond if abs(gain.mean()) > margin else "within noise"
        print(f"| {variant.asked} | {gain.mean():+.4f} | {verdict} |")
        panel.errorbar(gain.mean(), i, xerr=margin, fmt="o", color="tab:blue", capsize=3)
        panel.plot(gain, [i] * len(gain), ".", color="gray", ms=4)
    panel.set_yticks(range(len(VARIANTS) - 1), [variant.asked for variant in VARIANTS.values()][1:])
    panel.set(
        title="What the first of two choices gains",
        xlabel="nats per byte; dots are seeds, bars 95% intervals",
    )
    panel.invert_yaxis()
    panel.axvline(0, color="black", lw=0.8)
    figure.savefig(pathlib.Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def main() -> int:
    """One of the two commands."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument("command", choices=("train", "draw"))
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the directory of the runs")
    options = parser.parse_args()
    host.keep_memory()
    host.keep_compiled()
    {"train": train, "draw": draw}[options.command](options.out)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
