"""Makes the stream of training batches.

A batch is a pure function of (seed, config, step): the mixture says which source each row comes
from and how many rows that source gave before, the source's order which of its rows that is, and
its layout which tokens the row holds. Grain runs ahead of the training step; its element t is the
batch of step t, so a stream's whole state is one integer, and each process computes only its own
rows of the global batch.

After rolling back to step c, a run can skip the batches that it has already read, given as
[c, count]: from step c on, each source continues after the last row that it gave in them. Steps
stay as planned, with their phase, batch size and mixture. An era that starts inside the gap skips
the gap's rows.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zaya_jax.config import Config, UserError
from zaya_jax.data import layout, mix, order, pack, shuffle
from zaya_jax.data.pack import Batch, Span
from zaya_jax.data.prepared_store import PreparedStore
from zaya_jax.data.stores import (
    TokenStore,
    check_tokenizer,
    fill,
    local_rows,
    open_store,
    refuse_doubles,
)
from zaya_jax.text import chat_template
from zaya_jax.text.tokenizers import Tokenizer

PREFETCH_BATCHES, DEVICE_BATCHES = 4, 2
# Combines the figures of several processes (`Stream.metrics`) into one; others are averaged.
OVER_PROCESSES: dict[str, Callable] = {
    "data/wait_fraction": np.max,
    "data/retries": np.sum,
    "data/corrupt": np.sum,  # each process counts a bundle once
}
# The fraction of the machine's memory for the open blocks of one source in one process; beyond it
# some bundles are read more than once.
CACHE_FRACTION = 1 / 16
_log = logging.getLogger(__name__)
# Grain may read with several threads, and planning a packed source takes long.
_planning_lock = threading.Lock()


class SourceRows:
    """One source in an era: its store, how that is cut into rows, and the order in which they
    come."""

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        packing: str,
        batch_rows: tuple[int, int],
        key: int,
        rounds: int,
    ) -> None:
        self.store = store
        self.layout = layout.layout_of(store, seq_len, packing)
        most, usual = batch_rows
        if self.layout.num_rows < most:
            _log.warning(
                "%s has %d rows of %d tokens, fewer than the %d that one batch takes of it: rows"
                " come up to %d times in a batch",
                store.name,
                self.layout.num_rows,
                seq_len,
                most,
                layout.ceil_div(most, self.layout.num_rows),
            )
        block_rows = order.BLOCK_BUNDLES * store.bundle_tokens // seq_len
        if packing != "concat" and block_rows:  # the documents of a row lie anywhere in its unit
            block_rows = max(block_rows, layout.UNIT_ROWS)
        self.order = order.RowOrder(self.layout.num_rows, most, usual, block_rows, key, rounds)

    def spans(self, numbers: np.ndarray) -> list[list[Span]]:
        """The spans of the rows that come as these numbers."""
        return [self.layout.spans(int(row)) for row in self.order.rows(numbers)]

    def in_slot_order(self, numbers: np.ndarray) -> np.ndarray:
        """All rows of a step in the order in which they lie in the batch: a block's rows stay in
        one slot, and an epoch's come before the next one's.

        A source contributes a fractional number of rows per step, so in the order in which they
        come a block would drift across the slots, and several processes would each read every block.
        """
        if self.order.block_rows == 1:
            return numbers
        return numbers[np.lexsort((self.order.slots(numbers), numbers // self.order.num_rows))]

    def reserve_cache(self, fraction: float) -> None:
        """Size the store's cache for what this process reads of all open blocks at a time; it reads
        this fraction of the source."""
        store = self.store
        if not isinstance(store, PreparedStore) or self.order.block_rows == 1:
            return
        # A visit to a block reads a row of `Concat`, or from all over a unit of `BestFit`; either
        # begins and ends inside a bundle. Decoded, a token has two flags. With somewhat less memory
        # than this, each bundle is read at each visit: the least recently used one is the next one
        # wanted.
        block_tokens = self.layout.unit_tokens + 2 * store.bundle_tokens
        block_bytes = block_tokens * (store.manifest["token_bytes"] + 2)
        open_blocks = self.order.most_open * fraction
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = min(int(open_blocks * block_bytes), int(machine * CACHE_FRACTION))
        store.cache.limit = max(store.cache.limit, wanted)
        # Each open block may lie in two shards of its own.
        store.bundle_tables.limit = max(store.bundle_tables.limit, 2 * int(open_blocks + 1))


@dataclasses.dataclass(frozen=True)
class Era:
    """Consecutive steps of one context length and packing. Each starts a new order of its sources,
    because their rows are cut in another way."""

    number: int
    first_step: int
    stop: float  # the next era's first step; the last era has no end
    seq_len: int
    packing: str
    mixture: mix.Mixture

    def skipping(self, first: int, stop: int) -> "Era":
        """This era without the rows that its steps from `first` to `stop` - 1 took."""
        first, stop = max(first, self.first_step), int(min(stop, self.stop))
        if first >= stop:
            return self
        return dataclasses.replace(self, mixture=self.mixture.skipping(first, stop))


class Batches:
    """Random access to the batches of a run: element t is this process's rows of the batch of step
    t."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        process: tuple[int, int] = (0, 1),
        rounds: int = order.MIN_ROUNDS,  # with fewer, tests order small sources as large ones are
    ) -> None:
        self.data = config.data
        self.process = process
        self.pad_id = tokenizer.pad_id
        self._rounds = rounds
        self._seed = config.run.seed
        self._tokenizer_hash = tokenizer.sha256
        if config.data.chats:
            self._tokenizer_hash += chat_template.fingerprint(tokenizer)
        # A fork's rows come in another order than its parent's.
        self._fork = (config.run.fork_step,) if config.run.fork_step else ()
        check_tokenizer(config, tokenizer)
        paths, stretches = mix.plan_sources(config)
        self._stores = [open_store(config, path, tokenizer) for path in paths]
        self.prepared_stores = [s for s in self._stores if isinstance(s, PreparedStore)]
        self.notes = [store.note for store in self._stores if store.note]
        for stretch in stretches:
            self._check_stores(stretch)
        self.notes = list(dict.fromkeys(self.notes))
        self._planned = _eras(stretches)
        self.skip_batches(())  # none yet: makes `eras`, `skipped` and `_sources`

    def _check_stores(self, stretch: mix.Stretch) -> None:
        """UserError where the sources of a stretch do not fit together or into its rows."""
        weighted = zip(self._stores, stretch.weights, strict=True)
        used = [store for store, weight in weighted if weight]
        refuse_doubles(used)
        for store in used:
            if isinstance(store, PreparedStore) and store.chat_context:
                store.require_context(stretch.seq_len)
                if stretch.packing == "concat":
                    self.notes.append(
                        f"{store.name}: packing=concat cuts chats at the ends of rows, which"
                        " packing=best_fit keeps whole"
                    )

    def skip_batches(self, ranges: Sequence[Sequence[int]]) -> None:
        """Skip these batches, [step, count]: all ranges of the run, in the order of the
        decisions."""
        self.skipped = [list(item) for item in ranges]
        self.eras = list(self._planned)
        latest = 0
        for first, count in self.skipped:
            # Where an earlier range begins later, the run has once read all steps before that: they
            # stay skipped, too.
            stop = max(first + count, latest)
            latest = max(latest, first)
            self.eras = [era.skipping(first, stop) for era in self.eras]
        self._sources: dict[tuple[int, int], SourceRows] = {}

    def skipped_before(self, step: int) -> list[list[int]]:
        """The skipped ranges that affect any batch before `step`."""
        affecting = [i for i, (first, _) in enumerate(self.skipped) if first < step]
        return self.skipped[: affecting[-1] + 1] if affecting else []

    def _era_of(self, step: int) -> Era:
        return next(era for era in self.eras if step < era.stop)

    def fingerprint(self, step: float) -> str:
        """A hash of everything that the batches before a step depend on: of the eras that have
        begun by then."""
        begun = max(1, sum(era.first_step < step for era in self._planned))
        facts: list[Any] = [
            order.VERSION,
            self._tokenizer_hash,
            self._seed,
            self.data.cross_documents,
            self._fork,
        ]
        for era in self._planned[:begun]:
            facts.append([era.number, era.first_step, era.seq_len, era.packing])
            for stretch in era.mixture.stretches:
                weighted = zip(self._stores, stretch.weights, strict=True)
                weights = [(store.fingerprint, weight) for store, weight in weighted if weight]
                facts.append([stretch.first_step, stretch.batch, weights])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return 1 << 48  # epochs without end

    def __getitem__(self, step: int) -> Batch:
        era = self._era_of(step)
        _, stretch = era.mixture.stretch_of(step)
        slots = np.array(local_rows(stretch.batch, self.process))
        rows = pack.BatchBuilder(len(slots), era.seq_len, self.pad_id)
        batch_sources = era.mixture.sources(step)  # of each slot of the global batch
        our_sources = batch_sources[slots]
        for k in np.unique(our_sources):
            source = self.source(era, int(k))
            numbers = source.in_slot_order(era.mixture.row_numbers(step, k)[batch_sources == k])
            # Our slots are neighbours, so our rows of a source are neighbours among its rows.
            first = int(np.count_nonzero(batch_sources[: slots[0]] == k))
            row_ids = np.flatnonzero(our_sources == k)
            fill(source.store, rows, row_ids, source.spans(numbers[first : first + len(row_ids)]))
        return rows.build(self.data.cross_documents)

    def source(self, era: Era, k: int) -> SourceRows:
        """One of the sources in an era, made when it is first wanted: a packed one is planned
        then."""
        with _planning_lock:
            if (era.number, k) not in self._sources:
                # Those of the neighbours stay: readers ahead cross an era's border to and fro.
                self._sources = {
                    key: source
                    for key, source in self._sources.items()
                    if abs(key[0] - era.number) < 2
                }
                self._sources[era.number, k] = self._make_source(era, k)
            return self._sources[era.number, k]

    def _make_source(self, era: Era, k: int) -> SourceRows:
        store = self._stores[k]
        # By its content, not by its place among all sources: a path that moves may change that.
        content = hashlib.sha256(store.fingerprint.encode()).digest()
        key = shuffle.key(
            self._seed, int.from_bytes(content[:8], "little"), era.number, *self._fork
        )
        batch_rows = era.mixture.batch_row_counts(k)
        source = SourceRows(store, era.seq_len, era.packing, batch_rows, key, self._rounds)
        source.reserve_cache(1 / self.process[1])
        return source


def _eras(stretches: list[mix.Stretch]) -> list[Era]:
    """The eras of a run; the last first, since each ends where the next one begins."""
    eras: list[Era] = []
    stop = math.inf
    groups = [
        [*group]
        for _, group in itertools.groupby(
            stretches, lambda stretch: (stretch.seq_len, stretch.packing)
        )
    ]
    for number, group in reversed(list(enumerate(groups))):
        first = group[0]
        mixture = mix.Mixture(group)
        eras.insert(0, Era(number, first.first_step, stop, first.seq_len, first.packing, mixture))
        stop = first.first_step
    return eras


class Stream(Iterator[Any]):
    """An endless iterator over batches with an exact, small state: that of the last batch given
    out.

    Grain computes batches ahead; after `send_with` they are on the devices before the step asks.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.damaged = set[str]()  # bundles of held-out data, which evaluation adds
        self._step = 0
        self._put: Callable[[Batch, int], Any] | None = None
        self._iterator: Any = None
        self._waited = 0.0
        self._since = time.perf_counter()
        self._efficiency = list[float]()

    def send_with(self, put: Callable[[Batch, int], Any]) -> None:
        """From here on give `put(batch, number of its step)`, made in a thread, DEVICE_BATCHES
        ahead of the step.

        `put` is, say, `lambda batch, _: jax.device_put(batch, shardings)`.
        """
        self.close()
        self._put = put

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            if self._iterator is None:
                self._iterator = self._start()
            batch, efficiency = next(self._iterator)
        # batches that were fetched ahead are gone or half given: the next call begins anew
        except BaseException:
            self.close()
            raise
        self._step += 1
        self._waited += time.perf_counter() - began
        self._efficiency.append(efficiency)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The state for `set_state` to go on after the last batch given, on any number of
        processes."""
        state = {
            "step": self._step,
            "order": order.VERSION,
            "fingerprint": self.batches.fingerprint(self._step),
            "whole": self.batches.fingerprint(math.inf),  # of phases to come, too
        }
        ranges = self.batches.skipped_before(self._step)
        return state | ({"passed_over": ranges} if ranges else {})

    def skip_batches(self, ranges: Sequence[Sequence[int]]) -> None:
        """Skip these batches, [step, count]: all that were ever skipped in this run."""
        self.close()
        self.batches.skip_batches(ranges)

    def set_state(self, state: dict[str, Any]) -> str:
        """Resume from a saved state; UserError where data, tokenizer, seed or batch shape differ,
        except for a state from `forked`.

        Returns a note where those of later phases differ.
        """
        # Versions before 25 November 2026 had "left_out", of another rule.
        if "left_out" in state or ("fingerprint" in state and state.get("order") != order.VERSION):
            raise UserError(
                "this checkpoint was written by a version with a different data order, so the run"
                " cannot resume exactly; go on with the program that wrote it, or begin a new"
                " workdir with config.run.init_from naming this run's folder"
            )
        step = int(state["step"])
        expected = self.batches.fingerprint(step)
        if state.get("fingerprint", expected) != expected:
            raise UserError(
                f"the data is not what this run began with (fingerprint {expected}, its checkpoint"
                f" has {state['fingerprint']}): corpus, tokenizer, run.seed or a key that"
                " decides batches differs, in this or a later phase of the same context and"
                " packing; restore them, or start a new workdir"
            )
        self.close()
        self._step = step
        ranges = [list(item) for item in state.get("passed_over", [])]
        # Those that come later may have been decided already.
        if self.batches.skipped_before(step) != ranges:
            self.batches.skip_batches(ranges)
        if "fingerprint" not in state:
            return "note: this fork reads its data from the beginning, in an order of its own"
        if state.get("whole") != self.batches.fingerprint(math.inf):
            return (
                "note: data or batch sizes of phases that have not begun have changed since the"
                " checkpoint"
            )
        return ""

    def metrics(self) -> dict[str, float]:
        """Counts of reading, with the damage in held-out data; since the last call, the share of
        time that the step waited here, and the share of positions that had a token in the batches
        given out.
        """
        stores = self.batches.prepared_stores
        now = time.perf_counter()
        figures: dict[str, float] = {
            "data/retries": sum(store.retries for store in stores),
            "data/corrupt": len(self.damaged.union(*(store.corrupt for store in stores))),
            "data/wait_fraction": self._waited / max(now - self._since, 1e-9),
        }
        if self._efficiency:
            figures["data/efficiency"] = sum(self._efficiency) / len(self._efficiency)
        self._waited, self._since, self._efficiency = 0.0, now, []
        return figures

    def close(self) -> None:
        """Stop reading ahead; the stream can go on afterwards."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None

    def _start(self) -> Any:
        """Grain's iterator over (batch, share of its positions that have a token), from the step
        on."""
        # Imported here: it brings jax and orbax, 1.3 s of a core.
        import grain

        first = self._step
        put = self._put
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH_BATCHES)

        def finish(index: int, batch: Batch) -> tuple[Any, float]:
            efficiency = float((batch["segment_ids"] > 0).mean())
            return put(batch, first + index + 1) if put else batch, efficiency

        dataset = grain.MapDataset.source(self.batches)[first:].to_iter_dataset(ahead)
        dataset = dataset.map_with_index(finish)
        if put:
            dataset = grain.experimental.ThreadPrefetchIterDataset(
                dataset, prefetch_buffer_size=DEVICE_BATCHES
            )
        return iter(dataset)


def forked(state: dict[str, Any]) -> dict[str, Any]:
    """The state with which a fork begins, from its parent's."""
    return {"step": state["step"]}


def train_stream(config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1)) -> Stream:
    """The training batches of a config, of each the rows of process (index, count)."""
    return Stream(Batches(config, tokenizer, process))
