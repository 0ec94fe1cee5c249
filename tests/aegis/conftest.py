"""Runs that tests start in this process trace each program once."""

import json
import signal

import jax
import pytest
from traced_once import traced_once

from experiments.configs import tiny
from tools import faults
from zaya_jax import config
from zaya_jax import run as run_lib

__all__ = ["traced_once"]

DEVICES = jax.devices()
SMALL = {
    "model.hidden_size": 16, "model.num_hidden_layers": 2, "model.head_dim": 8, "model.moe_intermediate_size": 16,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 16, "data.global_batch": 8, "mesh.data": 1,
    "eval.every": 1000, "eval.windows": 0, "log.sample_tokens": 0, "log.every": 50, "checkpoint.every_steps": 10,
    "precision.compute": "float32", "optim.name": "adamw", "guard.spike_steps": 5, "schedule.warmup_fraction": 0.1,
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program in this process on as many devices as mesh.data says, with faults; without: `bad=None`."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"{i}.txt").write_text("".join(f"line {j} of file {i}, {i * j % 97}\n" for j in range(40)))

    def call(workdir, bad=None, **keys):
        given = SMALL | {"data.path": str(corpus)} | {n.replace("__", "."): value for n, value in keys.items()}
        devices = DEVICES[: given["mesh.data"]]
        monkeypatch.setattr(jax, "devices", lambda *args: devices)
        if bad is not None:
            (tmp_path / "faults.json").write_text(json.dumps(bad))
            monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults.json"))
        settings = tiny.get_config()
        settings.update_from_flattened_dict(given)
        return run_lib.train(config.check(settings), tmp_path / workdir, faults.given())

    yield call
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
