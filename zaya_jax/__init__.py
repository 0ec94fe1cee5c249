"""ZAYA1's training stack in JAX: the model, its optimizer, its data, its checkpoints.

    import zaya_jax as zj

`load`, `create` and `train` give a model with its weights (`zaya_jax.library`), `init`, `apply` and
`loss` are the pure functions underneath (`zaya_jax.functions`); docs/library.md. Each name is
imported when it is first used: launchers and watchers import this package on hosts that must not
initialise JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zaya_jax.version import __version__

if TYPE_CHECKING:
    from zaya_jax import checkpoint, config, data, schedule
    from zaya_jax.config import Config, StorageError, UserError
    from zaya_jax.functions import apply, init, loss, optimizer, scores, training_loss
    from zaya_jax.library import LanguageModel, Trace, TrainingStopped, create, load, train
    from zaya_jax.model.layer import Layer
    from zaya_jax.model.router import Router
    from zaya_jax.model.weights import Linear, TokenSum, weight
    from zaya_jax.optim import balance
    from zaya_jax.report.read import metrics
    from zaya_jax.training.observers import EndRun, Observer

__all__ = [
    "Config",
    "EndRun",
    "LanguageModel",
    "Layer",
    "Linear",
    "Observer",
    "Router",
    "StorageError",
    "TokenSum",
    "Trace",
    "TrainingStopped",
    "UserError",
    "__version__",
    "apply",
    "balance",
    "checkpoint",
    "config",
    "create",
    "data",
    "init",
    "load",
    "loss",
    "metrics",
    "optimizer",
    "schedule",
    "scores",
    "train",
    "training_loss",
    "weight",
]

# Where each name comes from.
_PLACES = {
    **dict.fromkeys(("Config", "StorageError", "UserError"), "config"),
    **dict.fromkeys(("apply", "init", "loss", "optimizer", "scores", "training_loss"), "functions"),
    **dict.fromkeys(
        ("LanguageModel", "Trace", "TrainingStopped", "create", "load", "train"), "library"
    ),
    "metrics": "report.read",
    "Layer": "model.layer",
    "Router": "model.router",
    "EndRun": "training.observers",
    "Observer": "training.observers",
    **dict.fromkeys(("Linear", "TokenSum", "weight"), "model.weights"),
}
_MODULES = {
    **{name: name for name in ("checkpoint", "config", "data", "library", "schedule")},
    "balance": "optim.balance",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"zaya_jax.{_MODULES[name]}")
    if name not in _PLACES:
        raise AttributeError(f"module 'zaya_jax' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"zaya_jax.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
