"""Decides which checkpoints to keep: the newest, every n-th, the best, and token milestones.

A checkpoint that was saved after an update without effect (skipped, or not finite), or among steps that may become a
spike (`aegis.spikes`), is not sound: it replaces none that was kept before, and while it is the newest nothing is
deleted.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.layout import META
from zaya_jax.config import Checkpoint, files

FIGURES = ("loss", "grad_norm", "skipped")  # by which a step is sound; saved with each checkpoint


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The facts about a checkpoint that the rules need."""

    step: int
    tokens: int
    loss: float | None = None  # on held-out text, where it was evaluated and is finite
    sound: bool = True


def saved_in(root: Path) -> list[Candidate]:
    """The complete checkpoints of a folder; a step whose small file is damaged is left out, and so never deleted."""
    saved = []
    for step in writing.steps_in(root):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            meta = files.read_json(root / str(step) / META)
            figures = meta.get("metrics") or {}
            loss = figures.get("eval/loss")
            finite = loss if _finite(loss) else None
            saved.append(Candidate(step, int(meta["tokens"]), finite, sound(figures)))
    return saved


def sound(figures: Mapping[str, Any]) -> bool:
    """Whether a step's update was made, of finite numbers, and nothing was suspicious.

    An update skipped for a spike counts as not made too. Its state is as good as the one before; but a run that spikes
    on and on may have gone wrong earlier, and then the older checkpoints are the ones to go back to.
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
