"""Small corpora and configs for the data tests."""

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from data_helpers import run_here

from zaya_jax import config as config_lib
from zaya_jax.data import prepare, prepare_task, tokens


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    """Sixty text files of very different lengths, one of them empty and one not UTF-8."""
    root = tmp_path / "corpus"
    root.mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        words = rng.integers(0, 1000, int(rng.integers(5, 400)))
        (root / f"doc{i:02d}.txt").write_text(f"document {i}: " + " ".join(f"w{w}" for w in words))
    (root / "empty.txt").write_text("")
    (root / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    return root


@pytest.fixture
def make_config() -> Callable[..., config_lib.Config]:
    """A checked config with the given data keys; run_seed and windows go to their own groups."""

    def make(
        run_seed: int = 0,
        windows: int = 8,
        vocab_size: int = 264,
        eval_named: tuple[str, ...] = (),
        **data,
    ) -> config_lib.Config:
        raw = config_lib.default()
        raw.model.vocab_size = vocab_size
        raw.run.seed, raw.eval.windows, raw.eval.named = run_seed, windows, eval_named
        for name, value in {"seq_len": 64, "global_batch": 8, **data}.items():
            raw.data[name] = value
        return config_lib.check(raw)

    return make


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing runs here, without worker processes, which take a second to start."""

    monkeypatch.setattr(prepare_task, "run_processes", run_here)


@pytest.fixture
def prepare_text(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> Callable[..., pathlib.Path]:
    """Writes documents as a prepared directory of many small shards and bundles, in this
    process."""

    def make(
        name: str,
        count: int,
        seed: int = 0,
        bundle_bytes: int = 2048,
        longest: int = 700,
        shards: int = 3,
    ) -> pathlib.Path:
        monkeypatch.setattr(tokens, "BUNDLE_BYTES", bundle_bytes)
        rng = np.random.default_rng(seed)
        source = tmp_path / f"{name}.jsonl"
        with source.open("w") as file:
            for i in range(count):
                letters = (
                    rng.integers(97, 123, int(rng.integers(1, longest)))
                    .astype(np.uint8)
                    .tobytes()
                    .decode()
                )
                file.write(json.dumps({"text": f"{name}{i}:{letters}"}) + "\n")
        options = prepare.Options([str(source)], part_bytes=1 + source.stat().st_size // shards)
        prepare.prepare(options, str(tmp_path / name), 1, lambda *_: None)
        return tmp_path / name

    return make
