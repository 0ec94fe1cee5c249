"""Reads conversations: the many forms in which records write turns, reasoning and calls of tools,
as one.

The model's role is always "assistant" and the person's "user", since generation and servers use
these names. Other roles keep their names. `chat_template` turns what is read into tokens.
"""

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from zaya_jax.config import UserError
from zaya_jax.text.tokenizers import utf8

# The version of the chat encoding. Earlier: 1 kept the roles' own names; 2 had tools after a
# record's system text; 3 found answers by the differences of prefixes; 4 learnt a next turn's
# header as an end; 5 learnt the answers of a prompt.
VERSION = 6
MODEL_ROLES = ("assistant", "model", "gpt", "bot", "chatgpt", "function_call")
USER_ROLES = ("user", "human", "prompter")
CANONICAL_ROLES = dict.fromkeys(MODEL_ROLES, "assistant") | dict.fromkeys(USER_ROLES, "user")
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
# Fields of a chat's record that are turns before its own, and their roles: descriptions of tools, a
# text. In this order, since a template has tools before all turns, and the system text is one.
LEADING_FIELDS = {"tools": "tools", "functions": "tools", "system": "system"}
# Two fields that are a chat of one question and one answer: a completion's, Alpaca's.
PAIRS = (("prompt", "completion"), ("instruction", "output"))
ADDED = "input"  # of Alpaca, after its instruction
EARLIER = "history"  # turns before that, in a form that is not read
PAIR_FIELDS = (*PAIRS[0], *PAIRS[1], ADDED, EARLIER, "label")
PAIR_FORM = (
    "a pair has chosen and rejected as texts or lists of turns, and a prompt unless both are whole"
    " conversations"
)
RESULT_ROLES = ("tool", "function", "observation")
ARGUMENTS = ("arguments", "parameters")  # of a call: OpenAI's name, Llama's
REASONING_PARTS = ("thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
# How a chat was fitted to a context (`chat_template.Template.encode_within`).
KEPT, TRIMMED, REDUCED, DROPPED = "kept", "trimmed", "reduced", "dropped"
_THINK = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)


class BadChat(UserError):
    """A conversation that is not a list of turns with role and content; its message says what it
    is instead."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn as text. Its repr decides whether its chat is held out (`memory`): a field that is
    added must not be in it."""

    role: str
    reasoning: str
    content: str
    # The calls of tools, and names of results, as templates take them.
    extra_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    # The reasoning as it was written before the content, with its tags and line ends.
    raw_reasoning: str = dataclasses.field(default="", repr=False, compare=False)
    # Read only: turns of a prompt, and those that OpenAI's form gives a weight of 0.
    not_learnt: bool = dataclasses.field(default=False, repr=False)

    def __str__(self) -> str:
        return "\n".join((self.role, self.reasoning, self.content))

    @property
    def is_answer(self) -> bool:
        """Whether the model writes it."""
        return self.role.lower() in MODEL_ROLES

    @property
    def is_learnt(self) -> bool:
        """Whether the model is to learn to write it."""
        return self.is_answer and not self.not_learnt

    def with_reasoning(self, reasoning: str) -> "Message":
        """The same turn with other reasoning, or none."""
        raw = ""
        if reasoning:
            before, tag, rest = self.raw_reasoning.partition("<think>")
            raw = before + tag + rest.replace(self.reasoning, reasoning, 1)
        return dataclasses.replace(self, reasoning=reasoning, raw_reasoning=raw)


class Arguments(dict[str, Any]):
    """A call's arguments: an object, and its text for a template that writes one."""

    text: str  # as it was given, or as JSON

    def __str__(self) -> str:
        return self.text

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def in_words(counts: Mapping[str, int]) -> str:
    """How often each thing happened."""
    return ", ".join(f"{counts[name]:,} {name}" for name in sorted(counts))


def parse_chat(messages: Any) -> list[Message]:
    """The turns of a chat: a list of {"role", "content"} or of {"from", "value"}.

    Content is a text, or a list of parts of text; the reasoning is inside it or in a field of its
    own.
    """
    if not isinstance(messages, list) or not messages:
        raise BadChat(f"a conversation is a list of turns, not {type(messages).__name__}")
    return _with_an_answer([parse_turn(turn) for turn in messages])


def _with_an_answer(turns: list[Message]) -> list[Message]:
    if not any(turn.is_learnt for turn in turns):
        raise BadChat("a conversation without an answer (a turn of role assistant) teaches nothing")
    return turns


class Pair(NamedTuple):
    """Two conversations with one beginning, of which nothing is learnt; the first is preferred."""

    chosen: list[Message]
    rejected: list[Message]
    shared: list[Message]  # the turns of their beginning


def parse_pair(record: Mapping[str, Any]) -> Pair:
    """A record with `chosen` and `rejected`: two answers to its `prompt`, each of the three a text
    or a list of turns; or two whole conversations, which may have the prompt in them.
    """
    prompt = record.get("prompt")
    whole = False
    conversations = []
    for side in (record.get("chosen"), record.get("rejected")):
        turns = [{"role": "assistant", "content": side}] if isinstance(side, str) else side
        if not isinstance(turns, list) or not turns:
            raise BadChat(f"{PAIR_FORM}; this one has {named_fields(record)}")
        if isinstance(prompt, list) and turns[: len(prompt)] == prompt:  # a whole conversation
            turns = turns[len(prompt) :]
        before: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        whole = not isinstance(prompt, list) and not parse_turn(turns[0]).is_answer
        if not whole and not isinstance(before, list):
            raise BadChat(f"{PAIR_FORM}; this one has {named_fields(record)}")
        before = [] if whole else before
        conversations.append(parse_chat([*leading_turns(record), *before, *turns]))
    pair = _paired(*conversations)
    if whole and prompt and prompt not in [turn.content for turn in pair.shared]:
        raise BadChat("its prompt is none of the turns that chosen and rejected begin with")
    return pair


def _paired(chosen: list[Message], rejected: list[Message]) -> Pair:
    """Two conversations, with the turns that both begin with as read only."""
    most = min(len(chosen), len(rejected)) - 1  # an answer stays, also where all are alike
    pairs = zip(chosen[:most], rejected[:most], strict=True)
    count = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    shared = [dataclasses.replace(turn, not_learnt=True) for turn in chosen[:count]]
    better, worse = (_with_an_answer([*shared, *side[count:]]) for side in (chosen, rejected))
    return Pair(better, worse, shared)


def leading_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools and system text of a chat's record, as turns of these roles before the first."""
    turns = []
    for field, role in LEADING_FIELDS.items():
        content = record.get(field)
        if content:
            text = content if isinstance(content, str) else to_json(content)
            turns.append({"role": role, "content": text})
    return turns


def paired_turns(record: Mapping[str, Any], text_field: str) -> list[Any]:
    """The turns of a record that has a question and its answer in two fields, as text or as lists
    of turns; none where it has no such pair, or `text_field` asks for one of the two as a text."""
    for pair in PAIRS:
        question, answer = (record.get(field) for field in pair)
        if text_field in pair or not isinstance(question, str | list) or answer is None:
            continue
        if record.get(EARLIER):
            raise BadChat(f"{EARLIER!r} is not supported; put all turns into messages")
        if record.get("label") is False:  # in KTO's data sets
            raise BadChat("its label is false, so its answer is a bad one (KTO) and not learnt")
        if pair[0] == "instruction" and record.get(ADDED):
            question = f"{question}\n\n{record[ADDED]}"
        if not isinstance(question, list):
            question = [{"role": "user", "content": question}]
        if not isinstance(answer, list):
            answer = [{"role": "assistant", "content": answer}]
        # A prompt's own answers are not learnt, as in TRL.
        read_only = [turn | {"weight": 0} if isinstance(turn, dict) else turn for turn in question]
        return [*read_only, *answer]
    return []


def parse_turn(turn: Any) -> Message:
    """One turn of a chat."""
    if not isinstance(turn, dict):
        raise BadChat(f"a turn is an object with role and content, not {type(turn).__name__}")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str) or not role.strip():
        raise BadChat(f"a turn needs a role as text, this one has {named_fields(turn)}")
    role = role.strip()
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    calls = _calls(turn)
    reasoning_field = next((turn[key] for key in REASONING_KEYS if turn.get(key)), None)
    if content is None and not calls and reasoning_field is None:
        raise BadChat(f"a turn needs content, this one has {named_fields(turn)}")
    is_answer = CANONICAL_ROLES.get(role.lower()) == "assistant"
    reasoning, text = _reasoning_and_text(content, role)
    if reasoning_field is not None:
        reasoning = "".join(_reasoning_and_text(reasoning_field, ""))
    raw_reasoning = ""
    inside = _THINK.match(text)
    if is_answer and not reasoning and inside:
        raw_reasoning, reasoning, text = inside[0], inside[1], text[inside.end() :]
    if not reasoning.strip():
        reasoning = ""
    elif not is_answer:
        raise BadChat(f"a turn of role {role!a} has reasoning, and only the model's turns may")
    extra: dict[str, Any] = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}
    if calls:
        extra["tool_calls"] = calls
    message = Message(
        CANONICAL_ROLES.get(role.lower(), role),
        reasoning.strip("\n"),
        text,
        extra,
        raw_reasoning,
        not_learnt=turn.get("weight") == 0,
    )
    utf8(message.role + message.reasoning + message.content + to_json(extra))
    return message


def _reasoning_and_text(content: Any, role: str) -> tuple[str, str]:
    """The two in a turn's content: text, parts, or a tool's result."""
    if content is None or isinstance(content, str):
        return "", content or ""
    if isinstance(content, dict) and role.lower() in RESULT_ROLES:
        return "", to_json(content)
    if not isinstance(content, list):
        raise BadChat(
            "a turn's content and reasoning are text or lists of parts, not"
            f" {type(content).__name__}"
        )
    texts = {"reasoning": "", "text": ""}
    for part in content:
        kind, text = "text", part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            text = part.get(str(kind)) or part.get("text")
        if kind in REASONING_PARTS and isinstance(text, str | None):
            texts["reasoning"] += text or ""
        elif kind in TEXT_PARTS and isinstance(text, str | None):
            texts["text"] += text or ""
        else:
            raise BadChat(
                f"a turn has a part of type {ascii(kind)[:40]}, and only parts of text can be"
                " learnt"
            )
    return texts["reasoning"], texts["text"]


def _calls(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of tools in a turn, in OpenAI's form."""
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadChat(f"tool_calls is a list of calls, not {type(calls).__name__}")
    in_one_form = []
    for call in filter(None, [*calls, turn.get("function_call")]):
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadChat(
                "a call of a tool needs a function with a name, this one has"
                f" {named_fields(function)}"
            )
        arguments: Any = next((function[key] for key in ARGUMENTS if key in function), {})
        text = arguments if isinstance(arguments, str) else to_json(arguments)
        if isinstance(arguments, str):  # JSON within JSON, mostly
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if isinstance(arguments, dict):
            arguments = Arguments(arguments)
            arguments.text = text
        identity = {"id": call["id"]} if call.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        in_one_form.append({**identity, "type": "function", "function": function})
    return in_one_form


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """A value as JSON; types of Parquet's that JSON has not become text."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, default=str, **options)
    except RecursionError:
        raise BadChat("a tool's JSON is nested too deep to be written") from None


def named_fields(value: Any) -> str:
    """The fields of a record with their types, in words."""
    if not isinstance(value, dict):
        return f"a {type(value).__name__}"
    fields = ", ".join(f"{key} ({type(value[key]).__name__})" for key in sorted(value)[:8])
    return ascii(fields)[1:-1][:200]
