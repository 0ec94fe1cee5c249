"""Writes zaya_jax/guard/first_step.json: the numbers that a run's first step is compared with.

    JAX_PLATFORMS=cpu python -m tools.golden.make_first_step

One device, float32, XLA's plain algorithms: a small step for each set of layer kinds and each
optimizer. Weights and batch come from NumPy's RandomState, whose streams are frozen, so that only
results are kept. `tests/guard/test_replay.py` says how far other forms may lie from them.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator

import jax
import numpy as np

from zaya_jax import config
from zaya_jax.config.keys import LAYER_KINDS
from zaya_jax.guard import first_step
from zaya_jax.parallel.mesh import make_mesh

ROWS, LENGTH, VOCABULARY = 4, 256, 128
MODEL = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_attention_heads": 8, "head_dim": 32}
ZAYA = MODEL | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "router_hidden_size": 32,
}
DENSE = MODEL | {
    "model_type": "dense",
    "num_key_value_heads": 8,
    "intermediate_size": 256,
    "num_experts": 1,
}
PLAIN = {"compute": "float32", "newton_schulz": "float32", "matmul": "highest"}


def models() -> Iterator[dict]:
    """A small model of each set of layer kinds."""
    for count in (1, 2, 3):
        for kinds in itertools.combinations(sorted(LAYER_KINDS), count):
            layers = kinds if count > 1 else 2 * kinds
            more: dict = {"layer_types": layers, "num_hidden_layers": len(layers)}
            if "hybrid_sliding" in kinds:
                more["sliding_window"] = 48
            yield ZAYA | more
            if "hybrid_linear" not in kinds:
                yield DENSE | more


def batch() -> dict[str, np.ndarray]:
    """Rows of uneven documents; some targets do not count."""
    random = np.random.RandomState(0)
    tokens = random.randint(0, VOCABULARY, (ROWS, LENGTH + 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": 1 + np.cumsum(random.random_sample((ROWS, LENGTH)) < 0.02, axis=1),
        "positions": np.tile(np.arange(LENGTH), (ROWS, 1)),
        "loss_mask": (random.random_sample((ROWS, LENGTH)) < 0.9).astype(np.float64),
    }


def rounded(numbers: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Eight digits of each number: float32 has seven."""
    return {name: [float(f"{x:.8g}") for x in values] for name, values in numbers.items()}


def main() -> None:
    """Writes the file, and prints each case's losses."""
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    record: dict[str, dict] = {"batch": {name: x.tolist() for name, x in batch().items()}}
    configs = [config.check({"model": model, "precision": PLAIN}) for model in models()]
    names = [first_step.small_model_name(case_config.model) for case_config in configs]
    record |= {"models": dict(zip(names, models(), strict=True)), "numbers": {}}
    first_step.EXPECTED.write_text(json.dumps(record))
    for name, case_config in zip(names, configs, strict=True):
        case: dict[str, dict] = {}
        for optim in ("muon", "adamw"):
            tried = dataclasses.replace(case_config, optim=config.Optim(name=optim))
            step = rounded(first_step.run_small_model(tried, mesh, 1))
            case[optim] = {first_step.AFTER_UPDATE: step.pop(first_step.AFTER_UPDATE)}
            case["step"] = step
        record["numbers"][name] = case
        print(name, *case["step"]["loss"], *case["muon"].values(), *case["adamw"].values())
    first_step.EXPECTED.write_text(json.dumps(record).replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    main()
