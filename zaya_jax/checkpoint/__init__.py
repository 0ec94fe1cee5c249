"""Saves, verifies, moves and restores checkpoints, in the layout of Orbax; `Handler` is for who
saves with Orbax."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zaya_jax.checkpoint.handler import Handler

__all__ = ["Handler"]


def __getattr__(name: str) -> Any:
    if name != "Handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zaya_jax.checkpoint.handler import Handler

    return Handler
