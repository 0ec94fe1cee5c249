"""Streams over prepared shards: the same batches from any number of processes, resumed anywhere,
nothing lost and nothing repeated, whatever the sizes.
"""

import collections
import concurrent.futures
import json
import shutil
import tracemalloc

import google_crc32c
import numpy as np
import pytest
from data_helpers import calls_of, in_memory, jsonl, make_config, prepared, side_by_side, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import check_refused

from zaya_jax import schedule
from zaya_jax.config import Phase
from zaya_jax.data import layout, order, pipeline, prepared_store, windows
from zaya_jax.text import prepare, shard_format, tokenizers

TOK = tokenizers.load("bytes")
SLOW = pytest.mark.slow


@pytest.fixture
def directories(prepare_text):
    return [str(prepare_text("web", 400)), str(prepare_text("code", 150, seed=1))]


def joined(config, count, steps, state=None, rounds=order.MIN_ROUNDS):
    """The global batches of `steps` steps, put together from `count` processes, and the state after
    them."""
    parts, states = [], []
    for index in range(count):
        stream = pipeline.Stream(pipeline.Batches(config, TOK, (index, count), rounds))
        stream.set_state(state or stream.get_state())
        parts.append([next(stream) for _ in range(steps)])
        states.append(stream.get_state())
        stream.close()
    assert states == states[:1] * count
    return [side_by_side(several) for several in zip(*parts, strict=True)], states[0]


@pytest.mark.parametrize(
    ("rounds", "packing"),
    [
        (1, "concat"),
        (1000, "best_fit"),
        *(pytest.param(*case, marks=SLOW) for case in ((1000, "concat"), (1, "best_fit"))),
    ],
)
def test_any_number_of_processes_gives_the_same_stream(monkeypatch, directories, rounds, packing):
    monkeypatch.setattr(layout, "UNIT_ROWS", 8)
    mixture = tuple(f"{d}={w}" for d, w in zip(directories, (0.7, 0.3), strict=True))
    config = make_config(mixture=mixture, packing=packing, seq_len=128)
    whole, _ = joined(config, 1, 60, rounds=rounds)
    for count in (2, 4, 8):
        np.testing.assert_equal(joined(config, count, 6, rounds=rounds)[0], whole[:6])
    # stopped in the middle of an epoch, continued by another number of processes, and stopped again
    _, state = joined(config, 4, 23, rounds=rounds)
    some, state = joined(config, 2, 17, state, rounds)
    rest, _ = joined(config, 8, 20, state, rounds)
    np.testing.assert_equal(some + rest, whole[23:])


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_document_comes_once_an_epoch_from_any_sources(data):
    """Sizes, batches, lengths, processes, packings and mixtures: documents are put together from
    batches, counted."""
    draw = data.draw
    num_sources, seq_len = draw(st.integers(1, 3)), draw(st.integers(2, 40))
    batch, bundle = draw(st.integers(1, 24)), draw(st.sampled_from([0, 7, 64]))
    processes = draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    sizes = [
        draw(st.lists(st.integers(1, 90), min_size=1, max_size=60)) for _ in range(num_sources)
    ]
    firsts = np.cumsum([1, *(sum(s) for s in sizes)])
    stores = {f"s{k}": in_memory(s, firsts[k], bundle) for k, s in enumerate(sizes)}
    weights = [draw(st.floats(0.1, 1)) for _ in sizes]
    config = make_config(
        mixture=tuple(f"s{k}={w}" for k, w in enumerate(weights)),
        seq_len=seq_len,
        global_batch=batch,
        packing=draw(st.sampled_from(["concat", "best_fit"])),
        run_seed=draw(st.integers(0, 99)),
        vocab_size=1 << 20,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "open_store", lambda _, path, __: stores[path])
        rounds = draw(st.integers(1, 2))
        parts = [pipeline.Batches(config, TOK, (i, processes), rounds) for i in range(processes)]
        era = parts[0].eras[0]
        rows = [parts[0].source(era, k).layout.num_rows for k in range(num_sources)]
        given_rows = [[] for _ in rows]
        step = 0
        while any(len(held) < n for held, n in zip(given_rows, rows, strict=True)):
            batch = side_by_side([part[step] for part in parts])
            owner = np.searchsorted(firsts, batch["tokens"][:, 0], side="right") - 1
            for k in range(num_sources):
                mine = [
                    (tokens[segments > 0], segments[segments > 0])
                    for tokens, segments in zip(
                        batch["tokens"][owner == k], batch["segment_ids"][owner == k], strict=True
                    )
                ]
                times = collections.Counter(int(tokens[0]) for tokens, _ in mine)
                fewest = len(mine) // rows[k]  # none twice, unless the source has not as many
                assert {*times.values()} <= {fewest, fewest + 1}
                assert len(times) == min(len(mine), rows[k])
                given_rows[k] += mine
            step += 1
            assert step < 3000
    for k, lengths in enumerate(sizes):
        epoch = given_rows[k][: rows[k]]
        came = np.sort(np.concatenate([tokens for tokens, _ in epoch]))
        np.testing.assert_array_equal(came, np.arange(firsts[k], firsts[k + 1]))
        document = np.repeat(np.arange(len(lengths)), lengths)
        # a segment is a stretch of one document, and only a cut begins another
        for tokens, segments in epoch:
            for s in range(1, segments.max() + 1):
                segment = tokens[segments == s]
                assert (np.diff(segment) == 1).all()
                assert len(set(document[segment - firsts[k]])) == 1


def test_phases_change_context_batch_and_mixture(directories):
    web, code = directories
    phases = (
        Phase(tokens=64 * 8 * 10, mixture=(f"{web}=1",), ramp_from=2, ramp_tokens=64 * 8 * 4),
        Phase(tokens=128 * 8 * 10, seq_len=128, mixture=(f"{web}=0.5", f"{code}=0.5")),
    )
    whole, _ = joined(make_config(phases=phases, micro_batch=2), 1, 30)
    shapes = [b["tokens"].shape for b in whole]
    assert list(dict.fromkeys(shapes)) == [(2, 64), (4, 64), (8, 64), (8, 128)]
    first = shapes.index((8, 128))
    assert (names(whole[:first]), names(whole[first:])) == ({"web"}, {"web", "code"})


def test_a_phase_that_leaves_its_batch_open_is_evaluated_as_any(directories):
    """Its values come from outside the phases; another phase's in their place would make it one
    that cannot be."""
    other = {"global_batch": 12, "micro_batch": 12, "seq_len": 32}
    phases = (
        Phase(tokens=64 * 8, micro_batch=8),
        Phase(tokens=32 * 12, mixture=(f"{directories[1]}=1",), **other),
    )
    config = make_config(path=directories[0], phases=phases)
    for segment in schedule.make_plan(config).segments:
        batches = windows.eval_batches(
            windows.eval_config(config, segment.phase), TOK, batch_rows=4, damaged=set()
        )
        assert batches[0]["tokens"].shape == (4, segment.phase.eval_seq_len)
        # the whole run's sources
        assert names(batches) == {"web", "code"}


def test_a_source_without_a_held_out_window_is_named(directories, caplog):
    sources = tuple(f"{directory}=1" for directory in directories)
    assert windows.eval_batches(make_config(mixture=sources, windows=2), TOK, damaged=set())
    assert not caplog.messages
    assert windows.eval_batches(make_config(mixture=sources, windows=1), TOK, damaged=set())
    assert caplog.messages == [
        f"{directories[0]} gives no held-out window: eval.windows=1 are fewer than the 2 sources"
    ]


def test_a_moved_path_changes_nothing_and_other_data_to_come_is_said(directories, tmp_path):
    web, code = directories

    def config(first, second):
        phases = (
            Phase(tokens=64 * 8 * 5, mixture=(f"{first}=1",)),
            Phase(tokens=128 * 8 * 5, seq_len=128, mixture=(f"{second}=1",)),
        )
        return make_config(phases=phases)

    _, state = joined(config(web, web), 1, 3)
    rest, _ = joined(config(web, web), 1, 7, state)
    shutil.copytree(web, tmp_path / "copy")
    moved = pipeline.train_stream(config(tmp_path / "copy", web), TOK)
    assert moved.set_state(state) == ""
    np.testing.assert_equal([next(moved) for _ in range(7)], rest)
    other = pipeline.train_stream(config(web, code), TOK)
    assert "phases that have not begun" in other.set_state(state)


def test_the_same_data_twice_is_refused(directories):
    config = make_config(mixture=(f"{directories[0]}=1", f"{directories[0]}/=1"))
    check_refused("the same data twice", pipeline.Batches, config, TOK)


@pytest.mark.parametrize("other", ["{}/sub", "{}/sub/*", "{}/link", "{}/sub/0.txt"])
def test_a_file_of_two_sources_is_refused(tmp_path, other):
    texts = {f"{folder}{i}.txt": f"{folder}{i}" for folder in ("", "sub/") for i in range(4)}
    root = write(tmp_path / "corpus", texts)
    (root / "link").mkdir()
    (root / "link" / "hard.txt").hardlink_to(root / "0.txt")
    mixture = (f"{root}=1", f"{other.format(root)}=1")
    said = r"has the same data twice \([14] files\): batches"
    check_refused(said, pipeline.Batches, make_config(mixture=mixture), TOK)
    phases = tuple(Phase(tokens=512, mixture=(one,)) for one in mixture)
    pipeline.Batches(make_config(phases=phases), TOK)  # one after the other


@pytest.mark.parametrize("contexts", [(256, 128), (128, 256), (256, 256), (0, 256)])
def test_chats_are_not_read_into_rows_shorter_than_their_context(tmp_path, contexts):
    answer = {"role": "assistant", "content": "<think>" + "word " * 60 + "</think>yes"}
    records = [{"messages": [{"role": "user", "content": f"{i}?"}, answer]} for i in range(40)]
    write(tmp_path, {"c.jsonl": jsonl(records)})
    directories = tmp_path / "first", tmp_path / "second"
    for directory, size in zip(directories, contexts, strict=True):
        prepared(
            prepare.Options([str(tmp_path / "c.jsonl")], context=size, held_out=0.1), directory
        )
    first, second = ((f"{directory}=1",) for directory in directories)
    phases = (
        Phase(tokens=2048, seq_len=128, packing="best_fit", mixture=first),
        Phase(tokens=2048, seq_len=256, packing="concat", mixture=second),
    )
    config = make_config(phases=phases, seq_len=128)
    if contexts[0] > 128:
        check_refused(
            "for a context of 256, and rows of 128 tokens would", pipeline.Batches, config, TOK
        )
    else:
        (note,) = pipeline.Batches(config, TOK).notes
        assert note.startswith(f"{directories[1]}: packing=concat cuts chats at the ends of rows")


def test_a_directory_with_texts_does_not_pass_as_chats(tmp_path):
    chat = {"prompt": "?", "completion": "!"}
    write(tmp_path, {"c.jsonl": jsonl([chat] * 30 + [{"text": "a text"}] * 7)})
    prepared(prepare.Options([str(tmp_path / "c.jsonl")], context=64), tmp_path / "out")
    config = make_config(path=str(tmp_path / "out"), packing="best_fit", chats=True)
    said = "out holds 30 chats and 7 texts, prepared for --context=64, but"
    check_refused(said, pipeline.Batches, config, TOK)


def test_a_shard_s_table_is_read_once_while_its_block_is_open(prepare_text, monkeypatch):
    monkeypatch.setattr(prepared_store, "CACHED_BUNDLE_TABLES", 2)
    monkeypatch.setattr(order, "BLOCK_BUNDLES", 2)
    config = make_config(path=str(prepare_text("web", 900, shards=12)), global_batch=16)
    batches = pipeline.Batches(config, TOK, rounds=1)
    source, (store,) = batches.source(batches.eras[0], 0), batches.prepared_stores
    assert source.order.block_rows > 1 and source.order.most_open > store.num_shards
    tables = calls_of(monkeypatch, prepared_store.PreparedStore, "_read_table")
    for step in range(source.layout.num_rows // 16):
        batches[step]
    assert sorted(shard for _, shard, *_ in tables) == list(range(store.num_shards))


def test_readers_that_cross_an_era_s_border_plan_each_source_once(directories, monkeypatch):
    phases = tuple(Phase(tokens=2048, seq_len=size) for size in (64, 128))
    batches = pipeline.Batches(make_config(path=directories[0], phases=phases), TOK)
    made = calls_of(monkeypatch, pipeline.SourceRows, "__init__")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(batches.__getitem__, [2, 3, 4, 5] * 4))
    assert len(batches.eras) == len(made) == 2


def names(batches):
    """The sources whose names stand in the batches' texts."""
    text = "".join(TOK.decode(row) for batch in batches for row in batch["tokens"])
    return {name for name in ("web", "code") if name in text}


@pytest.mark.parametrize(
    ("num_sources", "packing"),
    [(1, "concat"), (2, "best_fit"), pytest.param(2, "concat", marks=SLOW)],
)
def test_bundles_are_read_about_once_whatever_the_processes(
    prepare_text, monkeypatch, num_sources, packing
):
    """Also of shares that are no whole number of rows: over processes each block stays in few
    hands."""
    first, second = (prepare_text(n, 1500, k, bundle_bytes=1024) for k, n in enumerate("ab"))
    mixture = (f"{first}=0.7", f"{second}=0.3")[:num_sources]
    config = make_config(mixture=mixture, seq_len=64, global_batch=16, packing=packing)
    reads = calls_of(monkeypatch, prepared_store.PreparedStore, "_read_bundle")
    counts = []
    for parts in (1, 4):
        reads.clear()
        for index in range(parts):
            batches = pipeline.Batches(config, TOK, (index, parts), rounds=1)
            for store in batches.prepared_stores:
                store.cache.limit = 0  # but for what its open blocks need
            for step in range(250):
                batches[step]
            source = batches.source(batches.eras[0], 0)
            assert source.order.block_rows > 8 and source.store.cache.limit > 0
            assert packing == "best_fit" or source.store.cache.limit < 800_000 / parts
        counts.append(len(reads))
    if packing == "concat":
        bundles = 250 * 16 * 64 / source.store.bundle_tokens
        per_block = source.order.block_rows * 64 / source.store.bundle_tokens
        assert counts[0] / bundles < 1 + 2.5 / per_block
    assert counts[1] < 1.6 * counts[0]


def test_a_start_on_a_huge_index_is_quick_and_small(tmp_path):
    """12T tokens in 120,000 shards; a start opens no shard, and reads their table."""
    table = np.zeros(120_000, shard_format.SHARD_TYPE)
    table["task"], table["tokens"] = np.arange(len(table)), 100_000_007
    table["bundles"] = -(-100_000_007 // 32768)
    (tmp_path / shard_format.SHARDS).write_bytes(table.tobytes())
    manifest = {
        "format": shard_format.FORMAT,
        "version": shard_format.VERSION,
        "corpus": 1,
        "token_bytes": 2,
        "bundle_tokens": 32768,
        "shards_crc32c": google_crc32c.value(table.tobytes()),
        "totals": {},
        "chats": None,
        "tokenizer": {"sha256": TOK.sha256},
    }
    sealed = manifest | {"sha256": shard_format.json_sha256(manifest)}
    (tmp_path / shard_format.MANIFEST).write_text(json.dumps(sealed))
    tracemalloc.start()
    batches = pipeline.Batches(make_config(path=str(tmp_path), seq_len=4096), TOK, (5, 1024))
    era = batches.eras[0]
    source = batches.source(era, 0)
    assert source.layout.num_rows > 2.9e9 and 64 <= source.order.block_rows <= 128
    spans = source.spans(era.mixture.row_numbers(12345, 0)[4:8])
    assert all(list(batches.prepared_stores[0]._bundles_of(*span)) for row in spans for span in row)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 << 20


def test_named_evaluations_without_windows_are_refused():
    config = make_config(eval_named=("code=x.txt",), windows=0)
    check_refused("windows=0 turns evaluation off, but eval.named", windows.named_paths, config)
