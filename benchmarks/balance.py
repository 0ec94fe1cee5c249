"""Loss-free balancing on the embedded tiny run: with and without it, over a shift of the data, and
at the start.

    python benchmarks/balance.py corpora --out=DIR     prose/ and code/, from Python's own library
    python benchmarks/balance.py train --out=DIR       the seven runs (those that are complete are not repeated)
    python benchmarks/balance.py draw --out=DIR        the tables, and benchmarks/balance*.png
    python benchmarks/balance.py spread                how far apart a fresh router's probabilities lie

Every run is `experiments.pretrain` on a config derived from experiments/configs/tiny.py:

    tiny, tiny_off     make pretrain, and the same with balance.enabled=False
    shift, shift_off   200 steps of prose, then 150 of code (two schedule.phases) at a constant learning rate, 8
                       sequences a step in place of 16
    start_*            the first 60 of tiny's 400 steps with its former initialisation and other balancing rates
"""

import ast
import json
import math
import pathlib
import pydoc_data.topics
import sys
import sysconfig
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments.configs import tiny
from zaya_jax import cli
from zaya_jax import config as config_lib
from zaya_jax.config import Config, Model, Precision
from zaya_jax.hardware import host
from zaya_jax.model.router import Router
from zaya_jax.run import train as train_run

SHIFT = (200, 150)  # steps of prose, steps of code
START_STEPS = 60
STARTS = {  # (model.initializer_range, balance.lr)
    "start_020": (0.02, 1e-3),
    "start_020_slow": (0.02, 1e-4),
    "start_020_slower": (0.02, 3e-5),
}
HERE = pathlib.Path(__file__).parent


def corpora(out: pathlib.Path) -> None:
    """Writes prose/ (docstrings, Python's manual, licences, lists of words) and code/ (no
    docstring, no comment)."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = {"manual.txt": "\n\n".join(pydoc_data.topics.topics.values())}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if "site-packages" in inside.parts or not (found := split(path)):
            continue
        for kind, text in zip(("prose", "code"), found, strict=True):
            if len(text) > 200:
                name = "_".join(inside.parts)
                (out / kind / name[:2]).mkdir(parents=True, exist_ok=True)
                (out / kind / name[:2] / f"{name}.txt").write_text(text, "utf-8")
    for path in sorted(p for p in root.rglob("*.txt") if "test" not in p.parts):
        texts["_".join(path.relative_to(root).parts)] = path.read_text("utf-8", errors="replace")
    for name, text in texts.items():
        (out / "prose" / name).write_text(text, "utf-8")
    for kind in ("prose", "code"):
        size = sum(p.stat().st_size for p in (out / kind).rglob("*") if p.is_file())
        print(f"{out / kind}: {size / 1e6:.1f} MB")


def split(path: pathlib.Path) -> tuple[str, str] | None:
    """(the docstrings, the rest without comments) of a Python file, or None for one that cannot be
    parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError, RecursionError):
        return None
    docs = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                docs.append("\n".join(line for line in doc.splitlines() if ">>>" not in line))
                node.body = node.body[1:] or [ast.Pass()]
    return "\n\n".join(docs), ast.unparse(tree)


def settings(name: str, out: pathlib.Path) -> ConfigDict:
    """The config of a run."""
    c = tiny.get_config()
    c.name = name
    c.balance.enabled = not name.endswith("_off")
    c.checkpoint.every_steps = 10_000  # only the last
    if name.startswith("shift"):
        c.data.global_batch = 8
        c.data.path = str(out / "prose")
        kinds = ("prose", "code")
        c.schedule.phases = tuple(
            {
                "name": kind,
                "tokens": steps * c.data.global_batch * c.data.seq_len,
                "mixture": (f"{out / kind}=1",),
            }
            for kind, steps in zip(kinds, SHIFT, strict=True)
        )
        c.schedule.decay_fraction = 0.0
        c.eval.every = 50
    if name in STARTS:
        c.model.initializer_range, c.balance.lr = STARTS[name]
        tokens = c.run.num_steps * c.data.global_batch * c.data.seq_len
        c.schedule.phases = ({"name": "all", "tokens": tokens},)  # as long as tiny's, stopped early
        c.run.num_steps = START_STEPS
        c.eval.every = START_STEPS
    return c


def train(out: pathlib.Path) -> None:
    """All runs, one after another."""
    for name in ("shift", "shift_off", "tiny", "tiny_off", *STARTS):
        if not (out / name / "report.html").exists():
            code = train_run(config_lib.check(settings(name, out)), out / name)
            if code:
                sys.exit(code)


def read(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Figures by name, one row a step: those that every step has."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "load_entropy", "greatest_share", "dead_experts")
    figures = {name: np.array([line[name] for line in lines]) for name in names}
    return figures | {
        "eval": np.array([line["eval/loss"] for line in lines if "eval/loss" in line])
    }


def draw(out: pathlib.Path) -> None:
    """Prints the tables and draws the pictures of the runs that are there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    print(
        "| run | steps | load entropy, mean / worst layer | greatest share | dead experts |"
        " held-out loss |"
    )
    print("|---|---|---|---|---|---|")
    rows = {
        "tiny": ("tiny", "tiny_off"),
        f"prose, after step {SHIFT[0]} code": ("shift", "shift_off"),
    }
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for panels, (title, names) in zip(axes, rows.items(), strict=True):
        for name, color, label in zip(
            names, ("tab:blue", "tab:red"), ("balancing", "no balancing"), strict=True
        ):
            f = read(out / name)
            steps = np.arange(1, len(f["loss"]) + 1)
            panels[0].plot(
                steps, f["load_entropy"].mean(1), color=color, label=f"{label}, mean over layers"
            )
            panels[0].plot(
                steps,
                f["load_entropy"].min(1),
                color=color,
                lw=0.7,
                alpha=0.7,
                label=f"{label}, worst layer",
            )
            panels[1].plot(steps, f["greatest_share"].mean(1), color=color)
            panels[1].plot(steps, f["greatest_share"].max(1), color=color, lw=0.7, alpha=0.7)
            panels[2].plot(steps, f["dead_experts"].sum(1), color=color)
            table_rows(name, f)
        panels[0].set(title=f"{title}: load entropy", ylim=(-0.02, 1.02))
        panels[1].set(title="greatest share of an expert", ylim=(0, 1.02))
        panels[2].set(title="dead experts, of 32 in 4 layers", ylim=(-0.5, 32))
        for panel in panels:
            panel.set_xlabel("step")
            panel.grid(alpha=0.3)
            if names[0] == "shift":
                panel.axvline(SHIFT[0], color="black", lw=0.8, ls="--")
    axes[0, 0].legend(fontsize=8, loc="center right")
    figure.savefig(HERE / "balance.png", dpi=100)

    figure, panel = plt.subplots(figsize=(7, 3.4), layout="constrained")
    starts = {"tiny": (0.05, 1e-3), **STARTS}
    for name, (width, lr) in starts.items():
        entropy = read(out / name)["load_entropy"][:START_STEPS].mean(1)
        label = f"initializer_range {width:g}, balance.lr {lr:g}"
        panel.plot(np.arange(1, len(entropy) + 1), entropy, label=label)
        if name in STARTS:
            table_rows(name, read(out / name))
    panel.set(
        title="The start of tiny: load entropy, mean over layers", xlabel="step", ylim=(-0.02, 1.02)
    )
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(HERE / "balance_start.png", dpi=100)


def table_rows(name: str, f: dict[str, np.ndarray]) -> None:
    """A line for each stretch of steps that the page speaks of; figures are means over the
    stretch."""
    count = len(f["loss"])
    at = SHIFT[0]
    ends = [(1, 20), (21, min(60, count)), (count - 19, count)]
    if name.startswith("shift"):
        ends = [(at - 19, at), (at + 1, at + 5), (at + 6, at + 25), (count - 19, count)]
    for first, last in ends if count > 60 else ends[:2]:
        part = {key: value[first - 1 : last] for key, value in f.items() if key != "eval"}
        entropy, share = part["load_entropy"], part["greatest_share"]
        held_out = f"{f['eval'][-1]:.4f}" if last == count else ""
        print(
            f"| {name} | {first} to {last} | {entropy.mean():.3f} / {entropy.mean(0).min():.3f} | "
            f"{share.mean():.3f} | {part['dead_experts'][-1].sum()} | {held_out} |"
        )


def spread() -> None:
    """Prints how far a fresh router's probabilities differ between tokens, for tiny's shape and the
    full model's."""
    print("| model | initializer_range | sd of p over tokens | between experts' means |")
    print("|---|---|---|---|")
    small: Config = config_lib.check(tiny.get_config())
    for name, model in {"tiny": small.model, "ZAYA1-base": Model()}.items():
        for std in (0.02, 0.05, round(1 / math.sqrt(model.hidden_size), 3)):
            p = fresh_probabilities(model, std)
            print(f"| {name} | {std} | {p.std(0).mean():.1e} | {p.mean(0).std():.1e} |")


def fresh_probabilities(model: Model, std: float) -> np.ndarray:
    """[tokens, experts] of a router with weights of this spread, on inputs as an RMSNorm leaves
    them."""
    model = config_lib.check_model(
        {**config_lib.to_dict(Config(model=model))["model"], "initializer_range": std}
    )
    router = Router(nnx.Rngs(0), model, Precision(router="float32"))
    x = jax.random.normal(jax.random.key(1), (2048, model.hidden_size))
    stream = jnp.zeros((2048, model.router_hidden_size))
    logits = router(x, stream, jnp.zeros(model.num_experts + 1))[2]
    return np.asarray(jax.nn.softmax(logits, axis=-1))[:, :-1]


def main() -> int:
    """One of the four commands."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument("command", choices=("corpora", "train", "draw", "spread"))
    parser.add_argument("--out", type=pathlib.Path, help="the directory of corpora and runs")
    options = parser.parse_args()
    if options.command == "spread":
        spread()
        return cli.DONE
    if options.out is None:
        raise config_lib.UserError(
            f"{options.command} needs --out, the directory of corpora and runs"
        )
    host.keep_memory()
    {"corpora": corpora, "train": train, "draw": draw}[options.command](options.out)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
