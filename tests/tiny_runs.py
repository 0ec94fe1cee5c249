"""Runs as small as they can be, in this process. All tests have the same sizes, so that a program
is compiled once."""

import json
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.configs import tiny
from zaya_jax import config
from zaya_jax import run as run_lib
from zaya_jax.checkpoint import folders, partial
from zaya_jax.cluster import leaving

ALL_DEVICES = jax.devices()


def write_corpus(folder, files=40):
    """A folder of small texts, each its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        lines = (f"line {j} of file {i}, {i * j % 97}\n" for j in range(30))
        (folder / f"{i}.txt").write_text("".join(lines))
    return str(folder)


FOLDER = tempfile.TemporaryDirectory()  # for as long as the tests run
CORPUS = write_corpus(Path(FOLDER.name))
SMALL = {
    "data.path": CORPUS,
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
    return changed(tiny.get_config(), **SMALL | keys)


def changed(given, **keys):
    """The checked config of a ConfigDict with other values of these keys."""
    given.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in keys.items()}
    )
    return config.check(given)


def train(workdir, devices=1, faults=None, observers=(), tracker=None, **keys):
    """One start on so many devices; its exit code."""
    return start(settings(**keys), workdir, devices, faults, observers, tracker)


def start(given, workdir, devices=1, faults=None, observers=(), tracker=None):
    """One start of this config."""
    with pytest.MonkeyPatch.context() as patch, leaving.signals_as_they_were():
        patch.setattr(jax, "devices", lambda *args: ALL_DEVICES[:devices])
        return run_lib.train(given, workdir, faults, tracker, observers)


def lines(workdir):
    """The figures of all steps."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def by_step(workdir, figure):
    """A figure of the steps that have it."""
    return {line["step"]: line[figure] for line in lines(workdir) if figure in line}


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
