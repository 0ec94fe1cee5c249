"""Checkpoints of a past that a run has given up: set aside in workdir/checkpoints, deleted in the other tiers.

    stale.drop(tiers, decisions)        of all processes together, before the newest is looked for

A run that goes back to step c has decided so before anything of it is touched, and each checkpoint has the decisions
that were made before it was saved. So a checkpoint by itself tells whether it is stale, and a run that is killed while
it sets some aside does the rest at its next start.

All of them are compared with the decisions first: by a file of another run, every checkpoint would be of a past that
was given up.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.layout import META
from zaya_jax.checkpoint.remote import unreachable
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, UserError, files
from zaya_jax.config.fields import parse_json

KEY = "decisions"  # in a checkpoint's small file; a local part has their number
FILE = "aegis/decisions.json"  # the run's own, in its workdir

Known = Sequence[Any] | int  # the decisions that a checkpoint has, or their number


def is_stale(step: int, known: int, decisions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a checkpoint that knows the first so many of the decisions is of a past that was given up."""
    return any(one["step"] < step for one in decisions[known:])


def conflict(step: int, known: Known, decisions: Sequence[Mapping[str, Any]]) -> str:
    """Why a run that made these decisions cannot have saved a checkpoint which knows those; "" where it can."""
    count = known if isinstance(known, int) else len(known)
    if not isinstance(known, int) and list(known[: len(decisions)]) != list(decisions[:count]):
        return "has other decisions"
    if (
        count < len(decisions) and step > decisions[count]["at"]
    ):  # a run had not come so far before it decided that
        return f"does not know what was decided at step {decisions[count]['at']}, before it was saved"
    return ""


def compare(
    checkpoints: Iterable[tuple[Path | str, int, Known]], decisions: Sequence[Mapping[str, Any]]
) -> str:
    """The first of (place, step, known) that is not of these decisions, and why; "" where all are."""
    found = ((place, conflict(step, known, decisions)) for place, step, known in checkpoints)
    return next((f"{place} {why}" for place, why in found if why), "")


def drop(tiers: Any, decisions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Sees to all tiers; the steps that were set aside. UserError, before anything goes, if these are not the run's."""
    local = tiers.local
    mine = compare(parts(local.folder, local.decisions_of), decisions) if local else ""
    told = multihost.to_first("stale parts", mine)

    def check() -> None:
        why = compare(here(tiers.root), decisions) or next(filter(None, told or []), "")
        if tiers.durable and not why:
            try:
                why = compare(copies(tiers.durable.vault, decisions), decisions)
            except StorageError as failure:
                if not unreachable(failure):
                    raise
                tiers.durable.silent = failure  # nothing is fetched from there; the next start deletes
        if why:
            raise UserError(
                f"{tiers.root.parent / FILE} is not that of these checkpoints: {why}. Nothing was deleted; restore the "
                "run's own file, or move this one away: then it goes on from its newest checkpoint, and what that knows"
            )

    multihost.from_first("stale checked", check)
    if local:
        delete_parts(local.folder, local.decisions_of, decisions)

    def first() -> list[int]:
        if tiers.durable and not tiers.durable.silent:  # first, or what is left there would be fetched
            delete_copies(tiers.durable.vault, decisions)
        return set_aside(tiers.root, decisions)

    return multihost.from_first("stale", first)


def here(root: Path) -> Iterator[tuple[Path, int, list[Any]]]:
    """(folder, step, decisions) of those in workdir/checkpoints; what is damaged is somebody else's affair."""
    for step in writing.numbered(root):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            known = list(files.read_json(root / str(step) / META).get(KEY, []))
            yield root / str(step), step, known


def copies(vault: Any, decisions: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, list[Any]]]:
    """The same of those in a durable place that may be stale; the others are not read."""
    for step in vault.steps():
        if is_stale(step, 0, decisions):
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                yield f"{vault.url}/{step}", step, list(parse_json(vault.get(step, META)).get(KEY, []))


def parts(folder: Path, known_of: Callable[[Path], int]) -> Iterator[tuple[Path, int, int]]:
    """The same, with the number of decisions, of the parts in the local folders of all processes seen from here."""
    for own in folder.glob("process-*"):
        for step in writing.numbered(own):
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
                known = int(known_of(own / str(step)))
                yield own / str(step), step, known


def set_aside(root: Path, decisions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Those in workdir/checkpoints become `.stale-N-STEP`, N being the number of decisions; those of fewer go."""
    steps = []
    for path, step, known in list(here(root)):
        if is_stale(step, len(known), decisions):
            target = root / f"{writing.STALE}{len(decisions)}-{step}"
            with contextlib.suppress(OSError):
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)
                steps.append(step)
    if steps:
        for path in root.glob(f"{writing.STALE}*"):
            if not path.name.startswith(f"{writing.STALE}{len(decisions)}-"):
                shutil.rmtree(path, ignore_errors=True)
    return steps


def delete_copies(vault: Any, decisions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Those in a durable place go."""
    stale = [step for _, step, known in copies(vault, decisions) if is_stale(step, len(known), decisions)]
    for step in stale:
        vault.remove(step)
    return stale


def delete_parts(
    folder: Path, known_of: Callable[[Path], int], decisions: Sequence[Mapping[str, Any]]
) -> None:
    """Those in the local folders go, of all processes that can be seen from here: others may do so too."""
    for path, step, known in list(parts(folder, known_of)):
        if is_stale(step, known, decisions):
            with contextlib.suppress(OSError):
                writing.remove(path.parent, step)
