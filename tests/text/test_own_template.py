"""A model's own chat template decides how it is tuned and talked to, as in transformers; ours only
where it has none.

The template is one with the features of ZAYA1-8B's (a system turn always, tools as XML, calls and
results between tags of its own, empty reasoning before plain answers, a generation prompt that
begins reasoning), written for this test.
"""

from pathlib import Path

import pytest
from chat_families import tokenizer_of
from refusals import check_error, check_refused

from zaya_jax import generation
from zaya_jax.text import chat, chat_template

SOURCE = (Path(__file__).parent / "zaya_like.jinja").read_text()
MADE, OWN = tokenizer_of("", {}), tokenizer_of(SOURCE, {})  # without the template and with it


TOOL = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}},
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": "two"}'},
}
TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "4"},
    {"role": "tool", "content": "four"},
    {"role": "assistant", "content": "<think>\nSo it is.\n</think>\n\nIt is 4."},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "You are welcome <|im_end|>"},
]
CALLED = (
    "\n<zyphra_tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\ntwo\n</parameter>\n"
    "</function>\n</zyphra_tool_call>"
)
ANSWERS = [
    "I add.\n</think>\n\n" + CALLED * 2 + "<|im_end|>",
    "So it is.\n</think>\n\nIt is 4.<|im_end|>",
    "\n</think>\n\nYou are welcome <|im_end|><|im_end|>",
]
OPEN = "<|im_start|>assistant\n<think>\n"
BETWEEN = [
    "<|im_start|>system\nYou are a helpful assistant.\n\n#"
    " Tools\n<tools>\n<function>\n<name>add</name>"
    '\n<parameter><name>a</name><schema>{"type": "integer"}</schema></parameter>'
    "\n<parameter><name>b</name><schema>{}</schema></parameter>\n</function>\n</tools><|im_end|>\n"
    "<|im_start|>user\n2+2?<|im_end|>\n" + OPEN,
    "<|im_start|>user\n<zyphra_tool_response>\n4\n</zyphra_tool_response>\n<zyphra_tool_response>\nfour\n"
    "</zyphra_tool_response><|im_end|>\n" + OPEN,
    "<|im_start|>user\nthanks<|im_end|>\n" + OPEN,
]
WHOLE = "".join(f"{before}{answer}\n" for before, answer in zip(BETWEEN, ANSWERS, strict=True))


def messages():
    return chat.parse_chat([*chat.leading_turns({"tools": [TOOL]}), *TALK])


def test_a_conversation_is_spelt_as_the_template_does_and_its_answers_alone_are_learnt():
    form = chat_template.Template(OWN)
    document, outcome = form.encode_within(messages(), None)
    assert outcome == chat.KEPT and OWN.decode_with_specials(document.tokens.tolist()) == WHOLE
    assert (
        document.tokens.tolist() == OWN.encode_with_specials(WHOLE)[0]
        and OWN.special_id("<think>") in document.tokens
    )
    learnt = OWN.decode_with_specials(document.tokens[document.predicted].tolist())
    assert learnt == "".join(ANSWERS)
    assert form.stops == (OWN.encode_with_specials("<|im_end|>")[0], [])
    assert OWN.decode_with_specials(form.prompt_ids(messages()[:2])) == BETWEEN[0]


def test_the_template_is_found_where_transformers_finds_it():
    in_config = tokenizer_of("", {"chat_template": SOURCE})
    assert chat_template.Template(in_config).render(messages()) == WHOLE
    named = tokenizer_of(
        "{{ bos_token }}{{ messages[0].content }}", {"bos_token": {"content": "<B>"}}
    )
    assert chat_template.Template(named).render(chat.parse_chat(TALK)) == "<B>2+2?"
    ours = tokenizer_of("{#- Written by zaya_jax: -#}", {})
    assert (
        chat_template.template_sources(ours)
        == chat_template.template_sources(MADE)
        == {"default": chat_template.make_template(MADE)}
    )


def test_what_a_template_refuses_is_one_line():
    odd = chat.parse_chat([{"role": "developer", "content": "x"}, TALK[-1]])
    check_error(
        chat_template.Refused,
        "refuses this conversation: a role that is not known: developer;",
        lambda: chat_template.Template(OWN).encode_within(odd, None),
    )


@pytest.mark.parametrize(
    "bad", ["{% if %}", "{{ messages.__class__.__mro__[1].__subclasses__() }}"]
)
def test_a_template_that_is_none_or_reaches_into_python_is_refused(bad):
    check_refused(
        "the model's chat template",
        lambda: chat_template.Template(tokenizer_of(bad)).prompt_ids(chat.parse_chat(TALK)),
    )


def test_a_talk_sees_what_the_template_makes_of_it():
    talk = generation.Conversation(OWN, "Be brief.")
    asked = OWN.decode_with_specials(talk.ask("hi"))
    assert (
        asked == f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n{OPEN}"
    )
    ids = OWN.encode_with_specials("Hm.\n</think>\n\nHello")[
        0
    ]  # the prompt has begun the reasoning
    talk.answered(OWN.decode(ids), ids)
    again = OWN.decode_with_specials(talk.ask("more"))
    assert (
        again
        == asked + f"Hm.\n</think>\n\nHello<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n{OPEN}"
    )
    room = len(OWN.encode_with_specials(again)[0]) - 1
    talk.answered("x", OWN.encode("x"))
    rest = OWN.decode_with_specials(talk.ask("z", room))
    assert (
        "<|im_start|>user\nhi" not in rest
        and "Be brief." in rest
        and "user\nmore" in rest
        and talk.left_out == 2
    )
    talk.answered("y", OWN.encode("y"))
    before = OWN.decode_with_specials(talk.ask("w"))
    talk.answered("v", OWN.encode("v"))
    check_refused("this turn alone has .* tokens", talk.ask, "long " * 200, room)
    assert talk.left_out == 2 and OWN.decode_with_specials(talk.ask("u")).startswith(before)
    talk.reset()
    assert OWN.decode_with_specials(talk.ask("hi", room)) == asked and talk.left_out == 0
    talk.reset()
    check_refused("this turn alone has", talk.ask, "x" * room, room)


def test_an_answer_that_speaks_of_reasoning_stays_as_it_is():
    talk = generation.Conversation(MADE)
    talk.ask("hi")
    talk.answered("Begin with <think>.", MADE.encode("Begin with <think>."))
    again = MADE.decode_with_specials(talk.ask("more"))
    assert "Begin with <think>.<|end_turn|>" in again


def test_a_template_is_told_the_same_day_whenever_it_asks():
    source = "{{ strftime_now('%Y-%m-%d') }}" + SOURCE
    template = chat_template.Template(tokenizer_of(source))
    assert template.render(messages()).startswith("2024-07-26")
