"""Data sets of Hugging Face's library as input: folders that it saved, and streams in parts."""

import json
import shutil
import sys
import types

import pyarrow
import pyarrow.feather
import pytest
from data_helpers import arrow, contents, prepared, texts_of, write
from refusals import check_refused

from zaya_jax.text import hub, prepare
from zaya_jax.text.prepare import Options
from zaya_jax.text.prepare_task import BAD

TEXTS = [f"text {i} " + "word " * (i % 17) for i in range(700)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


DATA = "data-00000-of-00001.arrow"
STATE = {"_data_files": [{"filename": DATA}], "_split": None}


TRAIN = arrow({"text": TEXTS, "n": list(range(700))})


@pytest.fixture
def splits(tmp_path):
    """A DatasetDict of two splits, with what `map` left beside one."""
    companions = {"state.json": json.dumps(STATE), "dataset_info.json": '{"features": {}}'}
    train = {DATA: TRAIN, "cache-2ad7.arrow": TRAIN, **companions}
    write(tmp_path / "set" / "train", train)
    write(tmp_path / "set" / "test", {DATA: arrow({"messages": [CHAT] * 3}), **companions})
    return write(tmp_path / "set", {"dataset_dict.json": '{"splits": ["train", "test"]}'})


def check_texts(patterns, out, **counts):
    """All of TEXTS are prepared, and this is counted."""
    manifest, _ = prepared(Options([str(pattern) for pattern in patterns]), out)
    assert manifest["counts"] == counts
    assert texts_of(out) == sorted(TEXTS)


@pytest.mark.parametrize("pattern", ["{}/train", "{}/tra*/*.arrow", "{}/../se?/train/*"])
def test_a_saved_folder_is_what_its_state_names(splits, tmp_path, pattern):
    check_texts([pattern.format(splits)], tmp_path / "out")


@pytest.mark.parametrize("pattern", ["{}", "{}/**/*.arrow", "{}/.."])
def test_a_saved_dict_needs_a_split_named(splits, tmp_path, pattern):
    check_refused(
        r"has several splits of the DatasetDict .*; name one, such as",
        lambda: prepared(Options([pattern.format(splits)]), tmp_path / "out"),
    )
    # Both by name, or the one that there is.
    manifest, _ = prepared(Options([str(splits / "train"), str(splits / "test")]), tmp_path / "out")
    assert manifest["counts"]["kept"] == 3
    shutil.rmtree(splits / "test")
    check_texts([splits], tmp_path / "one")


def test_a_file_that_a_saved_folder_lacks_is_named(splits, tmp_path):
    (splits / "train" / DATA).unlink()
    check_refused(
        r"data-00000-of-00001\.arrow.* No such file",
        lambda: prepared(Options([str(splits / "train")]), tmp_path / "out"),
    )


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (TRAIN[:100], ", row group 0 is damaged: "),
        (TRAIN[:5000], ", row group 0 is damaged: "),
        (arrow({"n": [1, 2, 3]}), " has columns n, but expected a text"),
    ],
)
def test_an_arrow_file_that_cannot_be_read_is_named_and_counted_once(tmp_path, content, named):
    write(tmp_path, {"a.arrow": content, "u.txt": "sound"})
    options = Options([str(tmp_path / "*.*")], skip_bad=True, held_out=0.0)
    manifest, _ = prepared(options, tmp_path / "out")
    assert manifest["counts"] == {BAD: 1} and manifest["totals"]["train"]["documents"] == 1
    assert f"a.arrow{named}" in manifest["examples"][BAD][0]


@pytest.mark.parametrize("compression", ["lz4", "uncompressed"])
def test_an_arrow_file_of_feather_is_read(tmp_path, compression):
    table = pyarrow.table({"text": TEXTS, "n": [None, *range(699)]})
    path = tmp_path / "a.arrow"
    pyarrow.feather.write_feather(table, path, compression=compression, chunksize=300)
    check_texts([path], tmp_path / "out")


def records(texts):
    yield from ({"text": text} for text in texts)


def breaks_off(texts):
    yield {"text": "one"}
    raise ConnectionError("the line went dead")


@pytest.fixture
def remote(monkeypatch):
    """A hub whose newest commit is the last of these, under the library's names; of each its texts,
    and how they are streamed."""
    commits = {"c0ffee": (TEXTS, records)}

    def load(name, subset, split, streaming, revision):
        assert (name, subset, split, streaming) == ("owner/name", "sub", "test", True)
        texts, stream = commits[revision]
        shard = lambda num_shards, index: stream(texts[index::num_shards])  # noqa: E731
        return types.SimpleNamespace(num_shards=4, shard=shard)

    library = types.SimpleNamespace(
        load_dataset=load,
        load_dataset_builder=lambda name, subset: types.SimpleNamespace(hash=list(commits)[-1]),
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    return commits


STREAMED = Options(["hf:owner/name/sub:test"], skip_bad=True)


def test_machines_share_the_shards_of_the_revision_with_which_they_begin(tmp_path, remote):
    check_texts(STREAMED.inputs, tmp_path / "whole")
    prepare.prepare(STREAMED, str(tmp_path / "parts"), 1, lambda *_: None, part=(1, 2))
    remote["decade"] = ["rewritten"] * 100, records
    prepared(STREAMED, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    check_refused("is complete, from other input", prepared, STREAMED, tmp_path / "parts")


def test_a_broken_stream_is_no_bad_record(tmp_path, remote):
    remote["c0ffee"] = TEXTS, breaks_off
    says = "#0/4@c0ffee failed while streaming: the line went dead"
    check_refused(says, prepared, STREAMED, tmp_path / "out")


def test_a_data_set_given_twice_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "shard_inputs", lambda spec, planned: [f"{spec}#0/1@c0ffee"])
    monkeypatch.setattr(hub, "rows", lambda shard: iter([{"text": shard}]))
    prepared(Options(["hf:a", "hf:b", "hf:a"], held_out=0.0), tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["hf:a#0/1@c0ffee", "hf:b#0/1@c0ffee"]
