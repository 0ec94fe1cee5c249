"""Text corpora: which files are found, left out and held out."""

import os

import pytest
from refusals import check_refused

from zaya_jax.data import pipeline, stores, windows
from zaya_jax.text import inputs, memory, text_files, tokenizers
from zaya_jax.text.shard_format import SPLITS


def test_the_standard_library_is_a_corpus():
    names = [name for name, _ in text_files.list_files("stdlib")]
    assert names == sorted(names) and "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)
    share = sum(text_files.hash_below(name, text_files.HELD_OUT_SHARE) for name in names) / len(
        names
    )
    assert 0.005 < share < 0.04


def test_one_file_keeps_its_tail_for_evaluation(tmp_path):
    (tmp_path / "one.txt").write_text("abcdefghij" * 100)
    train, held_out = memory.split_texts(str(tmp_path / "*.txt"), tokenizers.load("bytes"))
    assert len(train) + len(held_out) == 1000 + 4
    assert len(held_out) == 22


def test_records_are_texts_and_what_is_left_out_is_said(tmp_path, caplog):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "sub" / "b.jsonl").write_text('{"text": "a"}\n{\n{"text": "b"}\n')
    assert memory.named_texts(str(tmp_path)) == [
        ("a.txt", "plain"),
        ("sub/b.jsonl:0", "a"),
        ("sub/b.jsonl:16", "b"),
    ]
    for i in range(5):
        (tmp_path / f"bad{i}.bin").write_bytes(b"\xff")
    memory.split_texts(str(tmp_path), tokenizers.load("bytes"))
    first, second = caplog.messages
    assert (
        f"1 files or records that are no text, such as {tmp_path / 'sub'}/b.jsonl, line 2" in first
    )
    assert "left out 6 files or records" in second and second.count("bin, line 1: not UTF-8") == 3
    (tmp_path / "c.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    check_refused(
        r"c\.jsonl, line 1: a chat; set config\.data\.chats", memory.named_texts, str(tmp_path)
    )


def test_missing_and_empty_corpora_are_user_errors(tmp_path):
    tok = tokenizers.load("bytes")
    check_refused("holds no text file", memory.split_texts, str(tmp_path / "nothing"), tok)
    check_refused("holds no text file", memory.split_texts, str(tmp_path), tok)
    (tmp_path / "blank.txt").write_text("\n")
    check_refused("none with text", memory.split_texts, str(tmp_path), tok)


@pytest.fixture
def linked(tmp_path):
    """d/f.txt and d/g.txt under many names, and a folder of its own that d only links to."""
    (tmp_path / "d").mkdir()
    (tmp_path / "big").mkdir()
    for place in ("d/f.txt", "d/g.txt", "big/h.txt"):
        (tmp_path / place).write_text(f"text of {place}")
    (tmp_path / "d" / "again").symlink_to(".")
    (tmp_path / "d" / "once_more").symlink_to("../d")
    (tmp_path / "d" / "a_link.txt").symlink_to("f.txt")
    (tmp_path / "d" / "hard.txt").hardlink_to(tmp_path / "d" / "g.txt")
    (tmp_path / "d" / "web").symlink_to(tmp_path / "big")
    return tmp_path / "d"


@pytest.mark.parametrize("pattern", ["{}", "{}/**/*.txt", "{}/**", "{}/../d", "{}/again/**/*.txt"])
def test_a_file_is_taken_once_under_all_its_names_and_linked_folders_are_read(linked, pattern):
    pattern = pattern.format(linked)
    found = text_files.list_files(pattern)
    assert sorted(path.read_text() for _, path in found) == [
        f"text of {p}" for p in ("big/h.txt", "d/f.txt", "d/g.txt")
    ]
    assert "web/h.txt" in [name for name, _ in found] and "f.txt" in [name for name, _ in found]


@pytest.mark.parametrize(
    "patterns",
    [
        ["{}"],
        ["{}/f.txt", "{}/../d/f.txt", "{}/*.txt", "{}/web/*"],
        ["{}", "{}/./f.txt"],
        ["{}/**/[fgh]*.txt", "{}"],
    ],
)
def test_prepare_data_has_the_same_rule(linked, patterns):
    found = inputs.find_inputs([pattern.format(linked) for pattern in patterns], "/nowhere")
    assert [os.path.basename(path) for path in found] == ["f.txt", "g.txt", "h.txt"]


def test_what_was_written_through_a_link_is_no_input(linked):
    (linked / "out").mkdir()
    (linked / "out" / "x.txt").write_text("x")
    (linked.parent / "other").symlink_to(linked / "out")
    assert not [
        path
        for path in inputs.find_inputs([str(linked)], linked.parent / "other")
        if "x.txt" in path
    ]


def test_text_that_changes_is_read_again(tmp_path, make_config, monkeypatch):
    """Also where another folder has the same relative name."""
    tok = tokenizers.load("bytes")
    for place, letter in (("here", "a"), ("there", "b")):
        (tmp_path / place / "corpus").mkdir(parents=True)
        for i in range(4):
            (tmp_path / place / "corpus" / f"{i}.txt").write_text(letter * 100)

    def letters():
        config = make_config(path="corpus", eval_named=("x=../extra.txt",))
        (tmp_path / "extra.txt").write_text(os.path.basename(os.getcwd()) + letter)
        sides = [stores.open_store(config, "corpus", tok, split).block.tokens for split in SPLITS]
        own = windows.named_stores(config, tok)["x"].block.tokens
        return [{chr(token) for token in side if token < 256} for side in sides], tok.decode(own)

    monkeypatch.chdir(tmp_path / "here")
    assert letters() == ([{"a"}] * 2, "hereb")
    monkeypatch.chdir(tmp_path / "there")
    assert letters() == ([{"b"}] * 2, "thereb")
    for i in range(4):
        (tmp_path / "there" / "corpus" / f"{i}.txt").write_text("z" * 100)
    letter = "z"
    assert letters() == ([{"z"}] * 2, "therez")


def test_rewritten_held_out_text_is_other_data(corpus, make_config):
    tok, config = tokenizers.load("bytes"), make_config(path=str(corpus))
    state = pipeline.train_stream(config, tok).get_state()
    held_out = stores.open_store(config, str(corpus), tok, "held_out").block
    text = tok.decode(held_out.tokens.tolist())
    (path,) = (
        path for _, path in text_files.list_files(str(corpus)) if path.read_bytes() == text.encode()
    )
    path.write_text("other text")
    check_refused(
        "the data is not what this run began with",
        lambda: pipeline.train_stream(config, tok).set_state(state),
    )
