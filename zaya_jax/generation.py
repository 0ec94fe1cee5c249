"""Continues texts: turns the ids that `zaya_jax.model.decode` generates into text as they come.

Text is shown as soon as it cannot change any more: part of a character waits for the rest, and so
does the possible beginning of a stop string. A text ends before its stop string, at the tokenizer's
end of document, or after its number of tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from zaya_jax.config import UserError, shown
from zaya_jax.model import decode
from zaya_jax.text import chat, chat_template
from zaya_jax.text.tokenizers import Tokenizer

CHARACTER = 5  # tokens of one character at most: its bytes in UTF-8, and a space after it
LONGEST = 64  # tokens that are decoded together until their text is whole


def stream(
    rows: decode.Continuation,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    stop: Sequence[str] = (),
    follows: bool = True,
) -> Iterator[list[str]]:
    """The text that each row gains, as it comes; `prompts` are the ids that `rows` continues.

    With `follows` a row's text continues its prompt; otherwise it stands alone, as an answer does.
    A row that a stop string ends keeps in `rows.ids` only the ids of its text.
    """
    texts = [Text(tokenizer, stop, ids if follows else ()) for ids in prompts]
    while not rows.ended:
        added = rows.more()
        new = [text.add(ids) for text, ids in zip(texts, added, strict=True)]
        for row, text in enumerate(texts):
            if text.stopped and added[row]:
                rows.end(row)
                again = Text(tokenizer, before=prompts[row] if follows else ())
                rows.ids[row] = _spelling(text.length, rows.ids[row], again)
        yield new
    yield [text.rest() for text in texts]


def generate(
    rows: decode.Continuation,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    stop: Sequence[str] = (),
    follows: bool = True,
) -> list[str]:
    """The whole continuations that `stream` gives piece by piece."""
    return [
        "".join(parts)
        for parts in zip(*stream(rows, tokenizer, prompts, stop, follows), strict=True)
    ]


class Text:
    """Turns tokens into text as they come, up to the first stop string, which is not part of the
    text.

    `before` are the ids that precede the text: many tokenizers spell a text's first word without
    its space.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()):
        _check_stop(stop)
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids, text = _end_of(tokenizer, before)
        self._settled = len(text)  # characters of these ids' text
        # The settled text that may begin a stop string.
        self.stopped, self._held = False, ""
        self.length = 0  # of the text so far

    def add(self, ids: Sequence[int]) -> str:
        """The text that these tokens settle."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        too_long = len(self._ids) > LONGEST  # to be the beginning of a character
        whole = text if too_long else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new, self._settled = whole[self._settled :], max(self._settled, len(whole))
        if whole == text:
            # Decoding all ids again at each call would take a time that grows with their square.
            last, before = _end_of(self._tokenizer, self._ids)
            if last or too_long:
                self._ids, self._settled = last, len(before)
        return self._show(new)

    def rest(self) -> str:
        """The text that was held back."""
        return self._show(self._tokenizer.decode(self._ids)[self._settled :], to_the_end=True)

    def _show(self, new: str, to_the_end: bool = False) -> str:
        """The text up to a stop string, or to what may begin one."""
        if self.stopped:
            return ""
        text = self._held + new
        end = len(text)
        if not to_the_end:
            begun = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
            end -= max((len(part) for part in begun if text.endswith(part)), default=0)
        # Of several stop strings the one that ends first counts, however many tokens came at once.
        begins = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if begins:
            self.stopped = True
            _, end = min((begin + len(stop), begin) for begin, stop in begins)
        self._held = text[end:]
        self.length += end
        return text[:end]


def _spelling(length: int, ids: Sequence[int], text: Text) -> list[int]:
    """The fewest first ids that spell this many characters of a text."""
    lengths = itertools.accumulate(len(text.add([token])) for token in ids)
    return [*ids[: sum(shorter < length for shorter in lengths) + (length > 0)]]


def _end_of(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], str]:
    """The fewest last ids that have a text of whole characters, and this text; of few ids without
    a text all; nothing without such ids."""
    for count in range(1, min(len(ids), CHARACTER) + 1):
        last = [int(token) for token in ids[-count:]]
        text = tokenizer.decode(last)
        # A prompt of spaces may have no text, and yet the next word keeps its own space.
        if (text or count == len(ids)) and "\N{REPLACEMENT CHARACTER}" not in text:
            return last, text
    return [], ""


@dataclasses.dataclass(frozen=True)
class ParsedPrompt:
    """What is to be continued: texts, conversations or ids, one or several, as rows of ids."""

    form: Literal["text", "chat", "ids"]
    single: bool  # the caller gave one, and not a list
    ids: list[list[int]]
    texts: list[str]  # with which the results begin
    ends: list[int]
    stop: list[str]  # the caller's, and those of the conversations' format


def parse_prompt(
    prompt: Any, tokenizer: Tokenizer | None, source: str, stop: Sequence[str] = ()
) -> ParsedPrompt:
    """What a caller gives, and the strings that end its continuations; UserError if it is not a
    prompt, or needs a tokenizer that is not there."""
    _check_stop(stop)
    if isinstance(prompt, jax.Array):  # whose items would be arrays too, where NumPy's are numbers
        prompt = np.asarray(prompt)
    if isinstance(prompt, Mapping):  # a conversation of one turn
        prompt = [prompt]
    if not isinstance(prompt, str):
        prompt = list(prompt)
    first = next(iter(prompt), None)
    single = isinstance(prompt, str) or isinstance(first, int | np.integer | dict)
    rows = [prompt] if single else prompt
    forms = {_form(row) for row in rows}
    if forms == {"ids"}:
        if stop:
            raise UserError("stop is for texts; ids end at one of ends")
        return ParsedPrompt("ids", single, [np.asarray(row).tolist() for row in rows], [], [], [])
    if tokenizer is None:
        raise UserError(
            f"the model of {source} has no tokenizer; give ids [B, S] instead of a text"
        )
    if len(forms) != 1:
        raise UserError(
            f"prompt={shown(prompt)} is not a text, ids or a conversation, nor a list of one of"
            " these"
        )
    if forms == {"text"}:
        ids = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in rows]
        return ParsedPrompt("text", single, ids, rows, [tokenizer.eos_id], [*stop])
    template = chat_template.Template(tokenizer)
    try:
        ids = [template.prompt_ids([chat.parse_turn(turn) for turn in talk]) for talk in rows]
    except chat.BadChat as error:
        raise UserError(
            f"a conversation is a list of turns with role and content: {error}"
        ) from None
    ends, stop_of_format = template.stops
    return ParsedPrompt(
        form="chat",
        single=single,
        ids=ids,
        texts=[""] * len(ids),
        ends=[tokenizer.eos_id, *ends],
        stop=[*stop, *stop_of_format],
    )


def _check_stop(stop: Any) -> None:
    """UserError unless it is a list of texts; a single text would be taken as its characters."""
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
        raise UserError(f"stop={shown(stop)} must be a list of texts that are not empty")


def _form(row: Any) -> Literal["text", "chat", "ids"]:
    if isinstance(row, str):
        return "text"
    return "chat" if isinstance(next(iter(row), None), dict) else "ids"


def results(
    generation: decode.Continuation,
    prompt: ParsedPrompt,
    rows: Sequence[list[int]],
    tokenizer: Tokenizer | None,
) -> list[Any]:
    """The texts, answers or ids of the rows that `generation` continues: each row of the prompt,
    several times if more than one sample is wanted."""
    if prompt.form == "ids" or tokenizer is None:
        while not generation.ended:
            generation.more()
        return [[*row, *new] for row, new in zip(rows, generation.ids, strict=True)]
    new = generate(generation, tokenizer, rows, prompt.stop, follows=prompt.form == "text")
    samples = len(rows) // len(prompt.ids)
    return [prompt.texts[i // samples] + text for i, text in enumerate(new)]


class Conversation:
    """Turns in the format that the model was tuned in (`chat_template`), as the ids that its answer
    continues.

    Where `ask` has too little room, the oldest turns are left out and counted in `left_out`; the
    system text stays.
    """

    def __init__(self, tokenizer: Tokenizer, system: str = ""):
        self._template, self._turns = chat_template.Template(tokenizer), list[chat.Message]()
        self._first = [chat.Message("system", "", system)] if system else []
        self.ends, self.stop = self._template.stops
        self.left_out = 0

    def reset(self) -> None:
        """Forgets the turns."""
        self._turns, self.left_out = [], 0

    def ask(self, text: str, room: float = math.inf) -> list[int]:
        """Adds a turn of the user and returns the ids, at most `room` of them, that the model
        continues."""
        turns = [*self._turns, chat.Message("user", "", text)]
        left_out = 0
        while len(ids := self._template.prompt_ids([*self._first, *turns[left_out:]])) > room:
            left_out += 2  # a question and its answer
            if left_out >= len(turns):  # refused, and the conversation stays as it was
                raise UserError(
                    f"this turn alone has {len(ids):,} tokens, and there is room for {room:,} beside"
                    " the answer's num_tokens"
                )
        self._turns = turns[left_out:]
        self.left_out += left_out
        return ids

    def answered(self, text: str, ids: Sequence[int]) -> None:
        """Adds the model's turn: its text, and the ids that it was."""
        self._turns.append(self._template.parse_answer([*self._first, *self._turns], text, ids))
