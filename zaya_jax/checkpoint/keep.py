"""Which checkpoints are kept: the newest, and beside them every n-th, the best, and token milestones."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.config import Checkpoint


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the rules ask of a checkpoint."""

    step: int
    tokens: int
    loss: float | None = None  # on held-out text, where it was evaluated


def to_delete(saved: Sequence[Saved], rules: Checkpoint) -> list[int]:
    """The steps that no rule keeps."""
    saved = sorted(saved, key=lambda s: s.step)
    kept = {s.step for s in saved[-rules.keep :]}
    if rules.keep_every:
        kept |= {s.step for s in saved if s.step % rules.keep_every == 0}
    if rules.keep_best:
        judged = sorted((s for s in saved if s.loss is not None), key=lambda s: (s.loss, s.step))
        kept |= {s.step for s in judged[: rules.keep_best]}
    if rules.keep_tokens:
        reached = 0
        for s in saved:  # the first one at or after each milestone
            if s.tokens // rules.keep_tokens > reached:
                reached = s.tokens // rules.keep_tokens
                kept.add(s.step)
    return [s.step for s in saved if s.step not in kept]
