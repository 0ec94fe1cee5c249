"""Writes the format of `chat.Format` as a Jinja template, for transformers and the servers that read its folders.

Rendered and encoded, it gives the ids of fine-tuning, with `{% generation %}` around the learnt tokens. That holds
where all marks are ids of the vocabulary. Two limits: arguments of a call that come as text are spelt as they came
(`chat` reads such text as JSON first), and a text that spells a mark becomes the mark, unless the tokenizer is called
with split_special_tokens=True.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from zaya_jax.data import chat
from zaya_jax.data.tokenizers import CHAT_TOKENS, Tokenizer

CONFIG_FILE, TEMPLATE_FILE, KEY = "tokenizer_config.json", "chat_template.jinja", "chat_template"
OWN = "Written by zaya_jax"

TEMPLATE = r"""
{#- Written by zaya_jax: what zaya_jax/data/chat.py spells. -#}
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


def make_template(tokenizer: Tokenizer) -> str:
    """The template for a vocabulary; "" where turns have no marks of its own."""
    if any(len(tokenizer.chat_token(role)) != 1 for role in ("turn", "end_turn")):
        return ""
    marks = {role: tokenizer.chat_mark(role) for role in CHAT_TOKENS}
    names: dict[str, Any] = {
        "END_TURN": marks["end_turn"], "TURN": marks["turn"], "END_THINK": marks["end_think"], "THINK": marks["think"],
        "TEXT_KINDS": list(chat.TEXT_PARTS), "REASONING_KINDS": list(chat.REASONING_PARTS),
        "MODEL_ROLES": list(chat.MODEL_ROLES), "USER_ROLES": list(chat.USER_ROLES),
        "BOS": tokenizer.mark(tokenizer.bos_id), "EOS": tokenizer.mark(tokenizer.eos_id),
    }  # fmt: skip
    keys = " or ".join(f"message[{key!r}]" for key in chat.REASONING_KEYS)
    spelt = {name: json.dumps(value, ensure_ascii=False) for name, value in names.items()} | {"REASONING_KEYS": keys}
    return re.sub(rf"\b({'|'.join(spelt)})\b", lambda found: spelt[found[0]], TEMPLATE.strip()) + "\n"


def own_source(files: Mapping[str, bytes]) -> str:
    """The template among a tokenizer's files that is not ours; "" where there is none."""
    source = files[TEMPLATE_FILE].decode("utf-8", "replace") if TEMPLATE_FILE in files else _settings(files).get(KEY)
    if isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    return source if isinstance(source, str) and OWN not in source[:200] else ""


def special_names(files: Mapping[str, bytes]) -> dict[str, str]:
    """The names of special tokens as the template's variables: those of tokenizer_config.json."""
    given = {key: value for key, value in _settings(files).items() if key.endswith("_token")}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in given.items()}
    return {key: value for key, value in named.items() if isinstance(value, str)}


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if it is missing or unreadable."""
    try:
        found = json.loads(files.get(CONFIG_FILE, b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def exact(tokenizer: Tokenizer) -> bool:
    """Whether the template gives the ids of fine-tuning also for reasoning: its marks are ids, too."""
    return all(len(tokenizer.chat_token(role)) == 1 for role in CHAT_TOKENS)
