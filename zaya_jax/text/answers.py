"""Finds in the text of a conversation what its model wrote, and what the template left out of it.

Templates leave out and rewrite what they like, so nothing is inferred from prefixes: the
conversation is rendered once more with a mark behind the text of each turn and the name of each
call and tool. Without its marks that text must be the real one; then the marks say where each part
ends. An answer begins behind the prompt that the template writes for it, or else with its own
words, and ends with the mark of its end.
"""

import collections
import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from zaya_jax.config import UserError
from zaya_jax.text import chat
from zaya_jax.text.chat import Message

MARK = "zjmark"  # with a number and "z": no filter of a template changes letters
ANSWER, REASONING = "an answer", "the last reasoning"
KINDS = {"assistant": ANSWER, "user": "a question", "system": "a system text"}
KINDS |= dict.fromkeys(chat.RESULT_ROLES, "a result")
ASKED = Message("user", "", "?")
Spans = list[tuple[int, int]]
Render = Callable[[Any, Sequence[Message], bool], str]  # of tools, turns, with a prompt


class Refused(UserError):
    """A conversation that the template does not take."""


class Incomplete(UserError):
    """A conversation whose text would teach something else than it says."""


class Marked:
    """A conversation and its text, with the places where its parts end in it.

    Incomplete where the text lacks one of them: only an answer may be rewritten.
    """

    def __init__(self, render: Render, tools: Any, turns: Sequence[Message], text: str) -> None:
        self._render, self._given, self._text = render, turns, text
        self._mark, self._parts = MARK, list[tuple[str, str]]()  # (kind, text) of each part
        while self._mark in text:
            self._mark += "q"
        given = tools if isinstance(tools, list) else []
        self._tools = [self._named("the tools", tool) for tool in given] or tools
        self._turns, self._first = list[Message](), [len(self._parts)]  # part of each turn
        for turn in turns:
            self._turns.append(self._turn(turn))
            self._first.append(len(self._parts))
        pieces = re.split(f"{self._mark}([0-9]+)z", render(self._tools, self._turns, False))
        if "".join(pieces[::2]) != text:
            raise Incomplete("left out: the chat template does not write its turns as they are")
        self._ends, at = dict[int, int](), 0
        for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
            at += len(piece)
            self._ends.setdefault(int(number), at)
        self._answers = [number for number, turn in enumerate(turns) if turn.answer]
        last = self._answers[-1]
        parts = [part for part in enumerate(self._parts) if self._begin(part[0]) is None]
        missing = [
            kind  # an answer that is there in other words is rewritten
            for part, (kind, _) in parts
            if kind not in (ANSWER, REASONING) or (kind == ANSWER and part not in self._ends)
        ]
        if turns[last].reasoning and self._own(last) is None:
            missing.append(REASONING)
        if missing:
            raise Incomplete(f"left out: the chat template does not write {missing[0]}")

    def spans(self, tail: str, ends: Sequence[str]) -> Spans:
        """The places of the answers that are not rewritten.

        `tail` is what the template writes behind an answer at the end of a conversation, and `ends`
        are the marks that may end one, the first of them there.
        """
        found: Spans = []
        heads = collections.defaultdict[str, list[str]](list)
        # The last one first: it is the one that a prompt surely fits, and others begin as it does.
        for number in reversed(self._answers):
            own = self._own(number)
            stop = None if own is None else self._stop(number, tail, ends)
            if own is not None and stop is not None:
                role = self._given[number - 1].role if number else ""
                found.insert(0, (self._start(number, own, heads[role]), stop))
        return found

    def without_context(self, spans: Spans) -> Spans:
        """The places of answers that are to be learnt: a place belongs to the first answer that
        ends behind its beginning, or to the last one."""
        ends = [(self._end(number), self._given[number].context) for number in self._answers]

        def only_read(begin: int) -> bool:
            return next((context for end, context in ends if end >= begin), ends[-1][1])

        return [span for span in spans if not only_read(span[0])]

    def learnt(self, spans: Spans) -> int:
        """How many answers end in these places."""
        ends = [self._end(number) for number in self._answers if self._given[number].learnt]
        return sum(any(begin <= end <= stop for begin, stop in spans) for end in ends)

    def _end(self, number: int) -> int:
        """Where an answer's text ends; -1 where it is rewritten."""
        return self._ends.get(self._first[number + 1] - 1, -1)

    def _behind(self, kind: str, text: str) -> str:
        """A text with a mark behind it, before its last white space: templates may strip that."""
        size = len(text.rstrip())
        self._parts.append((kind, text.strip()))
        return f"{text[:size]}{self._mark}{len(self._parts) - 1}z{text[size:]}"

    def _named(self, kind: str, given: Any) -> Any:
        """A call or a tool with a mark behind its name."""
        function = given.get("function", given) if isinstance(given, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return given
        function = function | {"name": self._behind(kind, function["name"])}
        return given | {"function": function} if "function" in given else function

    def _turn(self, turn: Message) -> Message:
        """A turn with marks behind its reasoning, its text and its calls."""
        calls, content, more = turn.more.get("tool_calls"), turn.content, dict(turn.more)
        if turn.reasoning:
            turn = turn.with_reasoning(self._behind(REASONING, turn.reasoning))
        # An empty system text says nothing, and many templates leave it out.
        if content.strip() or not (calls or turn.reasoning or turn.role == "system"):
            content = self._behind(KINDS.get(turn.role, "a turn of another role"), content)
        if calls:
            more["tool_calls"] = [self._named("a call", call) for call in calls]
        return dataclasses.replace(turn, content=content, more=more)

    def _begin(self, part: int) -> int | None:
        """Where a part begins; None where it is not written as it was given."""
        text, end = self._parts[part][1], self._ends.get(part, -1)
        for spelt in (text, json.dumps(text, ensure_ascii=False)[1:-1]):  # results as JSON
            if end >= 0 and self._text.endswith(spelt, 0, end):
                return end - len(spelt)
        return None

    def _before(self, number: int) -> int:
        """Where the turn before one ends, as far as it was given."""
        return self._ends.get(self._first[number] - 1, 0) if number else 0

    def _own(self, number: int) -> int | None:
        """Where an answer's own words begin; None where they are not written as they were given."""
        turn, text = self._given[number], self._text
        begins = [self._begin(p) for p in range(self._first[number], self._first[number + 1])]
        begin = begins[0]
        if begin is None or None in begins:
            return None
        if turn.reasoning:
            opening = text.rfind("<think>", self._before(number), begin)
            return begin if opening < 0 else opening
        lead = turn.content[: len(turn.content) - len(turn.content.lstrip())]
        return begin - len(lead) if text.endswith(lead, 0, begin) else begin

    def _start(self, number: int, own: int, heads: list[str]) -> int:
        """Where the prompt for an answer ends, whose own words begin at `own`."""
        before, text = self._before(number), self._text
        fitting = [head for head in heads if text.startswith(head, before)]
        if fitting:
            return before + max(map(len, fitting))
        head = text[before:own]
        if number:
            with contextlib.suppress(Refused):  # as of a conversation without a question
                prompt = self._render(self._tools, self._turns[:number], True)
                head = self._after(prompt, self._first[number] - 1)
        if not text.startswith(head, before):  # as one that begins reasoning, which this has not
            head = os.path.commonprefix((head, text[before:own]))  # noqa: RUF071
            plain = self._parts[self._first[number]][0] == ANSWER
            if plain or text.startswith("<think>", own):
                head += text[before + len(head) : own]
            else:  # a call, whose own mark may begin as that of reasoning does
                head = head[: head.rfind("<")] if head.rfind("<") > head.rfind(">") else head
        heads.append(head)
        return before + len(head)

    def _stop(self, number: int, tail: str, ends: Sequence[str]) -> int | None:
        """Where an answer ends, the mark of its end included; None where it has none of `ends`."""
        part, text = self._first[number + 1] - 1, self._text
        if self._parts[part][0] != ANSWER:  # behind its last name come arguments
            tail = self._after(self._render(self._tools, [ASKED, self._turns[number]], False), part)
        tail, at = tail.strip(), self._ends[part]
        if not tail:
            return at
        end = next((mark for mark in ends if mark in tail), tail)
        closing = r"\s*".join(map(re.escape, tail.rpartition(end)[0].split()))
        marks = "|".join(map(re.escape, (end, *ends)))
        found = re.compile(rf"\s*{closing}\s*(?:{marks})").match(text, at)
        return found.end() if found else None

    def _after(self, rendered: str, part: int) -> str:
        """What a text with marks has behind a part, or all of it where there is none, without
        them."""
        if part >= 0:
            rendered = rendered.partition(f"{self._mark}{part}z")[2]
        return re.sub(f"{self._mark}[0-9]+z", "", rendered)
