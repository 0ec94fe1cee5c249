"""What chats teach under the templates of many families: each answer or a count, and nothing else.

The templates are in `chat_families`; our own has `test_chat`.
"""

import itertools
import random

import pytest
from chat_families import FAMILIES, tokenizer_of
from data_helpers import calls_of, jsonl, make_config, prepared, write
from refusals import check_error, check_refused

from zaya_jax.data import stores, windows
from zaya_jax.text import chat, chat_template, memory, prepare, tokenizers
from zaya_jax.text.chat import KEPT
from zaya_jax.text.shard_format import SPLITS

TOOLS = [{"type": "function", "function": {"name": "find_sum", "parameters": {}}}]
CALL = {"id": "abc123def", "type": "function"}
CALL["function"] = {"name": "find_sum", "arguments": '{"a":2}'}
# These keep the last reasoning alone of two, or none; these write tools, calls and results.
LAST_REASONING, NO_REASONING = ("qwen_3", "qwq", "gpt_oss", "glm_45"), ("deepseek_r1",)
WITH_TOOLS = ("qwen_25", "qwen_3", "llama_31", "mistral_v3", "gpt_oss", "glm_45")
NO_END = ("glm_45", "alpaca")


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def learnt(tok, document):
    """The runs of learnt text."""
    pairs = zip(document.predicted.tolist(), document.tokens.tolist(), strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [tok.decode_with_specials([token for _, token in run]) for own, run in runs if own]


def counted(document):
    """The answers that are learnt, and those that the template rewrites."""
    return document.counts["answers learnt"], document.counts["answers rewritten"]


def encoded(source, messages, **leading):
    tok = tokenizer_of(source)
    turns = chat.parse_chat([*chat.leading_turns(leading), *messages])
    return tok, *chat_template.Template(tok).encode_within(turns, None)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_answer_is_learnt_with_its_end_and_nothing_else(family, count):
    rng = random.Random(f"{family} {count}")
    words = ["4", "an answer", "    return 1\n", "ok </b> ", "zjmark0z", "two\n\nlines"]
    said = [f"{rng.choice(words)}A{i}" for i in range(count)]
    asked = [f"{rng.choice(words)}Q{i}" for i in range(count)]
    talk = [turn for q, a in zip(asked, said, strict=True) for turn in (user(q), answer(a))]
    tok, document, outcome = encoded(FAMILIES[family], talk)
    assert outcome == KEPT and counted(document) == (count, 0)
    form = chat_template.Template(tok)
    end, _ = form.stops
    prompt = tok.decode_with_specials(form.prompt_ids(chat.parse_chat(talk)[:1]))
    for text, run in zip(said, learnt(tok, document), strict=True):
        before, found, after = run.partition(text.strip())
        assert found and not prompt.endswith(before.strip() or "x")
        ends = [tok.decode_with_specials(end), "<|end|>"] if family not in NO_END else [""]
        assert after.strip() in ends
        assert before.replace("<think>\n\n</think>", "").replace("<think></think>", "").strip() in (
            "",
            "<|channel|>final<|message|>",
        )


REASONED = [user("q"), answer("a", reasoning="because"), user("r"), answer("    b", reasoning="so")]
CALLED = [
    *chat.leading_turns({"tools": TOOLS}),
    user("q"),
    answer("", tool_calls=[CALL]),
    {"role": "observation", "content": "it is four"},
    answer("So 4."),
]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NO_REASONING])
def test_reasoning_is_learnt_or_its_answer_counted(family):
    tok, document, _ = encoded(FAMILIES[family], REASONED)
    assert counted(document) == ((1, 1) if family in LAST_REASONING else (2, 0))
    assert "so" in learnt(tok, document)[-1] and "b" in learnt(tok, document)[-1]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_calls_of_tools_are_learnt_and_their_results_are_not(family):
    tok, document, _ = encoded(FAMILIES[family], CALLED)
    called, answered = learnt(tok, document)
    assert "find_sum" in called and "four" not in called + answered and "So 4." in answered
    assert "it is four" in tok.decode_with_specials(document.tokens)


def test_a_template_whose_turns_must_alternate_refuses_results():
    refused = chat_template.Refused
    check_error(refused, "must alternate;", encoded, FAMILIES["llama_2"], CALLED)


@pytest.mark.parametrize(
    ("family", "turns", "loses"),
    [
        *(
            (family, CALLED, "the tools")
            for family in FAMILIES
            if family not in (*WITH_TOOLS, "llama_2")
        ),
        *((family, REASONED, "the last reasoning") for family in NO_REASONING),
        ("llama_3", [user("q"), answer("", tool_calls=[CALL])], "a call"),
        ("llama_31", [*CALLED[1:3], {"role": "tool", "content": 'say "4"'}, answer("4")], ""),
        ("gpt_oss", [*CALLED[1:3], {"role": "tool", "content": 'say "4"'}, answer("4")], ""),
        ("command_r", [user("q"), answer("x"), {"role": "tool", "content": "4"}], "a result"),
        (
            "mistral_v3",
            [{"role": "system", "content": "s"}, user("q"), answer("a")],
            "a system text",
        ),
        ("mistral_v3", [{"role": "system", "content": ""}, user("q"), answer("a")], ""),
        ("vicuna", [{"role": "critic", "content": "s"}, user("q"), answer("a")], ""),
        ("command_r", [{"role": "critic", "content": "s"}, user("q"), answer("a")], "another role"),
        ("llama_31", [user("q"), answer("I add.", tool_calls=[CALL])], "an answer"),
        ("glm_45", [user("q"), answer(" ")], "its turns as they are"),
    ],
)
def test_each_part_of_a_chat_must_stand_in_the_text(family, turns, loses):
    _, document, outcome = encoded(FAMILIES[family], turns)
    assert (document is None) == bool(loses) and (outcome.endswith(loses) or not loses)


# These end the last answer alone, ask for answers behind turns alone, write a last turn in another
# form than those before, have two blocks in one answer and none in others.
ENDS_LAST = """{% for m in messages %}{{ '\n' if not loop.first }}<|{{ m.role }}|>
{{ m.content }}{{ eos_token if loop.last }}{% endfor %}
{{- '\n<|assistant|>\n' if add_generation_prompt }}"""
ASKS_BEHIND = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}
{{- '<|assistant|>' if loop.last and add_generation_prompt }}{% endfor %}"""
LAST_APART = """{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}
{%- elif m.role == 'tool' %}<|user|><response>{{ m.content }}</response>
{%- else %}<|assistant|>
{{ '<think>\n' if loop.last and not m.tool_calls }}{{ m.content }}
{%- for call in m.tool_calls or [] %}<toolcall>{{ call.function.name }}</toolcall>{% endfor %}
{%- if not loop.last %}{{ '\n' }}{% endif %}<|end|>
{%- endif %}{% endfor %}{{ '<|assistant|>\n<think>\n' if add_generation_prompt }}"""

LAST_IN_BLOCKS = """{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}
{%- generation %}{{ m.content[:1] }}{% endgeneration %}
{%- generation %}{{ m.content[1:] }}</s>{% endgeneration %}
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}"""


# These write the answers of several turns as one, without anything between them: as they come, each
# in a block, all in one block.
MERGES = """{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}</s>
{%- else %}{{ '<|assistant|>' if messages[loop.index0 - 1].role == 'user' }}BEGIN{{ m.content }}
{{- '</s>' if loop.last }}END{% endif %}{% endfor %}"""
MERGES_TURNS = MERGES.replace("BEGIN", "").replace("END", "")
MERGES_BLOCKS = MERGES.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
MERGES_IN_A_BLOCK = """<|user|>{{ messages[0].content }}</s><|assistant|>
{%- generation %}{{ messages[1].content }}{{ messages[2].content }}</s>{% endgeneration %}"""


def weighted(first, second):
    return [user("q"), answer("one", weight=first), answer("two", weight=second)]


@pytest.mark.parametrize(
    ("source", "turns", "runs", "counts"),
    [
        (ENDS_LAST, [user("q"), answer("a"), user("r"), answer("b")], ["b</s>"], (1, 1)),
        (
            ENDS_LAST,
            [user("q"), answer("a"), answer("b"), user("r"), answer("c")],
            ["c</s>"],
            (1, 2),
        ),
        (ASKS_BEHIND, [answer("a"), user("q"), answer("b")], ["a</s>", "b</s>"], (2, 0)),
        (
            LAST_APART,
            CALLED[1:],
            ["<toolcall>find_sum</toolcall>\n<|end|>", "So 4.<|end|>"],
            (2, 0),
        ),
        (LAST_IN_BLOCKS, [user("q"), answer("a"), user("r"), answer("two")], ["two</s>"], (1, 1)),
        ("{{ tools is none }}" + ASKS_BEHIND, [user("q"), answer("a")], ["a</s>"], (1, 0)),
        (MERGES_TURNS, weighted(1, 1), ["two</s>"], (1, 1)),
        (MERGES_TURNS, weighted(0, 1), ["two</s>"], (1, 0)),
        (MERGES_TURNS, weighted(1, 0), None, None),
        (MERGES_BLOCKS, weighted(1, 1), ["onetwo</s>"], (2, 0)),
        (MERGES_BLOCKS, weighted(0, 1), ["two</s>"], (1, 0)),
        (MERGES_BLOCKS, weighted(1, 0), ["one"], (1, 0)),
        (MERGES_IN_A_BLOCK, weighted(1, 1), ["onetwo</s>"], (2, 0)),
        (MERGES_IN_A_BLOCK, weighted(0, 1), None, None),
        (MERGES_IN_A_BLOCK, weighted(1, 0), None, None),
        # a first answer has its space and its tag; an empty one is no part of the next one
        (FAMILIES["chatml"], [answer("  a")], ["  a<|im_end|>"], (1, 0)),
        (
            FAMILIES["chatml"],
            [answer("a", reasoning="r")],
            ["<think>\nr\n</think>\n\na<|im_end|>"],
            (1, 0),
        ),
        (MERGES_BLOCKS, [user("q"), answer(""), answer("b")], ["b</s>"], (2, 0)),
    ],
)
def test_answers_alone_are_learnt_however_a_template_writes_them(source, turns, runs, counts):
    tok, document, outcome = encoded(source, turns, tools="[]")
    if runs is None:
        assert document is None and outcome.endswith("writes no answer that can be learnt")
        return
    assert "False" not in tok.decode_with_specials(document.tokens)
    assert (learnt(tok, document), counted(document)) == (runs, counts)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (CALL, 'find_sum\n```json\n{"a":2}\n```<|call_end|>'),  # as it was given
        ({"name": "find_sum", "arguments": {"a": [1]}}, '```json\n{"a": [1]}\n```'),
    ],
)
def test_arguments_are_text_for_a_template_that_adds_them_to_text(call, text):
    talk = [user("q"), answer("", tool_calls=[call]), {"role": "function", "content": "4"}]
    tok, document, _ = encoded(FAMILIES["deepseek_v3"], talk)
    (called,) = learnt(tok, document)
    assert text in called


INSIDE = "<think>R</think>\n\n    return 1"
PARTS = [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "    return 1"}]


@pytest.mark.parametrize(
    ("family", "content", "written"),
    [
        ("chatml", INSIDE, INSIDE),
        ("llama_3", INSIDE, INSIDE),
        ("magistral", INSIDE, INSIDE),
        ("magistral", PARTS, "[THINK]R[/THINK]    return 1</s>"),
    ],
)
def test_reasoning_inside_a_content_stays_as_it_was_given(family, content, written):
    tok, document, _ = encoded(FAMILIES[family], [user("q"), answer(content)])
    assert written in learnt(tok, document)[0]


NAMED = [
    {"name": "default", "template": FAMILIES["chatml"]},
    {"name": "tool_use", "template": FAMILIES["qwen_25"]},
]


@pytest.mark.parametrize(
    "tok",
    [
        tokenizer_of("", {"chat_template": NAMED}),
        tokenizer_of(FAMILIES["chatml"], **{tokenizers.TOOLS_FILE: FAMILIES["qwen_25"]}),
    ],
    ids=["in the config", "beside it"],
)
def test_chats_with_tools_take_the_template_for_tools(tok):
    form, turns = chat_template.Template(tok), chat.parse_chat(CALLED)
    assert "# Tools" in form.render(turns) and "find_sum" in form.render(turns)
    assert form.render(turns[1:2]) == "<|im_start|>user\nq<|im_end|>\n"


BLOCK = "{% generation %}{{ m.content }}{% endgeneration %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% set x %}" + BLOCK + "{% endset %}<|user|>{{ x }}",
        "{% macro f(m) %}<|assistant|>" + BLOCK + "{% endmacro %}{{ f(m) }}",
    ],
)
def test_a_generation_block_whose_place_is_not_known_is_refused(source):
    source = "{% for m in messages %}" + source + "{% endfor %}"
    check_refused(
        r"inside a \{% set %\} or a macro",
        lambda: encoded(source, [user("my question"), answer("the answer")]),
    )


@pytest.mark.parametrize(("settings", "begin"), [({"bos_token": None}, ""), ({}, "<|bos|>")])
def test_a_name_that_is_null_is_no_mark(settings, begin):
    tok = tokenizer_of("{{ bos_token }}{{ messages[0].content }}", settings)
    written = chat_template.Template(tok).render(chat.parse_chat([user("q"), answer("a")]))
    assert written == f"{begin}q"


def test_many_turns_cost_a_few_renderings(monkeypatch):
    """Of prefixes it was one for each answer, so twice the turns cost four times the time."""
    talk = [turn for i in range(80) for turn in (user(f"q{i}"), answer(f"a{i}"))]
    renderings = calls_of(monkeypatch, chat_template.Template, "_render_with_blocks")
    for family in FAMILIES:
        renderings.clear()
        _, document, _ = encoded(FAMILIES[family], talk)
        assert counted(document)[0] == 80
        assert sum(len(turns) for _, _, turns, *_ in renderings) < 6 * len(talk), family


def test_another_template_is_other_data(tmp_path):
    """In one process, of prepared chats, and when these are prepared again."""
    records = [{"messages": [user(f"q{i}"), answer(f"a{i}")]} for i in range(30)]
    path = str(write(tmp_path, {"chats.jsonl": jsonl(records)}) / "chats.jsonl")
    folder, out = str(tmp_path / "model"), str(tmp_path / "out")
    config = make_config(
        vocab_size=400, path=path, tokenizer=folder, chats=True, packing="best_fit"
    )
    options, read = prepare.Options([path], folder, context=64), []
    for family in ("chatml", "llama_3"):
        tok = tokenizer_of(FAMILIES[family])
        tok.save(folder)
        sides = [stores.open_store(config, path, tok, split) for split in SPLITS]
        whole = windows.open_whole(config, path, tok)
        read.append({store.block.tokens.tobytes() for store in (*sides, whole)})
        if family == "chatml":
            prepared(options, out)
            stores.open_store(config, out, tok)
    assert not read[0] & read[1]
    check_refused("or another chat template; give another directory", prepared, options, out)
    said = "holds chats in another chat template than that of"
    check_refused(said, stores.open_store, config, out, tok)


def test_what_is_learnt_rewritten_and_left_out_is_counted(tmp_path):
    talk = [user("q"), answer("a", reasoning="r"), user("s"), answer("b", reasoning="r")]
    records = [{"messages": talk}, {"tools": TOOLS, "messages": talk}]
    records += [{"messages": [user(f"q{i}"), answer("x")]} for i in range(30)]
    write(tmp_path, {"chats.jsonl": jsonl(records)})
    read = memory.read_chats(str(tmp_path / "chats.jsonl"), tokenizer_of(FAMILIES["qwq"]), 512)
    tokens = sum(int(d.predicted.sum()) for side in read.documents.values() for d in side)
    assert chat.in_words(read.counts) == (
        "31 answers learnt, 1 answers rewritten, 31 kept,"
        f" 1 left out: the chat template does not write the tools, {tokens} tokens learnt"
    )


IN_BLOCKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", ["chatml", "llama_3", "mistral_v3", "phi_3", IN_BLOCKS, ""])
def test_answers_of_a_prompt_are_read_and_not_learnt(source):
    """As in TRL; so are turns with a weight of 0, as in OpenAI's form."""
    prompt = [user("q0"), answer("not this"), user("q1")]
    paired = chat.paired_turns({"prompt": prompt, "completion": [answer("learnt")]}, "text")
    weighted = [user("q0"), answer("learnt"), user("q1"), answer("not this", weight=0)]
    for turns in (paired, weighted):
        tok, document, outcome = encoded(FAMILIES.get(source, source), turns)
        assert outcome == KEPT and counted(document) == (1, 0)
        run, *ends = learnt(tok, document)
        assert run.lstrip().startswith("learnt") and "not this" not in "".join(ends)
        assert "not this" in tok.decode_with_specials(document.tokens)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_chat_that_the_template_refuses_is_named(tmp_path, pairs):
    prompt = [{"role": "system", "content": "Be brief."}, user("q")]
    record = {"messages": [*prompt, answer("a")]}
    if pairs:
        record = {"prompt": prompt, "chosen": "a", "rejected": "b"}
    write(tmp_path, {"chats.jsonl": jsonl([record])})
    tok = tokenizer_of(FAMILIES["gemma_2"])
    said = "line 1: the model's chat template refuses .*: System role not supported; change it, or"
    check_refused(said, memory.read_chats, str(tmp_path / "*"), tok, 512, pairs)


def test_a_chat_stays_on_its_side(tmp_path):
    """What is hashed decides which chats are held out, in all runs that there are."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    record = {"messages": [user("q"), answer("a", reasoning="r", tool_calls=[call])]}
    write(tmp_path, {"chats.jsonl": jsonl([record])})
    (key,) = memory.read_chats(str(tmp_path / "*"), tokenizer_of(""), 512).hashes
    assert key.hex()[:16] == "8ec1d89e4ff244bc"
