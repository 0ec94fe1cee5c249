"""What a checkpoint is: its files, how they are written, checked and read, in the layout of Orbax.

    layout      the files: arrays, their chunks, the small ones
    boxes       which device holds which part of an array, and which process writes it
    seal        the list of the files with their checksums; with its seal a checkpoint is complete
    writing     threads that write the files, and the rename that completes them
    reading     chunks, verified, onto the devices
    folders     the names of a run's folders: only STEP is a checkpoint
    storage     a folder or URL, with attempts
    vault       the checkpoints of one place: list, verify, copy, complete, delete
    source      one checkpoint to read; `orbax_source` if Orbax wrote it, `merged` with low-rank
                updates, `few_bits` with experts in few bits, `partial` some of its arrays
    handler     `Handler`: the same for code that saves through Orbax

What a run does with its checkpoints (when to save, what to keep, where copies go) is in `run`; that
wing imports this one, never the reverse.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zaya_jax.checkpoint.handler import Handler

__all__ = ["Handler"]


def __getattr__(name: str) -> Any:
    if name != "Handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zaya_jax.checkpoint.handler import Handler

    return Handler
