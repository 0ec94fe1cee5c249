"""Chat templates: a model's own, rendered as transformers does, or ours for a model that has none.

`Template(tokenizer)` is the format in which a model is tuned, evaluated and talked to: the
`chat_template` among its files, or else TEMPLATE, which an export takes along for transformers and
the servers that read its folders.

Only what the model writes is learnt. Where a template says what that is, by `{% generation %}`, it
is that; otherwise an answer is what the text up to it has more than the text before it with a
generation prompt. Templates may rewrite earlier turns (most leave their reasoning out): an answer
that does not stand in the whole text as the model wrote it is not learnt. A text that spells a mark
becomes the mark, as in transformers.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.config import UserError, first_line
from zaya_jax.text import chat
from zaya_jax.text.chat import DROPPED, KEPT, REDUCED, TRIMMED, Message
from zaya_jax.text.tokenizers import CHAT_TOKENS, Tokenizer
from zaya_jax.text.tokens import Document

CONFIG_FILE, TEMPLATE_FILE, KEY = "tokenizer_config.json", "chat_template.jinja", "chat_template"
OWN = "Written by zaya_jax"
ANSWER = "<@ an answer @>"  # to see how a template ends one
TRIES = 4  # to cut a reasoning to a length

# A turn is <|turn|>role NEWLINE text <|end_turn|>NEWLINE. The model's turns have reasoning between
# <think> and </think>
# before the answer, and tool calls after it, each as JSON between <tool_call> and </tool_call>.
TEMPLATE = r"""
{#- Written by zaya_jax: zaya_jax/text/chat_template.py, for tuning, talking and export. -#}
{%- set turn, end_turn = TURN, END_TURN -%}
{%- set think, end_think = THINK, END_THINK -%}
{%- macro parts(given, kinds) -%}
    {%- for part in given -%}
        {%- set kind = 'text' if part is string else part['type'] or 'text' -%}
        {%- if kind not in TEXT_KINDS and kind not in REASONING_KINDS -%}
            {{- raise_exception('a turn has a part of type ' + kind + ', and only text can be read') -}}
        {%- elif kind in kinds -%}
            {{- part if part is string else part[kind] or part['text'] or '' -}}
        {%- endif -%}
    {%- endfor -%}
{%- endmacro -%}
{{- BOS -}}
{%- if tools -%}
    {{- turn + 'tools\n' + (tools if tools is string else tools | tojson) + end_turn + '\n' -}}
{%- endif -%}
{%- set at = namespace(answer=false, reasoning='', text='') -%}
{%- for message in messages -%}
    {%- set role = (message['role'] or message['from']) | trim -%}
    {%- set at.answer = role | lower in MODEL_ROLES -%}
    {%- set role = MODEL_ROLES[0] if at.answer else USER_ROLES[0] if role | lower in USER_ROLES else role -%}
    {%- set content = message['content'] if message['content'] is defined else none -%}
    {%- set content = message['value'] if content is none else content -%}
    {%- set at.reasoning = '' -%}
    {%- set at.text = '' -%}
    {%- if content is string -%}
        {%- set at.text = content -%}
    {%- elif content is mapping -%}
        {%- set at.text = content | tojson -%}
    {%- elif content -%}
        {%- set at.reasoning = parts(content, REASONING_KINDS) -%}
        {%- set at.text = parts(content, TEXT_KINDS) -%}
    {%- endif -%}
    {%- set field = REASONING_KEYS -%}
    {%- if field is string and field -%}
        {%- set at.reasoning = field -%}
    {%- elif field -%}
        {%- set at.reasoning = parts(field, REASONING_KINDS) + parts(field, TEXT_KINDS) -%}
    {%- endif -%}
    {%- set rest = at.text.lstrip() -%}
    {%- if at.answer and not at.reasoning and rest.startswith('<think>') and '</think>' in rest -%}
        {%- set halves = rest[7:].split('</think>', 1) -%}
        {%- set at.reasoning = halves[0] -%}
        {%- set at.text = halves[1].lstrip() -%}
    {%- endif -%}
    {%- set at.reasoning = at.reasoning.strip('\n') if at.answer else '' -%}
    {%- if at.reasoning -%}
        {%- set at.text = at.text.lstrip() -%}
    {%- endif -%}
    {%- for call in (message['tool_calls'] or []) + [message['function_call']] -%}
        {%- if call -%}
            {%- set function = call if call['function'] is not defined else call['function'] -%}
            {%- set name = 'arguments' if function['arguments'] is defined else 'parameters' -%}
            {%- set arguments = function[name] if function[name] is defined else {} -%}
            {%- set arguments = arguments if arguments is string else arguments | tojson -%}
            {%- set spelt = '{"name": ' + (function['name'] | tojson) + ', "arguments": ' + arguments + '}' -%}
            {%- set at.text = at.text + ('\n' if at.text else '') + '<tool_call>\n' + spelt + '\n</tool_call>' -%}
        {%- endif -%}
    {%- endfor -%}
    {{- turn + role + '\n' -}}
    {%- if at.reasoning -%}
        {%- set at.text = think + at.reasoning + end_think + '\n' + at.text -%}
    {%- endif -%}
    {%- if at.answer -%}
        {%- generation -%}{{- at.text + end_turn -}}{%- endgeneration -%}
    {%- else -%}
        {{- at.text + end_turn -}}
    {%- endif -%}
    {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- turn + 'assistant\n' -}}
{%- elif at.answer -%}
    {%- generation -%}{{- EOS -}}{%- endgeneration -%}
{%- else -%}
    {{- EOS -}}
{%- endif -%}
"""


class Refused(UserError):
    """A conversation that the template does not take."""


def source_of(tokenizer: Tokenizer) -> str:
    """The template of a model: its own, or ours."""
    return own_source(tokenizer.extra_files) or make_template(tokenizer)


def has_marks(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary has ids for the marks around turns; otherwise our template spells them
    out as text."""
    return all(len(tokenizer.chat_token(role)) == 1 for role in ("turn", "end_turn"))


def require_marks(tokenizer: Tokenizer, named: str) -> None:
    """UserError where a model has no template of its own, and its vocabulary no marks of turns for
    ours."""
    if not own_source(tokenizer.extra_files) and not has_marks(tokenizer):
        names = " and ".join(
            f"one of {', '.join(CHAT_TOKENS[role])}" for role in ("turn", "end_turn")
        )
        raise UserError(
            f"{named} has no chat marks: it needs {names} as tokens; give unused ids of its"
            " tokenizer.json these names, as special tokens"
        )


def make_template(tokenizer: Tokenizer) -> str:
    """Our template for a vocabulary."""
    marks = {role: tokenizer.chat_mark(role) for role in CHAT_TOKENS}
    names: dict[str, Any] = {
        "END_TURN": marks["end_turn"],
        "TURN": marks["turn"],
        "END_THINK": marks["end_think"],
        "THINK": marks["think"],
        "TEXT_KINDS": list(chat.TEXT_PARTS),
        "REASONING_KINDS": list(chat.REASONING_PARTS),
        "MODEL_ROLES": list(chat.MODEL_ROLES),
        "USER_ROLES": list(chat.USER_ROLES),
        "BOS": tokenizer.mark(tokenizer.bos_id),
        "EOS": tokenizer.mark(tokenizer.eos_id),
    }
    keys = " or ".join(f"message[{key!r}]" for key in chat.REASONING_KEYS)
    spelt = {name: json.dumps(value, ensure_ascii=False) for name, value in names.items()} | {
        "REASONING_KEYS": keys
    }
    return (
        re.sub(rf"\b({'|'.join(spelt)})\b", lambda found: spelt[found[0]], TEMPLATE.strip()) + "\n"
    )


def own_source(files: Mapping[str, bytes]) -> str:
    """The template among a tokenizer's files that is not ours; "" where there is none."""
    source = (
        files[TEMPLATE_FILE].decode("utf-8", "replace")
        if TEMPLATE_FILE in files
        else _settings(files).get(KEY)
    )
    if isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    return source if isinstance(source, str) and OWN not in source[:200] else ""


def special_names(files: Mapping[str, bytes]) -> dict[str, str]:
    """The names of special tokens as the template's variables: those of tokenizer_config.json."""
    given = {key: value for key, value in _settings(files).items() if key.endswith("_token")}
    named = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in given.items()
    }
    return {key: value for key, value in named.items() if isinstance(value, str)}


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if it is missing or unreadable."""
    try:
        found = json.loads(files.get(CONFIG_FILE, b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Template:
    """A Jinja template that turns conversations into text, ids and documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.source = tokenizer, source_of(tokenizer)
        self._generations, self._blocks = list[tuple[int, int]](), list[str]()
        try:
            self._template = _environment(self._around, OWN in self.source[:200]).from_string(
                self.source
            )
        except Exception as error:  # Jinja's own classes, and Python's for what it cannot compile
            raise UserError(
                f"the model's chat template cannot be read: {first_line(error)}"
            ) from None
        names = {
            "bos_token": tokenizer.bos_id,
            "eos_token": tokenizer.eos_id,
            "pad_token": tokenizer.pad_id,
        }
        self._names = {name: tokenizer.mark(token) for name, token in names.items()}
        self._names |= special_names(tokenizer.extra_files)

    @functools.cached_property
    def ending(self) -> tuple[list[int], list[str]]:
        """(the id that ends an answer, or else the text that does): of these one is there,
        mostly."""
        text = self.render([Message("user", "", "?"), Message("assistant", "", ANSWER)]).rpartition(
            ANSWER
        )[2]
        ids = self._tokenizer.spelt(text)[0]
        special = next(
            (i for i, token in enumerate(ids) if not self._tokenizer.decode([token])), len(ids)
        )
        before = self._tokenizer.decode(ids[:special]).strip()
        return ([], [before]) if before else (ids[special : special + 1], [])

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
                messages=turns,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._names,
            ):
                self._blocks.append(block)
        except Exception as error:  # a template may fail in any way
            raise Refused(
                f"the model's chat template refuses this conversation: {first_line(error)}"
            ) from None
        return "".join(self._blocks)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the model continues with its answer."""
        return self._tokenizer.spelt(self.render(messages, prompt=True))[0]

    def answered(self, messages: Sequence[Message], text: str, ids: Sequence[int]) -> Message:
        """The answer to a conversation that is this text, and was these ids: they tell marks of
        reasoning from text.

        Reasoning that the prompt has begun belongs to it.
        """
        begun = "<think>" if self.render(messages, prompt=True).rstrip().endswith("<think>") else ""
        spelt = self._tokenizer.spell(ids)
        text = begun + (spelt if spelt != self._tokenizer.decode(ids) else text)
        text += "</think>" if "<think>" in text and "</think>" not in text else ""
        return chat.read([{"role": "assistant", "content": text}])[0]

    def prepare(
        self, messages: Sequence[Message], context: int | None
    ) -> tuple[Document | None, str]:
        """(the document of a chat fitted to a context, KEPT or how it changed); None where it is
        dropped.

        A chat that fits is kept. Otherwise all answers but the last lose their reasoning (reduced);
        where that is not enough, or there is one answer only, the end of the last reasoning is cut,
        just before the answer (trimmed). A chat that is too long without any reasoning is dropped.
        Prompts and answers are never touched.
        """
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
            # half of a character
            reasoning = self._tokenizer.decode(kept).rstrip("\N{REPLACEMENT CHARACTER}")
            turns[last] = dataclasses.replace(turns[last], reasoning=reasoning)
        return shortest, outcome

    def document(self, messages: Sequence[Message]) -> Document:
        """The document of a conversation, the model's own text marked to be learnt."""
        text = self.render(messages)
        spans = self._generations or self._answers(messages, text)
        ids, places = self._tokenizer.spelt(text)
        firsts, lasts = np.array(places, np.int64).reshape(-1, 2).T
        begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
        # As transformers' mask has it, also where a token joins an answer's first space with the
        # line's end before it.
        learn = np.searchsorted(begins, lasts) > np.searchsorted(ends, firsts, side="right")
        return Document(np.array(ids, self._tokenizer.dtype), learn)

    def _answers(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """The places of the answers, by the differences of prefixes."""
        found = []
        for number, message in enumerate(messages):
            if message.answer and number:
                upto = self.render(messages[: number + 1])
                if text.startswith(upto):
                    found.append(
                        (_alike(self.render(messages[:number], prompt=True), upto), len(upto))
                    )
        return found

    def _turn(self, message: Message) -> dict[str, Any]:
        """A message as templates take it; one that knows no field of reasoning finds it in the
        text."""
        turn = {"role": message.role, "content": message.content, **message.more}
        if not message.reasoning:
            return turn
        keys = [
            key
            for key in chat.REASONING_KEYS
            if f"message.{key}" in self.source or f"'{key}'" in self.source
        ]
        if keys:
            return turn | dict.fromkeys(keys, message.reasoning)
        return turn | {"content": f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"}

    def _around(self, caller: Any) -> str:
        """The body of a `{% generation %}`, whose place is noted."""
        text, begin = str(caller()), sum(map(len, self._blocks))
        self._generations.append((begin, begin + len(text)))
        return text


def _alike(a: str, b: str) -> int:
    """The number of characters with which both begin."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _environment(around: Any, ours: bool) -> Any:
    """Jinja's sandbox with transformers' settings; our own template takes a third of the time
    outside it."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(
                line
            )

        def _around(self, caller: Any) -> str:
            return around(caller)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Parquet has types of its own
        return json.dumps(value, ensure_ascii=ensure_ascii, default=str, **options)

    kind = jinja2.Environment if ours else jinja2.sandbox.ImmutableSandboxedEnvironment
    made = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made
