"""Runs as small as they can be, in this process. All tests have the same sizes, so that a program
is compiled once."""

import json
import shutil
import signal

import jax
import numpy as np
import pytest
from multiprocess_runs import write_corpus

from experiments.configs import tiny
from zaya_jax import config
from zaya_jax import run as run_lib
from zaya_jax.checkpoint import folders, partial

__all__ = ["write_corpus"]
ALL_DEVICES = jax.devices()
SMALL = {
    "model.hidden_size": 16,
    "model.num_hidden_layers": 2,
    "model.head_dim": 8,
    "model.moe_intermediate_size": 16,
    "model.num_experts": 4,
    "model.router_hidden_size": 8,
    "data.seq_len": 16,
    "data.global_batch": 8,
    "eval.every": 1000,
    "eval.windows": 2,
    "log.sample_tokens": 0,
    "log.every": 1,
    "checkpoint.every_steps": 4,
    "checkpoint.keep": 2,
    "precision.compute": "float32",
    "optim.name": "adamw",
}


GUARDED = SMALL | {
    "mesh.data": 1,
    "eval.windows": 0,
    "log.every": 50,
    "checkpoint.every_steps": 10,
    "checkpoint.keep": 3,
    "guard.spike_steps": 5,
    "schedule.warmup_fraction": 0.1,
}


def settings(**keys):
    """The checked config of a small run; `data__path` is data.path."""
    given = tiny.get_config()
    given.update_from_flattened_dict(
        SMALL | {name.replace("__", "."): value for name, value in keys.items()}
    )
    return config.check(given)


def train(workdir, devices=1, faults=None, observers=(), **keys):
    """One start on so many devices; its exit code."""
    return start(settings(**keys), workdir, devices, faults, observers)


def start(given, workdir, devices=1, faults=None, observers=()):
    """One start of this config."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "devices", lambda *args: ALL_DEVICES[:devices])
            return run_lib.train(given, workdir, faults, observers=observers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lines(workdir):
    """The figures of all steps."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_last(workdir, copy):
    """A copy of a run as a kill before its last save leaves it."""
    shutil.copytree(workdir, copy)
    shutil.rmtree(copy / "checkpoints" / str(max(folders.numbered(copy / "checkpoints"))))
    return copy


def same_run(a, b, *figures):
    """The same steps, losses and last state, bit for bit."""
    same_state(a, b)
    for name in ("step", "loss", *figures):
        assert [line.get(name) for line in lines(a)] == [line.get(name) for line in lines(b)], name


def same_state(a, b):
    """The newest checkpoints of two runs are equal bit for bit."""
    a, b = partial.read(a, "*"), partial.read(b, "*")
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
