"""Chat templates: a model's own, rendered as transformers does, or ours for a model that has none.

`Template(tokenizer)` is the format in which a model is tuned, evaluated and talked to: the
`chat_template` among its files, or else TEMPLATE, which an export takes along for transformers and
the servers that read its folders.

Only what the model writes is learnt. Where a template marks that by `{% generation %}`, the marked
text is learnt; otherwise `answer_spans` finds each answer in the text. Templates may rewrite
earlier turns (most leave their reasoning out): an answer that is not in the text as the model wrote
it is counted and not learnt, and a chat of which the template leaves something out is counted and
left out. A text that spells a special token becomes that token, as in transformers.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.config import UserError, first_line
from zaya_jax.text import answer_spans, chat
from zaya_jax.text.answer_spans import Incomplete, Refused
from zaya_jax.text.chat import DROPPED, KEPT, REDUCED, TRIMMED, Message
from zaya_jax.text.token_block import Document
from zaya_jax.text.tokenizers import (
    CHAT_TOKENS,
    TEMPLATE_FILE,
    TOOLS_FILE,
    Tokenizer,
    read_tokenizer_config,
    special_names,
)

OURS = "Written by zaya_jax"
ANSWER = "<@ an answer @>"  # to see how a template ends one,
REASONING = "<@ its reasoning @>"  # and how it takes this
RENDERING = "zaya_jax_rendering"  # a template's variable: the blocks of a text while it is written
TRIES = 4  # to cut a reasoning to a length
# What a template that asks for today is told, so that a chat gives the same tokens on each day. It
# is the date that Llama's templates write without a clock.
TODAY = datetime.datetime(2024, 7, 26)

# A turn is <|turn|>role NEWLINE text <|end_turn|>NEWLINE. The model's turns have reasoning between
# <think> and </think> before the answer, and tool calls after it, each as JSON between <tool_call>
# and </tool_call>. Most of it repeats `chat.parse_turn`, whose result training gives: exports have
# turns in the forms that others write.
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


def template_sources(tokenizer: Tokenizer) -> dict[str, str]:
    """The templates of a model by their names in transformers, its own or ours: "default", and for
    chats with tools perhaps "tool_use"."""
    return model_templates(tokenizer.extra_files) or {"default": make_template(tokenizer)}


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of all that decides, beside the tokenizer, how a chat becomes a document."""
    facts = [chat.VERSION, template_sources(tokenizer), special_names(tokenizer.extra_files)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def has_turn_tokens(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary has special tokens that begin and end turns; otherwise our template
    spells them out as text."""
    names = (tokenizer.chat_special_text(purpose) for purpose in ("turn", "end_turn"))
    return all(tokenizer.special_id(name) is not None for name in names)


def require_turn_tokens(tokenizer: Tokenizer, described_as: str) -> None:
    """UserError where a model has no template of its own, and its vocabulary no tokens of turns for
    ours."""
    if not model_templates(tokenizer.extra_files) and not has_turn_tokens(tokenizer):
        begin, end = (", ".join(CHAT_TOKENS[purpose]) for purpose in ("turn", "end_turn"))
        raise UserError(
            f"{described_as} has no tokens of chats: it needs one of {begin} and one of {end}; give"
            " unused ids of its tokenizer.json these names, as special tokens"
        )


def make_template(tokenizer: Tokenizer) -> str:
    """Our template for a vocabulary."""
    names: dict[str, Any] = {
        "END_TURN": tokenizer.chat_special_text("end_turn"),
        "TURN": tokenizer.chat_special_text("turn"),
        "END_THINK": tokenizer.chat_special_text("end_think"),
        "THINK": tokenizer.chat_special_text("think"),
        "TEXT_KINDS": list(chat.TEXT_PARTS),
        "REASONING_KINDS": list(chat.REASONING_PARTS),
        "MODEL_ROLES": list(chat.MODEL_ROLES),
        "USER_ROLES": list(chat.USER_ROLES),
        "BOS": tokenizer.special_text(tokenizer.bos_id),
        "EOS": tokenizer.special_text(tokenizer.eos_id),
    }
    values = {name: json.dumps(value, ensure_ascii=False) for name, value in names.items()}
    values["REASONING_KEYS"] = " or ".join(f"message[{key!r}]" for key in chat.REASONING_KEYS)
    any_name = rf"\b({'|'.join(values)})\b"
    return re.sub(any_name, lambda name: values[name[0]], TEMPLATE.strip()) + "\n"


def model_templates(files: Mapping[str, bytes]) -> dict[str, str]:
    """The templates among a tokenizer's files that are not ours; {} where none is the default."""
    templates: dict[str, Any] = {}
    entries = read_tokenizer_config(files).get("chat_template")
    if not isinstance(entries, list):
        entries = [{"name": "default", "template": entries}]
    for entry in entries:
        if isinstance(entry, dict):
            templates[str(entry.get("name"))] = entry.get("template")
    for name, file in (("default", TEMPLATE_FILE), ("tool_use", TOOLS_FILE)):
        if file in files:
            templates[name] = files[file].decode("utf-8", "replace")
    default = templates.get("default")
    if not isinstance(default, str) or not default or OURS in default[:200]:
        return {}
    return {name: str(templates[name]) for name in ("default", "tool_use") if templates.get(name)}


class Ending(NamedTuple):
    """What a template writes behind the text of an answer."""

    ids: list[int]  # the first special id in it, if there is one
    text_before: str  # the text before that
    marker: str  # both
    everything: str


class Template:
    """A Jinja template that turns conversations into text, ids and documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, sources = tokenizer, template_sources(tokenizer)
        self.source = sources["default"]
        self._ours = OURS in self.source[:200]
        environment = _environment()
        try:
            self._template = self._for_tools = environment.from_string(self.source)
            if "tool_use" in sources:
                self._for_tools = environment.from_string(sources["tool_use"])
        except Exception as error:  # Jinja's own classes, and Python's for what it cannot compile
            raise UserError(
                f"the model's chat template cannot be read: {first_line(error)}"
            ) from None
        names: dict[str, Any] = {
            "bos_token": tokenizer.special_text(tokenizer.bos_id),
            "eos_token": tokenizer.special_text(tokenizer.eos_id),
            "pad_token": tokenizer.special_text(tokenizer.pad_id),
            **special_names(tokenizer.extra_files),
        }
        self._names = {name: text for name, text in names.items() if text is not None}

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The text of a conversation; `prompt`: with the beginning of an answer."""
        return self._render(*_split_tools(messages), prompt)

    def _render(self, tools: Any, turns: Sequence[Message], prompt: bool) -> str:
        return self._render_with_blocks(tools, turns, prompt, self._reasoning_format)[0]

    def _turn(self, message: Message, form: str) -> dict[str, Any]:
        """A message as templates take it; those of models know results as "tool"."""
        role, reasoning, content = message.role, message.reasoning, message.content
        if role.lower() in chat.RESULT_ROLES and not self._ours:
            role = "tool"
        turn = {"role": role, "content": content, **message.extra_fields}
        if message.raw_reasoning and form != "fields":  # as it was written
            return turn | {"content": message.raw_reasoning + content}
        if not reasoning:
            return turn
        if form == "fields":
            return turn | dict.fromkeys(chat.REASONING_KEYS, reasoning)
        if form == "content":
            return turn | {"content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
        parts = {"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content}
        return turn | {"content": list(parts)}

    def _render_with_blocks(
        self, tools: Any, turns: Sequence[Message], prompt: bool, form: str
    ) -> tuple[str, list[tuple[int, str]]]:
        """(the text, the start and body of each `{% generation %}`), reasoning in this format."""
        blocks, generations = list[str](), list[tuple[int, str]]()
        template = self._for_tools if tools else self._template
        try:
            for block in template.generate(
                messages=[self._turn(turn, form) for turn in turns],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **{RENDERING: (blocks, generations)},
                **self._names,
            ):
                blocks.append(block)
        except Exception as error:  # a template may fail in any way
            raise Refused(
                f"the model's chat template refuses this conversation: {first_line(error)};"
                " change it, or leave it out"
            ) from None
        return "".join(blocks), generations

    @functools.cached_property
    def _reasoning_format(self) -> str:
        """How the template takes reasoning: in `fields` of a turn, in `parts` of its content, or in
        the `content` between <think> and </think>."""
        turns = [answer_spans.QUESTION, Message("assistant", REASONING, ANSWER)]
        for form in ("fields", "parts"):
            with contextlib.suppress(Refused):
                text, _ = self._render_with_blocks(None, turns, False, form)
                if REASONING in text and "'type'" not in text and '"type"' not in text:
                    return form
        return "content"

    @functools.cached_property
    def stops(self) -> tuple[list[int], list[str]]:
        """(ids, texts) that end an answer: one id, or one text where that comes before any special
        id; none of both where the template writes nothing behind an answer."""
        if self._ending.text_before:
            return [], [self._ending.text_before]
        return self._ending.ids, []

    @functools.cached_property
    def _ending(self) -> Ending:
        """That of an answer at the end of a conversation."""
        return self._ending_of(answer_spans.QUESTION, Message("assistant", "", ANSWER))

    @functools.cached_property
    def _end_markers(self) -> list[str]:
        """The texts that may end an answer: the one at the end of a conversation, and where other
        turns follow perhaps the one that ends questions too."""
        markers = [self._ending.marker.strip()]
        with contextlib.suppress(Refused):
            question = self._ending_of(Message("user", "", ANSWER))
            if not question.text_before:
                markers.append(question.marker.strip())
        return list(filter(None, markers))

    def _ending_of(self, *turns: Message) -> Ending:
        """What the template writes behind the last of some turns, whose text is ANSWER."""
        everything = self.render(turns).rpartition(ANSWER)[2]
        ids, characters = self._tokenizer.encode_with_specials(everything)
        for i, (id_, (_, stop)) in enumerate(zip(ids, characters, strict=True)):
            if id_ in self._tokenizer.specials:
                before = self._tokenizer.decode(ids[:i]).strip()
                return Ending([id_], before, everything[:stop], everything)
        return Ending([], self._tokenizer.decode(ids).strip(), everything, everything)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the model continues with its answer."""
        return self._tokenizer.encode_with_specials(self.render(messages, prompt=True))[0]

    def parse_answer(self, messages: Sequence[Message], text: str, ids: Sequence[int]) -> Message:
        """The answer to a conversation that is this text, and was these ids: they tell special
        tokens around reasoning from text.

        Reasoning that the prompt has begun belongs to it.
        """
        with_specials = self._tokenizer.decode_with_specials(ids)
        if with_specials != self._tokenizer.decode(ids):
            text = with_specials
        if self.render(messages, prompt=True).rstrip().endswith("<think>"):
            text = "<think>" + text
        if text.lstrip().startswith("<think>") and "</think>" not in text:
            text += "</think>"
        return chat.parse_turn({"role": "assistant", "content": text})

    def encode_within(
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
            return self._fit(messages, context)
        except Incomplete as error:
            return None, str(error)

    def _fit(self, messages: Sequence[Message], context: int | None) -> tuple[Document | None, str]:
        document = self.encode_chat(messages)
        if context is None or len(document.tokens) <= context:
            return document, KEPT
        without = [message.with_reasoning("") for message in messages]
        shortest = self.encode_chat(without)
        if len(shortest.tokens) > context:
            return None, DROPPED
        last = max(i for i, message in enumerate(messages) if message.is_answer)
        turns = list(without)
        turns[last] = messages[last]
        outcome = TRIMMED if turns == list(messages) else REDUCED
        for _ in range(TRIES):
            document = self.encode_chat(turns)
            excess = len(document.tokens) - context
            if excess <= 0:
                return document, outcome
            ids = self._tokenizer.encode(turns[last].reasoning)[:-excess]
            # The cut may leave half of a character.
            reasoning = self._tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
            turns[last] = turns[last].with_reasoning(reasoning if reasoning.strip() else "")
        return shortest, outcome

    def encode_chat(self, messages: Sequence[Message]) -> Document:
        """The document of a conversation, of which the model's own text is to be predicted;
        Incomplete where the rendered text would teach something else."""
        tools, turns = _split_tools(messages)
        text, generations = self._render_with_blocks(tools, turns, False, self._reasoning_format)
        if any(not text.startswith(body, start) for start, body in generations):
            raise UserError(
                "the model's chat template has a {% generation %} inside a {% set %} or a macro,"
                " where its position in the text is not known; move it to where the text is written"
            )
        spans = [(start, start + len(body)) for start, body in generations]
        ids, characters = self._tokenizer.encode_with_specials(text)
        locator = answer_spans.AnswerLocator(self._render, tools, turns, text)
        if spans:
            spans, learnt = locator.learnt_blocks(spans)
        else:
            spans = locator.spans(self._ending.everything, self._end_markers)
            learnt = len(spans)
        firsts, lasts = np.array(characters, np.int64).reshape(-1, 2).T
        starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
        # A token is predicted if it has a character of a span, as by transformers' mask: more spans
        # start before its last one than stop before its first. So is a token that joins an answer's
        # first space with the line's end before it.
        started = np.searchsorted(starts, lasts)
        stopped = np.searchsorted(stops, firsts, side="right")
        predicted = started > stopped
        if not predicted.any():
            raise Incomplete("left out: the chat template writes no answer that can be learnt")
        counts = {
            "answers learnt": learnt,
            "answers rewritten": sum(turn.is_learnt for turn in turns) - learnt,
            "tokens learnt": int(predicted.sum()),
        }
        with contextlib.suppress(Refused):  # the short chat that shows the ending
            if not any(self.stops):
                counts["answers learnt without an end"] = learnt
        return Document(np.array(ids, self._tokenizer.dtype), predicted, counts)


def _split_tools(messages: Sequence[Message]) -> tuple[Any, Sequence[Message]]:
    """(the tools that lead a conversation, or None; its turns)."""
    with contextlib.suppress(ValueError):  # tools described in words stay a turn
        if messages and messages[0].role == "tools":
            return json.loads(messages[0].content) or None, messages[1:]
    return None, messages


def _environment() -> Any:
    """Jinja's sandbox with transformers' settings."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}`: its body, whose position and text are noted."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            note = self.call_method("_note", [jinja2.nodes.ContextReference()])
            return jinja2.nodes.CallBlock(note, [], [], body).set_lineno(line)

        def _note(self, context: Any, caller: Any) -> str:
            text = str(caller())
            blocks, generations = context[RENDERING]
            generations.append((sum(map(len, blocks)), text))
            return text

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = chat.to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment
