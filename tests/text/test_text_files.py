"""Text corpora: which files are found, left out and held out."""

import os

import pytest
from data_helpers import make_config, write
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
    write(tmp_path, {"a.txt": "plain", "sub/b.jsonl": '{"text": "a"}\n{\n{"text": "b"}\n'})
    assert memory.named_texts(str(tmp_path)) == [
        ("a.txt", "plain"),
        ("sub/b.jsonl:0", "a"),
        ("sub/b.jsonl:16", "b"),
    ]
    write(tmp_path, {f"bad{i}.bin": b"\xff" for i in range(5)})
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
    for path in (str(tmp_path / "nothing"), str(tmp_path), ""):
        check_refused("holds no text file", memory.named_texts, path)
    (tmp_path / "blank.txt").write_text("\n")
    check_refused("none with text", memory.named_texts, str(tmp_path))


@pytest.fixture
def linked(tmp_path):
    """d/f.txt and d/g.txt under many names, and a folder of its own that d only links to."""
    write(tmp_path, {place: f"text of {place}" for place in ("d/f.txt", "d/g.txt", "big/h.txt")})
    (tmp_path / "d" / "again").symlink_to(".")
    (tmp_path / "d" / "once_more").symlink_to("../d")
    (tmp_path / "d" / "a_link.txt").symlink_to("f.txt")
    (tmp_path / "d" / "hard.txt").hardlink_to(tmp_path / "d" / "g.txt")
    (tmp_path / "d" / "web").symlink_to(tmp_path / "big")
    return tmp_path / "d"


@pytest.mark.parametrize("pattern", ["{}", "{}/**/*.txt", "{}/**", "{}/../d", "{}/again/**/*.txt"])
def test_a_file_is_taken_once_under_all_its_names_and_linked_folders_are_read(linked, pattern):
    found = {name: path.read_text() for name, path in text_files.list_files(pattern.format(linked))}
    assert sorted(found.values()) == [f"text of {p}" for p in ("big/h.txt", "d/f.txt", "d/g.txt")]
    assert {"web/h.txt", "f.txt"} < found.keys()


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
    write(linked, {"out/x.txt": "x"})
    (linked.parent / "other").symlink_to(linked / "out")
    assert not [
        path
        for path in inputs.find_inputs([str(linked)], linked.parent / "other")
        if "x.txt" in path
    ]


def test_text_that_changes_is_read_again(tmp_path, monkeypatch):
    """Also where another folder has the same relative name."""
    tok = tokenizers.load("bytes")
    config = make_config(path="corpus", eval_named=("x=../extra.txt",))
    for place, letter in (("here", "a"), ("there", "b"), ("there", "z")):
        texts = {f"{place}/corpus/{i}.txt": letter * 100 for i in range(4)}
        write(tmp_path, texts | {"extra.txt": place + letter})
        monkeypatch.chdir(tmp_path / place)
        for split in SPLITS:
            side = stores.open_store(config, "corpus", tok, split)
            assert set(tok.decode(side.block.tokens)) == {letter}
        named = windows.named_stores(config, tok)["x"]
        assert tok.decode(named.block.tokens) == place + letter


def test_rewritten_held_out_text_is_other_data(corpus):
    tok, config = tokenizers.load("bytes"), make_config(path=str(corpus))
    state = pipeline.train_stream(config, tok).get_state()
    held_out = stores.open_store(config, str(corpus), tok, "held_out").block
    text = tok.decode(held_out.tokens)
    (path,) = (path for path in corpus.glob("d*") if path.read_text() == text)
    path.write_text("other text")
    check_refused(
        "the data is not what this run began with",
        lambda: pipeline.train_stream(config, tok).set_state(state),
    )
