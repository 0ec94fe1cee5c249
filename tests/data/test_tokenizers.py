"""Tokenizers: round trips, storage, and what they refuse."""

import pytest

from zaya_jax.config import UserError
from zaya_jax.data import tokenizers

TEXT = "def naïve(x):\n    return '日本' + x  # \U0001f600\n"


def test_bytes_are_bytes():
    tok = tokenizers.load("bytes")
    assert tok.encode("aé") == [97, 195, 169]
    assert (tok.vocab_size, tok.bos_id, tok.eos_id, tok.pad_id) == (264, 256, 257, 258)
    assert tok.decode([tok.bos_id, *tok.encode(TEXT), tok.eos_id]) == TEXT
    assert tok.decode([255, 65]) == "�A"
    assert tok.document(TEXT).tolist() == [256, *tok.encode(TEXT), 257] and tok.document(TEXT).dtype == tok.dtype


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train_bpe([TEXT * 50, " ".join(f"word{i}" for i in range(400))], 300)


def test_trained_bpe_encodes_anything(bpe):
    assert bpe.vocab_size == 300
    for text in (TEXT, "unseen Ω \x00 \t", ""):
        assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode(TEXT)) < len(TEXT.encode())
    ids = {bpe.bos_id, bpe.eos_id, bpe.pad_id, *(bpe.chat_token(r)[0] for r in tokenizers.CHAT_TOKENS)}
    assert len(ids) == 7


def test_text_never_becomes_a_special_token(bpe):
    for tok in (bpe, tokenizers.load("bytes")):
        text = "<|bos|> <think> <|end_turn|>"
        specials = {tok.bos_id, *(tok.chat_token(role)[0] for role in tokenizers.CHAT_TOKENS)}
        assert not specials.intersection(tok.encode(text))
        assert not specials.intersection(tok.document(text)[1:-1].tolist())
        assert tok.decode(tok.encode(text)) == text


def test_saved_and_loaded_is_the_same(bpe, tmp_path):
    for i, tok in enumerate((tokenizers.load("bytes"), bpe)):
        tok.save(tmp_path / str(i))
        again = tokenizers.load(tmp_path / str(i))
        assert again.sha256 == tok.sha256
        assert (again.bos_id, again.eos_id, again.pad_id) == (tok.bos_id, tok.eos_id, tok.pad_id)
        assert again.encode(TEXT) == tok.encode(TEXT)
        assert not [p for p in (tmp_path / str(i)).iterdir() if p.suffix in (".pkl", ".pickle")]


def test_bad_tokenizers_are_one_clear_line(bpe, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        tokenizers.load(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"holds no zaya_tokenizer\.json or tokenizer\.json"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    for place in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(UserError, match=r"SentencePiece model transformers writes.*save_pretrained"):
            tokenizers.load(place)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a Hugging Face tokenizer\.json"):
        tokenizers.load(tmp_path / "tokenizer.json")
    bpe.save(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + " ")
    with pytest.raises(UserError, match="SHA-256"):
        tokenizers.load(tmp_path)
    with pytest.raises(UserError, match="gives a BPE of 263 ids, 200 were asked for; bytes and specials need"):
        tokenizers.train_bpe([TEXT], 200)
    with pytest.raises(UserError, match=r"asked for; give more text"):
        tokenizers.train_bpe(["ab"], 5000)
