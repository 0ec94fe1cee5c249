"""Tokenizers: round trips, storage, what they refuse, and a model's ids of begin, end and padding
against theirs."""

import functools
import json

import pytest
from data_helpers import write
from refusals import check_refused

from zaya_jax import config as config_lib
from zaya_jax.text import tokenizers
from zaya_jax.training import workdir

KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
TEXT = "def naïve(x):\n    return '日本' + x  # \U0001f600\n"


def test_bytes_are_bytes():
    tok = tokenizers.load("bytes")
    assert tok.encode("aé") == [97, 195, 169]
    assert (tok.vocab_size, tok.bos_id, tok.eos_id, tok.pad_id) == (264, 256, 257, 258)
    assert repr(tok).startswith("<bytes tokenizer of 264 ids, sha256 ")
    assert tok.decode([tok.bos_id, *tok.encode(TEXT), tok.eos_id]) == TEXT
    assert tok.decode([255, 65]) == "�A"
    assert (
        tok.encode_document(TEXT).tolist() == [256, *tok.encode(TEXT), 257]
        and tok.encode_document(TEXT).dtype == tok.dtype
    )


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train_bpe([TEXT * 50, " ".join(f"word{i}" for i in range(400))], 300)


def test_trained_bpe_encodes_anything(bpe):
    assert bpe.vocab_size == 300
    for text in (TEXT, "unseen Ω \x00 \t", ""):
        assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode(TEXT)) < len(TEXT.encode())
    chat = [bpe.special_id(names[0]) for names in tokenizers.CHAT_TOKENS.values()]
    assert len({bpe.bos_id, bpe.eos_id, bpe.pad_id, *chat}) == 7


def test_a_tokenizer_made_here_begins_a_text_as_training_does(bpe):
    """In every program that reads its tokenizer.json, so an exported model continues the same."""
    from tokenizers import Tokenizer

    for tokenizer in (tokenizers.load("bytes"), bpe):
        theirs = Tokenizer.from_str(tokenizer.json())
        assert theirs.encode("a text").ids == tokenizer.encode_document("a text")[:-1].tolist()
        assert tokenizer.adds_bos and tokenizer.encode_with_specials("a text")[
            0
        ] == tokenizer.encode("a text")


def test_text_never_becomes_a_special_token(bpe):
    for tok in (bpe, tokenizers.load("bytes")):
        text = "<|bos|> <think> <|end_turn|>"
        assert not tok.specials.intersection(tok.encode(text))
        assert tok.encode_document(text)[1:-1].tolist() == tok.encode(text)
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
    check_refused("does not exist", tokenizers.load, tmp_path / "none.json")
    check_refused(r"holds no zaya_tokenizer\.json or tokenizer\.json", tokenizers.load, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    for place in (tmp_path, tmp_path / "tokenizer.model"):
        check_refused("SentencePiece model.*save_pretrained", tokenizers.load, place)
    (tmp_path / "tokenizer.json").mkdir()
    check_refused(r"tokenizer\.json cannot be read: Is a directory", tokenizers.load, tmp_path)
    (tmp_path / "tokenizer.json").rmdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    check_refused(
        r"not a Hugging Face tokenizer\.json", tokenizers.load, tmp_path / "tokenizer.json"
    )
    bpe.save(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + " ")
    check_refused("SHA-256", tokenizers.load, tmp_path)
    check_refused(
        "gives a BPE of 263 ids, 200 were asked for; ask for 263", tokenizers.train_bpe, [TEXT], 200
    )
    check_refused(r"ask for 264, or give more text", tokenizers.train_bpe, ["ab"], 5000)


def with_ids(*ids):
    raw = config_lib.default()
    raw.model.update(dict(zip(KEYS, ids, strict=True)))
    return config_lib.check(raw)


def ids_of(config):
    return tuple(getattr(config.model, key) for key in KEYS)


def test_what_is_left_open_is_the_tokenizers(bpe):
    for tok in (tokenizers.load("bytes"), bpe):
        own = (tok.bos_id, tok.eos_id, tok.pad_id)
        for given in ((None, None, None), (None, own[1], None), own):
            assert ids_of(tokenizers.with_model_ids(with_ids(*given), tok)) == own


@pytest.mark.parametrize("key", range(3))
def test_another_id_than_the_tokenizers_is_refused(bpe, key):
    ids = [bpe.bos_id, bpe.eos_id, bpe.pad_id]
    assert bpe.bos_id == 0  # as padding it would freeze the begin of every document
    for wrong in (ids[(key + 1) % 3], 200_000):
        given = list(ids)
        given[key] = wrong
        check_refused(
            rf"config.model.{KEYS[key]}={wrong}, but tokenizer .* has {ids[key]};",
            tokenizers.with_model_ids,
            with_ids(*given),
            bpe,
        )


@pytest.mark.parametrize("pad", ["", "<|end_turn|>", "a", "<|eos|>"])
def test_padding_that_stands_for_something_else_freezes_nothing(bpe, tmp_path, pad):
    """Its own, named next to the tokenizer, or none, when it is the end of documents."""
    beside = {tokenizers.META_FILE: json.dumps({"pad_id": bpe.special_id(pad)})} if pad else {}
    content = bpe.json() if pad else bpe.json().replace("<|pad|>", "<|other|>")
    write(tmp_path, {tokenizers.FILE: content, **beside})
    tok = tokenizers.load(tmp_path)
    assert tok.pad_id == bpe.special_id(pad or "<|eos|>")
    assert ids_of(tokenizers.with_model_ids(with_ids(None, None, None), tok)) == (0, 1, None)
    for given in (1, 2):
        words = f"pad_token_id={given}, .* has no token of its own"
        check_refused(words, tokenizers.with_model_ids, with_ids(None, None, given), tok)


def test_a_tokenizer_without_known_names_is_read_as_its_refusal_advises(tmp_path):
    content = tokenizers.Bytes().json()
    for names in (tokenizers.BOS_NAMES, tokenizers.EOS_NAMES):
        for name in names:
            content = content.replace(name, name.strip("<>").upper())
    (tmp_path / "mine.json").write_text(content)
    says = f"into {tokenizers.META_FILE} next to it, and name the file {tokenizers.FILE}"
    check_refused(says, tokenizers.load, tmp_path / "mine.json")
    (tmp_path / tokenizers.META_FILE).write_text('{"bos_id": 5, "eos_id": 6, "pad_id": 7}')
    (tmp_path / "mine.json").rename(tmp_path / tokenizers.FILE)
    assert tokenizers.load(tmp_path / tokenizers.FILE).eos_id == 6


CONFIG = {"eos_token_id": [5, 1], "pad_token_id": -1}
NAMED = {"eos_token": {"content": "<|turn|>"}, "pad_token": "<think>", "bos_token": None}


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({}, (0, 1, 2)),
        ({"tokenizer_config.json": NAMED}, (0, 3, 5)),
        ({"tokenizer_config.json": NAMED, "config.json": CONFIG}, (0, 5, 5)),
        ({"config.json": CONFIG, tokenizers.META_FILE: {"eos_id": 6}}, (0, 6, 2)),
    ],
)
def test_ids_beside_a_tokenizer_count_before_its_names(bpe, tmp_path, beside, expected):
    written = {name: json.dumps(content) for name, content in beside.items()}
    write(tmp_path, {tokenizers.FILE: bpe.json(), **written})
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        tok = tokenizers.load(spec)
        assert (tok.bos_id, tok.eos_id, tok.pad_id) == expected


@pytest.mark.parametrize("bad", ['{"eos_id": 300}', '{"eos_id": "x"}', '{"bos_id": true}'])
def test_an_id_that_is_none_is_refused(bpe, tmp_path, bad):
    write(tmp_path, {tokenizers.FILE: bpe.json(), tokenizers.META_FILE: bad})
    check_refused(tokenizers.META_FILE, tokenizers.load, tmp_path)


def test_an_imported_model_may_take_its_tokenizers_ids_until_it_is_trained(tmp_path, bpe):
    imported = with_ids(2, 106, 0)
    filled = tokenizers.with_model_ids(with_ids(None, None, None), bpe)
    reason = r"was started with config\.model\.bos_token_id=2"
    refuses = functools.partial(check_refused, reason, workdir.check_same, imported, filled)
    refuses(tmp_path, reached=0)
    (tmp_path / workdir.IMPORTED).write_text("{}")
    workdir.check_same(imported, filled, tmp_path, reached=0)
    refuses(tmp_path, reached=1)


def test_files_beside_a_tokenizer_count_whatever_its_name(bpe, tmp_path):
    write(tmp_path, {"mine.json": bpe.json(), tokenizers.TEMPLATE_FILE: "a template"})
    tok = tokenizers.load(tmp_path / "mine.json")
    assert tok.extra_files == {tokenizers.TEMPLATE_FILE: b"a template"}
