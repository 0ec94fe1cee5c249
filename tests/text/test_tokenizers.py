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
BYTES = tokenizers.load("bytes")
BPE = tokenizers.train_bpe([TEXT * 50, " ".join(f"word{i}" for i in range(400))], 300)
MADE, SHA = {tokenizers.FILE: BPE.json()}, {"sha256": BPE.sha256}
BOTH = pytest.mark.parametrize("tok", [BYTES, BPE], ids=["bytes", "bpe"])


def test_bytes_are_bytes():
    tok = BYTES
    assert tok.encode("aé") == [97, 195, 169]
    assert (tok.vocab_size, tok.bos_id, tok.eos_id, tok.pad_id) == (264, 256, 257, 258)
    assert repr(tok).startswith("<bytes tokenizer of 264 ids, sha256 ")
    assert tok.decode([tok.bos_id, *tok.encode(TEXT), tok.eos_id]) == TEXT
    assert tok.decode([255, 65]) == "�A"
    assert (
        tok.encode_document(TEXT).tolist() == [256, *tok.encode(TEXT), 257]
        and tok.encode_document(TEXT).dtype == tok.dtype
    )


def test_trained_bpe_encodes_anything():
    assert BPE.vocab_size == 300
    for text in (TEXT, "unseen Ω \x00 \t", ""):
        assert BPE.decode(BPE.encode(text)) == text
    assert len(BPE.encode(TEXT)) < len(TEXT.encode())
    chat = [BPE.special_id(names[0]) for names in tokenizers.CHAT_TOKENS.values()]
    assert len({BPE.bos_id, BPE.eos_id, BPE.pad_id, *chat}) == 7


@BOTH
def test_a_tokenizer_made_here_begins_a_text_as_training_does(tok):
    """In every program that reads its tokenizer.json, so an exported model continues the same."""
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_str(tok.json())
    assert theirs.encode("a text").ids == tok.encode_document("a text")[:-1].tolist()
    assert tok.adds_bos and tok.encode_with_specials("a text")[0] == tok.encode("a text")


@BOTH
def test_text_never_becomes_a_special_token(tok):
    text = "<|bos|> <think> <|end_turn|>"
    assert not tok.specials.intersection(tok.encode(text))
    assert tok.encode_document(text)[1:-1].tolist() == tok.encode(text)
    assert tok.decode(tok.encode(text)) == text


@BOTH
def test_saved_and_loaded_is_the_same(tok, tmp_path):
    tok.save(tmp_path)
    again = tokenizers.load(tmp_path)
    assert again.sha256 == tok.sha256
    assert (again.bos_id, again.eos_id, again.pad_id) == (tok.bos_id, tok.eos_id, tok.pad_id)
    assert again.encode(TEXT) == tok.encode(TEXT)
    assert not [p for p in tmp_path.iterdir() if p.suffix in (".pkl", ".pickle")]


@pytest.mark.parametrize(
    ("contents", "name", "words"),
    [
        ({}, "none.json", "does not exist"),
        ({}, "", r"holds no zaya_tokenizer\.json or tokenizer\.json"),
        ({"tokenizer.model": ""}, "", "SentencePiece model.*save_pretrained"),
        ({"tokenizer.model": ""}, "tokenizer.model", "SentencePiece model.*save_pretrained"),
        ({"tokenizer.json/a": ""}, "", r"tokenizer\.json cannot be read: Is a directory"),
        ({"tokenizer.json": "{}"}, "tokenizer.json", r"not a Hugging Face tokenizer\.json"),
        (
            {"tokenizer.json": BPE.json() + " ", "zaya_tokenizer.json": json.dumps(SHA)},
            "",
            "is not the file that .* describes .SHA-256 differs",
        ),
        (MADE | {"zaya_tokenizer.json": '{"eos_id": 300}'}, "", "ids below 300, but eos_id=300"),
        (MADE | {"zaya_tokenizer.json": '{"eos_id": "x"}'}, "", "but eos_id='x' in zaya_token"),
        (MADE | {"zaya_tokenizer.json": '{"bos_id": true}'}, "", "but bos_id=True in zaya_token"),
    ],
)
def test_a_bad_tokenizer_is_one_clear_line(tmp_path, contents, name, words):
    write(tmp_path, contents)
    check_refused(words, tokenizers.load, tmp_path / name)


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        (TEXT, 200, "gives a BPE of 263 ids, 200 were asked for; ask for 263"),
        ("ab", 5000, "ask for 264, or give more text"),
    ],
)
def test_a_bpe_of_another_size_than_asked_for_is_refused(text, size, words):
    check_refused(words, tokenizers.train_bpe, [text], size)


def with_ids(*ids):
    raw = config_lib.default()
    raw.model.update(dict(zip(KEYS, ids, strict=True)))
    return config_lib.check(raw)


def ids_of(config):
    return tuple(getattr(config.model, key) for key in KEYS)


@BOTH
def test_what_is_left_open_is_the_tokenizers(tok):
    own = (tok.bos_id, tok.eos_id, tok.pad_id)
    for given in ((None, None, None), (None, own[1], None), own):
        assert ids_of(tokenizers.with_model_ids(with_ids(*given), tok)) == own


@pytest.mark.parametrize("key", range(3))
def test_another_id_than_the_tokenizers_is_refused(key):
    ids = [BPE.bos_id, BPE.eos_id, BPE.pad_id]
    assert BPE.bos_id == 0  # as padding it would freeze the begin of every document
    for wrong in (ids[(key + 1) % 3], 200_000):
        given = list(ids)
        given[key] = wrong
        check_refused(
            rf"config.model.{KEYS[key]}={wrong}, but tokenizer .* has {ids[key]};",
            tokenizers.with_model_ids,
            with_ids(*given),
            BPE,
        )


@pytest.mark.parametrize("pad", ["", "<|end_turn|>", "a", "<|eos|>"])
def test_padding_that_stands_for_something_else_freezes_nothing(tmp_path, pad):
    """Its own, named next to the tokenizer, or none, when it is the end of documents."""
    beside = {tokenizers.META_FILE: json.dumps({"pad_id": BPE.special_id(pad)})} if pad else {}
    content = BPE.json() if pad else BPE.json().replace("<|pad|>", "<|other|>")
    write(tmp_path, {tokenizers.FILE: content, **beside})
    tok = tokenizers.load(tmp_path)
    assert tok.pad_id == BPE.special_id(pad or "<|eos|>")
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
def test_ids_beside_a_tokenizer_count_before_its_names(tmp_path, beside, expected):
    written = {name: json.dumps(content) for name, content in beside.items()}
    write(tmp_path, MADE | written)
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        tok = tokenizers.load(spec)
        assert (tok.bos_id, tok.eos_id, tok.pad_id) == expected


def test_an_imported_model_may_take_its_tokenizers_ids_until_it_is_trained(tmp_path):
    imported = with_ids(2, 106, 0)
    filled = tokenizers.with_model_ids(with_ids(None, None, None), BPE)
    reason = r"was started with config\.model\.bos_token_id=2"
    refuses = functools.partial(check_refused, reason, workdir.check_same, imported, filled)
    refuses(tmp_path, reached=0)
    (tmp_path / workdir.IMPORTED).write_text("{}")
    workdir.check_same(imported, filled, tmp_path, reached=0)
    refuses(tmp_path, reached=1)


def test_files_beside_a_tokenizer_count_whatever_its_name(tmp_path):
    write(tmp_path, {"mine.json": BPE.json(), tokenizers.TEMPLATE_FILE: "a template"})
    tok = tokenizers.load(tmp_path / "mine.json")
    assert tok.extra_files == {tokenizers.TEMPLATE_FILE: b"a template"}
