"""The model's ids of begin, end and padding against the tokenizer's."""

import json

import pytest

from zaya_jax import config as config_lib
from zaya_jax.config import UserError
from zaya_jax.data import tokenizers
from zaya_jax.training import workdir

KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train_bpe(["words of a small vocabulary " * 30], 270)


def with_ids(*ids):
    raw = config_lib.default()
    for key, value in zip(KEYS, ids, strict=True):
        raw.model[key] = value
    return config_lib.check(raw)


def ids_of(config):
    return tuple(getattr(config.model, key) for key in KEYS)


def test_what_is_left_open_is_the_tokenizers(bpe):
    for tok in (tokenizers.load("bytes"), bpe):
        own = (tok.bos_id, tok.eos_id, tok.pad_id)
        filled = tokenizers.with_model_ids(config_lib.check(config_lib.default()), tok)
        assert ids_of(filled) == own
        assert tokenizers.with_model_ids(filled, tok) == filled  # a run that goes on has its recorded config
        recorded = config_lib.check(json.loads(json.dumps(config_lib.to_dict(filled))))
        assert recorded == filled
        assert ids_of(tokenizers.with_model_ids(with_ids(None, own[1], None), tok)) == own


@pytest.mark.parametrize("key", range(3))
def test_another_id_than_the_tokenizers_is_refused(bpe, key):
    ids = [bpe.bos_id, bpe.eos_id, bpe.pad_id]
    assert bpe.bos_id == 0  # as padding it would freeze the begin of every document
    for wrong in (ids[(key + 1) % 3], 200_000):
        given = list(ids)
        given[key] = wrong
        with pytest.raises(UserError, match=rf"config.model.{KEYS[key]}={wrong}, but tokenizer .* has {ids[key]};"):
            tokenizers.with_model_ids(with_ids(*given), bpe)


@pytest.mark.parametrize("pad", ["", "<|end_turn|>", "a", "<|eos|>"])
def test_padding_that_stands_for_something_else_freezes_nothing(bpe, tmp_path, pad):
    """Its own, named next to the tokenizer, or none, when it is the end of documents."""
    if pad:
        (tmp_path / "tokenizer.json").write_bytes(bpe._content)
        (tmp_path / tokenizers.META_FILE).write_text(json.dumps({"pad_id": bpe._id(pad)}))
    else:
        (tmp_path / "tokenizer.json").write_bytes(bpe._content.replace(b"<|pad|>", b"<|other|>"))
    tok = tokenizers.load(tmp_path)
    assert tok.pad_id == bpe._id(pad or "<|eos|>")
    assert ids_of(tokenizers.with_model_ids(with_ids(None, None, None), tok)) == (0, 1, None)
    for given in (1, 2):
        with pytest.raises(UserError, match=f"pad_token_id={given}, .* has no token of its own"):
            tokenizers.with_model_ids(with_ids(None, None, given), tok)


def test_ids_beside_a_tokenizer_count_for_its_file_too(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(bpe._content)
    assert tokenizers.load(tmp_path / "tokenizer.json").bos_id == bpe.bos_id
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5, 1], "pad_token_id": -1}))
    tok = tokenizers.load(tmp_path)
    assert (tok.eos_id, tok.pad_id) == (5, bpe.pad_id)
    (tmp_path / tokenizers.META_FILE).write_text('{"eos_id": 6}')
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizers.load(spec).eos_id == 6
    for bad in ('{"eos_id": 270}', '{"eos_id": "x"}', '{"bos_id": true}'):
        (tmp_path / tokenizers.META_FILE).write_text(bad)
        with pytest.raises(UserError, match=tokenizers.META_FILE):
            tokenizers.load(tmp_path)


def test_an_imported_model_may_take_its_tokenizers_ids_until_it_is_trained(tmp_path, bpe):
    imported = with_ids(2, 106, 0)
    filled = tokenizers.with_model_ids(with_ids(None, None, None), bpe)
    with pytest.raises(UserError, match=r"was started with config\.model\.bos_token_id=2"):
        workdir.check_same(imported, filled, tmp_path, reached=0)
    (tmp_path / workdir.IMPORTED).write_text("{}")
    workdir.check_same(imported, filled, tmp_path, reached=0)
    with pytest.raises(UserError, match=r"was started with config\.model\.bos_token_id=2"):
        workdir.check_same(imported, filled, tmp_path, reached=1)
