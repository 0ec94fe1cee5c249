"""A made-up run, with the habits of a real one, and the checks that every page must pass."""

import json
import math
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import numpy as np

from zaya_jax import config as config_module


def write_run(
    path: pathlib.Path, steps: int, layers=6, experts=8, extras=True, load_every=1, settings=()
) -> pathlib.Path:
    """Writes a workdir of a run: losses fall, one layer starts unbalanced, every file is there.
    `settings` are keys of the config's groups."""
    rng = np.random.default_rng(0)
    path.mkdir(parents=True, exist_ok=True)
    pull = rng.normal(0, 0.8, (layers, experts + 1))
    pull[layers // 3] *= 2.5
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            done = step / steps
            course = 1.55 + 4.0 * math.exp(-14 * done) + 0.5 * math.exp(-3 * done)
            seconds = (3.4 if step == 1 else 0.42) * rng.lognormal(0, 0.06)
            logits = pull * math.exp(-5 * done) + rng.normal(0, 0.06, pull.shape)
            logits[:, -1] -= 2.2 - done
            load = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            routed = load[:, :-1] / load[:, :-1].sum(-1, keepdims=True)
            record = {
                "step": step,
                "tokens": step * 4096,
                "loss": course + rng.normal(0, 0.06),
                "lr": 1e-3 * min(1, step / (0.05 * steps + 1)) * min(1, (1.0 - done) / 0.25 + 0.02),
                "grad_norm": (0.5 + 3 * math.exp(-10 * done)) * rng.lognormal(0, 0.2),
                "step_seconds": seconds,
                "tokens_per_second": 4096 / seconds,
                "load_entropy": (-(routed * np.log(routed)).sum(-1) / math.log(experts)).tolist(),
            }
            if step % load_every == 0:
                record["load"] = load.tolist()
            if step % max(1, steps // 8) == 0:
                record["eval/loss"] = course + 0.06
            if extras:
                record |= {
                    "data/wait_fraction": 0.01 * rng.lognormal(0, 0.5),
                    "mfu": 0.31 * 0.42 / seconds,
                    "skipped": int(step > steps / 2),
                    "param_norm": 40 + 3 * done,
                    "bias_change": np.abs(rng.normal(0, 1e-3, layers)).tolist(),
                }
                for i, group in enumerate(("attention", "experts", "router", "embed")):
                    record[f"grad_norm/{group}"] = (
                        record["grad_norm"] * (0.2 + 0.2 * i) * rng.lognormal(0, 0.1)
                    )
            file.write(json.dumps(record) + "\n")
    config = config_module.to_dict(config_module.Config()) | {"name": "tiny"}
    for group, keys in (
        ("model", {"num_hidden_layers": layers, "num_experts": experts, "hidden_size": 256}),
        ("data", {"seq_len": 256, "global_batch": 16}),
        ("run", {"num_steps": steps}),
        *dict(settings).items(),
    ):
        config[group] = config.get(group, {}) | keys
    (path / "config.json").write_text(json.dumps(config))
    (path / "environment.json").write_text(json.dumps({"device": "2 CPU cores", "jax": "0.12.0"}))
    (path / "sample.txt").write_text(
        'def read(self, size=-1):\n    """Return up to size <bytes> & more."""\n'
    )
    return path


def checked(source: str) -> str:
    """A page's text, after the checks that every page must pass: it nests, loads nothing and runs
    nothing."""
    elements = list(ElementTree.fromstring(source.removeprefix("<!doctype html>\n")).iter())
    tags, attributes = {x.tag for x in elements}, {name for x in elements for name in x.attrib}
    assert not tags & {"script", "link", "iframe", "object", "embed", "img", "base"}
    assert not attributes & {"src", "href", "action", "data"}
    assert not re.search(r"https?:|@import|url\(|<script| on\w+=", source)
    assert "nan" not in "".join(re.findall(r' (?:points|d|x|y|cx|cy)="[^"]*"', source)).lower()
    assert len(source.encode(errors="replace")) < 1_000_000
    return "".join(elements[0].itertext())


def figure(source: str, title: str) -> str:
    """The picture with this caption."""
    return source[source.index(f"<figcaption>{title}<") :].split("</figure>")[0]
