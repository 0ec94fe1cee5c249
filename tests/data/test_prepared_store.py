"""Storage: any address gives the same, failures are retried, damage is found, named, and stops or
is skipped. Its sizing from the command line."""

import collections
import json
import random
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from data_helpers import damage, make_config, side_by_side
from refusals import check_refused, check_storage_error

from zaya_jax.data import pipeline, prepared_store, windows
from zaya_jax.data.prepared_store import PreparedStore
from zaya_jax.text import shard_format, tokenizers

TOK = tokenizers.load("bytes")


@pytest.fixture
def directory(prepare_text):
    return prepare_text("web", 200)


def bundles(store):
    """All bundles of a store, by (shard, number)."""
    found = {}
    for shard in range(store.num_shards):
        first, end = store.first_token[shard : shard + 2].tolist()
        for number, start in enumerate(range(first, end, store.bundle_tokens)):
            span = start, min(start + store.bundle_tokens, end)
            (found[shard, number],) = store.read_spans([span])
    return found


def contents(store):
    """The tokens of a store that can be read."""
    (block,) = store.read_spans([(0, store.num_tokens)])
    return block.tokens[block.real]


def place_of(directory, shard, number, split="train"):
    """(file, offset, size) of a bundle's record."""
    store = PreparedStore(str(directory), split)
    begin, end = store._bundle_table(shard)[0][number : number + 2].tolist()
    return directory / store.shard_file(shard), begin, end - begin


def copied_to(scheme, directory, name):
    """The address of a copy of the directory."""
    files = fsspec.filesystem(scheme)
    files.mkdir(f"/{name}")
    files.put(str(directory), f"/{name}/web", recursive=True)
    return f"{scheme}://{name}/web"


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_byte_ranges_give_what_local_files_give(directory, scheme, request):
    """Also from a real S3 server."""
    if scheme == "s3":
        request.getfixturevalue("s3_server")
    url = copied_to(scheme, directory, "ranges")
    local, remote = PreparedStore(str(directory)), PreparedStore(url)
    np.testing.assert_equal(contents(remote), contents(local))
    ours, theirs = (list(prepared_store.lengths_of_all(store)) for store in (remote, local))
    np.testing.assert_equal(ours, theirs)
    assert remote.retries == 0
    assert prepared_store.verify(url) == []


def test_an_unreliable_store_is_retried_and_counted(directory, monkeypatch):
    url = copied_to("memory", directory, "unreliable")
    monkeypatch.setattr(prepared_store, "PAUSES", (0.001,) * 5)
    files = type(fsspec.filesystem("memory"))
    good, fail = files.cat_file, random.Random(0)

    def sometimes(self, *args, **kwargs):
        if fail.random() < 0.4:
            raise ConnectionResetError("the line went dead")
        return good(self, *args, **kwargs)

    monkeypatch.setattr(files, "cat_file", sometimes)
    store = PreparedStore(url)
    np.testing.assert_array_equal(contents(store), contents(PreparedStore(str(directory))))
    assert store.retries > 3


def test_a_corrupt_record_stops_the_run_or_is_skipped_and_counted(directory, caplog):
    stops, skips = (
        make_config(path=str(directory), on_corrupt=how, seq_len=512) for how in ("stop", "skip")
    )
    epoch = -(-PreparedStore(str(directory)).num_tokens // 512) // 8
    sound = pipeline.train_stream(stops, TOK)
    before = [next(sound) for _ in range(epoch)]
    path, offset, _ = place_of(directory, 0, 3)
    damage(path, offset + 100)
    says = f"corrupt record 3 of shard {path.name}"
    check_storage_error(says, collections.deque, pipeline.train_stream(stops, TOK), maxlen=0)
    stream = pipeline.train_stream(skips, TOK)
    after = [next(stream) for _ in range(epoch)]
    assert stream.metrics()["data/corrupt"] == 1
    assert says in caplog.text
    a, b = side_by_side(after), side_by_side(before)
    hole = (a["segment_ids"] == 0) & (b["segment_ids"] > 0)
    assert not a["loss_mask"][hole].any() and (a["tokens"][hole] == TOK.pad_id).all()
    np.testing.assert_array_equal(a["tokens"][~hole], b["tokens"][~hole])
    np.testing.assert_array_equal(a["loss_mask"][~hole], b["loss_mask"][~hole])
    bundle_tokens = sound.batches.prepared_stores[0].bundle_tokens
    assert 0.5 * bundle_tokens < hole.sum() <= bundle_tokens


def test_damage_in_held_out_data_is_counted_too(directory):
    config = make_config(path=str(directory), on_corrupt="skip", windows=64)
    stream = pipeline.train_stream(config, TOK)

    def learnt():
        batches = windows.eval_batches(config, TOK, damaged=stream.damaged)
        return sum(batch["loss_mask"].sum() for batch in batches)

    sound = learnt()
    path, offset, _ = place_of(directory, 0, 0, split="held_out")
    damage(path, offset + 100)
    pipeline.train_stream(config, TOK)  # another one in this program changes nothing
    assert learnt() < sound and stream.metrics()["data/corrupt"] == 1


@pytest.mark.parametrize("on_corrupt", ["stop", "skip"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        OSError(5, "Input/output error"),
        ValueError("odd client"),
    ],
)
def test_what_the_bytes_do_not_prove_is_no_damage(directory, monkeypatch, on_corrupt, error):
    monkeypatch.setattr(prepared_store, "PAUSES", (0.001,) * 5)
    store = PreparedStore(str(directory), on_corrupt=on_corrupt)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "cat_file", fail)
        check_storage_error(r"cannot read shard train-00000", store.read_spans, [(0, 10)])
    assert not store.corrupt and store.retries == 5
    assert len(contents(store)) == store.num_tokens  # it passes


def test_manifest_and_index_are_checked(directory, tmp_path):
    check_refused(
        "not a prepared directory", prepared_store.load_manifest, str(tmp_path / "nothing")
    )
    damage(directory / shard_format.SHARDS, 5)
    check_storage_error("damaged", PreparedStore, str(directory))
    assert prepared_store.verify(str(directory))
    manifest = directory / shard_format.MANIFEST
    manifest.write_text(manifest.read_text().replace('"bos_id": 256', '"bos_id": 255'))
    elsewhere = "into another directory"  # there prepare_data refuses it, too
    check_refused(f"changed after it was written.*{elsewhere}", PreparedStore, str(directory))
    manifest.write_text("{")
    check_refused(f"not a manifest.*{elsewhere}", PreparedStore, str(directory))


def test_the_cache_is_bounded(directory):
    store = PreparedStore(str(directory), cache_bytes=40_000)
    for start in range(0, store.num_tokens - 10, 700):
        store.read_spans([(start, start + 10)])
        assert store.cache._size <= 40_000
    assert len(store.cache._entries) > 1


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer/zaya_tokenizer.json", None, "tokenizer is not the manifest's"),
        ("tokenizer/zaya_tokenizer.json", b"{", "tokenizer cannot be read: "),
        ("train-00001.tokens", None, "shard train-00001.tokens is missing"),
        ("train-09999.tokens", b"", "train-09999.tokens does not belong to the prepared directory"),
        ("shards.bin", None, "has no shards.bin, which its manifest names"),
    ],
)
def test_verifying_names_it(directory, name, content, problem):
    (directory / name).unlink(missing_ok=True)
    if content is not None:
        (directory / name).write_bytes(content)
    elsewhere = [copied_to("memory", directory, name)] if "tokenizer" not in name else []
    for address in (str(directory), *elsewhere):
        (found,) = prepared_store.verify(address)
        assert problem in found


def test_a_damaged_table_is_one_problem(directory):
    store = PreparedStore(str(directory))
    damage(directory / store.shard_file(0), int(store.shards["places_at"][0]) + 100)
    renamed = directory.rename(directory.with_name("a;b"))
    (problem,) = prepared_store.verify(str(renamed))
    assert problem == f"corrupt table of bundles of shard {store.shard_file(0)}: CRC32C differs"


@pytest.mark.parametrize("kind", ["flip", "truncate", "zero", "swap", "grow"])
def test_damage_of_any_kind_is_named_and_never_read(directory, kind):
    rng, store = random.Random(kind), PreparedStore(str(directory))
    sound = bundles(store)
    for _ in range(4):
        path = directory / store.shard_file(rng.randrange(store.num_shards))
        content = path.read_bytes()
        at = rng.randrange(1024, len(content))
        damaged = {
            "flip": content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
            "truncate": content[:at],
            "zero": content[:at] + bytes(len(content[at : at + 4096])) + content[at + 4096 :],
            "swap": content[at - 512 : at] + content[512 : at - 512] + content[:512] + content[at:],
            "grow": content + rng.randbytes(100),
        }[kind]
        assert damaged != content
        path.write_bytes(damaged)
        assert any(path.name in problem for problem in prepared_store.verify(str(directory)))
        skipping = PreparedStore(str(directory), on_corrupt="skip")
        found = bundles(skipping)
        for key, bundle in found.items():
            if bundle.real.all():
                np.testing.assert_array_equal(bundle.tokens, sound[key].tokens)
        assert len(skipping.corrupt) == sum(not bundle.real.any() for bundle in found.values())
        path.write_bytes(content)


@pytest.mark.slow
def test_storage_is_sized_by_a_prepared_directory(tmp_path, prepare_text):
    data = prepare_text("web", 6000, bundle_bytes=65536, longest=3000, shards=1)
    (tmp_path / "s").mkdir()
    before, old = tmp_path / "s" / "storage.json", tmp_path / "old.json"
    before.write_text("before")
    old.hardlink_to(before)  # a file that is written in place changes under its other name too
    command = [
        sys.executable,
        "-m",
        "experiments.characterize",
        "storage",
        f"--data={data}",
        f"--out={tmp_path / 's'}",
        "--iops_budget=70000",
        "--seconds=0.3",
        "--rows=2",
        "--seq_len=512",
    ]
    sized = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert sized.returncode == 0, sized.stderr
    assert "break-even" in sized.stdout and "70,000" in sized.stdout
    assert "Page reads a second by step time" in (tmp_path / "s" / "storage.html").read_text()
    figures = json.loads((tmp_path / "s" / "storage.json").read_text())
    cold, warm = figures["readings"]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    # Of a short time many bundles are read that the next rows would have shared: only what was
    # counted can be held.
    asked = (cold["bytes_read"] / shard_format.PAGE_BYTES + cold["reads"]) / (
        cold["bytes_ideal"] / shard_format.PAGE_BYTES
    )
    factor = json.loads((data / "manifest.json").read_text())["storage_factor"]
    assert 1 < factor < 1.2 and figures["sigma"] == pytest.approx(max(asked, factor))
    assert old.read_text() == "before"  # a kill finds the old file or the new one
