"""The stream of training batches, and the fixed batches of evaluation.

A batch is a pure function of (seed, config, step): the mixture says which source each row comes from and how
many rows that source gave before, the source's order says which tokens that row holds. Grain runs ahead of
the training step; its element t is the batch of step t, so a stream's whole state is one integer, and each
process computes its own rows of the global batch and nothing else.
"""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from zaya_jax.config import Config, Data, UserError
from zaya_jax.data import mix, order, pack, shuffle, sources, storage
from zaya_jax.data.pack import Batch, Piece
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.optim import schedule

PREFETCH_BATCHES = 4
# How several processes' figures (`Stream.metrics`) become one; the mean where nothing is said.
OVER_PROCESSES: dict[str, Callable] = {
    "data/wait_fraction": np.max,
    "data/retries": np.sum,
    "data/corrupt": np.sum,
}
# A source up to this size is shuffled row by row: all its bundles end up in the cache, 4 bytes a token with
# 16-bit ids.
WINDOW_TOKENS = 64 << 20

Store = order.Memory | storage.Prepared


class Source:
    """One source in an era: its store, and the order in which its rows come."""

    def __init__(
        self, store: Store, data: Data, seq_len: int, batch: int, key: int, most_here: int, lanes: bool
    ) -> None:
        self.store = store
        self.turns = 1
        big = lanes or int(store.lengths.sum()) > WINDOW_TOKENS
        most = None
        if big:  # lanes may hold at most about half an epoch between them
            while self.turns < order.LANES_PER_SLOT and len(store.lengths) >= 8 * self.turns * batch:
                self.turns *= 2
            most = len(store.lengths) // (2 * self.turns * batch)
        if data.packing == "concat":
            layout: order.Tape | order.Plan = order.Tape(store.lengths, seq_len)
        else:
            layout = order.Plan(store, seq_len, data.packing, store.pieces, most)
        self.windows = None if big else order.Windows(layout, key)
        self.lanes = order.Lanes(layout, key, batch * self.turns) if big else None
        self.batch = batch
        if big and isinstance(store, storage.Prepared):  # what the lanes here are reading stays in memory
            store.cache_bytes = max(store.lane_bytes, most_here * self.turns * lane_bytes(store, layout.unit))
            store.lane_bytes = store.cache_bytes

    def spans(self, mixture: mix.Mixture, source: int, step: int, slots: np.ndarray) -> list[list[Piece]]:
        """What these slots of the step's batch hold, all of which are this source's."""
        if self.windows is not None:
            return self.windows.rows(mixture.ranks(step, source)[slots])
        assert self.lanes is not None
        lanes = slots + self.batch * (step % self.turns)
        return self.lanes.rows(lanes, mixture.lane_counts(step, source, slots, self.turns))

    def fill(self, rows: pack.Rows, row_ids: np.ndarray, spans: list[list[Piece]]) -> None:
        """Read what the spans name and put it into these rows."""
        needed = sorted({bundle for row in spans for bundle, _, _ in row})
        bundles = self.store.read(needed)
        for row, pieces in zip(row_ids, spans, strict=True):
            for bundle, start, stop in pieces:
                rows.add(row, bundles[bundle], start, stop)


def lane_bytes(store: storage.Prepared, unit: int) -> int:
    """Memory that a lane needs not to read a bundle twice: what it is in and the next one, decoded (all lanes may
    change bundles at once).

    A lane is longer in a long bundle, so their sizes count by themselves: sum of squares over sum.
    """
    lengths = store.lengths.astype(np.float64)
    per_token = store.manifest["token_bytes"] + 2  # and two flags
    return int((unit + 1.1) * (lengths**2).sum() / lengths.sum() * per_token)


@dataclasses.dataclass(frozen=True)
class Era:
    """Steps of one context length: orders begin anew with each, since rows are of another size."""

    first_step: int
    seq_len: int
    mixture: mix.Mixture
    sources: list[Source]


class Batches:
    """Random access to the batches of a run: element t is this process's rows of the batch of step t."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1), lanes: bool = False
    ) -> None:
        # `lanes` measures the order of large sources on small ones.
        self.data, self.process, self.pad_id = config.data, process, tokenizer.pad_id
        paths, stretches = plan_sources(config)
        stores = [open_stores(config, path, tokenizer)[0] for path in paths]
        self.stores = [store for store in stores if isinstance(store, storage.Prepared)]
        self.eras: list[Era] = []
        for seq_len, group in itertools.groupby(stretches, key=lambda item: item[0]):
            here = [stretch for _, stretch in group]
            batch = max(s.batch for s in here)
            most_here = max(len(local_rows(s.batch, process)) for s in here)
            sources_here = [
                Source(
                    store,
                    config.data,
                    seq_len,
                    batch,
                    shuffle.key(config.run.seed, k, len(self.eras)),
                    most_here,
                    lanes,
                )
                for k, store in enumerate(stores)
            ]
            self.eras.append(Era(here[0].first_step, seq_len, mix.Mixture(here), sources_here))
        facts: list[Any] = [tokenizer.sha256, [s.fingerprint for s in stores], config.run.seed]
        facts += [config.data.packing, config.data.cross_documents]
        facts += [[seq_len, dataclasses.astuple(stretch)] for seq_len, stretch in stretches]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return 1 << 48  # epochs without end

    def __getitem__(self, step: int) -> Batch:
        era = next(e for e in reversed(self.eras) if e.first_step <= step)
        slots = np.array(local_rows(era.mixture.at(step)[1].batch, self.process))
        rows = pack.Rows(len(slots), era.seq_len, self.pad_id)
        from_source = era.mixture.sources(step)[slots]
        for k, source in enumerate(era.sources):
            row_ids = np.flatnonzero(from_source == k)
            if len(row_ids):
                source.fill(rows, row_ids, source.spans(era.mixture, k, step, slots[row_ids]))
        return pack.finish(rows, self.data.cross_documents)

    def counters(self) -> dict[str, int]:
        """What reading has met so far, over all sources: records, bytes, retries, corrupt records."""
        found = [vars(store.counters) for store in self.stores]
        return {name: sum(c[name] for c in found) for name in vars(storage.Counters())}


class Stream(Iterator[Batch]):
    """An endless iterator over batches with an exact, small state."""

    def __init__(self, batches: Batches, workers: int = 0) -> None:
        self.batches = batches
        self._workers = workers
        self._step = 0
        self._iterator: Any = None
        self._waited = 0.0
        self._since = time.perf_counter()
        self._places, self._real = 0, 0

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        if self._iterator is None:
            self._iterator = self._start()
        batch = next(self._iterator)
        self._step += 1
        self._waited += time.perf_counter() - begin
        self._places += batch["segment_ids"].size
        self._real += int(np.count_nonzero(batch["segment_ids"]))
        return batch

    def get_state(self) -> dict[str, int | str]:
        """What `set_state` needs to go on after the last batch given, on any number of processes and workers."""
        return {"step": self._step, "fingerprint": self.batches.fingerprint}

    def set_state(self, state: dict[str, int | str]) -> None:
        """Go on where the state was taken; UserError where data, tokenizer, seed or batch shape are not the
        same.
        """
        if state.get("fingerprint") != self.batches.fingerprint:
            raise UserError(
                f"the data is not what this run began with (fingerprint {self.batches.fingerprint}, its "
                f"checkpoint has "
                f"{state.get('fingerprint')}): corpus, tokenizer, run.seed or a data.* key that decides "
                f"batches differ; "
                "restore them, or start a new workdir"
            )
        self.close()
        self._step = int(state["step"])

    def metrics(self) -> dict[str, float]:
        """Since the last call: share of time spent waiting here, share of places filled; and reading's
        counters.
        """
        now = time.perf_counter()
        out = {
            "data/wait_fraction": self._waited / max(now - self._since, 1e-9),
            "data/efficiency": self._real / max(self._places, 1),
        }
        self._waited, self._since, self._places, self._real = 0.0, now, 0, 0
        counters = self.batches.counters()
        return {**out, "data/retries": counters["retries"], "data/corrupt": counters["corrupt"]}

    def close(self) -> None:
        """Stop reading ahead; the stream can go on afterwards."""
        if self._iterator is not None and hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = None

    def _start(self) -> Iterator[Batch]:
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH_BATCHES)
        dataset = grain.MapDataset.source(self.batches)[self._step :].to_iter_dataset(ahead)
        if self._workers:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._workers))
        return iter(dataset)


def train_stream(config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1)) -> Stream:
    """The training batches of a config; `process` is (index, count), and each gets its rows of every global
    batch.
    """
    check_tokenizer(config, tokenizer)
    return Stream(Batches(config, tokenizer, process), config.data.workers)


def eval_batches(config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1)) -> list[Batch]:
    """Fixed held-out batches of `eval.windows` windows, an equal share from each source, spread evenly over its text.

    The last batch is filled up with empty rows; without held-out text the list is empty.
    """
    check_tokenizer(config, tokenizer)
    data = config.data
    stores = [open_stores(config, path, tokenizer)[1] for path in plan_sources(config)[0]]
    stores = [store for store in stores if len(store.lengths)]
    rows: list[tuple[Store, list[Piece]]] = []
    for k, store in enumerate(stores):
        share = config.eval.windows * (k + 1) // len(stores) - config.eval.windows * k // len(stores)
        windows = order.Windows(order.Tape(store.lengths, data.seq_len), 0)
        share = min(share, windows.num_rows)
        chosen = np.arange(share) * windows.num_rows // max(share, 1)
        rows += [(store, spans) for spans in windows.windows(chosen)]
    mine = local_rows(data.global_batch, process)
    batches = []
    for begin in range(0, len(rows), data.global_batch):
        filled = pack.Rows(len(mine), data.seq_len, tokenizer.pad_id)
        for row, (store, spans) in enumerate(rows[begin : begin + data.global_batch][mine.start : mine.stop]):
            bundles = store.read(sorted({bundle for bundle, _, _ in spans}))
            for bundle, start, stop in spans:
                filled.add(row, bundles[bundle], start, stop)
        batches.append(pack.finish(filled, data.cross_documents))
    return batches


def plan_sources(config: Config) -> tuple[list[str], list[tuple[int, mix.Stretch]]]:
    """(paths of all sources, (context length, stretch) of each part of the run) from data.* and
    schedule.phases.
    """
    default = mix.parse(config.data.mixture) or {config.data.path: 1.0}
    if not config.schedule.phases:
        stretch = mix.Stretch(0, config.data.global_batch, tuple(default.values()))
        return list(default), [(config.data.seq_len, stretch)]
    segments = schedule.make_plan(config).segments
    named = [
        mix.parse(s.phase.mixture, f"config.schedule.phases[{s.phase_index}].mixture") or default
        for s in segments
    ]
    paths = list(dict.fromkeys(path for weights in named for path in weights))
    stretches = []
    for segment, weights in zip(segments, named, strict=True):
        row = tuple(weights.get(path, 0.0) for path in paths)
        stretches.append((segment.phase.seq_len, mix.Stretch(segment.first_step - 1, segment.sequences, row)))
    return paths, stretches


def local_rows(batch: int, process: tuple[int, int]) -> range:
    """The rows of a global batch that belong to process (index, count)."""
    index, count = process
    if batch % count:
        raise UserError(
            f"a global batch of {batch} sequences does not divide among {count} processes; give a multiple"
        )
    share = batch // count
    return range(index * share, (index + 1) * share)


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """UserError where the tokenizer has ids that the model's vocabulary lacks."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"config.data.tokenizer={config.data.tokenizer!r} has {tokenizer.vocab_size} ids, but "
            f"config.model.vocab_size={config.model.vocab_size}; raise the latter"
        )


_text_stores: dict[tuple[str, str], tuple[order.Memory, order.Memory]] = {}


def open_stores(config: Config, path: str, tokenizer: Tokenizer) -> tuple[Store, Store]:
    """(training, held-out) stores of a path; a text corpus is tokenised once a program."""
    if path != "stdlib" and storage.is_prepared(path):
        shards = storage.Prepared(path, "train", config.data.on_corrupt)
        made = shards.manifest["tokenizer"]
        if made["sha256"] != tokenizer.sha256:
            raise UserError(
                f"{path} was prepared with another tokenizer ({made['kind']}, {made['vocab_size']} ids) than "
                f"config.data.tokenizer={config.data.tokenizer!r}; set that to {storage.join(path, 'tokenizer')}"
            )
        if not len(shards.lengths):
            raise UserError(f"{path} holds no training tokens; prepare it with more input")
        return shards, storage.Prepared(path, "held_out", config.data.on_corrupt)
    key = (path, tokenizer.sha256)
    if key not in _text_stores:
        sides = sources.text_corpus(path, tokenizer)
        train, held_out = (
            order.Memory(path, side, hashlib.sha256(side.tokens).hexdigest()) for side in sides
        )
        _text_stores[key] = train, held_out
    return _text_stores[key]
