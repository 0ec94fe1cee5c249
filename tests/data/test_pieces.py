"""Long texts: the ids of the pieces are those of the whole, for every kind of tokenizer that can be cut."""

import json

import numpy as np
import pytest
import tokenizers as library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from zaya_jax.data import tokenizers

WORDS = ["word", "don't", "café", "日本", "x1", "42", "  ", "\t", "ﬁn", "é", "(a)", "--", "<|bos|>", "I'm"]
ENDS = [" ", " ", " ", "\n", "\n\n", "\r\n", " \n", "\n  ", ", ", ""]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def text_of(rng, length):
    parts = [w for i in rng.integers(0, len(WORDS) * len(ENDS), length) for w in (WORDS[i % 14], ENDS[i // 14])]
    return "".join(parts)


def trained(pre_tokenizer=None, normalizer=None, **options):
    """A tokenizer.json's tokenizer with these parts, trained on a little text."""
    made = library.Tokenizer(models.BPE(**options))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<|bos|>", "<|eos|>", "<|pad|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=12,
    )  # fmt: skip
    made.train_from_iterator([text_of(np.random.default_rng(i), 60) for i in range(30)], trainer)
    return tokenizers.HuggingFace(made.to_str().encode(), {}, "made here")


def byte_level(**options):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


def gemma():
    """Without words: the whole text is one, and spaces are letters."""
    spaces = normalizers.Replace(" ", "\u2581")
    made = trained(pre_tokenizers.Split("\n", "isolated"), spaces, unk_token="<unk>", fuse_unk=True)
    raw = json.loads(made._content)
    raw["pre_tokenizer"] = None
    return tokenizers.HuggingFace(json.dumps(raw).encode(), {}, "made here")


KINDS = {
    "bytes": tokenizers.Bytes,
    "gpt2": lambda: trained(byte_level()),
    "llama": lambda: trained(
        pre_tokenizers.Sequence([pre_tokenizers.Split(library.Regex(LLAMA), "isolated"), byte_level(use_regex=False)])
    ),
    "nfkc": lambda: trained(byte_level(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "gemma": gemma,
}
NOT_CUT = {
    "prefixed": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always"), unk_token="<unk>"),
}


@pytest.mark.parametrize("kind", [*KINDS, *NOT_CUT])
def test_pieces_have_the_ids_of_the_whole(kind, monkeypatch):
    monkeypatch.setattr(tokenizers, "PIECE", 700)
    monkeypatch.setattr(tokenizers, "CUT_CONTEXT", 100)
    monkeypatch.setattr(tokenizers, "CUT_REGION", 500)
    tok = (KINDS | NOT_CUT)[kind]()
    taken = []
    encode_many = type(tok).encode_many
    monkeypatch.setattr(type(tok), "encode_many", lambda self, texts: taken.append(texts) or encode_many(self, texts))
    for seed in range(12):
        text = text_of(np.random.default_rng(seed), 900)
        whole = tok.encode(text)
        for parts in ([text], [text[i : i + 97] for i in range(0, len(text), 97)]):
            taken.clear()
            found = tokenizers.encode_document(tok, parts)
            assert found.tolist() == [tok.bos_id, *whole, tok.eos_id] and found.dtype == tok.dtype
            if kind in KINDS:
                assert len(taken) > 4, "nothing was cut"
    texts = ["short", text, "", text[:50]]
    for ids, one in zip(tokenizers.encode_texts(tok, texts), texts, strict=True):
        np.testing.assert_array_equal(ids[1:-1], tok.encode(one))
