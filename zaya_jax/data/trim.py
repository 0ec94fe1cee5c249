"""Fitting reasoning samples to a context without losing an answer.

A sample that fits is kept. One that does not loses, in a conversation of several answers, the reasoning of
all answers but the last; if it still does not fit, or has one answer only, the end of the last reasoning is
cut, just before the answer. A sample that is too long without any reasoning is dropped. Prompts and answers
are never touched. It is done anew for each context length.
"""

import collections
import dataclasses
from collections.abc import Sequence

KEPT, TRIMMED, REDUCED, DROPPED = "kept", "trimmed", "reduced", "dropped"


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of a conversation in tokens: what stands before the reasoning, the reasoning, what stands after it.

    `opening` and `closing` are the marks around the reasoning; they go when all of it goes.
    """

    head: Sequence[int]
    reasoning: Sequence[int] = ()
    tail: Sequence[int] = ()
    opening: Sequence[int] = ()
    closing: Sequence[int] = ()
    answer: bool = False  # the model's own turn

    def __len__(self) -> int:
        marks = len(self.opening) + len(self.closing) if len(self.reasoning) else 0
        return len(self.head) + marks + len(self.reasoning) + len(self.tail)


def trim(turns: Sequence[Turn], context: int) -> tuple[list[Turn], str]:
    """(the turns that fit into `context` tokens, what was done); no turns where the sample is dropped.

    What was done: kept as it was; trimmed (the last reasoning's end is cut); reduced (earlier reasoning is gone,
    and the last one's end where that was not enough); dropped.
    """
    turns = list(turns)
    if _length(turns) <= context:
        return turns, KEPT
    if _length([_without(turn) for turn in turns]) > context:
        return [], DROPPED
    reasoned = [i for i, turn in enumerate(turns) if len(turn.reasoning)]
    answers = [i for i, turn in enumerate(turns) if turn.answer]
    last = answers[-1] if answers else -1
    outcome = TRIMMED
    if any(i != last for i in reasoned):
        turns = [turn if i == last else _without(turn) for i, turn in enumerate(turns)]
        outcome = REDUCED
    excess = _length(turns) - context
    if excess > 0:
        room = len(turns[last].reasoning) - excess
        cut = turns[last].reasoning[: max(room, 0)]
        turns[last] = dataclasses.replace(turns[last], reasoning=cut) if len(cut) else _without(turns[last])
    return turns, outcome


class Counts(collections.Counter[str]):
    """How many samples were kept, trimmed, reduced and dropped."""

    def __str__(self) -> str:
        return ", ".join(f"{self[name]:,} {name}" for name in (KEPT, TRIMMED, REDUCED, DROPPED))


def _length(turns: Sequence[Turn]) -> int:
    return sum(len(turn) for turn in turns)


def _without(turn: Turn) -> Turn:
    return dataclasses.replace(turn, reasoning=())
