"""Decides which checkpoints to keep: the newest, every n-th and the best; none of an abandoned
branch.

    retention.to_delete(saved, rules)                       the steps that no rule keeps
    retention.find_stale(vault, decisions, file)            the steps of an abandoned branch

A checkpoint that was saved after an update without effect (skipped, or not finite), or among steps
that may become a spike (`guard.spikes`), is not sound: it replaces none that was kept before, and
while it is the newest nothing is deleted.

A rollback to step c is recorded before any checkpoint is touched, and every checkpoint stores the
decisions made before it was saved. So each checkpoint shows by itself whether it belongs to an
abandoned branch, and an interrupted clean-up is finished at the next start. All checkpoints are
first checked for consistency with the decisions: against another run's file, every one of them
would look stale.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import folders
from zaya_jax.checkpoint.layout import META
from zaya_jax.checkpoint.storage import FileError
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import Checkpoint as CheckpointKeys
from zaya_jax.config import UserError, files

DECISIONS = "decisions"  # in a checkpoint's small file
DECISIONS_FILE = "aegis/decisions.json"  # the run's own, in its workdir
FIGURES = ("loss", "grad_norm", "skipped")  # by which a step is sound; saved with each checkpoint

# of `guard.decisions`: each goes back to its "step", and was made after the step "at"
Decisions = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """The facts about a checkpoint that the rules need."""

    step: int
    loss: float | None = None  # on held-out text, if it was evaluated
    sound: bool = True


def saved_in(root: Path) -> list[SavedStep]:
    """The complete checkpoints of a folder; a step whose small file is damaged is left out, and so
    never deleted."""
    saved = []
    for step in folders.steps_in(root):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            meta = files.read_json(root / str(step) / META)
            figures = meta.get("metrics") or {}
            loss = figures.get("eval/loss")
            saved.append(SavedStep(step, loss, is_sound(figures)))
    return saved


def is_sound(figures: Mapping[str, Any]) -> bool:
    """Whether a step's update was made, of finite numbers, and nothing was suspicious.

    An update skipped for a spike counts as not made too. Its state is as good as the one before;
    but a run that spikes on and on may have gone wrong earlier, and then the older checkpoints are
    the ones to go back to.
    """
    doubtful = figures.get("skipped") or figures.get("suspicious")
    return not doubtful and all(_is_finite(figures.get(name, 0.0)) for name in FIGURES)


def to_delete(saved: Sequence[SavedStep], rules: CheckpointKeys) -> list[int]:
    """The steps that no rule keeps."""
    saved = sorted(saved, key=lambda s: s.step)
    if not saved or not saved[-1].sound:
        return []
    sound = [s for s in saved if s.sound]
    keep = {s.step for s in sound[-rules.keep :]}
    if rules.keep_every:
        keep |= {s.step for s in saved if s.step % rules.keep_every == 0}
    if rules.keep_best:
        evaluated = [(s.loss, s.step) for s in sound if _is_finite(s.loss)]
        keep |= {step for _, step in sorted(evaluated)[: rules.keep_best]}
    return [s.step for s in saved if s.step not in keep]


def _is_finite(value: Any) -> bool:
    # in JSON a number that is not finite may be null or a string
    return value is not None and not isinstance(value, str) and math.isfinite(value)


# ################################################################################################
# Abandoned branches
# ##################################################################################################


def is_stale(step: int, num_known: int, decisions: Decisions) -> bool:
    """Whether a checkpoint saved after the first `num_known` decisions is of an abandoned branch."""
    return any(decision["step"] < step for decision in decisions[num_known:])


def conflict(step: int, known: Decisions, decisions: Decisions) -> str:
    """Why a run that made `decisions` cannot have saved a checkpoint in which `known` are stored;
    "" if it can."""
    if known[: len(decisions)] != list(decisions[: len(known)]):
        return "has other decisions"
    if len(known) < len(decisions) and step > decisions[len(known)]["at"]:
        later = decisions[len(known)]["at"]
        return f"does not know the decision at step {later}, before it was saved"
    return ""


def find_stale(vault: Vault, decisions: Decisions, file: Path) -> list[int]:
    """The steps of a vault that these decisions have abandoned; UserError if it has another run's,
    which did not make the decisions in this file."""
    stale = []
    for step in vault.steps() if decisions else ():
        try:
            known = vault.read_meta(step).get(DECISIONS, [])
        except FileError:  # damage is found elsewhere
            continue
        if why := conflict(step, known, decisions):
            raise UserError(
                f"{file} is not that of these checkpoints: {vault.url}/{step} {why}. Nothing was"
                " deleted; restore the run's own file, or move this one away: then it goes on from"
                " its newest checkpoint and its decisions"
            )
        if is_stale(step, len(known), decisions):
            stale.append(step)
    return stale
