"""ZAYA1's training stack in JAX: the model, its optimizer, its data, its checkpoints.

    import zaya_jax as zj

`load`, `create` and `train` give a model with its weights (`zaya_jax.library`), `init`, `apply` and `loss` are the pure
functions underneath (`zaya_jax.functions`); docs/library.md. Each name is imported when it is first used: launchers and
watchers import this package on hosts that must not initialise JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zaya_jax import checkpoint, config, data
    from zaya_jax.config import Config, StorageError, UserError
    from zaya_jax.functions import apply, init, loss, scores
    from zaya_jax.library import LanguageModel, Trace, TrainingStopped, create, load, train

__version__ = "0.1.0"

__all__ = [
    "Config",
    "LanguageModel",
    "StorageError",
    "Trace",
    "TrainingStopped",
    "UserError",
    "__version__",
    "apply",
    "checkpoint",
    "config",
    "create",
    "data",
    "init",
    "load",
    "loss",
    "scores",
    "train",
]

# Where each name comes from.
_PLACES = {
    **dict.fromkeys(("Config", "StorageError", "UserError"), "config"),
    **dict.fromkeys(("apply", "init", "loss", "scores"), "functions"),
    **dict.fromkeys(("LanguageModel", "Trace", "TrainingStopped", "create", "load", "train"), "library"),
}
_MODULES = ("checkpoint", "config", "data", "library")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"zaya_jax.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'zaya_jax' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"zaya_jax.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
