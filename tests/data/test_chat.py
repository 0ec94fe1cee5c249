"""Conversations: their spelling in tokens, and that exactly the model's own words are learnt."""

import pytest

from zaya_jax.data import chat, inputs, tokenizers

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd them\n</think>\n\n4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "reasoning": "again", "content": "6"},
]


@pytest.fixture(params=["bytes", "bpe"])
def tok(request):
    if request.param == "bytes":
        return tokenizers.load("bytes")
    return tokenizers.train_bpe(["user assistant think 2+2? add them again " * 30], 270)


def spell(tok, ids):
    names = {tuple(tok.chat_token(role)): f"[{role}]" for role in tokenizers.CHAT_TOKENS}
    return "".join(names.get((i,)) or tok.decode([i]) for i in ids)


def test_a_conversation_is_spelt_out_and_answers_are_learnt(tok):
    document, outcome = chat.Format(tok).prepare(chat.read(MESSAGES), None)
    assert outcome == chat.KEPT
    assert spell(tok, document.tokens) == (
        "[turn]user\n2+2?[end_turn]\n"
        "[turn]assistant\n[think]add them[end_think]\n4[end_turn]\n"
        "[turn]user\nand 3+3?[end_turn]\n"
        "[turn]assistant\n[think]again[end_think]\n6[end_turn]\n"
    )
    assert (document.tokens[0], document.tokens[-1]) == (tok.bos_id, tok.eos_id)
    learnt = [i for i, own in zip(document.tokens, document.learn, strict=True) if own]
    assert spell(tok, learnt) == ("[think]add them[end_think]\n4[end_turn][think]again[end_think]\n6[end_turn]")
    assert document.learn[-1]


@pytest.mark.parametrize(
    "messages", [[], {}, ["hi"], [{"role": "user"}], [{"role": "user", "content": "no answer follows"}]]
)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(chat.BadChat):
        chat.read(messages)


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
SPELT = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"role": "tool", "content": [{"type": "text", "text": "a"}, "b"]}, ("tool", "", "ab")),
        ({"role": "tool", "content": {"sum": 3}}, ("tool", "", '{"sum": 3}')),
        ({"role": "Tool", "content": {"a": 1}}, ("Tool", "", '{"a": 1}')),
        ({"role": "developer", "content": ""}, ("developer", "", "")),
        ({"from": "gpt", "value": "hi"}, ("assistant", "", "hi")),
        ({"role": None, "content": None, "from": "human", "value": "hi"}, ("user", "", "hi")),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ("assistant", "", SPELT)),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "parameters": {"a": 1}}]},
            ("assistant", "", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        ),
        (
            {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]},
            ("assistant", "", f"so\n{SPELT}\n{SPELT}"),
        ),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": {"a": 1, "b": [2]}}},
            ("assistant", "", SPELT),
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [], "function_call": {}, "reasoning": None},
            ("assistant", "", "a"),
        ),
        ({"role": "assistant", "content": "a", "reasoning": [{"type": "text", "text": "r"}]}, ("assistant", "r", "a")),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}]},
            ("assistant", "r", "a"),
        ),
        ({"role": "assistant", "content": None, "reasoning_content": "r"}, ("assistant", "r", "")),
    ],
)
def test_the_forms_that_turns_come_in(turn, expected):
    last = {"role": "assistant", "content": "end"}
    assert chat.read([turn, last])[0] == chat.Message(*expected)


@pytest.mark.parametrize("person", ["user", "human", "Human", "prompter"])
@pytest.mark.parametrize("model", [*chat.MODEL_ROLES, "GPT", "Assistant", " assistant\n"])
def test_the_roles_learnt_are_those_that_generation_asks_by(tok, person, model):
    """Else a model that learnt ShareGPT's "human" and "gpt" would be asked as "user" for "assistant"."""
    form = chat.Format(tok)
    question, answer = {"from": person, "value": "2+2?"}, {"from": model, "value": "4"}
    document, _ = form.prepare(chat.read([question, answer]), None)
    asked = [tok.bos_id, *form.turn_ids(chat.Message("user", "", "2+2?")), *form.opening("assistant")]
    assert document.tokens[: len(asked)].tolist() == asked
    assert document.learn.tolist() == [False] * len(asked) + [True] * 2 + [False, True]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "image"}]}, "part of type 'image'"),
        ({"role": "user", "content": [3]}, "a part of type 'text'"),
        ({"role": "user", "content": 3}, "text or lists of parts, not int"),
        ({"role": "user", "content": None}, r"needs content, this one has content \(NoneType\), role"),
        ({"role": ["user"], "content": "a"}, "needs a role as text"),
        ({"role": " ", "content": "a"}, "needs a role as text"),
        ({"role": "assistant", "content": "a", "reasoning": {"a": 1}}, "not dict"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}, "a function with a name"),
        ({"role": "assistant", "content": "a", "tool_calls": "x"}, "a list of calls, not str"),
        ({"role": "user", "content": "\ud800"}, r"U\+D800"),
    ],
)
def test_a_turn_that_cannot_be_learnt_says_why(turn, message):
    with pytest.raises(chat.BadChat, match=message) as error:
        chat.read([turn, {"role": "assistant", "content": "end"}])
    assert str(error.value).isprintable()


def test_calls_of_tools_are_learnt_and_their_results_are_not(tok):
    messages = chat.leading_turns({"system": "be brief", "tools": [{"name": "add"}]})
    messages += [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    document, _ = chat.Format(tok).prepare(chat.read(messages), None)
    learnt = [i for i, own in zip(document.tokens, document.learn, strict=True) if own]
    assert spell(tok, learnt) == f"{SPELT}[end_turn]"
    assert spell(tok, document.tokens) == (
        '[turn]tools\n[{"name": "add"}][end_turn]\n[turn]system\nbe brief[end_turn]\n'
        f"[turn]assistant\n{SPELT}[end_turn]\n[turn]tool\n3[end_turn]\n"
    )


def test_a_record_with_text_and_chat_is_the_chat():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for field in inputs.CHAT_FIELDS:
        _, sample = inputs._record({"text": "a rendering of it", field: turns}, "name", "text")
        assert sample == chat.read(turns)


def user(size):
    return chat.Turn(head=range(size))


def answer(reasoning, size=4):
    return chat.Turn(head=[1], opening=[2], reasoning=list(range(reasoning)), closing=[3], tail=[9] * size, answer=True)


ONE, TWO = [user(5), answer(10)], [user(5), answer(10), user(3), answer(8)]


@pytest.mark.parametrize(
    ("turns", "excess", "outcome", "reasoning"),
    [
        (ONE, 0, chat.KEPT, [0, 10]),
        (ONE, 3, chat.TRIMMED, [0, 7]),  # its end is cut
        (ONE, 10, chat.TRIMMED, [0, 0]),  # no room for a token of it between its marks, which go too
        (TWO, 12, chat.REDUCED, [0, 0, 0, 8]),  # earlier reasoning goes before the last is cut
        (TWO, 15, chat.REDUCED, [0, 0, 0, 5]),
        (TWO, 12 + 10, chat.REDUCED, [0, 0, 0, 0]),
        (TWO, 12 + 11, chat.DROPPED, []),
        ([user(5), answer(0, size=20)], 1, chat.DROPPED, []),
    ],
)
def test_reasoning_is_trimmed_from_the_last_answer_s_end(turns, excess, outcome, reasoning):
    out, found = chat.trim(turns, sum(map(len, turns)) - excess)
    assert (found, [len(turn.reasoning) for turn in out]) == (outcome, reasoning)
    assert all(list(turn.reasoning) == list(range(n)) for turn, n in zip(out, reasoning, strict=True))


@pytest.mark.parametrize("context", range(1, 60))
def test_no_context_is_exceeded_and_no_answer_lost(context):
    turns = [user(4), answer(9), user(2), answer(0), user(1), answer(7)]
    out, outcome = chat.trim(turns, context)
    assert sum(map(len, out)) <= context
    if outcome != chat.DROPPED:
        assert [(t.head, t.tail) for t in out] == [(t.head, t.tail) for t in turns]
    else:
        assert sum(len(t.head) + len(t.tail) for t in turns) > context
