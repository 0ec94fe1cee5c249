"""Small corpora and configs for the data tests."""

import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from zaya_jax import config as config_lib


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

    def make(run_seed: int = 0, windows: int = 8, vocab_size: int = 264, **data) -> config_lib.Config:
        raw = config_lib.default()
        raw.model.vocab_size = vocab_size
        raw.run.seed, raw.eval.windows = run_seed, windows
        for name, value in {"seq_len": 64, "global_batch": 8, **data}.items():
            raw.data[name] = value
        return config_lib.check(raw)

    return make
