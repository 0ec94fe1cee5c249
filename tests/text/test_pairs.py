"""Records of a better and a worse answer, in the forms of TRL's data sets."""

import json

import numpy as np
import pytest

from zaya_jax.text import chat, chat_template, memory_chats, tokenizers

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
    "a text and turns": {
        "prompt": "How many?",
        "chosen": [answer("two")],
        "rejected": [answer("three")],
    },
}


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_each_form_is_the_same_pair(record):
    pair = chat.parse_pair(record)
    assert [str(turn) for turn in pair.chosen] == ["user\n\nHow many?", "assistant\n\ntwo"]
    assert [str(turn) for turn in pair.rejected] == ["user\n\nHow many?", "assistant\n\nthree"]
    assert pair.shared == pair.chosen[:1]
    with_system = chat.parse_pair(record | {"system": "Be short."})
    assert [turn.role for turn in with_system.shared] == ["system", "user"]


def test_answers_that_both_have_are_read_and_not_learnt():
    before = [SYSTEM, ASKED, answer("two"), {"role": "user", "content": "And now?"}]
    pair = chat.parse_pair({"chosen": [*before, answer("a")], "rejected": [*before, answer("bb")]})
    assert len(pair.shared) == 4
    for side, text in ((pair.chosen, "a"), (pair.rejected, "bb")):
        tok = tokenizers.Bytes()
        document = chat_template.Template(tok).encode_chat(side)
        assert tok.decode(document.tokens[document.predicted].tolist()) == text


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
    with pytest.raises(chat.BadChat, match=says):
        chat.parse_pair(record)


def test_pairs_of_one_prompt_are_on_one_side(tmp_path):
    """They would be known otherwise; and all of a Parquet file, whose other columns are not read."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [
        {"prompt": f"{i} and {i}?", "chosen": f"{2 * i}", "rejected": f"{x}", "score": 1.5}
        for i in range(30)
        for x in ("none", "many")
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    tok, blocks = tokenizers.Bytes(), []
    for name in ("a.jsonl", "a.parquet"):
        pairs = memory_chats.read_chats(str(tmp_path / name), tok, 100, pairs=True)
        train, held_out, note = pairs.split(memory_chats.last_held_out([pairs]))
        assert "54 pairs to learn and 6 held out (60 kept, " in note
        blocks.append((train, held_out))
        prompts = [
            {tok.decode(part.tolist()).split("?")[0] for part in documents(side)}
            for side in (train, held_out)
        ]
        assert [len(side) for side in prompts] == [27, 3] and not prompts[0] & prompts[1]
    for ours, theirs in zip(*blocks, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def documents(block):
    return np.split(block.tokens, np.flatnonzero(block.starts)[1:])
