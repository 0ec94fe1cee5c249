"""A model's own chat template, rendered as transformers does: the format in which it was tuned, and is tuned further.

`form_of(tokenizer)` is the format of its chats: that of the `chat_template` among its files, or else `chat.Format`.

Only what the model writes is learnt. Where the template says what that is, by `{% generation %}`, it is that; otherwise
an answer is what the text up to it has more than the text before it with a generation prompt. Templates may rewrite
earlier turns (most leave their reasoning out): an answer that does not stand in the whole text as the model wrote it is
not learnt.
"""

import bisect
import dataclasses
import datetime
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from zaya_jax.config import UserError, first_line
from zaya_jax.data import chat, chat_template
from zaya_jax.data.chat import DROPPED, KEPT, REDUCED, TRIMMED, Message
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.data.tokens import Document

MARKED = "<@ an answer @>"  # to see how a template ends one
TRIES = 4  # to cut a reasoning to a length


class Refused(UserError):
    """A conversation that the template does not take."""


def form_of(tokenizer: Tokenizer) -> "chat.Format | Template":
    """The format of a model's chats."""
    source = chat_template.own_source(tokenizer.extra_files)
    return Template(tokenizer, source) if source else chat.Format(tokenizer)


def template_of(tokenizer: Tokenizer) -> "Template":
    """The template of a model, its own or ours; UserError where it has none."""
    if source := chat_template.own_source(tokenizer.extra_files) or chat_template.make_template(tokenizer):
        return Template(tokenizer, source)
    raise UserError("the model has no chat template, and its vocabulary no marks of turns for ours")


class Template:
    """A Jinja template with the interface of `chat.Format`."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._tokenizer, self.source = tokenizer, source
        self._generations, self._blocks = list[tuple[int, int]](), list[str]()
        try:
            self._template = _environment(self._around).from_string(source)
        except Exception as error:  # Jinja's own classes, and Python's for what it cannot compile
            raise UserError(f"the model's chat template cannot be read: {first_line(error)}") from None
        names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
        self._names = {name: tokenizer.mark(token) for name, token in names.items()}
        self._names |= chat_template.special_names(tokenizer.extra_files)

    @functools.cached_property
    def ends(self) -> list[int]:
        """The ids that end an answer: the first special one that the template writes after it."""
        ids = self._tokenizer.spelt(self._after_an_answer())[0]
        return [token for token in ids if not self._tokenizer.decode([token])][:1]

    @functools.cached_property
    def stop(self) -> list[str]:
        """The text that ends an answer, where no id does."""
        after = self._after_an_answer().strip()
        return [after] if after and not self.ends else []

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The text of a conversation; `prompt`: with the beginning of an answer."""
        leads = bool(messages) and messages[0].role == "tools"
        tools: Any = None
        if leads:
            try:
                tools = json.loads(messages[0].content)
            except ValueError:
                leads = False  # in words: a turn as it was given
        turns = [self._turn(message) for message in messages[leads:]]
        self._generations, self._blocks = [], []
        try:
            for block in self._template.generate(
                messages=turns, tools=tools, documents=None, add_generation_prompt=prompt, **self._names
            ):
                self._blocks.append(block)
        except Exception as error:  # a template may fail in any way
            raise Refused(f"the model's chat template refuses this conversation: {first_line(error)}") from None
        return "".join(self._blocks)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the model continues with its answer."""
        return self._tokenizer.spelt(self.render(messages, prompt=True))[0]

    def answered(self, messages: Sequence[Message], text: str, ids: Sequence[int]) -> Message:
        """The answer to a conversation that is this text, and was these ids: they tell marks of reasoning from text.

        Reasoning that the prompt has begun belongs to it.
        """
        asked = self.render(messages, prompt=True)
        begun = "<think>" if asked[_alike(asked, self.render(messages)) :].rstrip().endswith("<think>") else ""
        spelt = self._tokenizer.spell(ids)
        text = begun + (spelt if spelt != self._tokenizer.decode(ids) else text)
        text += "</think>" if "<think>" in text and "</think>" not in text else ""
        return chat.read([{"role": "assistant", "content": text}])[0]

    def prepare(self, messages: Sequence[Message], context: int | None) -> tuple[Document | None, str]:
        """As `chat.Format.prepare`, by the same rules; the end of the last reasoning is cut as text."""
        document = self.document(messages)
        if context is None or len(document.tokens) <= context:
            return document, KEPT
        bare = [dataclasses.replace(message, reasoning="") for message in messages]
        shortest = self.document(bare)
        if len(shortest.tokens) > context:
            return None, DROPPED
        last = max(i for i, message in enumerate(messages) if message.answer)
        turns = [*bare[:last], messages[last], *bare[last + 1 :]]
        outcome = REDUCED if turns != list(messages) else TRIMMED
        for _ in range(TRIES):
            document = self.document(turns)
            if len(document.tokens) <= context:
                return document, outcome
            kept = self._tokenizer.encode(turns[last].reasoning)[: context - len(document.tokens)]
            turns[last] = dataclasses.replace(turns[last], reasoning=self._tokenizer.decode(kept))
        return shortest, outcome

    def document(self, messages: Sequence[Message]) -> Document:
        """The document of a conversation, the model's own text marked to be learnt."""
        text = self.render(messages)
        spans = self._generations or self._answers(messages, text)
        ids, places = self._tokenizer.spelt(text)
        begins = [begin for begin, _ in spans]
        at = [bisect.bisect_right(begins, first) - 1 for first, _ in places]
        learn = [i >= 0 and first < spans[i][1] for i, (first, _) in zip(at, places, strict=True)]
        return Document(np.array(ids, self._tokenizer.dtype), np.array(learn, bool))

    def _answers(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """The places of the answers, by the differences of prefixes."""
        found = []
        for number, message in enumerate(messages):
            if message.answer and number:
                upto = self.render(messages[: number + 1])
                if text.startswith(upto):
                    found.append((_alike(self.render(messages[:number], prompt=True), upto), len(upto)))
        return found

    def _turn(self, message: Message) -> dict[str, Any]:
        """A message as templates take it; one that knows no field of reasoning finds it in the text."""
        content = message.plain
        turn = {"role": message.role, "content": content, **message.more}
        if not message.reasoning:
            return turn
        keys = [key for key in chat.REASONING_KEYS if f"message.{key}" in self.source or f"'{key}'" in self.source]
        if keys:
            return turn | dict.fromkeys(keys, message.reasoning)
        return turn | {"content": f"<think>\n{message.reasoning}\n</think>\n\n{content}"}

    def _after_an_answer(self) -> str:
        text = self.render([Message("user", "", "?"), Message("assistant", "", MARKED)])
        return text.rpartition(MARKED)[2]

    def _around(self, caller: Any) -> str:
        """The body of a `{% generation %}`, whose place is noted."""
        text, begin = str(caller()), sum(map(len, self._blocks))
        self._generations.append((begin, begin + len(text)))
        return text


def _alike(a: str, b: str) -> int:
    """The number of characters with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _environment(around: Any) -> Any:
    """Jinja's sandbox with transformers' settings."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

        def _around(self, caller: Any) -> str:
            return around(caller)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made
