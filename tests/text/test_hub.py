"""Data sets of Hugging Face's library as input: folders that it saved, and streams in parts."""

import json
import shutil
import sys
import types

import pyarrow
import pyarrow.feather
import pytest
from data_helpers import contents, here, texts_of
from refusals import check_refused

from zaya_jax.text import hub, prepare
from zaya_jax.text.prepare import Options
from zaya_jax.text.prepare_task import BAD

TEXTS = [f"text {i} " + "word " * (i % 17) for i in range(700)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture(autouse=True)
def without_workers(in_process):
    """Preparing runs here."""


def saved(folder, columns):
    """A file as `datasets.save_to_disk` writes it, and its companions."""
    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    path = str(folder / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=300)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=1))


@pytest.fixture
def splits(tmp_path):
    """A DatasetDict of two splits, with what `map` left beside one."""
    root = tmp_path / "set"
    saved(root / "train", {"text": TEXTS, "n": list(range(700))})
    saved(root / "test", {"messages": [CHAT] * 3})
    shutil.copy(root / "train" / "data-00000-of-00001.arrow", root / "train" / "cache-2ad7.arrow")
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return root


@pytest.mark.parametrize("pattern", ["{}/train", "{}/tra*/*.arrow", "{}/../se?/train/*"])
def test_a_saved_folder_is_what_its_state_names(splits, tmp_path, pattern):
    manifest, _ = here(Options([pattern.format(splits)]), tmp_path / "out")
    assert not manifest["counts"]
    assert texts_of(tmp_path / "out") == sorted(TEXTS)


@pytest.mark.parametrize("pattern", ["{}", "{}/**/*.arrow", "{}/.."])
def test_a_saved_dict_needs_a_split_named(splits, tmp_path, pattern):
    check_refused(
        r"has several splits of the DatasetDict .*; name one, such as",
        lambda: here(Options([pattern.format(splits)]), tmp_path / "out"),
    )
    # Both by name, or the one that there is.
    manifest, _ = here(Options([str(splits / "train"), str(splits / "test")]), tmp_path / "out")
    assert manifest["counts"]["kept"] == 3
    shutil.rmtree(splits / "test")
    here(Options([str(splits)]), tmp_path / "one")
    assert texts_of(tmp_path / "one") == sorted(TEXTS)


def test_a_file_that_a_saved_folder_lacks_is_named(splits, tmp_path):
    (splits / "train" / "data-00000-of-00001.arrow").unlink()
    check_refused(
        r"data-00000-of-00001\.arrow.* No such file",
        lambda: here(Options([str(splits / "train")]), tmp_path / "out"),
    )


@pytest.mark.parametrize("size", [100, 5000])
def test_a_damaged_file_is_named_and_counted(tmp_path, size):
    saved(tmp_path / "set", {"text": TEXTS})
    (path,) = (tmp_path / "set").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:size])
    (tmp_path / "u.txt").write_text("sound")
    given = [str(tmp_path / "set"), str(tmp_path / "u.txt")]
    check_refused(
        r"\.arrow, row group 0 is damaged: .*also with --skip_bad added",
        lambda: here(Options([str(tmp_path / "set")]), tmp_path / "strict"),
    )
    manifest, _ = here(Options(given, skip_bad=True, held_out=0.0), tmp_path / "out")
    assert manifest["counts"] == {BAD: 1}


@pytest.mark.parametrize("compression", ["lz4", "uncompressed"])
def test_an_arrow_file_of_feather_is_read(tmp_path, compression):
    table = pyarrow.table({"text": TEXTS, "n": [None, *range(699)]})
    path = tmp_path / "a.arrow"
    pyarrow.feather.write_feather(table, path, compression=compression, chunksize=300)
    manifest, _ = here(Options([str(path)]), tmp_path / "out")
    assert not manifest["counts"]
    assert texts_of(tmp_path / "out") == sorted(TEXTS)


def test_an_arrow_file_that_has_no_text_is_told_once(tmp_path):
    pyarrow.feather.write_feather(pyarrow.table({"n": [1, 2, 3]}), tmp_path / "a.arrow")
    (tmp_path / "u.txt").write_text("sound")
    options = Options([str(tmp_path / "*.*")], skip_bad=True, held_out=0.0)
    manifest, _ = here(options, tmp_path / "out")
    assert manifest["counts"] == {BAD: 1}
    assert "a.arrow has columns n, but expected a text" in manifest["examples"][BAD][0]


class Stream:
    """A streamed data set in four shards, the way that this module uses one."""

    num_shards = 4

    def __init__(self, texts=TEXTS):
        self.texts = texts

    def shard(self, num_shards, index):
        return ({"text": text} for text in self.texts[index::num_shards])


@pytest.fixture
def remote(monkeypatch):
    """The library over a hub whose newest commit is the last of these."""
    commits = {"c0ffee": TEXTS}

    def builder(name, subset):
        return types.SimpleNamespace(hash=list(commits)[-1])

    def load(name, subset, split, streaming, revision):
        assert (name, subset, split, streaming) == ("owner/name", "sub", "test", True)
        return Stream(commits[revision])

    library = types.SimpleNamespace(load_dataset=load, load_dataset_builder=builder)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return commits


def test_shards_are_shared_and_a_broken_stream_is_no_bad_record(tmp_path, monkeypatch, remote):
    options = Options(["hf:owner/name/sub:test"], skip_bad=True)
    here(options, tmp_path / "whole")
    assert texts_of(tmp_path / "whole") == sorted(TEXTS)
    for index in (1, 0):
        prepare.prepare(options, str(tmp_path / "parts"), 1, lambda *_: None, part=(index, 2))
    here(options, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")

    def broken(self, num_shards, index):
        yield {"text": "one"}
        raise ConnectionError("the line went dead")

    monkeypatch.setattr(Stream, "shard", broken)
    check_refused(
        r"#0/4@c0ffee failed while streaming: the line went dead",
        here,
        options,
        tmp_path / "broken",
    )


def test_a_preparation_stays_with_its_revision(tmp_path, remote):
    options = Options(["hf:owner/name/sub:test"])
    prepare.prepare(options, str(tmp_path / "out"), 1, lambda *_: None, part=(0, 2))
    remote["decade"] = ["rewritten"] * 100
    here(options, tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(TEXTS)
    check_refused("is complete, from other input", here, options, tmp_path / "out")


def test_a_data_set_given_twice_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "shard_inputs", lambda spec, planned: [f"{spec}#0/1@c0ffee"])
    monkeypatch.setattr(hub, "rows", lambda shard: iter([{"text": shard}]))
    here(Options(["hf:a", "hf:b", "hf:a"], held_out=0.0), tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["hf:a#0/1@c0ffee", "hf:b#0/1@c0ffee"]
