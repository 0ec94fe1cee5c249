"""Makes the stream of training batches.

A batch is a pure function of (seed, config, step): the mixture says which source each row comes
from and how many rows that source gave before, and the source's order says which tokens that row
holds. Grain runs ahead of the training step; its element t is the batch of step t, so a stream's
whole state is one integer, and each process computes only its own rows of the global batch.

After a run went back to step c, the batches that it had read since can be left out, as [c, how
many]: from c on, each source goes on behind the last row that it gave in them. Steps stay as
planned, with their phase, batch size and mixture. An era that starts inside the gap skips the gap's
rows.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zaya_jax.config import Config, UserError
from zaya_jax.data import mix, order, pack, shuffle, storage, workers
from zaya_jax.data.pack import Batch, Span
from zaya_jax.data.stores import (
    TokenStore,
    check_tokenizer,
    fill,
    local_rows,
    notes_on,
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
    "data/corrupt": np.sum,  # each process counts a piece once
}
# The share of the machine's memory for one process's bundles; beyond it some are read more than
# once.
CACHE_SHARE = 1 / 16
_log = logging.getLogger(__name__)
_planning = threading.Lock()  # Grain may read with several threads, and a packed source takes long


class Source:
    """One source in an era: its store, how that is cut into rows, and the order in which they
    come."""

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        packing: str,
        rows: tuple[int, int],
        key: int,
        rounds: int,
    ) -> None:
        self.store = store
        self.layout = order.layout_of(store, seq_len, packing)
        most, share = rows
        if self.layout.num_rows < most:
            _log.warning(
                "%s has %d rows of %d tokens, fewer than the %d that one batch takes of it: rows"
                " come up to %d times in a batch",
                store.name,
                self.layout.num_rows,
                seq_len,
                most,
                -(-most // self.layout.num_rows),
            )
        block_rows = order.BLOCK_BUNDLES * store.bundle_tokens // seq_len
        if packing != "concat" and block_rows:  # the documents of a row lie anywhere in its unit
            block_rows = max(block_rows, order.UNIT_ROWS)
        self.order = order.Order(self.layout.num_rows, most, share, block_rows, key, rounds)

    def spans(self, numbers: np.ndarray) -> list[list[Span]]:
        """The spans of the rows that come as these numbers."""
        return [self.layout.spans(int(row)) for row in self.order.rows(numbers)]

    def placed(self, numbers: np.ndarray) -> np.ndarray:
        """All rows of a step in the order in which they lie in the batch: a block's stay in one
        place of it, and an epoch's come before the next one's.

        In the order in which they come they would move on by a few places at each visit, since a
        source of a mixture does not give a whole number of rows per step: over three workers every
        block would be read by all of them.
        """
        if self.order.block_rows == 1:
            return numbers
        return numbers[np.lexsort((self.order.lane(numbers), numbers // self.order.num_rows))]

    def keep(self, share_here: float) -> None:
        """Makes room for all blocks that a process has open at a time, which reads this share of
        the source."""
        store = self.store
        if isinstance(store, storage.Prepared) and self.order.block_rows > 1:
            # A block begins and ends inside a bundle; decoded, a token has two flags. With somewhat
            # less memory than this, each bundle is read at each visit: the least recently used one
            # is the next one wanted.
            each = (self.layout.unit_tokens + 2 * store.bundle_tokens) * (
                store.manifest["token_bytes"] + 2
            )
            machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            wanted = int(self.order.most_open * share_here * each)
            store.cache.limit = max(store.cache.limit, min(wanted, int(machine * CACHE_SHARE)))
            # Each open block may lie in two shards of its own.
            tables = 2 * int(self.order.most_open * share_here + 1)
            store.places.limit = max(store.places.limit, tables)


@dataclasses.dataclass(frozen=True)
class Era:
    """Steps of one context length and packing: orders begin anew with each, since rows are other
    ones."""

    number: int
    first_step: int
    seq_len: int
    packing: str
    mixture: mix.Mixture


class Batches:
    """Random access to the batches of a run: element t is this process's rows of the batch of step
    t."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        process: tuple[int, int] = (0, 1),
        rounds: int = order.ROUNDS,
    ) -> None:
        # Fewer `rounds` measure the order of large sources on small ones.
        self.data, self.process, self.pad_id = config.data, process, tokenizer.pad_id
        form = chat_template.fingerprint(tokenizer) if config.data.chats else ""
        self._rounds, self._seed, self._tokenizer = rounds, config.run.seed, tokenizer.sha256 + form
        self._part = 0, 1  # of the process's rows: a worker has its own
        check_tokenizer(config, tokenizer)
        paths, stretches = mix.plan_sources(config)
        self._all_stores = [open_store(config, path, tokenizer) for path in paths]
        self.stores = [store for store in self._all_stores if isinstance(store, storage.Prepared)]
        self.notes = notes_on(self._all_stores)
        for seq_len, packing, stretch in stretches:
            chosen = zip(self._all_stores, stretch.weights, strict=True)
            used = [store for store, weight in chosen if weight]
            refuse_doubles(used)
            for store in used:
                if isinstance(store, storage.Prepared) and store.fitted_to:
                    store.require_context(seq_len)
                    if packing == "concat":
                        self.notes.append(
                            f"{store.name}: packing=concat cuts chats at the ends of rows, which"
                            " packing=best_fit keeps whole"
                        )
        self.notes = list(dict.fromkeys(self.notes))
        # A fork's rows come in another order than its parent's.
        self._fork = (config.run.fork_step,) if config.run.fork_step else ()
        self._planned: list[Era] = []
        for (seq_len, packing), group in itertools.groupby(stretches, key=lambda item: item[:2]):
            here = [stretch for *_, stretch in group]
            era = Era(len(self._planned), here[0].first_step, seq_len, packing, mix.Mixture(here))
            self._planned.append(era)
        self.leave_out(())

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """Leave out these batches, [step, how many]: all of the run, in the order of the
        decisions."""
        self.left_out = [list(one) for one in ranges]
        self.eras = _left_out(self._planned, self.left_out)
        self._sources: dict[tuple[int, int], Source] = {}

    def left_out_until(self, step: int) -> list[list[int]]:
        """The ranges left out that the batches before a step depend on."""
        behind = [i for i, (at, _) in enumerate(self.left_out) if at < step]
        return self.left_out[: max(behind, default=-1) + 1]

    def _era_of(self, step: int) -> Era:
        return next(e for e in reversed(self.eras) if e.first_step <= step)

    def fingerprint(self, step: int) -> str:
        """A hash of everything that the batches before a step depend on: of the eras that have
        begun by then."""
        begun = max(1, sum(era.first_step < step for era in self._planned))
        facts: list[Any] = [
            order.VERSION,
            self._tokenizer,
            self._seed,
            self.data.cross_documents,
            self._fork,
        ]
        for era in self._planned[:begun]:
            facts.append([era.number, era.first_step, era.seq_len, era.packing])
            for stretch in era.mixture.stretches:
                weights = [
                    (store.fingerprint, weight)
                    for store, weight in zip(self._all_stores, stretch.weights, strict=True)
                    if weight
                ]
                facts.append([stretch.first_step, stretch.batch, weights])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def part(self, index: int, count: int) -> "Batches":
        """The same batches, but element t has only the index-th of `count` parts of this process's
        rows."""
        one = copy.copy(self)
        one._part = index, count
        return one

    def __len__(self) -> int:
        return 1 << 48  # epochs without end

    def __getitem__(self, step: int) -> Batch:
        era = self._era_of(step)
        mine = np.array(local_rows(era.mixture.at(step)[1].batch, self.process))
        index, count = self._part
        slots = np.array_split(mine, count)[index]
        rows = pack.Rows(len(slots), era.seq_len, self.pad_id)
        everywhere = era.mixture.sources(step)
        from_source = everywhere[slots]
        for k in np.unique(from_source):
            source = self.source(era, int(k))
            numbers = source.placed(era.mixture.ranks(step, k)[everywhere == k])
            first = int(np.count_nonzero(everywhere[: slots[0]] == k))  # slots here are neighbours
            row_ids = np.flatnonzero(from_source == k)
            fill(source.store, rows, row_ids, source.spans(numbers[first : first + len(row_ids)]))
        return pack.finish(rows, self.data.cross_documents)

    def source(self, era: Era, k: int) -> Source:
        """One of the sources in an era, made when it is first wanted: a packed one is planned
        then."""
        with _planning:
            return self._sources.get((era.number, k)) or self._plan(era, k)

    def _plan(self, era: Era, k: int) -> Source:
        store = self._all_stores[k]
        # By its content, not by its place among all sources: a path that moves may change that.
        content = hashlib.sha256(store.fingerprint.encode()).digest()
        key = shuffle.key(
            self._seed, int.from_bytes(content[:8], "little"), era.number, *self._fork
        )
        made = Source(store, era.seq_len, era.packing, era.mixture.rows_of(k), key, self._rounds)
        made.keep(1 / (self.process[1] * self._part[1]))
        # The neighbours too: readers ahead cross an era's border to and fro.
        kept = {at: v for at, v in self._sources.items() if abs(at[0] - era.number) < 2}
        self._sources = kept | {(era.number, k): made}
        return made

    def counters(self) -> storage.Counters:
        """Counts of reading so far, over all sources."""
        return sum((store.counters for store in self.stores), storage.Counters())


class Stream(Iterator[Any]):
    """An endless iterator over batches with an exact, small state: that of the last batch given
    out.

    Grain computes batches ahead, or our workers do; after `send_by` they are on the devices before
    the step asks.
    """

    def __init__(self, batches: Batches, num_workers: int = 0) -> None:
        self.batches = batches
        self._num_workers = num_workers
        self._step = 0
        self._put: Callable[[Batch, int], Any] | None = None
        self._iterator: Any = None
        self._workers: workers.Workers | None = None
        self._of_workers = storage.Counters()  # of those that have ended
        self._waited, self._since, self._efficiency = 0.0, time.perf_counter(), list[float]()
        self.damaged = set[str]()  # pieces of held-out data, as `windows` notes them

    def send_by(self, put: Callable[[Batch, int], Any]) -> None:
        """From here on give `put(batch, number of its step)`, made in a thread, DEVICE_BATCHES
        ahead of the step.

        `put` is, say, `lambda batch, _: jax.device_put(batch, shardings)`.
        """
        self.close()
        self._put = put

    def __next__(self) -> Any:
        began = time.perf_counter()
        if self._iterator is None:
            self._iterator = self._start()
        try:
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
        """The state for `set_state` to go on after the last batch given, on any number of processes
        and workers."""
        fingerprint = self.batches.fingerprint(self._step)
        whole = self.batches.fingerprint(len(self.batches))  # of phases to come, too
        state = {
            "step": self._step,
            "order": order.VERSION,
            "fingerprint": fingerprint,
            "whole": whole,
        }
        ranges = self.batches.left_out_until(self._step)
        return state | ({"passed_over": ranges} if ranges else {})

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """Go on without these batches, [step, how many]: all that were ever left out of this
        run."""
        self.close()
        self.batches.leave_out(ranges)

    def set_state(self, state: dict[str, Any]) -> str:
        """Go on where the state was taken; UserError where data, tokenizer, seed or batch shape
        differ.

        Returns a note where those of later phases differ. A state from `forked` may be of other
        data.
        """
        # Versions before 25 November 2026 had "left_out", of another rule.
        if "left_out" in state or ("fingerprint" in state and state.get("order") != order.VERSION):
            raise UserError(
                "this checkpoint was written when data came in another order, so the run cannot go"
                " on exactly; go on with the program that wrote it, or begin a new workdir with"
                " config.run.init_from naming this run's folder"
            )
        step, ranges = int(state["step"]), [list(one) for one in state.get("passed_over", [])]
        expected = self.batches.fingerprint(step)
        if state.get("fingerprint", expected) != expected:
            raise UserError(
                f"the data is not what this run began with (fingerprint {expected}, its checkpoint"
                f" has {state.get('fingerprint')}): corpus, tokenizer, run.seed or a key that"
                " decides batches differs, in this or a later phase of the same context and"
                " packing; restore them, or start a new workdir"
            )
        self.close()
        self._step = step
        # what comes later may have been decided already
        if self.batches.left_out_until(step) != ranges:
            self.batches.leave_out(ranges)
        if "fingerprint" not in state:
            return "note: the data begins anew, in an order of its own"
        if state.get("whole") == self.batches.fingerprint(len(self.batches)):
            return ""
        return (
            "note: the batches of phases that have not begun are not what they were: other data, or"
            " other sizes"
        )

    def counters(self) -> storage.Counters:
        """Counts of reading so far, in this process and its workers."""
        running = self._workers.counters() if self._workers else storage.Counters()
        return self.batches.counters() + self._of_workers + running

    def metrics(self) -> dict[str, float]:
        """Reading's counters, with the damage in held-out data; since the last call, the share of
        time that the step waited here, and the share of places that had a token in the batches
        given out.
        """
        found, now = self.counters(), time.perf_counter()
        out: dict[str, float] = {
            "data/retries": found.retries,
            "data/corrupt": len(found.corrupt | self.damaged),
        }
        out["data/wait_fraction"] = self._waited / max(now - self._since, 1e-9)
        if self._efficiency:
            out["data/efficiency"] = sum(self._efficiency) / len(self._efficiency)
        self._waited, self._since, self._efficiency = 0.0, now, []
        return out

    def close(self) -> None:
        """Stop reading ahead; the stream can go on afterwards."""
        if self._iterator is not None:
            self._iterator.close()
        if self._workers:
            self._of_workers += self._workers.counters()
            self._workers.close()
        self._iterator = self._workers = None

    def _start(self) -> Any:
        """Grain's iterator over (batch, share of its places that have a token), from the step
        on."""
        # brings jax and orbax, 1.3 s of a core, which a data worker must not pay to read its part
        import grain

        first, put = self._step, self._put
        source: Any = self.batches
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH_BATCHES)
        if self._num_workers:  # they are ahead themselves
            source = self._workers = workers.Workers(
                self.batches, self._num_workers, first, PREFETCH_BATCHES
            )
            ahead = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = (
            grain.MapDataset.source(source)[first:]
            .to_iter_dataset(ahead)
            .map_with_index(
                lambda i, batch: (
                    put(batch, first + i + 1) if put else batch,
                    float((batch["segment_ids"] > 0).mean()),
                )
            )
        )
        if put:
            dataset = grain.experimental.ThreadPrefetchIterDataset(
                dataset, prefetch_buffer_size=DEVICE_BATCHES
            )
        return iter(dataset)


def forked(state: dict[str, Any]) -> dict[str, Any]:
    """The state with which a fork begins, from its parent's."""
    return {"step": state["step"]}


def _left_out(eras: list[Era], ranges: Sequence[Sequence[int]]) -> list[Era]:
    """The eras without these batches, one range after the other."""
    eras, furthest = list(eras), 0
    for at, count in ranges:
        stop = max(at + count, furthest)  # behind all that was left out before
        furthest = max(furthest, at)
        for i, era in enumerate(eras):
            first = max(at, era.first_step)
            end = min(stop, eras[i + 1].first_step) if i + 1 < len(eras) else stop
            if first < end:
                eras[i] = dataclasses.replace(era, mixture=era.mixture.leave_out(first, end))
    return eras


def train_stream(config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1)) -> Stream:
    """The training batches of a config, of each the rows of process (index, count)."""
    return Stream(Batches(config, tokenizer, process), config.data.workers)
