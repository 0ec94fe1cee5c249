"""Conversations: what the tokens spell, and that exactly the model's own words are learnt."""

import numpy as np
import pytest

from zaya_jax.data import chat, tokenizers, trim

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
    document, outcome = chat.prepare(chat.Format(tok), chat.read(MESSAGES), None)
    assert outcome == trim.KEPT
    assert spell(tok, document.tokens) == (
        "[turn]user\n2+2?[end_turn]\n"
        "[turn]assistant\n[think]add them[end_think]\n4[end_turn]\n"
        "[turn]user\nand 3+3?[end_turn]\n"
        "[turn]assistant\n[think]again[end_think]\n6[end_turn]\n"
    )
    assert (document.tokens[0], document.tokens[-1]) == (tok.bos_id, tok.eos_id)
    learnt = [i for i, own in zip(document.tokens, document.learn, strict=True) if own]
    assert spell(tok, learnt) == (
        "[think]add them[end_think]\n4[end_turn][think]again[end_think]\n6[end_turn]"
    )
    assert document.learn[-1]


def test_trimming_fits_the_context(tok):
    whole, _ = chat.prepare(chat.Format(tok), chat.read(MESSAGES), None)
    for context in range(1, len(whole.tokens) + 2):
        document, outcome = chat.prepare(chat.Format(tok), chat.read(MESSAGES), context)
        assert (document is None) == (outcome == trim.DROPPED)
        if document is not None:
            assert len(document.tokens) <= context
            assert len(document.tokens) == len(document.learn)
            assert tok.decode(document.tokens.tolist()).count("4") == 1
    assert outcome == trim.KEPT
    np.testing.assert_array_equal(document.tokens, whole.tokens)


@pytest.mark.parametrize(
    "messages", [[], {}, ["hi"], [{"role": "user"}], [{"role": "user", "content": "no answer follows"}]]
)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(chat.BadChat):
        chat.read(messages)
