"""Reads conversations: the many forms in which records spell turns, reasoning and calls of tools,
as one.

The model's role is always "assistant" and the person's "user", since generation and servers use
these names. Other roles keep their names. `chat_template` turns what is read into tokens.
"""

import collections
import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from zaya_jax.text.tokenizers import NotUnicode, utf8
from zaya_jax.text.tokens import Document

# Of how chats become documents: 1 kept the roles' own names, 2 had tools after a record's system
# text, 3 found answers by the differences of prefixes, 4 learnt a next turn's header as an end, 5
# the answers of a prompt.
VERSION = 6
MODEL_ROLES = ("assistant", "model", "gpt", "bot", "chatgpt", "function_call")
USER_ROLES = ("user", "human", "prompter")
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
# Fields of a chat's record that are turns before its own, and their roles: descriptions of tools, a
# text. In this order, since a template has tools before all turns, and the system text is one.
LEADING_FIELDS = {"tools": "tools", "functions": "tools", "system": "system"}
# Two fields that are a chat of one question and one answer: a completion's, Alpaca's.
PAIRS = (("prompt", "completion"), ("instruction", "output"))
ADDED = "input"  # of Alpaca, behind its instruction
EARLIER = "history"  # turns before that, in a form that is not read
PAIR_FIELDS = (*PAIRS[0], *PAIRS[1], ADDED, EARLIER)
RESULT_ROLES = ("tool", "function", "observation")
ARGUMENTS = ("arguments", "parameters")  # of a call: OpenAI's name, Llama's
REASONING_PARTS = ("thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
KEPT, TRIMMED, REDUCED, DROPPED = OUTCOMES = ("kept", "trimmed", "reduced", "dropped")
LEARNT = ("answers learnt", "answers rewritten", "tokens learnt", "answers learnt without an end")
_THINK = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)


class BadChat(ValueError):
    """A conversation that is not a list of turns with role and content; its message names the kind
    found."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn as text."""

    role: str
    reasoning: str
    content: str
    # The calls of tools, and names of results, as templates take them.
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    # The reasoning as it was given before the content, with its marks and line ends.
    inside: str = dataclasses.field(default="", repr=False, compare=False)
    # Read, and never learnt: turns of a prompt, and those that OpenAI's form gives a weight of 0.
    context: bool = dataclasses.field(default=False, repr=False)

    def __str__(self) -> str:
        return "\n".join((self.role, self.reasoning, self.content))

    @property
    def answer(self) -> bool:
        """Whether the model writes it."""
        return self.role.lower() in MODEL_ROLES

    @property
    def learnt(self) -> bool:
        """Whether the model is to learn to write it."""
        return self.answer and not self.context

    def with_reasoning(self, reasoning: str) -> "Message":
        """The same turn with other reasoning, or none."""
        before, mark, rest = self.inside.partition("<think>")
        inside = before + mark + rest.replace(self.reasoning, reasoning, 1) if reasoning else ""
        return dataclasses.replace(self, reasoning=reasoning, inside=inside)


class Arguments(dict[str, Any]):
    """A call's arguments: an object, and its text for a template that writes one."""

    text: str  # as it was given, or as JSON

    def __str__(self) -> str:
        return self.text

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def read(messages: Any) -> list[Message]:
    """The turns of a chat sample as text: a list of {"role", "content"} or of {"from", "value"}.

    Content is a text, or a list of parts of text; the reasoning stands inside it or in a field of
    its own.
    """
    if not isinstance(messages, list) or not messages:
        raise BadChat(f"a conversation is a list of turns, not {type(messages).__name__}")
    found = [message(one) for one in messages]
    if not any(one.learnt for one in found):
        raise BadChat("a conversation without an answer (a turn of role assistant) teaches nothing")
    return found


def leading_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools and system text of a chat's record, as turns of these roles before the first."""
    return [
        {"role": role, "content": value if isinstance(value, str) else _json(value)}
        for field, role in LEADING_FIELDS.items()
        if (value := record.get(field))
    ]


def paired_turns(record: Mapping[str, Any], text_field: str) -> list[Any]:
    """The turns of a record that has a question and its answer in two fields, as text or as lists
    of turns; none where it has no such pair, or `text_field` asks for one of the two as a text."""
    for pair in PAIRS:
        question, answer = (record.get(field) for field in pair)
        if text_field in pair or not isinstance(question, str | list) or answer is None:
            continue
        if record.get(EARLIER):
            raise BadChat(f"earlier turns under {EARLIER!r} are not read; give all under messages")
        if pair[0] == "instruction" and record.get(ADDED):
            question = f"{question}\n\n{record[ADDED]}"
        if not isinstance(question, list):
            question = [{"role": "user", "content": question}]
        if not isinstance(answer, list):
            answer = [{"role": "assistant", "content": answer}]
        # A prompt's own answers are not learnt, as in TRL.
        said = [one | {"weight": 0} if isinstance(one, dict) else one for one in question]
        return [*said, *answer]
    return []


class Counts(collections.Counter[str]):
    """How many chats were kept, trimmed, reduced, dropped and left out; and LEARNT of them."""

    def add(self, document: Document | None, outcome: str, ends: bool) -> None:
        """Count a chat as `Template.prepare` gives it; `ends`: whether its template ends
        answers."""
        self[outcome] += 1
        if document is not None and document.learn is not None:
            told = document.answers, document.rewritten, int(document.learn.sum())
            self.update(dict(zip(LEARNT, told, strict=False)))
            self.update({} if ends else {LEARNT[3]: document.answers})

    def __str__(self) -> str:
        others = sorted(self.keys() - {*OUTCOMES, *LEARNT})
        return ", ".join(f"{self[name]:,} {name}" for name in (*OUTCOMES, *others))

    @property
    def learnt(self) -> str:
        """What is learnt, in words."""
        return ", ".join(f"{self[name]:,} {name}" for name in LEARNT if name in self)


def message(given: Any) -> Message:
    """One turn as text."""
    if not isinstance(given, dict):
        raise BadChat(f"a turn is an object with role and content, not {type(given).__name__}")
    role = given.get("role") or given.get("from")
    role = role.strip() if isinstance(role, str) else None
    if not role:
        raise BadChat(f"a turn needs a role as text, this one has {named_fields(given)}")
    content = next((given[key] for key in ("content", "value") if given.get(key) is not None), None)
    calls = _calls(given)
    field = next((given[key] for key in REASONING_KEYS if given.get(key)), None)
    if content is None and not calls and field is None:
        raise BadChat(f"a turn needs content, this one has {named_fields(given)}")
    reasoning, text = _text(content, role)
    if field is not None:
        reasoning = "".join(_text(field, ""))
    turn, inside = Message(_spelt(role), "", text), ""
    if turn.answer and not reasoning and (found := _THINK.match(text)):
        inside, reasoning, text = found[0], found[1], text[found.end() :]
    if not reasoning.strip():
        reasoning = ""
    elif not turn.answer:
        raise BadChat(f"a turn of role {role!a} has reasoning, and only the model's turns may")
    reasoning = reasoning.strip("\n")
    more: dict[str, Any] = {key: given[key] for key in ("name", "tool_call_id") if given.get(key)}
    if calls:
        more["tool_calls"] = calls
    turn = Message(turn.role, reasoning, text, more, inside, given.get("weight") == 0)
    try:
        utf8(turn.role + turn.reasoning + turn.content + _json(more))
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
        raise BadChat(
            "a turn's content and reasoning are text or lists of parts, not"
            f" {type(content).__name__}"
        )
    reasoning, text = "", ""
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        held = (
            (part.get(kind) or part.get("text"))
            if isinstance(part, dict) and isinstance(kind, str)
            else part
        )
        if kind in REASONING_PARTS and (held is None or isinstance(held, str)):
            reasoning += held or ""
        elif kind in TEXT_PARTS and (held is None or isinstance(held, str)):
            text += held or ""
        else:
            raise BadChat(
                f"a turn has a part of type {ascii(kind)[:40]}, and only parts of text can be"
                " learnt"
            )
    return reasoning, text


def _calls(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of tools in a turn, in OpenAI's form."""
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadChat(f"tool_calls is a list of calls, not {type(calls).__name__}")
    found = []
    for call in filter(None, [*calls, given.get("function_call")]):
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadChat(
                f"a call of a tool needs a function with a name, this one has {named_fields(function)}"
            )
        arguments: Any = next((function[key] for key in ARGUMENTS if key in function), {})
        text = arguments if isinstance(arguments, str) else _json(arguments)
        if isinstance(arguments, str):  # JSON within JSON, mostly
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if isinstance(arguments, dict):
            arguments = Arguments(arguments)
            arguments.text = text
        known = {"id": call["id"]} if call.get("id") else {}
        named = {"name": function["name"], "arguments": arguments}
        found.append({**known, "type": "function", "function": named})
    return found


def _json(value: Any) -> str:
    try:
        # Parquet has types that JSON has not
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        raise BadChat("a tool's JSON is nested too deep to be written") from None


def named_fields(value: Any) -> str:
    """The fields of a record with their types, in words."""
    if not isinstance(value, dict):
        return f"a {type(value).__name__}"
    return ascii(", ".join(f"{key} ({type(value[key]).__name__})" for key in sorted(value)[:8]))[
        1:-1
    ][:200]
