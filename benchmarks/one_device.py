"""Our side of a comparison on one device: a training step from given weights, and its batches."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.config import Config
from zaya_jax.optim import balance
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.pytorch import any_model
from zaya_jax.training import state as states
from zaya_jax.training import step as steps


def start(settings: Config, case: str | Path) -> tuple[Callable, Any, Any]:
    """The training step, the state with the case's weights, and the mesh, of one device."""
    params, bias = any_model.find(case).load_weights()
    mesh = make_mesh(dataclasses.replace(settings.mesh, data=1), jax.devices()[:1])
    setup = states.set_up(settings, mesh)
    state = states.init(settings, setup)
    begin = balance.init(settings.model.num_hidden_layers, settings.model.num_experts)
    given = {"params": params, "balance": begin._replace(bias=bias)}
    given = jax.tree.map(np.array, given)
    state |= jax.device_put(given, {name: setup.shardings[name] for name in given})
    return steps.make_train_step(settings, setup), state, mesh


def batch_of(ids: np.ndarray) -> dict[str, np.ndarray]:
    """A batch of whole sequences [B, S], each token's target the next, as PyTorch shifts labels."""
    places = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    return {
        "tokens": ids.astype(np.int32),
        "targets": np.roll(ids, -1, axis=1).astype(np.int32),
        "segment_ids": np.ones_like(places),
        "positions": places,
        "loss_mask": (places < ids.shape[1] - 1).astype(np.float32),
    }
