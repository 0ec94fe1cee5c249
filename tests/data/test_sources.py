"""Text corpora: what is found, what is left out, what is held out."""

import pytest

from zaya_jax.config import UserError
from zaya_jax.data import sources, tokenizers


def test_the_standard_library_is_a_corpus():
    files = sources.list_files("stdlib")
    names = [name for name, _ in files]
    assert names == sorted(names) and "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)
    share = sum(sources.held_out(name) for name in names) / len(names)
    assert 0.005 < share < 0.04


def test_documents_carry_begin_and_end(corpus):
    tok = tokenizers.load("bytes")
    train, held_out = sources.text_corpus(str(corpus), tok)
    documents = int(train.starts.sum()) + int(held_out.starts.sum())
    assert documents == 60  # the empty and the undecodable one are left out
    assert (train.tokens[train.starts] == tok.bos_id).all()
    ends = train.tokens == tok.eos_id
    assert ends.sum() == train.starts.sum() and not train.learn[ends].any()
    assert train.learn[~ends].all()
    assert (train.targets[:-1][train.learn[:-1]] == train.tokens[1:][train.learn[:-1]]).all()


def test_one_file_keeps_its_tail_for_evaluation(tmp_path):
    (tmp_path / "one.txt").write_text("abcdefghij" * 100)
    train, held_out = sources.text_corpus(str(tmp_path / "*.txt"), tokenizers.load("bytes"))
    assert len(train) + len(held_out) == 1000 + 4
    assert len(held_out) == 22


def test_jsonl_that_is_taken_for_text_is_said(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    assert len(sources.named_texts(str(tmp_path))) == 2
    (said,) = caplog.messages
    assert "1 of 2 files are JSONL, taken as they stand" in said and "such as b.jsonl" in said


def test_what_is_left_out_is_said(corpus, caplog):
    for i in range(5):
        (corpus / f"bad{i}.bin").write_bytes(b"\xff")
    sources.text_corpus(str(corpus), tokenizers.load("bytes"))
    assert caplog.messages == [
        f"{corpus}: left out 6 of 67 files that are not UTF-8 text (bad0.bin, bad1.bin, bad2.bin, ...), "
        "and 1 empty ones"
    ]


def test_missing_and_empty_corpora_are_user_errors(tmp_path):
    tok = tokenizers.load("bytes")
    with pytest.raises(UserError, match="holds no text file"):
        sources.text_corpus(str(tmp_path / "nothing"), tok)
    with pytest.raises(UserError, match="holds no text file"):
        sources.text_corpus(str(tmp_path), tok)
    (tmp_path / "blank.txt").write_text("\n")
    with pytest.raises(UserError, match="none with UTF-8 text"):
        sources.text_corpus(str(tmp_path), tok)
