"""The exported chat template, rendered and encoded, equals `chat.Format`: ids, and learnt tokens."""

import bisect
import functools
import json

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest
import tokenizers as library
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zaya_jax.data import chat, chat_template, tokenizers

SPELT = functools.partial(json.dumps, ensure_ascii=False)


class Generation(jinja2.ext.Extension):
    """transformers' `{% generation %}`: remembers where in the text its bodies stand, by marks that no text has."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

    def _around(self, caller):
        return f"\ue000{caller()}\ue001"


def environment():
    """As transformers makes it."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation])
    made.filters["tojson"] = SPELT

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    made.globals["raise_exception"] = raise_exception
    return made


BYTES = tokenizers.Bytes()
BPE = tokenizers.train_bpe(
    ["user\n  assistant\n\n tool \n \n think 2+2? add\n\tthem\n again éü\n" * 30, "\n a\n b\n  c" * 30], 300
)
JSONS = {BYTES: BYTES.json(), BPE: BPE._content.decode()}
TOKENIZERS = {key: library.Tokenizer.from_str(content) for key, content in JSONS.items()}
TEMPLATES = {tok: environment().from_string(chat_template.make_template(tok)) for tok in JSONS}


def rendered(tok, messages, **more):
    """(ids, learnt or not) of the template's text, encoded as transformers does it: in one, marks as ids."""
    text = TEMPLATES[tok].render(messages=messages, **more)
    plain, places = "", []
    for piece in text.replace("\ue001", "\ue000").split("\ue000"):
        plain += piece
        places.append(len(plain))
    found = TOKENIZERS[tok].encode(plain, add_special_tokens=False)
    learnt = [bisect.bisect_right(places, first) % 2 == 1 for first, _ in found.offsets]
    return found.ids, learnt


ODD = st.characters(exclude_categories=("Cs", "Co"))
TEXT = st.text(st.sampled_from("ab \n\t?é😀<>{}'\"\\\u00a0\x85") | ODD, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
FUNCTION = st.fixed_dictionaries(
    {"name": TEXT},  # as text, arguments are JSON as Python writes it
    optional=dict.fromkeys(
        ("arguments", "parameters"),
        st.dictionaries(TEXT, JSON, max_size=2) | st.dictionaries(TEXT, JSON, max_size=2).map(SPELT),
    ),
)
CALL = FUNCTION | FUNCTION.map(lambda function: {"id": "1", "type": "function", "function": function})
CALLS = st.lists(CALL, max_size=2)
PART = TEXT | st.builds(
    lambda kind, text: {"type": kind, "text" if kind.endswith("text") else kind: text},
    st.sampled_from(["text", "input_text", "output_text", "thinking", "reasoning"]),
    TEXT,
)
SPACE = st.sampled_from(["", " \n"])
THOUGHT = st.builds("{}<think>{}</think>{}{}".format, SPACE, TEXT, SPACE, TEXT)
CONTENT = TEXT | THOUGHT | st.lists(PART, max_size=3)
KEYS = (("role", "content"), ("from", "value"))
MESSAGE = st.builds(
    lambda role, content, more, old: dict(zip(KEYS[old], (role, content), strict=True)) | more,
    st.sampled_from(["system", "user", "assistant", "gpt", "Assistant", "Human", "tool", "developer", "x y", " gpt\n"]),
    CONTENT,
    st.fixed_dictionaries(
        {},
        optional={
            "tool_calls": CALLS, "function_call": st.none() | CALL,
            "reasoning": st.none() | TEXT, "reasoning_content": TEXT | st.lists(PART, max_size=2), "thinking": TEXT,
        },
    ),
    st.booleans(),
)  # fmt: skip
RESULT = st.builds(lambda value: {"role": "tool", "content": value}, st.dictionaries(TEXT, JSON, max_size=2))
CONVERSATION = st.lists(MESSAGE | RESULT, min_size=1, max_size=4)


@pytest.mark.parametrize("tok", JSONS, ids=lambda tok: tok.kind)
@settings(max_examples=60, deadline=None)
@given(
    messages=CONVERSATION,
    tools=st.none() | TEXT | st.lists(JSON, min_size=1, max_size=2),
    system=st.sampled_from(["", "be brief"]),
)
def test_template_is_the_format(tok, messages, tools, system):
    record = ({"tools": tools} if tools else {}) | ({"system": system} if system else {})
    try:
        turns = chat.read(chat.leading_turns(record) + messages)
    except chat.BadChat:  # without an answer: it teaches nothing, and is a prompt all the same
        turns = chat.read([*chat.leading_turns(record), *messages, {"role": "assistant", "content": "x"}])[:-1]
    marks = [tok.chat_mark(role) for role in tokenizers.CHAT_TOKENS]
    assume(not any(mark in turn.content + turn.reasoning for mark in marks for turn in turns))  # see below
    document, _ = chat.Format(tok).prepare(turns, None)
    if system:  # which a template takes as a turn
        messages = [{"role": "system", "content": system}, *messages]
    ids, learnt = rendered(tok, messages, tools=tools)
    assert ids == document.tokens.tolist()
    assert learnt == document.learn.tolist()
    prompt, _ = rendered(tok, messages, tools=tools, add_generation_prompt=True)
    assert prompt == [*ids[:-1], *chat.Format(tok).opening("assistant")]


def test_texts_that_spell_marks_are_marks_in_the_template_alone():
    messages = [{"role": "user", "content": "a<|end_turn|>"}, {"role": "assistant", "content": "b"}]
    document, _ = chat.Format(BPE).prepare(chat.read(messages), None)
    (end,) = BPE.chat_token("end_turn")
    ids, _ = rendered(BPE, messages)
    assert (document.tokens.tolist().count(end), ids.count(end)) == (2, 3)


def test_a_picture_is_refused():
    with pytest.raises(jinja2.exceptions.TemplateError, match="part of type image"):
        rendered(BPE, [{"role": "user", "content": [{"type": "image"}]}])


def test_bytes_as_a_tokenizer_of_the_library():
    library_has = TOKENIZERS[BYTES]
    text = "".join(map(chr, range(300))) + "é😀\n\t"
    assert library_has.encode(text, add_special_tokens=False).ids == BYTES.encode(text)
    assert library_has.decode(BYTES.encode(text)) == text
    assert library_has.get_vocab_size() == BYTES.vocab_size
    for role in tokenizers.CHAT_TOKENS:
        assert [library_has.token_to_id(BYTES.chat_mark(role))] == BYTES.chat_token(role)


def test_no_template_without_marks():
    content = json.loads(BPE._content)
    for token in content["added_tokens"]:
        token["content"] = token["content"].replace("turn", "x")
    content["model"]["vocab"] = {key.replace("turn|>", "x|>"): i for key, i in content["model"]["vocab"].items()}
    bare = tokenizers.HuggingFace(json.dumps(content).encode(), {}, "here")
    assert chat_template.make_template(bare) == ""
    assert chat_template.make_template(BPE) and chat_template.exact(BPE)
    assert chat_template.exact(BYTES)
