"""Finds in the text of a conversation what its model wrote, and what the template left out of it.

Templates leave out and rewrite what they like, so nothing is inferred from prefixes: the
conversation is rendered once more with a *mark*, a string that occurs nowhere in it, behind each
*part*: the reasoning and the text of each turn, and the name of each call and tool. Without its
marks that text must be the real one; then the marks say where each part ends.

An answer starts right after its generation prompt (or, failing that, at its first own character)
and ends with its end marker, inclusive.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zaya_jax.config import UserError
from zaya_jax.text import chat
from zaya_jax.text.chat import Message

MARK = "zjmark"  # with a number and "z": no filter of a template changes letters
ANSWER, REASONING = "an answer", "the last reasoning"
PART_NAMES = {"assistant": ANSWER, "user": "a question", "system": "a system text"}
PART_NAMES |= dict.fromkeys(chat.RESULT_ROLES, "a result")
QUESTION = Message("user", "", "?")
Spans = list[tuple[int, int]]
Render = Callable[[Any, Sequence[Message], bool], str]  # of tools, turns, with a generation prompt


class Refused(UserError):
    """A conversation that the template does not take."""


class Incomplete(UserError):
    """The rendered text drops or alters part of the conversation, so training on it would be
    wrong."""


@dataclasses.dataclass
class Part:
    """A text of the conversation that its template must write."""

    kind: str
    text: str  # without the white space around it
    mark: str  # what stands behind it in the second rendering
    start: int = -1  # in the rendered text; -1: it is not written as it was given
    end: int = -1  # -1: it is not written


class MarkedTurn(NamedTuple):
    """A turn with its parts."""

    message: Message
    marked: Message  # with a mark behind each part
    parts: list[Part]
    part_before: Part | None  # the last one of the turns before


class AnswerLocator:
    """Where the answers of a conversation are in its rendered text.

    Raises Incomplete if a part is missing from the text. Earlier answers may be reworded by the
    template; nothing else may.
    """

    def __init__(self, render: Render, tools: Any, turns: Sequence[Message], text: str) -> None:
        self._render = render
        self._text = text
        self._mark = MARK
        while self._mark in text:
            self._mark += "q"
        self._parts = list[Part]()
        self._tools = tools
        if isinstance(tools, list) and tools:
            self._tools = [self._mark_name("the tools", tool) for tool in tools]
        self._turns = list[MarkedTurn]()
        before: Part | None = None
        for turn in turns:
            count = len(self._parts)
            marked = self._mark_turn(turn)
            parts = self._parts[count:]
            self._turns.append(MarkedTurn(turn, marked, parts, before))
            before = parts[-1] if parts else before
        self._answers = [index for index, turn in enumerate(turns) if turn.is_answer]
        self._find_parts()
        self._require_all_parts()

    def _mark_turn(self, turn: Message) -> Message:
        """A turn with marks behind its reasoning, its text and the names of its calls."""
        calls = turn.extra_fields.get("tool_calls")
        content = turn.content
        extra = dict(turn.extra_fields)
        if turn.reasoning:
            turn = turn.with_reasoning(self._mark_text(REASONING, turn.reasoning))
        # An empty system text says nothing, and many templates leave it out.
        if content.strip() or not (calls or turn.reasoning or turn.role == "system"):
            content = self._mark_text(PART_NAMES.get(turn.role, "a turn of another role"), content)
        if calls:
            extra["tool_calls"] = [self._mark_name("a call", call) for call in calls]
        return dataclasses.replace(turn, content=content, extra_fields=extra)

    def _mark_name(self, kind: str, tool: Any) -> Any:
        """A call or a tool with a mark behind its name."""
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return tool
        function = function | {"name": self._mark_text(kind, function["name"])}
        return tool | {"function": function} if "function" in tool else function

    def _mark_text(self, kind: str, text: str) -> str:
        """A text with a mark behind it, before its last white space: templates may strip that."""
        mark = f"{self._mark}{len(self._parts)}z"
        self._parts.append(Part(kind, text.strip(), mark))
        size = len(text.rstrip())
        return text[:size] + mark + text[size:]

    def _find_parts(self) -> None:
        """Notes where each part is in the text; of one that is written twice, the first time."""
        rendered = self._render(self._tools, [turn.marked for turn in self._turns], False)
        texts = re.split(f"{self._mark}([0-9]+)z", rendered)  # and the marks' numbers between them
        if "".join(texts[::2]) != self._text:
            raise Incomplete("left out: the chat template does not write its turns as they are")
        end = 0
        for text, number in zip(texts[::2], texts[1::2], strict=False):
            end += len(text)
            part = self._parts[int(number)]
            if part.end < 0:
                part.end = end
                part.start = self._start_of(part)

    def _start_of(self, part: Part) -> int:
        """Where a part starts whose end is known; -1 where another text ends there."""
        for spelling in (part.text, json.dumps(part.text, ensure_ascii=False)[1:-1]):  # in JSON
            if self._text.endswith(spelling, 0, part.end):
                return part.end - len(spelling)
        return -1

    def _require_all_parts(self) -> None:
        for part in self._parts:
            reworded = part.kind == ANSWER and part.end >= 0
            if part.start < 0 and part.kind != REASONING and not reworded:
                raise Incomplete(f"left out: the chat template does not write {part.kind}")
        last = self._turns[self._answers[-1]]
        if last.message.reasoning and self._body_start(last) is None:
            raise Incomplete(f"left out: the chat template does not write {REASONING}")

    def spans(self, closing_text: str, end_markers: Sequence[str]) -> Spans:
        """Where the answers are that are to be learnt and that the template does not reword.

        `closing_text` is what the template writes behind an answer at the end of a conversation.
        `end_markers` may end an answer; the first of them does there.
        """
        spans: Spans = []
        prompts: dict[str, list[str]] = {}  # that were found, by the role of the turn before
        # The last one first: it is the one that a prompt surely fits, and others begin as it does.
        for index in reversed(self._answers):
            answer = self._turns[index]
            body_start = self._body_start(answer)
            if body_start is None:
                continue
            stop = self._stop(answer, closing_text, end_markers)
            if stop is None:
                continue
            known = prompts.setdefault(self._turns[index - 1].message.role if index else "", [])
            start = self._start(index, body_start, known)
            known.append(self._text[self._end_before(answer) : start])
            if answer.message.is_learnt:
                spans.insert(0, (start, stop))
        return spans

    def learnt_blocks(self, blocks: Spans) -> tuple[Spans, int]:
        """(the `{% generation %}` blocks that are to be learnt, the number of answers in them).

        A block belongs to the answers whose text ends in it, or if there are none to the first one
        that ends behind it. If one of them must not be learnt, no part of the block is.
        """
        learnt_blocks: Spans = []
        learnt_answers = set[int]()
        for start, stop in blocks:
            inside = [i for i in self._answers if _ends_in(self._turns[i], start, stop)]
            later = [i for i in self._answers if self._turns[i].parts[-1].end > stop]
            owners = inside or later[:1] or self._answers[-1:]
            if all(self._turns[owner].message.is_learnt for owner in owners):
                learnt_blocks.append((start, stop))
                learnt_answers.update(inside)
        return learnt_blocks, len(learnt_answers)

    def _end_before(self, turn: MarkedTurn) -> int:
        """Where the last part before a turn ends."""
        return max(turn.part_before.end, 0) if turn.part_before else 0

    def _body_start(self, answer: MarkedTurn) -> int | None:
        """Where an answer's own words start; None where they are not written as they were given."""
        text, message = self._text, answer.message
        start = answer.parts[0].start
        if any(part.start < 0 for part in answer.parts):
            return None
        if message.reasoning:
            opening = text.rfind("<think>", self._end_before(answer), start)
            return start if opening < 0 else opening
        space = message.content[: len(message.content) - len(message.content.lstrip())]
        return start - len(space) if text.endswith(space, 0, start) else start

    def _start(self, index: int, body_start: int, known_prompts: list[str]) -> int:
        """Where the generation prompt for an answer ends, whose own words start at `body_start`."""
        answer, text = self._turns[index], self._text
        before = self._end_before(answer)
        fitting = [len(prompt) for prompt in known_prompts if text.startswith(prompt, before)]
        if fitting:
            return before + max(fitting)
        if not index:
            return body_start
        try:
            turns = [turn.marked for turn in self._turns[:index]]
            rendered = self._render(self._tools, turns, True)
        except Refused:  # as of a conversation without a question
            return body_start
        prompt = self._text_after(rendered, answer.part_before)
        if text.startswith(prompt, before):
            return before + len(prompt)
        # The prompt begins something that this answer has not, such as reasoning.
        if answer.parts[0].kind == ANSWER or text.startswith("<think>", body_start):
            return body_start
        # A call, whose own tag may begin as that of reasoning does: "<" is in both.
        common = os.path.commonprefix((prompt, text[before:body_start]))  # noqa: RUF071
        if common.rfind("<") > common.rfind(">"):
            common = common[: common.rfind("<")]
        return before + len(common)

    def _stop(
        self, answer: MarkedTurn, closing_text: str, end_markers: Sequence[str]
    ) -> int | None:
        """Where an answer ends, its end marker included; None where it has none."""
        part = answer.parts[-1]
        if part.kind != ANSWER:  # behind its last name come arguments
            alone = self._render(self._tools, [QUESTION, answer.marked], False)
            closing_text = self._text_after(alone, part)
        closing_text = closing_text.strip()
        if not closing_text:
            return part.end
        end = next((marker for marker in end_markers if marker in closing_text), closing_text)
        words = closing_text.rpartition(end)[0].split()
        before_end = r"\s*".join(map(re.escape, words))
        any_end = "|".join(map(re.escape, (end, *end_markers)))
        match = re.compile(rf"\s*{before_end}\s*(?:{any_end})").match(self._text, part.end)
        return match.end() if match else None

    def _text_after(self, rendered: str, part: Part | None) -> str:
        """The rendered text after a part (all of it if there is none), marks removed."""
        if part:
            rendered = rendered.partition(part.mark)[2]
        return re.sub(f"{self._mark}[0-9]+z", "", rendered)


def _ends_in(answer: MarkedTurn, start: int, stop: int) -> bool:
    """Whether an answer's text ends in a block. Where nothing is between two answers, the text of
    the first ends at the start of the second one's block, and does not end in it."""
    last = answer.parts[-1]
    return start < last.end <= stop or (last.end == start and not last.text)
