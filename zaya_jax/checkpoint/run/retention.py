"""Decides which checkpoints to keep: the newest, every n-th, the best, and token milestones; none
of a past given up.

    retention.to_delete(saved, rules)                 the steps that no rule keeps
    retention.drop_stale(root, durable, decisions)    in all processes together, before looking for the newest

A checkpoint that was saved after an update without effect (skipped, or not finite), or among steps
that may become a spike (`guard.spikes`), is not sound: it replaces none that was kept before, and
while it is the newest nothing is deleted.

A run that goes back to step c has decided so before anything of it is touched, and each checkpoint
has the decisions that were made before it was saved. So a checkpoint by itself tells whether it is
of an abandoned past, and a run that is killed while it sets some aside does the rest at its next
start. First all are compared with the decisions: judged by another run's file, every checkpoint
would look stale.
"""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.layout import META
from zaya_jax.checkpoint.place import Unreachable
from zaya_jax.checkpoint.run.durable import Durable
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError, UserError, files

KEY = "decisions"  # in a checkpoint's small file
FILE = "aegis/decisions.json"  # the run's own, in its workdir
FIGURES = ("loss", "grad_norm", "skipped")  # by which a step is sound; saved with each checkpoint

Decisions = Sequence[Mapping[str, Any]]
Known = tuple[str, int, list]  # a checkpoint's place, its step, and the decisions that it has


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The facts about a checkpoint that the rules need."""

    step: int
    tokens: int
    loss: float | None = None  # on held-out text, where it was evaluated
    sound: bool = True


def saved_in(root: Path) -> list[Candidate]:
    """The complete checkpoints of a folder; a step whose small file is damaged is left out, and so
    never deleted."""
    saved = []
    for step in writing.steps_in(root):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            meta = files.read_json(root / str(step) / META)
            figures = meta.get("metrics") or {}
            loss = figures.get("eval/loss")
            saved.append(Candidate(step, int(meta["tokens"]), loss, sound(figures)))
    return saved


def sound(figures: Mapping[str, Any]) -> bool:
    """Whether a step's update was made, of finite numbers, and nothing was suspicious.

    An update skipped for a spike counts as not made too. Its state is as good as the one before;
    but a run that spikes on and on may have gone wrong earlier, and then the older checkpoints are
    the ones to go back to.
    """
    doubtful = figures.get("skipped") or figures.get("suspicious")
    return not doubtful and all(_finite(figures.get(name, 0.0)) for name in FIGURES)


def to_delete(saved: Sequence[Candidate], rules: Checkpoint) -> list[int]:
    """The steps that no rule keeps."""
    saved = sorted(saved, key=lambda s: s.step)
    if not saved or not saved[-1].sound:
        return []
    trusted = [s for s in saved if s.sound]
    kept = {s.step for s in trusted[-rules.keep :]}
    if rules.keep_every:
        kept |= {s.step for s in saved if s.step % rules.keep_every == 0}
    if rules.keep_best:
        judged = [(s.loss, s.step) for s in saved if _finite(s.loss)]
        kept |= {step for _, step in sorted(judged)[: rules.keep_best]}
    if rules.keep_tokens:
        reached = 0
        for s in trusted:  # the first one at or after each milestone
            if s.tokens // rules.keep_tokens > reached:
                reached = s.tokens // rules.keep_tokens
                kept.add(s.step)
    return [s.step for s in saved if s.step not in kept]


def _finite(value: Any) -> bool:
    return value is not None and not isinstance(value, str) and math.isfinite(value)


# ################################################################################################
# A past that was given up
# ##################################################################################################


def is_stale(step: int, known: int, decisions: Decisions) -> bool:
    """Whether a checkpoint saved after the first `known` decisions is of an abandoned past."""
    return any(one["step"] < step for one in decisions[known:])


def conflict(checkpoints: Iterable[Known], decisions: Decisions) -> str:
    """The first checkpoint that a run with these decisions cannot have saved, and why; "" where it
    can have all."""
    for place, step, known in checkpoints:
        if known[: len(decisions)] != list(decisions[: len(known)]):
            return f"{place} has other decisions"
        later = decisions[len(known)]["at"] if len(known) < len(decisions) else step
        if step > later:
            return f"{place} does not know the decision at step {later}, before it was saved"
    return ""


def drop_stale(root: Path, durable: Durable | None, decisions: Decisions) -> list[int]:
    """Cleans both places and returns the steps set aside. UserError, before deleting, if these are
    another run's."""

    def first() -> list[int]:
        why = conflict(known_in(Vault(root), decisions), decisions)
        if durable and not why:
            try:
                why = conflict(known_in(durable.vault, decisions), decisions)
            except Unreachable as failure:
                durable.silent = failure  # nothing is fetched from there; the next start deletes
        if why:
            raise UserError(
                f"{root.parent / FILE} is not that of these checkpoints: {why}. Nothing was"
                " deleted; restore the run's own file, or move this one away: then it goes on from"
                " its newest checkpoint and its decisions"
            )
        if durable and not durable.silent:  # first, or the rest would be fetched
            for step in stale_in(durable.vault, decisions):
                durable.vault.remove(step)
        return set_aside(root, decisions)

    return multihost.broadcast_from_zero("stale", first)


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
    return [
        step
        for _, step, known in known_in(vault, decisions)
        if is_stale(step, len(known), decisions)
    ]


def set_aside(root: Path, decisions: Decisions) -> list[int]:
    """Those in workdir/checkpoints become `.stale-N-STEP`, N being the number of decisions; those
    of fewer go."""
    steps = stale_in(Vault(root), decisions)
    for step in steps:
        target = root / f"{writing.STALE}{len(decisions)}-{step}"
        shutil.rmtree(target, ignore_errors=True)
        (root / str(step)).rename(target)
    for path in root.glob(f"{writing.STALE}*") if steps else ():
        if not path.name.startswith(f"{writing.STALE}{len(decisions)}-"):
            shutil.rmtree(path, ignore_errors=True)
    return steps
