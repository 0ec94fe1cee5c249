"""Storage: byte ranges equal ArrayRecord, failures are retried, damage is found, named, and stops or is
skipped.
"""

import collections
import pathlib
import random
import shutil
import time

import fsspec
import numpy as np
import pytest

from zaya_jax.config import UserError
from zaya_jax.data import pipeline, storage, tokenizers
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.storage import Prepared, StorageError

TOK = tokenizers.load("bytes")


@pytest.fixture
def directory(prepare_text):
    return prepare_text("web", 200)


def contents(store):
    """The tokens of all bundles that can be read."""
    found = [store.read([b])[b] for b in range(len(store.lengths))]
    return np.concatenate([b.tokens for b in found if b.real])


def damage(path, place, bit=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def to_memory(directory, name):
    files = fsspec.filesystem("memory")
    for path in directory.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/{name}/{path.relative_to(directory)}", path.read_bytes())
    return f"memory://{name}"


def test_byte_ranges_give_what_array_record_gives(directory):
    url = to_memory(directory, "ranges")
    local, remote = Prepared(str(directory)), Prepared(url)
    np.testing.assert_array_equal(contents(local), contents(remote))
    for shard in range(len(local.shards)):
        np.testing.assert_array_equal(local.piece_lengths(shard), remote.piece_lengths(shard))
    assert remote.counters.records == len(remote.lengths) and remote.counters.retries == 0
    assert storage.verify(url) == []


def test_a_real_s3_server_gives_it_too(directory, s3_server):
    files = fsspec.filesystem("s3")
    files.mkdir("corpus")
    files.put(str(directory), "corpus/web", recursive=True)
    np.testing.assert_array_equal(contents(Prepared("s3://corpus/web")), contents(Prepared(str(directory))))
    assert storage.verify("s3://corpus/web") == []


def test_an_unreliable_store_is_retried_and_counted(directory, monkeypatch):
    url = to_memory(directory, "unreliable")
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.001)
    files = type(fsspec.filesystem("memory"))
    good, fail = files.cat_ranges, random.Random(0)

    def sometimes(self, *args, **kwargs):
        if fail.random() < 0.4:
            raise ConnectionResetError("the line went dead")
        return good(self, *args, **kwargs)

    monkeypatch.setattr(files, "cat_ranges", sometimes)
    store = Prepared(url)
    np.testing.assert_array_equal(contents(store), contents(Prepared(str(directory))))
    assert store.counters.retries > 3
    monkeypatch.setattr(files, "cat_ranges", lambda *a, **k: fail.missing)
    with pytest.raises(StorageError, match=r"cannot read shard train-0000"):
        contents(Prepared(url))


def test_a_corrupt_record_stops_the_run_and_is_named(directory, make_config):
    store = Prepared(str(directory))
    bundle = 7
    shard = int(store.shard_of[bundle])
    entry, number = store.shards[shard], bundle - int(store.first_bundle[shard])
    damage(directory / entry["file"], int(store.index["offset"][bundle]) + 100)
    name = f"corrupt record {number} of shard {entry['file']}"
    with pytest.raises(StorageError, match=name):
        Prepared(str(directory)).read(list(range(len(store.lengths))))
    assert [p for p in storage.verify(str(directory)) if p.startswith(name)]
    stream = pipeline.train_stream(make_config(path=str(directory), seq_len=512), TOK)
    with pytest.raises(StorageError, match=name):
        collections.deque(stream, maxlen=0)


def test_a_corrupt_record_is_skipped_and_counted_where_asked(directory, make_config, caplog):
    config = make_config(path=str(directory), on_corrupt="skip", seq_len=512)
    sound = pipeline.train_stream(config, TOK)
    before = [next(sound) for _ in range(30)]
    store = Prepared(str(directory))
    entry = store.shards[0]
    damage(directory / entry["file"], int(store.index["offset"][3]) + 100)
    stream = pipeline.train_stream(config, TOK)
    after = [next(stream) for _ in range(30)]
    assert stream.metrics()["data/corrupt"] == 1
    assert f"corrupt record 3 of shard {entry['file']}" in caplog.text
    lost = 0
    for a, b in zip(after, before, strict=True):
        hole = (a["segment_ids"] == 0) & (b["segment_ids"] > 0)
        lost += hole.sum()
        assert not a["loss_mask"][hole].any() and (a["tokens"][hole] == TOK.pad_id).all()
        np.testing.assert_array_equal(a["tokens"][~hole], b["tokens"][~hole])
        np.testing.assert_array_equal(a["loss_mask"][~hole], b["loss_mask"][~hole])
    assert store.lengths[3] <= lost <= 2 * store.lengths[3]  # 30 steps are between one epoch and two


@pytest.mark.parametrize("what", ["missing", "truncated", "empty"])
def test_a_whole_shard_gone_is_named(directory, what):
    path = directory / Prepared(str(directory)).shards[1]["file"]
    content = path.read_bytes()
    path.unlink()
    if what != "missing":
        path.write_bytes(content[: len(content) // 2] if what == "truncated" else b"")
    with pytest.raises(StorageError, match=path.name):
        contents(Prepared(str(directory)))
    assert any(path.name in problem for problem in storage.verify(str(directory)))


def test_manifest_and_index_are_checked(directory, tmp_path):
    with pytest.raises(UserError, match="not a prepared directory"):
        storage.load_manifest(str(tmp_path / "nothing"))
    damage(directory / tokens_lib.INDEX, 5)
    with pytest.raises(StorageError, match="damaged"):
        Prepared(str(directory))
    assert storage.verify(str(directory))
    manifest = directory / tokens_lib.MANIFEST
    manifest.write_text(manifest.read_text().replace('"documents": 1', '"documents": 2', 1))
    with pytest.raises(UserError, match="changed after it was written"):
        Prepared(str(directory))
    manifest.write_text("{")
    with pytest.raises(UserError, match="not a manifest"):
        Prepared(str(directory))


def test_the_cache_is_bounded(directory):
    store = Prepared(str(directory), cache_bytes=40_000)
    for b in range(len(store.lengths)):
        store.read([b])
        assert store._cached_bytes <= 40_000
    assert len(store._cache) > 1


def fuzz(directory: pathlib.Path, scratch: pathlib.Path, seconds: float, seed: int = 0) -> int:
    """Damage random shards for some time; every damage must be named, and nothing wrong ever be read."""
    rng = random.Random(seed)
    sound = contents(Prepared(str(directory)))
    store = Prepared(str(directory))
    tries, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        tries += 1
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(directory, scratch)
        path = scratch / rng.choice(store.shards)["file"]
        content = bytearray(path.read_bytes())
        kind = rng.choice(["flip", "flip", "truncate", "zero", "swap", "grow"])
        at = rng.randrange(len(content))
        if kind == "flip":
            content[at] ^= 1 << rng.randrange(8)
        elif kind == "truncate":
            del content[at:]
        elif kind == "zero":
            content[at : at + 4096] = bytes(min(4096, len(content) - at))
        elif kind == "swap":
            content[at : at + 512], content[:512] = content[:512], content[at : at + 512]
        else:
            content += rng.randbytes(100)
        if bytes(content) == path.read_bytes():
            continue
        path.write_bytes(content)
        problems = storage.verify(str(scratch))
        assert any(path.name in p for p in problems), (seed, tries, kind, at)
        skipping = Prepared(str(scratch), on_corrupt="skip")
        found = {b: skipping.read([b])[b] for b in range(len(skipping.lengths))}
        ends = np.cumsum(skipping.lengths)
        for b, bundle in found.items():
            if bundle.real:
                np.testing.assert_array_equal(bundle.tokens, sound[ends[b] - len(bundle) : ends[b]])
        assert skipping.counters.corrupt == sum(not bundle.real for bundle in found.values())
    return tries


def test_fuzz_briefly(directory, tmp_path):
    assert fuzz(directory, tmp_path / "fuzz", 3.0) > 10


@pytest.mark.slow
def test_fuzz_for_a_minute(directory, tmp_path):
    assert fuzz(directory, tmp_path / "fuzz", 60.0, seed=1) > 200
