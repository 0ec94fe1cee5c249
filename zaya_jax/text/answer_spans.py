"""Finds in the text of a conversation what its model wrote, and what the template left out of it.

Templates leave out and rewrite what they like, so nothing is inferred from prefixes: the
conversation is rendered once more with a *sentinel*, a string that occurs nowhere in it, behind
each *part*: the reasoning and the text of each turn, and the name of each call and tool. Without
its sentinels that text must be the real one; then the sentinels say where each part ends.

An answer starts right after its generation prompt (or, failing that, at its first own character)
and ends with its end marker, inclusive.
"""

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

SENTINEL = "zjmark"  # with a number and "z": no filter of a template changes letters
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


class AnswerLocator:
    """Where the answers of a conversation are in its rendered text.

    Raises Incomplete if a part is missing from the text. Earlier answers may be reworded by the
    template; nothing else may.
    """

    def __init__(self, render: Render, tools: Any, turns: Sequence[Message], text: str) -> None:
        self._render = render
        self._turns = turns
        self._text = text
        self._sentinel = SENTINEL
        while self._sentinel in text:
            self._sentinel += "q"
        self._parts = list[tuple[str, str]]()  # (kind, text)
        self._tools = tools
        if isinstance(tools, list) and tools:
            self._tools = [self._with_sentinel_in_name("the tools", tool) for tool in tools]
        self._marked_turns = list[Message]()
        self._first_part = [len(self._parts)]  # of each turn, and behind the last one
        for turn in turns:
            self._marked_turns.append(self._turn_with_sentinels(turn))
            self._first_part.append(len(self._parts))
        self._part_end = self._find_parts()
        self._answers = [index for index, turn in enumerate(turns) if turn.is_answer]
        self._require_all_parts()

    def _find_parts(self) -> dict[int, int]:
        """Where each part that is written ends in the text."""
        rendered = self._render(self._tools, self._marked_turns, False)
        pieces = re.split(f"{self._sentinel}([0-9]+)z", rendered)
        if "".join(pieces[::2]) != self._text:
            raise Incomplete("left out: the chat template does not write its turns as they are")
        ends: dict[int, int] = {}
        offset = 0
        for piece, part in zip(pieces[::2], pieces[1::2], strict=False):
            offset += len(piece)
            ends.setdefault(int(part), offset)
        return ends

    def _require_all_parts(self) -> None:
        for part, (kind, _) in enumerate(self._parts):
            reworded = kind == ANSWER and part in self._part_end
            if self._part_start(part) is None and kind != REASONING and not reworded:
                raise Incomplete(f"left out: the chat template does not write {kind}")
        last = self._answers[-1]
        if self._turns[last].reasoning and self._answer_body_start(last) is None:
            raise Incomplete(f"left out: the chat template does not write {REASONING}")

    def spans(self, closing_text: str, end_markers: Sequence[str]) -> Spans:
        """Where the answers are that are to be learnt and that the template does not reword.

        `closing_text` is what the template writes behind an answer at the end of a conversation.
        `end_markers` may end an answer; the first of them does there.
        """
        spans: Spans = []
        prompts: dict[str, list[str]] = {}  # that were found, by the role of the turn before
        # The last one first: it is the one that a prompt surely fits, and others begin as it does.
        for answer in reversed(self._answers):
            body_start = self._answer_body_start(answer)
            if body_start is None:
                continue
            stop = self._answer_stop(answer, closing_text, end_markers)
            if stop is None:
                continue
            known = prompts.setdefault(self._turns[answer - 1].role if answer else "", [])
            start = self._answer_start(answer, body_start, known)
            known.append(self._text[self._previous_turn_end(answer) : start])
            if self._turns[answer].is_learnt:
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
            inside = [answer for answer in self._answers if self._ends_in(answer, start, stop)]
            later = [answer for answer in self._answers if self._answer_text_end(answer) > stop]
            owners = inside or later[:1] or self._answers[-1:]
            if all(self._turns[owner].is_learnt for owner in owners):
                learnt_blocks.append((start, stop))
                learnt_answers.update(inside)
        return learnt_blocks, len(learnt_answers)

    def _ends_in(self, answer: int, start: int, stop: int) -> bool:
        """Whether an answer's text ends in a block. Where nothing is between two answers, the text
        of the first ends at the start of the second one's block, and does not end in it."""
        end = self._answer_text_end(answer)
        _, text = self._parts[self._first_part[answer + 1] - 1]
        return start < end <= stop or (end == start and not text)

    def _answer_text_end(self, answer: int) -> int:
        """Where an answer's text ends; -1 where it is not written."""
        return self._part_end.get(self._first_part[answer + 1] - 1, -1)

    def _with_sentinel(self, kind: str, text: str) -> str:
        """A text with a sentinel behind it, before its last white space: templates may strip
        that."""
        size = len(text.rstrip())
        self._parts.append((kind, text.strip()))
        return f"{text[:size]}{self._sentinel}{len(self._parts) - 1}z{text[size:]}"

    def _with_sentinel_in_name(self, kind: str, tool: Any) -> Any:
        """A call or a tool with a sentinel behind its name."""
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return tool
        function = function | {"name": self._with_sentinel(kind, function["name"])}
        return tool | {"function": function} if "function" in tool else function

    def _turn_with_sentinels(self, turn: Message) -> Message:
        """A turn with sentinels behind its reasoning, its text and the names of its calls."""
        calls = turn.extra_fields.get("tool_calls")
        content = turn.content
        extra = dict(turn.extra_fields)
        if turn.reasoning:
            turn = turn.with_reasoning(self._with_sentinel(REASONING, turn.reasoning))
        # An empty system text says nothing, and many templates leave it out.
        if content.strip() or not (calls or turn.reasoning or turn.role == "system"):
            content = self._with_sentinel(
                PART_NAMES.get(turn.role, "a turn of another role"), content
            )
        if calls:
            extra["tool_calls"] = [self._with_sentinel_in_name("a call", call) for call in calls]
        return dataclasses.replace(turn, content=content, extra_fields=extra)

    def _part_start(self, part: int) -> int | None:
        """Where a part starts; None where it is not written as it was given."""
        text, end = self._parts[part][1], self._part_end.get(part, -1)
        for spelling in (text, json.dumps(text, ensure_ascii=False)[1:-1]):  # results as JSON
            if end >= 0 and self._text.endswith(spelling, 0, end):
                return end - len(spelling)
        return None

    def _previous_turn_end(self, turn: int) -> int:
        """Where the last part of the turn before one ends."""
        return self._part_end.get(self._first_part[turn] - 1, 0) if turn else 0

    def _answer_body_start(self, answer: int) -> int | None:
        """Where an answer's own words start; None where they are not written as they were given."""
        turn = self._turns[answer]
        text = self._text
        parts = range(self._first_part[answer], self._first_part[answer + 1])
        starts = [self._part_start(part) for part in parts]
        start = starts[0]
        if start is None or None in starts:
            return None
        if turn.reasoning:
            opening = text.rfind("<think>", self._previous_turn_end(answer), start)
            return start if opening < 0 else opening
        space = turn.content[: len(turn.content) - len(turn.content.lstrip())]
        return start - len(space) if text.endswith(space, 0, start) else start

    def _answer_start(self, answer: int, body_start: int, known_prompts: list[str]) -> int:
        """Where the generation prompt for an answer ends, whose own words start at `body_start`."""
        before = self._previous_turn_end(answer)
        text = self._text
        fitting = [len(prompt) for prompt in known_prompts if text.startswith(prompt, before)]
        if fitting:
            return before + max(fitting)
        prompt = text[before:body_start]
        if answer:
            with contextlib.suppress(Refused):  # as of a conversation without a question
                rendered = self._render(self._tools, self._marked_turns[:answer], True)
                prompt = self._text_after_part(rendered, self._first_part[answer] - 1)
        if text.startswith(prompt, before):
            return before + len(prompt)
        # The prompt begins something that this answer has not, such as reasoning.
        common = os.path.commonprefix((prompt, text[before:body_start]))  # noqa: RUF071
        begins_with_text = self._parts[self._first_part[answer]][0] == ANSWER
        if begins_with_text or text.startswith("<think>", body_start):
            return body_start
        # A call, whose own tag may begin as that of reasoning does: "<" is in both.
        if common.rfind("<") > common.rfind(">"):
            common = common[: common.rfind("<")]
        return before + len(common)

    def _answer_stop(
        self, answer: int, closing_text: str, end_markers: Sequence[str]
    ) -> int | None:
        """Where an answer ends, its end marker included; None where it has none."""
        part = self._first_part[answer + 1] - 1
        text = self._text
        if self._parts[part][0] != ANSWER:  # behind its last name come arguments
            alone = self._render(self._tools, [QUESTION, self._marked_turns[answer]], False)
            closing_text = self._text_after_part(alone, part)
        closing_text, text_end = closing_text.strip(), self._part_end[part]
        if not closing_text:
            return text_end
        end = next((marker for marker in end_markers if marker in closing_text), closing_text)
        words = closing_text.rpartition(end)[0].split()
        before_end = r"\s*".join(map(re.escape, words))
        any_end = "|".join(map(re.escape, (end, *end_markers)))
        match = re.compile(rf"\s*{before_end}\s*(?:{any_end})").match(text, text_end)
        return match.end() if match else None

    def _text_after_part(self, rendered: str, part: int) -> str:
        """The rendered text after the given part (all of it if `part` < 0), sentinels removed."""
        if part >= 0:
            rendered = rendered.partition(f"{self._sentinel}{part}z")[2]
        return re.sub(f"{self._sentinel}[0-9]+z", "", rendered)
