"""Checkpoints of a past that a run has given up: set aside in workdir/checkpoints, deleted in the other tiers.

    stale.drop(tiers, decisions)        of all processes together, before the newest is looked for

A run that goes back to step c has decided so before anything of it is touched, and each checkpoint has the decisions
that were made before it was saved. So a checkpoint by itself tells whether it is stale, and a run that is killed while
it sets some aside does the rest at its next start.
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.layout import META
from zaya_jax.cluster import multihost
from zaya_jax.config import files
from zaya_jax.config.fields import parse_json

KEY = "decisions"  # in a checkpoint's small file; a local part has their number


def is_stale(step: int, known: int, decisions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a checkpoint that knows the first so many of the decisions is of a past that was given up."""
    return any(one["step"] < step for one in decisions[known:])


def drop(tiers: Any, decisions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Sees to all tiers; the steps that were set aside."""
    if tiers.local:
        delete_parts(tiers.local.folder, tiers.local.decisions_of, decisions)

    def first() -> list[int]:
        if tiers.durable:  # before they lie here no more: what is left there would be fetched
            delete_copies(tiers.durable.vault, decisions)
        return set_aside(tiers.root, decisions)

    return multihost.from_first("stale", first)


def set_aside(root: Path, decisions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Those in workdir/checkpoints become `.stale-N-STEP`, N being the number of decisions; those of fewer go."""
    steps = []
    for step in writing.numbered(root):
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # what is damaged is somebody else's affair
            known = len(files.read_json(root / str(step) / META).get(KEY, []))
            if is_stale(step, known, decisions):
                target = root / f"{writing.STALE}{len(decisions)}-{step}"
                shutil.rmtree(target, ignore_errors=True)
                (root / str(step)).rename(target)
                steps.append(step)
    if steps:
        for path in root.glob(f"{writing.STALE}*"):
            if not path.name.startswith(f"{writing.STALE}{len(decisions)}-"):
                shutil.rmtree(path, ignore_errors=True)
    return steps


def delete_copies(vault: Any, decisions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Those in a durable place go."""
    steps = []
    for step in vault.steps():
        if not is_stale(step, 0, decisions):
            continue
        with contextlib.suppress(ValueError, AttributeError):
            known = len(parse_json(vault.get(step, META)).get(KEY, []))
            if is_stale(step, known, decisions):
                vault.remove(step)
                steps.append(step)
    return steps


def delete_parts(
    folder: Path, known_of: Callable[[Path], int], decisions: Sequence[Mapping[str, Any]]
) -> None:
    """Those in the local folders go, of all processes that can be seen from here: others may do so too."""
    for own in folder.glob("process-*"):
        for step in writing.numbered(own):
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
                if is_stale(step, known_of(own / str(step)), decisions):
                    writing.remove(own, step)
