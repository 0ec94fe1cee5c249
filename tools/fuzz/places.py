"""Places of every kind for programs to be sent to: files, folders, links, addresses, and a run's
folder."""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from zaya_jax import config
from zaya_jax.checkpoint import claims, store
from zaya_jax.config import Model
from zaya_jax.model import zaya
from zaya_jax.text import tokenizers
from zaya_jax.training.workdir import open_workdir

URLS = (
    "nothing://host/x",
    "://",
    "s3://",
    "s3:/x",
    "file:///dev/null/x",
    "memory://x",
    "a=b",
    "=",
    "=1",
    "a=nan",
)
MODEL = Model(
    vocab_size=264,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    moe_intermediate_size=4,
    num_experts=2,
    router_hidden_size=4,
    max_position_embeddings=64,
    initializer_range=0.5,
)


@functools.cache
def places(sandbox: Path) -> tuple[str, ...]:
    """Paths of every kind in a sandbox that `make_places` has filled."""
    here = sorted(str(path) for path in sandbox.iterdir())
    odd = [
        "/dev/null",
        "/dev/null/x",
        "/proc/self/mem",
        ".",
        "nowhere",
        "n" * 300,
        "d/" * 2000 + "d",
    ]
    return (*here, *(path + "/" for path in here), *odd, *URLS, *(Path(path).name for path in here))


def make_places(sandbox: Path) -> None:
    """A text, an empty file, noise, a folder of texts, an empty folder, links to all and to
    nothing, no permissions."""
    text = "".join(f"line {i}, {i * i % 97}\n" for i in range(400))
    (sandbox / "text.txt").write_text(text)
    (sandbox / "empty.txt").write_bytes(b"")
    (sandbox / "noise.bin").write_bytes(bytes(i * i % 251 for i in range(3000)))
    (sandbox / "\u00fc\u4e16 .txt").write_text(text)
    (sandbox / "json.json").write_text('{"a": [1, 2]}')
    (sandbox / "empty").mkdir()
    (sandbox / "texts").mkdir()
    for i in range(12):
        (sandbox / "texts" / f"{i}.txt").write_text(f"{i}\n{text}")
    for name in ("text.txt", "texts", "nowhere", "loop"):
        (sandbox / f"to_{name}").symlink_to(sandbox / name)
    (sandbox / "loop").symlink_to(sandbox / "to_loop")
    (sandbox / "closed.txt").write_text(text)
    (sandbox / "closed.txt").chmod(0)


def make_run(folder: Path) -> Path:
    """A run's folder that is complete at step 2, with all that one has but a training."""
    given_config = config.default().to_dict() | {"model": config.to_dict(MODEL), "name": "small"}
    given_config["data"] |= {"seq_len": 16, "global_batch": 2, "path": "texts"}
    given_config["run"]["num_steps"] = 2
    checked = config.check(given_config)
    workdir = open_workdir(folder, checked)
    tokenizers.load("bytes").save(workdir / "tokenizer")
    params = zaya.init(MODEL, jax.random.key(0))
    state = {
        "params": params,
        "balance": {"bias": zaya.init_balance(MODEL)},
        "optimizer": {"count": np.zeros(3, np.float32)},
    }
    saved = store.Store(workdir)
    figures = {"loss": 2.0, "eval/loss": 2.0}
    for step in (2,):
        saved.save(
            step,
            state,
            {
                "step": step,
                "tokens": 32 * step,
                "config": config.to_dict(checked),
                "metrics": figures,
                "data": {},
                "tokenizer": tokenizers.load("bytes").sha256,
                "version": "0",
            },
        )
    saved.close()
    lines = [
        {
            "step": i + 1,
            "loss": 5.0 - i,
            "lr": 0.1,
            "grad_norm": 1.0,
            "step_seconds": 0.1,
            "tokens_per_second": 9.0,
            "load": [[0.5, 0.4, 0.1]],
            "load_entropy": [0.9],
            "eval/loss": 5.0,
            "tokens": 32 * i,
        }
        for i in range(2)
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "environment.json").write_text('{"device": "cpu", "jax": "0"}')
    (workdir / "sample.txt").write_text("def f():")
    (workdir / "samples.jsonl").write_text('{"step": 1, "prompt": "def ", "text": "def f():"}\n')
    claims.release(workdir)
    return workdir
