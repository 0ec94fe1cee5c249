"""Conversations: their forms, our template's spelling of them, and that exactly the model's own words
are learnt; records of a better and a worse answer, in the forms of TRL's data sets."""

import re
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from chat_families import tokenizer_of
from data_helpers import jsonl
from refusals import check_error, refusal

from zaya_jax.text import chat, chat_template, inputs, memory, tokenizers

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd them\n</think>\n\n4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "reasoning": "again", "content": "6"},
]


ZAYA_LIKE = (Path(__file__).parent / "zaya_like.jinja").read_text()
BYTES = tokenizers.load("bytes")
BPE = tokenizers.train_bpe(["user assistant think 2+2? add them again " * 30], 270)


@pytest.fixture(params=[BYTES, BPE], ids=["bytes", "bpe"])
def tok(request):
    return request.param


def special(tok, purpose):
    return tok.special_id(tok.chat_special_text(purpose))


def spell(tok, ids):
    names = {(special(tok, purpose),): f"[{purpose}]" for purpose in tokenizers.CHAT_TOKENS}
    return "".join(names.get((i,)) or tok.decode([i]) for i in ids)


CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'},
}
CALLED = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
NAMED = {"id": "1", **CALLED}  # as some templates want it
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
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            ("assistant", "", "", [NAMED]),
        ),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": "add", "parameters": {"a": 1, "b": [2]}}],
            },
            ("assistant", "", "", [CALLED]),
        ),
        (
            {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]},
            ("assistant", "", "so", [NAMED, NAMED]),
        ),
        (
            {
                "role": "assistant",
                "content": "",
                "function_call": {"name": "add", "arguments": {"a": 1, "b": [2]}},
            },
            ("assistant", "", "", [CALLED]),
        ),
        (
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [],
                "function_call": {},
                "reasoning": None,
            },
            ("assistant", "", "a"),
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": [{"type": "text", "text": "r"}]},
            ("assistant", "r", "a"),
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}],
            },
            ("assistant", "r", "a"),
        ),
        ({"role": "assistant", "content": None, "reasoning_content": "r"}, ("assistant", "r", "")),
    ],
)
def test_the_forms_that_turns_come_in(turn, expected):
    last = {"role": "assistant", "content": "end"}
    said, calls = expected[:3], expected[3:]
    assert chat.parse_chat([turn, last])[0] == chat.Message(
        *said, {"tool_calls": calls[0]} if calls else {}
    )

    # transformers and servers render the exported template with turns as they come
    for tok in (BYTES, BPE):
        template = chat_template.Template(tok)
        names = {"messages": [turn, last], chat_template.RENDERING: ([], [])}
        raw = "".join(template._template.generate(**names))
        assert raw == template.render(chat.parse_chat([turn, last]))


@pytest.mark.parametrize("person", ["user", "human", "Human", "prompter"])
@pytest.mark.parametrize("model", [*chat.MODEL_ROLES, "GPT", "Assistant", " assistant\n"])
def test_the_roles_learnt_are_those_that_generation_asks_by(tok, person, model):
    """Else a model that learnt ShareGPT's "human" and "gpt" would be asked as "user" for
    "assistant"."""
    template = chat_template.Template(tok)
    document, _ = template.encode_within(
        chat.parse_chat([{"from": person, "value": "2+2?"}, {"from": model, "value": "4"}]), None
    )
    asked = template.prompt_ids([chat.Message("user", "", "2+2?")])
    assert document.tokens[: len(asked)].tolist() == asked
    assert document.predicted.tolist() == [False] * len(asked) + [True] * 2 + [False, True]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            "part of type 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "image"}]}, "part of type 'image'"),
        ({"role": "user", "content": [3]}, "a part of type 'text'"),
        ({"role": "user", "content": 3}, "text or lists of parts, not int"),
        (
            {"role": "user", "content": None},
            r"needs content, this one has content \(NoneType\), role",
        ),
        ({"role": ["user"], "content": "a"}, "needs a role as text"),
        ({"role": " ", "content": "a"}, "needs a role as text"),
        ({"role": "assistant", "content": "a", "reasoning": {"a": 1}}, "not dict"),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]},
            "a function with a name",
        ),
        ({"role": "assistant", "content": "a", "tool_calls": "x"}, "a list of calls, not str"),
        ({"role": "user", "content": "\ud800"}, r"U\+D800"),
        (
            {"role": "user", "content": [{"type": "thinking", "thinking": "r"}]},
            "role 'user' has reasoning, and only the model's",
        ),
    ],
)
def test_a_turn_that_cannot_be_learnt_says_why(turn, message):
    said = refusal(chat.parse_chat, [turn, {"role": "assistant", "content": "end"}])
    assert re.search(message, said) and said.isprintable()


@pytest.mark.parametrize("messages", [[], {}, ["hi"], MESSAGES[:1], [MESSAGES[1] | {"weight": 0}]])
def test_what_has_no_answer_is_no_chat(messages):
    check_error(
        chat.BadChat, "is a list of turns|is an object|teaches nothing", chat.parse_chat, messages
    )


@pytest.mark.parametrize(
    ("messages", "spelt", "answers"),
    [
        (
            MESSAGES,
            "[turn]user\n2+2?[end_turn]\n"
            "[turn]assistant\n[think]add them[end_think]\n4[end_turn]\n"
            "[turn]user\nand 3+3?[end_turn]\n"
            "[turn]assistant\n[think]again[end_think]\n6[end_turn]\n",
            "[think]add them[end_think]\n4[end_turn][think]again[end_think]\n6[end_turn]",
        ),
        (
            [
                *chat.leading_turns({"system": "be brief", "tools": [{"name": "add"}]}),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "3"},
            ],
            '[turn]tools\n[{"name": "add"}][end_turn]\n[turn]system\nbe brief[end_turn]\n'
            f"[turn]assistant\n{SPELT}[end_turn]\n[turn]tool\n3[end_turn]\n",
            f"{SPELT}[end_turn]",
        ),
    ],
)
def test_a_conversation_is_spelt_out_and_answers_are_learnt(tok, messages, spelt, answers):
    """And calls of tools; their results are not."""
    template = chat_template.Template(tok)
    document, outcome = template.encode_within(chat.parse_chat(messages), None)
    assert outcome == chat.KEPT and template.stops == ([special(tok, "end_turn")], [])
    assert spell(tok, document.tokens) == spelt
    assert (document.tokens[0], document.tokens[-1]) == (tok.bos_id, tok.eos_id)
    assert spell(tok, document.tokens[document.predicted]) == answers
    assert document.predicted[-1] == (messages is MESSAGES)  # the end, after an answer


QUESTION, ANSWER = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
PAIRS = [
    ({"prompt": "q", "completion": "a"}, ["q", "a"]),
    ({"prompt": [QUESTION], "completion": [ANSWER]}, ["q", "a"]),
    ({"prompt": [QUESTION, ANSWER, QUESTION], "completion": "b"}, ["q", "a", "q", "b"]),
    ({"prompt": "q", "completion": [ANSWER], "system": "s"}, ["s", "q", "a"]),
    ({"instruction": "q", "input": "", "output": "a", "text": "all"}, ["q", "a"]),
    ({"instruction": "q", "input": "more", "output": "a"}, ["q\n\nmore", "a"]),
    ({"instruction": "q", "output": "a"}, ["q", "a"]),
    ({"messages": [], "prompt": "q", "completion": "a"}, ["q", "a"]),
    ({"functions": "two", "messages": [QUESTION, ANSWER]}, ["two", "q", "a"]),
    ({"messages": [], "text": "a text"}, "a text"),
    ({"prompt": "of a text", "text": "a text"}, "a text"),
    ({"prompt": None, "completion": None, "text": "a text"}, "a text"),
    ({"prompt": "q", "completion": "a", "label": True}, ["q", "a"]),  # of KTO
    ({"prompt": "q", "completion": "a", "label": False}, "a bad one (KTO) and not learnt"),
    (
        {"prompt": "q", "completion": "a", "history": [["p", "b"]]},
        "'history' is not supported; put all turns into messages",
    ),
    *(
        ({"text": "a rendering of it", field: [QUESTION, ANSWER]}, ["q", "a"])
        for field in inputs.CHAT_FIELDS
    ),
]


def write_records(path, records):
    if path.suffix == ".jsonl":
        path.write_bytes(jsonl(records))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


def samples_of(path):
    return inputs.samples(inputs.whole_file(str(path), "a"), inputs.TextOrChat())


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("record", "expected"), PAIRS)
def test_questions_with_their_answers_are_chats(tmp_path, record, expected, form):
    write_records(tmp_path / f"a.{form}", [record])
    (sample,) = samples_of(tmp_path / f"a.{form}")
    where = f"{tmp_path}/a.{form}, {'line 1' if form == 'jsonl' else 'row 1 of row group 0'}"
    if isinstance(sample, inputs.BadInput):
        assert str(sample).startswith(f"{where}: ") and str(sample).endswith(expected)
        return
    assert sample.where == where
    if isinstance(sample.content, str):
        assert sample.content == expected
        return
    roles = [turn.role for turn in sample.content if turn.role not in ("system", "tools")]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert [turn.content for turn in sample.content] == expected


def test_a_field_that_is_asked_for_is_a_text():
    record = {"instruction": "q", "output": "the text"}
    assert inputs.TextOrChat("output").content(record) == "the text"


@pytest.mark.parametrize(
    ("name", "write_table"),
    [("a.parquet", pyarrow.parquet.write_table), ("a.arrow", pyarrow.feather.write_feather)],
)
def test_a_map_of_arrow_s_is_an_object(tmp_path, name, write_table):
    types = pyarrow.map_(pyarrow.string(), pyarrow.string())
    types = pyarrow.struct([("name", pyarrow.string()), ("arguments", types)])
    types = pyarrow.struct(
        [("role", pyarrow.string()), ("content", pyarrow.string()), ("function_call", types)]
    )
    call = {"name": "find", "arguments": [("city", "Rome"), ("unit", None)]}
    turns = [QUESTION, {"role": "assistant", "function_call": call}]
    table = pyarrow.table({"messages": pyarrow.array([turns], pyarrow.list_(types))})
    write_table(table, tmp_path / name)
    (sample,) = samples_of(tmp_path / name)
    (call,) = sample.content[1].extra_fields["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Rome"}


def talk(*reasonings):
    """A conversation whose answers have reasoning of these lengths."""
    return chat.parse_chat(
        [
            turn
            for size in reasonings
            for turn in (
                {"role": "user", "content": "question"},
                {"role": "assistant", "reasoning": "é" * size, "content": "answer"},
            )
        ]
    )


MARKS = 2  # around reasoning


@pytest.mark.parametrize(
    ("reasonings", "excess", "outcome", "left"),
    [
        ([10], 0, chat.KEPT, [10]),
        ([10], 6, chat.TRIMMED, [7]),  # its end is cut
        ([10], 5, chat.TRIMMED, [7]),  # half of a character goes too
        ([10], 20, chat.TRIMMED, [0]),  # no room for a token of it between its marks, which go too
        # earlier reasoning goes before the last is cut
        ([10, 8], 20 + MARKS + 1, chat.REDUCED, [0, 8]),
        ([10, 8], 20 + MARKS + 1 + 6, chat.REDUCED, [0, 5]),
        ([10, 8], 36 + 2 * MARKS + 2, chat.REDUCED, [0, 0]),
        ([10, 8], 36 + 2 * MARKS + 3, chat.DROPPED, None),
        ([0], 1, chat.DROPPED, None),
    ],
)
def test_reasoning_is_trimmed_from_the_last_answer_s_end(reasonings, excess, outcome, left):
    template = chat_template.Template(BYTES)
    whole = template.encode_chat(talk(*reasonings))
    document, found = template.encode_within(talk(*reasonings), len(whole.tokens) - excess)
    assert found == outcome and (document is None) == (left is None)
    if document is not None:
        assert document.tokens.tolist() == template.encode_chat(talk(*left)).tokens.tolist()


@pytest.mark.parametrize("tok", [BYTES, BPE, tokenizer_of(ZAYA_LIKE, {})])
def test_no_context_is_exceeded_and_no_answer_lost(tok):
    template = chat_template.Template(tok)
    least = len(template.encode_chat(talk(0, 0, 0)).tokens)
    for context in range(1, len(template.encode_chat(talk(9, 0, 7)).tokens)):
        document, outcome = template.encode_within(talk(9, 0, 7), context)
        assert (outcome == chat.DROPPED) == (document is None) == (context < least)
        if document is not None:
            assert len(document.tokens) <= context
            assert tok.decode(document.tokens.tolist()).count("answer") == 3


def test_a_token_of_the_line_s_end_and_the_answer_s_first_spaces_is_learnt():
    """As by transformers' return_assistant_tokens_mask."""
    joins = tokenizers.train_bpe(["a\n  b " * 30], 265)
    document = chat_template.Template(joins).encode_chat(
        chat.parse_chat([{"role": "assistant", "content": "  b"}])
    )
    assert spell(joins, document.tokens[document.predicted]) == "\n  b[end_turn]"


def test_marks_that_a_vocabulary_lacks_are_spelt_out():
    bare = tokenizers.Tokenizer(BPE.json().replace("turn|>", "x|>").encode(), {}, "here")
    assert chat_template.has_turn_tokens(BPE) and not chat_template.has_turn_tokens(bare)
    template = chat_template.Template(bare)
    assert template.stops == ([], ["<|end_turn|>"])
    assert (
        bare.decode(template.prompt_ids(chat.parse_chat(MESSAGES)[:1]))
        == "<|turn|>user\n2+2?<|end_turn|>\n<|turn|>assistant\n"
    )


ASKED = {"role": "user", "content": "How many?"}
SYSTEM = {"role": "system", "content": "Be short."}


def answer(text):
    return {"role": "assistant", "content": text}


FORMS = {
    "texts": {"prompt": "How many?", "chosen": "two", "rejected": "three"},
    "turns": {"prompt": [ASKED], "chosen": [answer("two")], "rejected": [answer("three")]},
    "whole conversations": {"chosen": [ASKED, answer("two")], "rejected": [ASKED, answer("three")]},
    "the prompt twice": {
        "prompt": "How many?",
        "chosen": [ASKED, answer("two")],
        "rejected": [ASKED, answer("three")],
    },
    "the prompt's turns twice": {
        "prompt": [ASKED],
        "chosen": [ASKED, answer("two")],
        "rejected": [ASKED, answer("three")],
    },
    "a text and turns": {
        "prompt": "How many?",
        "chosen": [answer("two")],
        "rejected": [answer("three")],
    },
}


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_each_form_is_the_same_pair(record):
    pair = chat.parse_pair(record)
    sides = [[(turn.role, turn.content) for turn in side] for side in pair[:2]]
    assert sides == [[("user", "How many?"), ("assistant", text)] for text in ("two", "three")]
    assert pair.shared == pair.chosen[:1]
    with_system = chat.parse_pair(record | {"system": "Be short."})
    assert [turn.role for turn in with_system.shared] == ["system", "user"]


def test_answers_that_both_have_are_read_and_not_learnt():
    before = [SYSTEM, ASKED, answer("two"), {"role": "user", "content": "And now?"}]
    pair = chat.parse_pair({"chosen": [*before, answer("a")], "rejected": [*before, answer("bb")]})
    assert len(pair.shared) == 4
    for side, text in ((pair.chosen, "a"), (pair.rejected, "bb")):
        document = chat_template.Template(BYTES).encode_chat(side)
        assert BYTES.decode(document.tokens[document.predicted]) == text


WRONG = {
    "no prompt": ({"chosen": "a", "rejected": "b"}, "and a prompt unless both are whole"),
    "one side": ({"prompt": "a", "chosen": "b"}, "a pair has chosen and rejected"),
    "another prompt": (
        {"prompt": "x", "chosen": [ASKED, answer("a")], "rejected": [ASKED, answer("b")]},
        "its prompt is none of the turns",
    ),
    "no answer": ({"prompt": "x", "chosen": [ASKED], "rejected": [ASKED]}, "without an answer"),
}


@pytest.mark.parametrize(("record", "says"), WRONG.values(), ids=WRONG)
def test_what_is_no_pair_is_said(record, says):
    check_error(chat.BadChat, says, chat.parse_pair, record)


def test_pairs_of_one_prompt_are_on_one_side(tmp_path):
    """They would be known otherwise; and all of a Parquet file, whose other columns are not read."""
    records = [
        {"prompt": f"{i} and {i}?", "chosen": f"{2 * i}", "rejected": f"{x}", "score": 1.5}
        for i in range(30)
        for x in ("none", "many")
    ]
    read = []
    for name in ("a.jsonl", "a.parquet"):
        write_records(tmp_path / name, records)
        pairs = memory.read_chats(str(tmp_path / name), BYTES, 100, pairs=True)
        *blocks, note = pairs.split(memory.last_held_out([pairs]))
        assert "54 pairs to learn and 6 held out, " in note and "60 kept" in note
        read.append([BYTES.decode(block.tokens) for block in blocks])
    assert read[0] == read[1]
    train, held_out = ({*re.findall("[0-9]+ and", text)} for text in read[0])
    assert (len(train), len(held_out)) == (27, 3) and not train & held_out
