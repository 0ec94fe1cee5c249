"""Removes checkpoints of an abandoned past: set aside in workdir/checkpoints, deleted in the other tiers.

    stale.drop(tiers, decisions)        in all processes together, before looking for the newest

A run that goes back to step c has decided so before anything of it is touched, and each checkpoint has the decisions
that were made before it was saved. So a checkpoint by itself tells whether it is stale, and a run that is killed while
it sets some aside does the rest at its next start.

First all are compared with the decisions: judged by another run's file, every checkpoint would look stale.
"""

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.vault import Unreachable, Vault
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, UserError

KEY = "decisions"  # in a checkpoint's small file, and in a local part's
FILE = "aegis/decisions.json"  # the run's own, in its workdir

Decisions = Sequence[Mapping[str, Any]]
Known = tuple[Any, int, list]  # a checkpoint's place, its step, and the decisions that it has


def is_stale(step: int, known: int, decisions: Decisions) -> bool:
    """Whether a checkpoint saved after the first `known` decisions is of an abandoned past."""
    return any(one["step"] < step for one in decisions[known:])


def conflict(checkpoints: Iterable[Known], decisions: Decisions) -> str:
    """The first checkpoint that a run with these decisions cannot have saved, and why; "" where it can have all."""
    for place, step, known in checkpoints:
        if known[: len(decisions)] != list(decisions[: len(known)]):
            return f"{place} has other decisions"
        later = decisions[len(known)]["at"] if len(known) < len(decisions) else step
        if step > later:
            return f"{place} does not know the decision at step {later}, before it was saved"
    return ""


def drop(tiers: Any, decisions: Decisions) -> list[int]:
    """Cleans all tiers and returns the steps set aside. UserError, before deleting, if these are another run's."""
    parts = list(tiers.local.known()) if tiers.local else []
    conflicts = multihost.to_first("stale parts", conflict(parts, decisions))

    def check() -> None:
        why = conflict(known_in(Vault(tiers.root), decisions), decisions) or next(filter(None, conflicts or []), "")
        if tiers.durable and not why:
            try:
                why = conflict(known_in(tiers.durable.vault, decisions), decisions)
            except Unreachable as failure:
                tiers.durable.silent = failure  # nothing is fetched from there; the next start deletes
        if why:
            raise UserError(
                f"{tiers.root.parent / FILE} is not that of these checkpoints: {why}. Nothing was deleted; restore the "
                "run's own file, or move this one away: then it goes on from its newest checkpoint and its decisions"
            )

    multihost.from_first("stale checked", check)
    for path, step, known in parts:  # others may see the same
        if is_stale(step, len(known), decisions):
            with contextlib.suppress(OSError):
                writing.remove(path.parent, step)

    def first() -> list[int]:
        if tiers.durable and not tiers.durable.silent:  # first, or the rest would be fetched
            for step in stale_in(tiers.durable.vault, decisions):
                tiers.durable.vault.remove(step)
        return set_aside(tiers.root, decisions)

    return multihost.from_first("stale", first)


def known_in(vault: Vault, decisions: Decisions) -> Iterator[Known]:
    """The checkpoints of a place; damage is found elsewhere."""
    for step in vault.steps() if decisions else ():
        try:
            yield f"{vault.url}/{step}", step, vault.meta(step).get(KEY, [])
        except Unreachable:
            raise
        except StorageError:
            pass


def stale_in(vault: Vault, decisions: Decisions) -> list[int]:
    """The stale ones among them."""
    return [step for _, step, known in known_in(vault, decisions) if is_stale(step, len(known), decisions)]


def set_aside(root: Path, decisions: Decisions) -> list[int]:
    """Those in workdir/checkpoints become `.stale-N-STEP`, N being the number of decisions; those of fewer go."""
    steps = stale_in(Vault(root), decisions)
    for step in steps:
        target = root / f"{writing.STALE}{len(decisions)}-{step}"
        shutil.rmtree(target, ignore_errors=True)
        (root / str(step)).rename(target)
    for path in root.glob(f"{writing.STALE}*") if steps else ():
        if not path.name.startswith(f"{writing.STALE}{len(decisions)}-"):
            shutil.rmtree(path, ignore_errors=True)
    return steps
