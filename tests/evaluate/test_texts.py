"""The loss on text: each token once, the bytes that it represents, only the answers of chats, files
as prepared."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config import UserError
from zaya_jax.data import prepared_store
from zaya_jax.evaluate import texts
from zaya_jax.evaluate.scorer import Scorer
from zaya_jax.text import chat, chat_template, tokenizers
from zaya_jax.text.prepare import Options, prepare

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "6"},
]


class Even:
    """A scorer of a model to which a token is as likely as its id says."""

    def __call__(self, rows, tell=lambda done: None):
        return [
            (-np.float32(0.01) * np.asarray(r.ids[r.first :]), np.ones(len(r.ids) - r.first, bool))
            for r in rows
        ]


@given(st.integers(0, 300), st.integers(1, 70))
def test_windows_predict_each_token_once_after_at_least_half_a_context(count, context):
    found = list(texts.windows(count, context))
    predicted = [place for _, end, first in found for place in range(first, end)]
    assert predicted == list(range(1, count))
    for number, (begin, end, first) in enumerate(found):
        assert 0 <= begin < first < end <= count and end - begin <= context + 1
        assert first - begin > context // 2 or number == 0


def test_each_document_s_tokens_are_counted_once_whatever_the_portions(
    tmp_path, tokenizer, monkeypatch
):
    contents = ["a" * n for n in (1, 5, 40, 100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": c}) + "\n" for c in contents))
    for at_once, context in itertools.product((1, 30, 1 << 20), (1, 7, 64)):
        monkeypatch.setattr(texts, "TOKENS_AT_A_TIME", at_once)
        loss = texts.evaluate(
            Even(), texts.documents(str(tmp_path / "a.jsonl"), tokenizer), context
        )
        figures = loss.figures()
        assert (
            figures["documents"] == 4 and figures["tokens"] == 146 + 4 and figures["bytes"] == 146
        )
        assert loss.nats == pytest.approx(146 * 0.97 + 4 * 2.57, rel=1e-5)
        assert sum(bucket["tokens"] for bucket in figures["by_position"]) == 150
        assert [b["from"] for b in figures["by_position"]] == [1, 2, 4, 8, 16, 32, 64]


def test_bits_per_byte_by_hand(tmp_path, tokenizer, model):
    """With bytes as ids each byte is a token, and the end of the document is another one without a
    byte."""
    text = "é and ü"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    figures = texts.evaluate(
        Scorer(model), texts.documents(str(tmp_path / "a.txt"), tokenizer), 64
    ).figures()
    assert (figures["bytes"], figures["tokens"]) == (9, 10)
    ids = np.array([[256, *text.encode(), 257]])
    logits = model.logits(ids)[0, :-1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -wanted[np.arange(10), ids[0, 1:]].sum()
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / 9, rel=1e-5)
    assert figures["loss"] == pytest.approx(nats / 10, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(nats / 10), rel=1e-4)
    assert figures["accuracy"] == pytest.approx((wanted.argmax(-1) == ids[0, 1:]).mean())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_of_a_chat_answers_alone_are_predicted(tmp_path, kind):
    own = (
        tokenizers.load("bytes")
        if kind == "bytes"
        else tokenizers.train_bpe(["2+2? user " * 30], 265)
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    (document,) = texts.documents(str(tmp_path / "a.jsonl"), own)
    made, _ = chat_template.Template(own).encode_within(chat.parse_chat(MESSAGES), None)
    assert document.tokens.tolist() == list(made.tokens)
    learnt = [
        i
        for i, predicted in zip(document.tokens.tolist(), document.predicted, strict=True)
        if predicted
    ]
    assert learnt == [
        i for i, predicted in zip(made.tokens, made.predicted, strict=True) if predicted
    ]
    assert own.decode(learnt).replace("\n", "") == "46" or kind == "bpe"
    figures = texts.evaluate(Even(), [document], 16).figures()
    assert figures["tokens"] == len(learnt) < len(document.tokens) - 10
    assert figures["bytes"] == len(own.decode(learnt).encode())


def test_prepared_data_are_their_files(tmp_path, tokenizer, model):
    lines = [{"text": f"line {i} of it, é"} for i in range(30)] + [{"messages": MESSAGES}] * 4
    blank = [{"text": text} for text in ("", " ", "\n\t\u2003")]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, *blank])
    )
    options = Options([str(tmp_path / "in")], "bytes", held_out=0.5)
    prepare(options, str(tmp_path / "out"), 1, lambda *_: None)
    plain = lambda document: (document.tokens.tolist(), document.predicted.tolist(), document.bytes)  # noqa: E731
    notes = []
    files = {
        str(plain(document)): document
        for document in texts.documents(str(tmp_path / "in"), tokenizer, skipped=notes.append)
    }
    assert len(notes) == len(blank) and all("empty" in one for one in notes)
    held_out = list(texts.documents(str(tmp_path / "out"), tokenizer))
    train = list(
        texts._of_store(prepared_store.PreparedStore(str(tmp_path / "out"), "train"), tokenizer)
    )
    assert held_out and train and len(held_out) + len(train) == len(lines)
    assert {str(plain(document)) for document in [*held_out, *train]} == set(files)
    read = [files[str(plain(document))] for document in held_out]
    scored = [texts.evaluate(Scorer(model), found, 64).figures() for found in (read, held_out)]
    assert scored[0] == scored[1]
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        list(texts.documents(str(tmp_path / "out"), tokenizers.train_bpe(["a text"], 263)))


def test_what_is_left_out_is_said_and_what_is_damaged_refused(tmp_path, tokenizer):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\0\0\xff" * 9)
    notes = []
    (document,) = texts.documents(str(tmp_path), tokenizer, skipped=notes.append)
    assert document.tokens.tolist() == [256, ord("x"), 257]
    assert (
        len(notes) == 2
        and "empty.txt" in notes[0] + notes[1]
        and "picture.txt" in notes[0] + notes[1]
    )
    nothing = texts.evaluate(
        Even(), texts.documents(str(tmp_path / "empty.txt"), tokenizer), 8
    ).figures()
    assert nothing["tokens"] == nothing["documents"] == 0 and nothing["bits_per_byte"] is None
    with pytest.raises(UserError, match=r"nowhere.* names no file"):
        list(texts.documents(str(tmp_path / "nowhere"), tokenizer))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"tex')
    with pytest.raises(UserError, match=r"bad\.jsonl"):
        list(texts.documents(str(tmp_path / "bad.jsonl"), tokenizer))
