"""Conversations as tokens: roles, reasoning and answers between marks, and which of it is to be learnt.

A turn is <|turn|>role NEWLINE text <|end_turn|>NEWLINE, the model's own with its reasoning between <think>
and </think> before the answer. Only what the model itself is to write is learnt: reasoning, answer and the
end of its turn.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.data import trim
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.data.tokens import Document
from zaya_jax.data.trim import Turn

MODEL_ROLES = ("assistant", "model", "gpt", "bot")
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


class BadChat(ValueError):
    """A conversation that is not a list of turns with role and content; says what it is instead."""


class Format:
    """Turns conversations into documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        marks = {
            role: tuple(tokenizer.chat_token(role)) for role in ("turn", "end_turn", "think", "end_think")
        }
        self._turn, self._end, self._think, self._end_think = marks.values()
        self._newline = tuple(tokenizer.encode("\n"))

    def turns(self, messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
        """The turns of a chat sample: a list of {"role", "content"}, the reasoning inside content or beside
        it.
        """
        if not isinstance(messages, list) or not messages:
            raise BadChat(f"a conversation is a list of turns, not {type(messages).__name__}")
        turns = []
        for message in messages:
            if not isinstance(message, dict):
                raise BadChat(f"a turn is an object with role and content, not {type(message).__name__}")
            role = message.get("role", message.get("from"))
            content = message.get("content", message.get("value"))
            if not isinstance(role, str) or not isinstance(content, str):
                raise BadChat(f"a turn needs role and content as text, this one has {sorted(message)}")
            turns.append(
                self._one(role, content, next((message[k] for k in REASONING_KEYS if message.get(k)), ""))
            )
        if not any(turn.answer for turn in turns):
            raise BadChat("a conversation without an answer (a turn of role assistant) teaches nothing")
        return turns

    def document(self, turns: Sequence[Turn]) -> Document:
        """The document of turns, the model's own marked as what is to be learnt."""
        ids: list[int] = [self._tokenizer.bos_id]
        learn: list[bool] = [False]
        for turn in turns:
            inside = [*turn.opening, *turn.reasoning, *turn.closing] if len(turn.reasoning) else []
            ids += [*turn.head, *inside, *turn.tail]
            newline = len(self._newline)
            own = len(inside) + len(turn.tail) - newline
            learn += [False] * len(turn.head) + [turn.answer] * own + [False] * newline
        ids.append(self._tokenizer.eos_id)
        learn.append(bool(turns) and turns[-1].answer)
        return Document(np.array(ids, self._tokenizer.dtype), np.array(learn, bool))

    def _one(self, role: str, content: str, reasoning: str) -> Turn:
        answer = role.lower() in MODEL_ROLES
        if answer and not reasoning:
            found = _THINK.match(content)
            if found:
                reasoning, content = found[1], content[found.end() :]
        encode = self._tokenizer.encode
        return Turn(
            head=(*self._turn, *encode(role), *self._newline),
            opening=self._think,
            reasoning=encode(reasoning.strip("\n")) if answer and reasoning else (),
            closing=(*self._end_think, *self._newline),
            tail=(*encode(content), *self._end, *self._newline),
            answer=answer,
        )


def prepare(
    chat: Format, messages: Sequence[Mapping[str, Any]], context: int | None
) -> tuple[Document | None, str]:
    """(the document of a chat sample fitted to a context, what was done to it); None where it is dropped."""
    turns = chat.turns(messages)
    if context is None:
        return chat.document(turns), trim.KEPT
    turns, outcome = trim.trim(turns, context - 2)  # begin and end of document
    return (chat.document(turns) if turns else None), outcome
