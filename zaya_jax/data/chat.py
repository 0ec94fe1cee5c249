"""Spells conversations as tokens, marks the tokens to learn, and fits conversations to a context.

A turn is <|turn|>role NEWLINE text <|end_turn|>NEWLINE. The model's turns have reasoning between <think> and </think>
before the answer, and tool calls after it, each as JSON between <tool_call> and </tool_call>. Only the model's own
output is learnt: reasoning, answer, calls and the end of its turn. The model's role is always spelt "assistant" and
the person's "user", since generation and servers use these names. Other roles keep their names.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.data.tokenizers import CHAT_TOKENS, NotUnicode, Tokenizer, utf8
from zaya_jax.data.tokens import Document

VERSION = 3  # of how chats are spelt: 1 kept the roles' own names, 2 spelt tools after a record's system text
MODEL_ROLES = ("assistant", "model", "gpt", "bot", "chatgpt", "function_call")
USER_ROLES = ("user", "human", "prompter")
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
# Fields of a chat's record before its turns: descriptions of tools, a text. In this order, since a template has
# tools before all turns, and the system text is one.
LEADING_FIELDS = ("tools", "system")
RESULT_ROLES = ("tool", "function", "observation")
ARGUMENTS = ("arguments", "parameters")  # of a call: OpenAI's name, Llama's
REASONING_PARTS = ("thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
KEPT, TRIMMED, REDUCED, DROPPED = "kept", "trimmed", "reduced", "dropped"  # samples, fitted to a context
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


class BadChat(ValueError):
    """A conversation that is not a list of turns with role and content; its message names the kind found."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn as text."""

    role: str
    reasoning: str
    content: str
    # For a template of its own (`own_template`): the calls of tools, which `content` spells, and names of results.
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join((self.role, self.reasoning, self.content))

    @property
    def answer(self) -> bool:
        """Whether the model is to learn to write it."""
        return self.role.lower() in MODEL_ROLES

    @property
    def plain(self) -> str:
        """The content without the calls of tools."""
        calls = "\n".join(_call(call["function"]) for call in self.more.get("tool_calls", ()))
        return self.content.removesuffix(calls).removesuffix("\n") if calls else self.content


def read(messages: Any) -> list[Message]:
    """The turns of a chat sample as text: a list of {"role", "content"} or of {"from", "value"}.

    Content is a text, or a list of parts of text; the reasoning stands inside it or in a field of its own.
    """
    if not isinstance(messages, list) or not messages:
        raise BadChat(f"a conversation is a list of turns, not {type(messages).__name__}")
    found = [message(one) for one in messages]
    if not any(one.answer for one in found):
        raise BadChat("a conversation without an answer (a turn of role assistant) teaches nothing")
    return found


def leading_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools and system text of a chat's record, as turns of these roles before the first."""
    found = {role: record[role] for role in LEADING_FIELDS if record.get(role)}
    return [
        {"role": role, "content": value if isinstance(value, str) else _json(value)} for role, value in found.items()
    ]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of a conversation in tokens: the ids before the reasoning, the reasoning, the ids after it.

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


class Format:
    """Turns conversations into documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        marks = {role: tuple(tokenizer.chat_token(role)) for role in ("turn", "end_turn", "think", "end_think")}
        self._turn, self._end, self._think, self._end_think = marks.values()
        self._encode = functools.lru_cache(64)(lambda text: tuple(tokenizer.encode(text)))  # roles, and NEWLINE
        self._newline = self._encode("\n")

    def document(self, turns: Sequence[Turn]) -> Document:
        """The document of turns, the model's own marked to be learnt."""
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

    @property
    def ends(self) -> list[int]:
        """The id that ends an answer, if there is one."""
        return [*self._end] if len(self._end) == 1 else []

    @property
    def stop(self) -> list[str]:
        """The text that ends an answer, where no id does."""
        return [] if self.ends else [CHAT_TOKENS["end_turn"][0]]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the model continues with its answer."""
        turns = (token for message in messages for token in self.turn_ids(message))
        return [self._tokenizer.bos_id, *turns, *self.opening("assistant")]

    def answered(self, messages: Sequence[Message], text: str, ids: Sequence[int]) -> Message:
        """The answer to a conversation that is this text, and was these ids."""
        return Message("assistant", "", text)

    def prepare(self, messages: Sequence[Message], context: int | None) -> tuple[Document | None, str]:
        """(the document of a chat fitted to a context, KEPT or how it changed); None where it is dropped."""
        turns = [self.turn(message) for message in messages]
        if context is None:
            return self.document(turns), KEPT
        turns, outcome = trim(turns, context - 2)  # begin and end of document
        return (self.document(turns) if turns else None), outcome

    def opening(self, role: str) -> tuple[int, ...]:
        """The ids that open a turn of this role."""
        return (*self._turn, *self._encode(f"{role}\n"))

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        """A whole turn, without reasoning, as ids."""
        turn = self.turn(message)
        return (*turn.head, *turn.tail)

    def turn(self, message: Message) -> Turn:
        """A turn in tokens."""
        opening, tail = self.opening(message.role), (*self._end, *self._newline)
        if not message.reasoning:
            head, content = self._together(f"{message.role}\n", message.content)
            return Turn(head=(*self._turn, *head), tail=(*content, *tail), answer=message.answer)
        newline, content = self._together("\n", message.content)
        return Turn(
            head=opening,
            opening=self._think,
            reasoning=self._tokenizer.encode(message.reasoning),
            closing=(*self._end_think, *newline),
            tail=(*content, *tail),
            answer=message.answer,
        )

    def _together(self, before: str, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """The ids of two adjacent texts, encoded as one text, as a chat template does.

        A tokenizer may join the line's end with white space that the text begins with; such an id is the text's.
        """
        alone, both = self._encode(before), self._tokenizer.encode(before + text)
        same = 0
        while same < min(len(alone), len(both)) and alone[same] == both[same]:
            same += 1
        return both[:same], both[same:]


def trim(turns: Sequence[Turn], context: int) -> tuple[list[Turn], str]:
    """(the turns that fit into `context` tokens, KEPT or how they changed); no turns where the sample is dropped.

    A sample that fits is kept. Otherwise all answers but the last lose their reasoning (reduced); where that is not
    enough, or there is one answer only, the end of the last reasoning is cut, just before the answer (trimmed). A
    sample that is too long without any reasoning is dropped. Prompts and answers are never touched.
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


def message(given: Any) -> Message:
    """One turn as text."""
    if not isinstance(given, dict):
        raise BadChat(f"a turn is an object with role and content, not {type(given).__name__}")
    role = given.get("role") or given.get("from")
    role = role.strip() if isinstance(role, str) else None
    if not role:
        raise BadChat(f"a turn needs a role as text, this one has {_fields(given)}")
    content = given.get("content")
    content = given.get("value") if content is None else content
    functions = _functions(given)
    calls = [_call(function) for function in functions]
    field = next((given[key] for key in REASONING_KEYS if given.get(key)), None)
    if content is None and not calls and field is None:
        raise BadChat(f"a turn needs content, this one has {_fields(given)}")
    reasoning, text = _text(content, role)
    if field is not None:
        reasoning = "".join(_text(field, ""))
    turn = Message(_spelt(role), "", text)
    if turn.answer and not reasoning:
        found = _THINK.match(text)
        if found:
            reasoning, text = found[1], text[found.end() :]
    reasoning = reasoning.strip("\n") if turn.answer else ""
    text = text.lstrip() if reasoning else text  # as where the reasoning stands inside
    more: dict[str, Any] = {key: given[key] for key in ("name", "tool_call_id") if given.get(key)}
    if functions:
        more["tool_calls"] = [{"type": "function", "function": _arguments(function)} for function in functions]
    turn = Message(turn.role, reasoning, "\n".join(filter(None, [text, *calls])), more)
    try:
        utf8(turn.role + turn.reasoning + turn.content)
    except NotUnicode as error:
        raise BadChat(f"a turn of role {role!a}: {error}") from None
    return turn


def _spelt(role: str) -> str:
    """A role as the document names it."""
    same = {name: names[0] for names in (MODEL_ROLES, USER_ROLES) for name in names}
    return same.get(role.lower(), role)


def _text(content: Any, role: str) -> tuple[str, str]:
    """(reasoning, text) of a turn's content: text, parts, or a tool's result."""
    if content is None or isinstance(content, str):
        return "", content or ""
    if isinstance(content, dict) and role.lower() in RESULT_ROLES:
        return "", _json(content)
    if not isinstance(content, list):
        raise BadChat(f"a turn's content and reasoning are text or lists of parts, not {type(content).__name__}")
    reasoning, text = "", ""
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        held = (part.get(kind) or part.get("text")) if isinstance(part, dict) and isinstance(kind, str) else part
        if kind in REASONING_PARTS and (held is None or isinstance(held, str)):
            reasoning += held or ""
        elif kind in TEXT_PARTS and (held is None or isinstance(held, str)):
            text += held or ""
        else:
            raise BadChat(f"a turn has a part of type {ascii(kind)[:40]}, and only parts of text can be learnt")
    return reasoning, text


def _functions(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of tools in a turn."""
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadChat(f"tool_calls is a list of calls, not {type(calls).__name__}")
    if given.get("function_call"):
        calls = [*calls, given["function_call"]]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls if call]
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadChat(f"a call of a tool needs a function with a name, this one has {_fields(function)}")
    return functions


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """A call's name and arguments."""
    arguments: Any = next((function[key] for key in ARGUMENTS if key in function), {})
    if isinstance(arguments, str):  # JSON within JSON, mostly
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def _call(function: dict[str, Any]) -> str:
    """A call as the text that the model writes."""
    return f"<tool_call>\n{_json(_arguments(function))}\n</tool_call>"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)  # Parquet has types that JSON has not
    except RecursionError:
        raise BadChat("a tool's JSON is nested too deep to be written") from None


def _fields(value: Any) -> str:
    if not isinstance(value, dict):
        return f"a {type(value).__name__}"
    return ascii(", ".join(f"{key} ({type(value[key]).__name__})" for key in sorted(value)[:8]))[1:-1][:200]
