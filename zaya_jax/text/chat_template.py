"""Chat templates: a model's own, rendered as transformers does, or ours for a model that has none.

`Template(tokenizer)` is the format in which a model is tuned, evaluated and talked to: the
`chat_template` among its files, or else TEMPLATE, which an export takes along for transformers and
the servers that read its folders.

Only what the model writes is learnt. Where a template says what that is, by `{% generation %}`, it
is that; otherwise `answers` finds each answer in the text. Templates may rewrite earlier turns (most
leave their reasoning out): an answer that does not stand in the text as the model wrote it is
counted and not learnt, and a chat of which the template leaves something out is counted and left
out. A text that spells a mark becomes the mark, as in transformers.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.config import UserError, first_line
from zaya_jax.text import answers, chat
from zaya_jax.text.answers import Incomplete, Refused
from zaya_jax.text.chat import DROPPED, KEPT, REDUCED, TRIMMED, Message
from zaya_jax.text.tokenizers import (
    CHAT_TOKENS,
    TEMPLATE_FILE,
    TOOLS_FILE,
    Tokenizer,
    settings_of,
    special_names,
)
from zaya_jax.text.tokens import Document

OWN = "Written by zaya_jax"
ANSWER = "<@ an answer @>"  # to see how a template ends one,
REASONING = "<@ its reasoning @>"  # and how it takes this
TRIES = 4  # to cut a reasoning to a length
# What a template that asks for today is told, so that a chat gives the same tokens on each day. It
# is the date that Llama's templates write without a clock.
TODAY = datetime.datetime(2024, 7, 26)

# A turn is <|turn|>role NEWLINE text <|end_turn|>NEWLINE. The model's turns have reasoning between
# <think> and </think> before the answer, and tool calls after it, each as JSON between <tool_call>
# and </tool_call>.
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
        {%- set at.text = halves[1].lstrip('\n') -%}
    {%- endif -%}
    {%- set at.reasoning = at.reasoning.strip('\n') if at.answer else '' -%}
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


def sources_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The templates of a model by their names in transformers, its own or ours: "default", and for
    chats with tools perhaps "tool_use"."""
    return own_sources(tokenizer.extra_files) or {"default": make_template(tokenizer)}


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of all that decides, beside the tokenizer, how a chat becomes a document."""
    facts = [chat.VERSION, sources_of(tokenizer), special_names(tokenizer.extra_files)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def has_marks(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary has ids for the marks around turns; otherwise our template spells them
    out as text."""
    return all(len(tokenizer.chat_token(role)) == 1 for role in ("turn", "end_turn"))


def require_marks(tokenizer: Tokenizer, named: str) -> None:
    """UserError where a model has no template of its own, and its vocabulary no marks of turns for
    ours."""
    if not own_sources(tokenizer.extra_files) and not has_marks(tokenizer):
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
    spelt = {name: json.dumps(value, ensure_ascii=False) for name, value in names.items()}
    spelt["REASONING_KEYS"] = " or ".join(f"message[{key!r}]" for key in chat.REASONING_KEYS)
    return (
        re.sub(rf"\b({'|'.join(spelt)})\b", lambda found: spelt[found[0]], TEMPLATE.strip()) + "\n"
    )


def own_sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """The templates among a tokenizer's files that are not ours; {} where none is the default."""
    given = settings_of(files).get("chat_template")
    several = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = {one.get("name"): one.get("template") for one in several if isinstance(one, dict)}
    for name, file in (("default", TEMPLATE_FILE), ("tool_use", TOOLS_FILE)):
        if file in files:
            named[name] = files[file].decode("utf-8", "replace")
    default = named.get("default")
    if not isinstance(default, str) or not default or OWN in default[:200]:
        return {}
    return {name: str(named[name]) for name in ("default", "tool_use") if named.get(name)}


class Template:
    """A Jinja template that turns conversations into text, ids and documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, sources = tokenizer, sources_of(tokenizer)
        self.source = sources["default"]
        self._ours = OWN in self.source[:200]
        self._generations, self._blocks = list[tuple[int, str]](), list[str]()
        made = _environment(self._around, self._ours)
        try:
            self._template = self._for_tools = made.from_string(self.source)
            if "tool_use" in sources:
                self._for_tools = made.from_string(sources["tool_use"])
        except Exception as error:  # Jinja's own classes, and Python's for what it cannot compile
            raise UserError(
                f"the model's chat template cannot be read: {first_line(error)}"
            ) from None
        names: dict[str, Any] = {
            "bos_token": tokenizer.mark(tokenizer.bos_id),
            "eos_token": tokenizer.mark(tokenizer.eos_id),
            "pad_token": tokenizer.mark(tokenizer.pad_id),
            **special_names(tokenizer.extra_files),
        }
        self._names = {name: mark for name, mark in names.items() if mark is not None}

    @functools.cached_property
    def ending(self) -> tuple[list[int], list[str]]:
        """(the id that ends an answer, or else the text that does); nothing where the template has
        neither."""
        ids, before, _, _ = self._ending
        return ([], [before]) if before else (ids, [])

    @functools.cached_property
    def _ending(self) -> tuple[list[int], str, str, str]:
        """`_behind` of a last answer."""
        return self._behind(answers.ASKED, Message("assistant", "", ANSWER))

    @functools.cached_property
    def _ends(self) -> list[str]:
        """The marks that may end an answer: the one behind a last answer, and where others follow
        perhaps the one that ends questions too."""
        ends = [self._ending[2].strip()]
        with contextlib.suppress(Refused):
            _, before, end, _ = self._behind(Message("user", "", ANSWER))
            ends += [] if before else [end.strip()]
        return list(filter(None, ends))

    def _behind(self, *turns: Message) -> tuple[list[int], str, str, str]:
        """(the first special id behind the last of some turns, the text before it, all of both, all
        text behind the turn)."""
        tail = self.render(turns).rpartition(ANSWER)[2]
        ids, places = self._tokenizer.spelt(tail)
        first = next((i for i, one in enumerate(ids) if one in self._tokenizer.specials), len(ids))
        stop = places[first][1] if first < len(ids) else len(tail)
        before = self._tokenizer.decode(ids[:first]).strip()
        return ids[first : first + 1], before, tail[:stop], tail

    @functools.cached_property
    def _form(self) -> str:
        """How the template takes reasoning: in `fields` of a turn, in `parts` of its content, or in
        the `content` between <think> and </think>."""
        for form in ("fields", "parts"):
            told = [answers.ASKED, Message("assistant", REASONING, ANSWER)]
            with contextlib.suppress(Refused):
                text = self._text(None, [self._turn(turn, form) for turn in told], False)
                if REASONING in text and "'type'" not in text and '"type"' not in text:
                    return form
        return "content"

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The text of a conversation; `prompt`: with the beginning of an answer."""
        return self._render(*_with_tools(messages), prompt)

    def _render(self, tools: Any, turns: Sequence[Message], prompt: bool) -> str:
        return self._text(tools, [self._turn(turn, self._form) for turn in turns], prompt)

    def _turn(self, message: Message, form: str) -> dict[str, Any]:
        """A message as templates take it; those of models know results as "tool"."""
        role, reasoning, content = message.role, message.reasoning, message.content
        role = "tool" if role.lower() in chat.RESULT_ROLES and not self._ours else role
        turn = {"role": role, "content": content, **message.more}
        if message.inside and form != "fields":  # as it was given
            return turn | {"content": message.inside + content}
        if not reasoning:
            return turn
        if form == "fields":
            return turn | dict.fromkeys(chat.REASONING_KEYS, reasoning)
        if form == "content":
            return turn | {"content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
        parts = {"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content}
        return turn | {"content": list(parts)}

    def _text(self, tools: Any, turns: list[dict[str, Any]], prompt: bool) -> str:
        self._generations, self._blocks = [], []
        template = self._for_tools if tools else self._template
        try:
            for block in template.generate(
                messages=turns,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._names,
            ):
                self._blocks.append(block)
        except Exception as error:  # a template may fail in any way
            raise Refused(
                f"the model's chat template refuses this conversation: {first_line(error)}; change"
                " it, or let prepare_data --skip_bad leave such conversations out"
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
        dropped or left out.

        A chat that fits is kept. Otherwise all answers but the last lose their reasoning (reduced);
        where that is not enough, or there is one answer only, the end of the last reasoning is cut,
        just before the answer (trimmed). A chat that is too long without any reasoning is dropped.
        Prompts and answers are never touched.
        """
        try:
            return self._fitted(messages, context)
        except Incomplete as error:
            return None, str(error)

    def _fitted(
        self, messages: Sequence[Message], context: int | None
    ) -> tuple[Document | None, str]:
        document = self.document(messages)
        if context is None or len(document.tokens) <= context:
            return document, KEPT
        bare = [message.with_reasoning("") for message in messages]
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
            turns[last] = turns[last].with_reasoning(reasoning if reasoning.strip() else "")
        return shortest, outcome

    def document(self, messages: Sequence[Message]) -> Document:
        """The document of a conversation, the model's own text marked to be learnt; Incomplete where
        the template's text would teach something else than the conversation."""
        tools, turns = _with_tools(messages)
        text, blocks = self._render(tools, turns, False), self._generations
        if any(not text.startswith(block, begin) for begin, block in blocks):
            raise UserError(
                "the model's chat template has a {% generation %} inside a {% set %} or a macro,"
                " where its place in the text is not known; move it to where the text is written"
            )
        spans = [(begin, begin + len(block)) for begin, block in blocks]
        ids, places = self._tokenizer.spelt(text)
        learnt = total = sum(turn.learnt for turn in turns)
        only_read = any(turn.answer and turn.context for turn in turns)
        if not self._ours or only_read:
            marked = answers.Marked(self._render, tools, turns, text)
            if not spans:
                spans = marked.spans(self._ending[3], self._ends)
            spans = marked.without_context(spans) if only_read else spans
            learnt = marked.learnt(spans)
        firsts, lasts = np.array(places, np.int64).reshape(-1, 2).T
        begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
        # As transformers' mask has it, also where a token joins an answer's first space with the
        # line's end before it.
        learn = np.searchsorted(begins, lasts) > np.searchsorted(ends, firsts, side="right")
        if not learn.any():
            raise Incomplete("left out: the chat template writes no answer that can be learnt")
        return Document(np.array(ids, self._tokenizer.dtype), learn, learnt, total - learnt)

    def _around(self, caller: Any) -> str:
        """The body of a `{% generation %}`, whose place is noted."""
        text = str(caller())
        self._generations.append((sum(map(len, self._blocks)), text))
        return text


def _with_tools(messages: Sequence[Message]) -> tuple[Any, Sequence[Message]]:
    """(the tools that lead a conversation, or None; its turns)."""
    with contextlib.suppress(ValueError):  # in words: a turn as it was given
        if messages and messages[0].role == "tools":
            return json.loads(messages[0].content) or None, messages[1:]
    return None, messages


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
    made.globals["strftime_now"] = TODAY.strftime
    return made
