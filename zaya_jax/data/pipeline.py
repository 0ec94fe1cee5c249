"""The stream of training batches, and the fixed batches of evaluation.

A batch is a pure function of (seed, config, step): the mixture says which source each row comes from and how
many rows that source gave before, the source's order says which tokens that row holds. Grain runs ahead of
the training step; its element t is the batch of step t, so a stream's whole state is one integer, and each
process computes its own rows of the global batch and nothing else.

Where a run went back to step c, the batches that it had had since can be left out, [c, how many]: from c on, each
source goes on behind the last row that it gave in them. What a step is stays as it was planned: its phase, its batch
size, its mixture. An era whose first steps were among them begins behind the rows that these had.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zaya_jax import schedule
from zaya_jax.config import Config, Phase, UserError
from zaya_jax.data import mix, order, pack, past, shuffle, storage, workers
from zaya_jax.data.pack import Batch, Span
from zaya_jax.data.stores import TokenStore, open_stores
from zaya_jax.data.tokenizers import Tokenizer

PREFETCH_BATCHES = 4
# How several processes' figures (`Stream.metrics`) become one; the mean where nothing is said.
OVER_PROCESSES: dict[str, Callable] = {
    "data/wait_fraction": np.max,
    "data/retries": np.sum,
    "data/corrupt": np.sum,
}
# Of the machine's memory that one process's bundles may take; beyond it some are read more than once.
CACHE_SHARE = 1 / 16
_log = logging.getLogger(__name__)


class Source:
    """One source in an era: its store, how that is cut into rows, and the order in which they come."""

    def __init__(
        self, store: TokenStore, seq_len: int, packing: str, rows: tuple[int, int], key: int, rounds: int
    ) -> None:
        self.store = store
        began = time.perf_counter()
        if packing == "concat":
            self.layout: order.Tape | order.Packed = order.Tape(store.num_tokens, seq_len)
        else:
            self.layout = order.Packed(store, seq_len, packing)
        seconds = time.perf_counter() - began
        if seconds > 5:
            _log.info("planned %d rows of %s in %.0f s", self.layout.num_rows, store.name, seconds)
        most, share = rows
        if self.layout.num_rows < most:
            _log.warning(
                "%s has %d rows of %d tokens, fewer than the %d that one batch takes of it: rows come up to %d times "
                "in a batch", store.name, self.layout.num_rows, seq_len, most, -(-most // self.layout.num_rows),
            )  # fmt: skip
        block_rows = order.BLOCK_BUNDLES * store.bundle_tokens // seq_len
        if packing != "concat" and block_rows:  # the documents of a row lie anywhere in its unit
            block_rows = max(block_rows, order.UNIT_ROWS)
        self.order = order.Order(self.layout.num_rows, most, share, block_rows, key, rounds)

    def spans(self, numbers: np.ndarray) -> list[list[Span]]:
        """What the rows hold that come as these numbers."""
        return [self.layout.spans(int(row)) for row in self.order.rows(numbers)]

    def placed(self, numbers: np.ndarray) -> np.ndarray:
        """All rows of a step in the order in which they lie in the batch: a block's stay in one place of it, and an
        epoch's come before the next one's.

        In the order in which they come they would move on by a few places at each visit, since a source of a mixture
        does not give a whole number of rows per step: over three workers every block would be read by all of them.
        """
        if self.order.block_rows == 1:
            return numbers
        return numbers[np.lexsort((self.order.lane(numbers), numbers // self.order.num_rows))]

    def fill(self, rows: pack.Rows, row_ids: np.ndarray, numbers: np.ndarray) -> None:
        """Read the rows that come as these numbers, and put each into its place."""
        fill(self.store, rows, row_ids, self.spans(numbers))

    def keep(self, share_here: float) -> None:
        """Makes room for all that is open at a time in a process that reads so much of the source."""
        store = self.store
        if isinstance(store, storage.Prepared) and self.order.block_rows > 1:
            # What rows lie in, begun and ended inside a bundle, decoded, with two flags per token. With somewhat less
            # than that, each bundle is read at each visit: the least recently used is the next one wanted.
            each = (self.layout.unit_tokens + 2 * store.bundle_tokens) * (store.manifest["token_bytes"] + 2)
            machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            wanted = int(self.order.most_open * share_here * each)
            store.cache_bytes = max(store.cache_bytes, min(wanted, int(machine * CACHE_SHARE)))


def fill(store: TokenStore, rows: pack.Rows, row_ids, spans: list[list[Span]]) -> None:
    """Read what the spans name and put it into these rows."""
    found = iter(store.parts([span for row in spans for span in row]))
    for row, pieces in zip(row_ids, spans, strict=True):
        for _ in pieces:
            rows.add(row, next(found))


@dataclasses.dataclass(frozen=True)
class Era:
    """Steps of one context length and packing: orders begin anew with each, since rows are other ones."""

    number: int
    first_step: int
    seq_len: int
    packing: str
    mixture: mix.Mixture
    # What a fork takes over, by source.
    orders: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


class Batches:
    """Random access to the batches of a run: element t is this process's rows of the batch of step t."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        process: tuple[int, int] = (0, 1),
        rounds: int = order.ROUNDS,
    ) -> None:
        # Fewer `rounds` measure the order of large sources on small ones.
        self.data, self.process, self.pad_id = config.data, process, tokenizer.pad_id
        self._rounds, self._seed, self._tokenizer = rounds, config.run.seed, tokenizer.sha256
        self._part = 0, 1  # of the process's rows: a worker has its own
        paths, stretches = plan_sources(config)
        self._all_stores = [open_stores(config, path, tokenizer)[0] for path in paths]
        self.stores = [store for store in self._all_stores if isinstance(store, storage.Prepared)]
        self.notes = [s.said for s in self._all_stores if isinstance(s, order.Memory) and s.said]
        self._refuse_doubles(paths, stretches)
        self._names = [store.fingerprint for store in self._all_stores]
        self._planned: list[Era] = []
        for (seq_len, packing), group in itertools.groupby(stretches, key=lambda item: item[:2]):
            here = [stretch for *_, stretch in group]
            era = Era(len(self._planned), here[0].first_step, seq_len, packing, mix.Mixture(here))
            self._planned.append(era)
        self.past: list[past.Record] | None = None  # of a fork: its parent's
        self.left_out: list[list[int]] = []  # [step, batches], in the order in which it was decided
        self._inherited: list[list[int]] = []  # likewise, of a fork's parent
        self._set_eras(self._planned)

    def _set_eras(self, eras: list[Era]) -> None:
        self._whole = eras  # with what is left out here
        self._after_leaving_out()

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """Batches that are left out, [step, how many]: all there are, in the order in which it was decided."""
        self.left_out = [list(one) for one in ranges]
        self._after_leaving_out()

    def left_out_until(self, step: int) -> list[list[int]]:
        """Those that the batches before a step depend on."""
        behind = [i for i, (at, _) in enumerate(self.left_out) if at < step]
        return self.left_out[: max(behind, default=-1) + 1]

    def _after_leaving_out(self) -> None:
        self.eras = _left_out(self._whole, self.left_out)
        self._eras_before: dict[int, list[Era]] = {len(self.left_out): self.eras}
        self._sources: dict[tuple[int, int], Source] = {}
        self._fingerprints: dict[int, str] = {}
        self._records: dict[tuple[int, int, int], past.Record] = {}

    def _refuse_doubles(self, paths: list[str], stretches: list[tuple[int, str, mix.Stretch]]) -> None:
        for *_, stretch in stretches:
            seen: dict[str, str] = {}
            for path, store, weight in zip(paths, self._all_stores, stretch.weights, strict=True):
                if weight and seen.setdefault(store.fingerprint, path) != path:
                    raise UserError(
                        f"a mixture has the same data twice, as {seen[store.fingerprint]} and as {path}: batches would "
                        "hold copies; name it once, with the sum of its weights"
                    )

    def go_on(self, records: list[past.Record]) -> str:
        """Begins where another run stood, as far as its order allows; a note of how."""
        first, *later = self._planned
        found, why = past.choose(records, self._seed, first.seq_len, first.packing)
        known = [name for name in self._used(first) if name in found["orders"]] if found else []
        if found and not known:
            why = "none of the sources was that run's"
        if found and known:
            stretches, given = first.mixture.stretches, past.given_until(found, first.first_step)
            same = past.weights(stretches[0], self._names) == found["weights"]
            if same and stretches[0].batch == found["batch"]:  # the stretch that was running goes on
                first_step, entry = found["first_step"], found.get("entry", 0)
                stretches = [
                    dataclasses.replace(stretches[0], first_step=first_step, entry=entry),
                    *stretches[1:],
                ]
                given = found["given"]
            mixture = mix.Mixture(stretches, tuple(given.get(name, 0) for name in self._names))
            orders = {name: tuple(found["orders"][name]) for name in known}
            eras = [
                dataclasses.replace(first, number=found["number"], mixture=mixture, orders=orders),
                *later,
            ]
            self.past = records
            here, *later = _numbered(eras, found["number"])
            # What its parent left out of eras to come. Of the one that goes on it is in what was given.
            self._inherited = found.get("left_out", [])
            self._set_eras([here, *_left_out(later, self._inherited)])
            why = self._misfit()
        if why:
            highest = max((found["number"] for found in records), default=first.first_step)
            self.past, self._inherited = records, []
            self._set_eras(_numbered(self._planned, highest + 1))
            return f"note: the data begins anew, in another order: {why}"
        new = len(self._used(first)) - len(known)
        return "note: the data goes on where it stood" + (f"; {new} of its sources are new" if new else "")

    def _misfit(self) -> str:
        """Why the orders that were taken over do not do for these batches."""
        era = self.eras[0]
        for k, name in enumerate(self._names):
            most = era.mixture.rows_of(k)[0]
            if (
                name in era.orders
                and most > era.orders[name][0]
                and not self.source(era, k).order.serves(most)
            ):
                path, before = self._all_stores[k].name, era.orders[name][0]
                return f"batches have up to {most} rows of {path}, whose order was made for {before}"
        return ""

    def _used(self, era: Era) -> list[str]:
        """The sources of an era."""
        taken = np.any([stretch.weights for stretch in era.mixture.stretches], axis=0)
        return [name for name, weight in zip(self._names, taken, strict=True) if weight]

    def records(self, step: int) -> list[past.Record]:
        """Where the data stands before a step: in the era that the step is of, and in the one before if that ends."""
        ranges = self.left_out_until(step)
        if len(ranges) not in self._eras_before:
            self._eras_before[len(ranges)] = _left_out(self._whole, ranges)
        eras = self._eras_before[len(ranges)]
        wanted = dict.fromkeys(
            self._era_of(at).number for at in (step, max(step - 1, self.eras[0].first_step))
        )
        found = [self._record(era, step, len(ranges)) for era in eras if era.number in wanted][::-1]
        every = [*self._inherited, *ranges]
        return [one | {"left_out": every} for one in found] if every else found

    def _record(self, era: Era, step: int, ranges: int) -> past.Record:
        key = era.number, era.mixture.at(step)[0], ranges
        if key not in self._records:
            orders = {
                name: era.orders.get(name) or era.mixture.rows_of(k)
                for k, name in enumerate(self._names)
                if name in self._used(era)
            }
            self._records[key] = past.record(
                era.number, self._seed, era.seq_len, era.packing, era.mixture, self._names, step, orders
            )
        return self._records[key]

    def _era_of(self, step: int) -> Era:
        return next(e for e in reversed(self.eras) if e.first_step <= step)

    def fingerprint(self, step: int) -> str:
        """Of everything that the batches before a step depend on: of the eras that have begun then."""
        begun = max(1, sum(era.first_step < step for era in self._whole))
        if begun not in self._fingerprints:
            self._fingerprints[begun] = self._facts(self._whole[:begun])
        return self._fingerprints[begun]

    def _facts(self, eras: list[Era]) -> str:
        facts: list[Any] = [order.VERSION, self._tokenizer, self._seed, self.data.cross_documents]
        for era in eras:
            facts.append([era.number, era.first_step, era.seq_len, era.packing])
            if self.past is not None:
                facts[-1] += [era.mixture.given, sorted(era.orders.items())]
                facts[-1] += [[s.entry, s.left_out] for s in era.mixture.stretches if s.entry or s.left_out]
            for stretch in era.mixture.stretches:
                weights = [
                    (store.fingerprint, weight)
                    for store, weight in zip(self._all_stores, stretch.weights, strict=True)
                    if weight
                ]
                facts.append([stretch.first_step, stretch.batch, weights])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def part(self, index: int, count: int) -> "Batches":
        """The same batches, of which element t has only the index-th of `count` parts of this process's rows."""
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
            source.fill(rows, row_ids, numbers[first : first + len(row_ids)])
        return pack.finish(rows, self.data.cross_documents)

    def source(self, era: Era, k: int) -> Source:
        """One of the sources in an era, made when it is first wanted: a packed one is planned then."""
        if (era.number, k) not in self._sources:
            store = self._all_stores[k]
            rows = era.orders.get(store.fingerprint) or era.mixture.rows_of(k)
            # By what it holds, not by its place among all sources: a path that moves may change that.
            content = hashlib.sha256(store.fingerprint.encode()).digest()
            key = shuffle.key(self._seed, int.from_bytes(content[:8], "little"), era.number)
            made = Source(store, era.seq_len, era.packing, rows, key, self._rounds)
            made.keep(1 / (self.process[1] * self._part[1]))
            self._sources = {at: held for at, held in self._sources.items() if at[0] == era.number}
            self._sources[era.number, k] = made
        return self._sources[era.number, k]

    def counters(self) -> dict[str, int]:
        """What reading has met so far, over all sources: records, bytes, retries, corrupt records."""
        found = [vars(store.counters) for store in self.stores]
        return {name: sum(c[name] for c in found) for name in vars(storage.Counters())}


class Stream(Iterator[Batch]):
    """An endless iterator over batches with an exact, small state."""

    def __init__(self, batches: Batches, num_workers: int = 0) -> None:
        self.batches = batches
        self._num_workers = num_workers
        self._step = 0
        self._iterator: Any = None
        self._waited = 0.0
        self._since = time.perf_counter()
        self._places, self._real = 0, 0
        self._of_workers = dict.fromkeys(vars(storage.Counters()), 0)  # of those that have ended

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        if self._iterator is None:
            self._iterator = self._start()
        try:
            batch = next(self._iterator)
        except BaseException:  # what was fetched ahead is gone or half given: the next call begins anew
            self.close()
            raise
        self._step += 1
        self._waited += time.perf_counter() - begin
        self._places += batch["segment_ids"].size
        self._real += int(np.count_nonzero(batch["segment_ids"]))
        return batch

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to go on after the last batch given, on any number of processes and workers; and
        what a fork does.
        """
        fingerprint = self.batches.fingerprint(self._step)
        whole = self.batches.fingerprint(len(self.batches))  # of phases to come, too
        state = {"step": self._step, "order": order.VERSION, "fingerprint": fingerprint, "whole": whole}
        state["eras"] = self.batches.records(max(self._step, self.batches.eras[0].first_step))
        ranges = self.batches.left_out_until(self._step)
        state |= {"left_out": ranges} if ranges else {}
        return state if self.batches.past is None else state | {"past": self.batches.past}

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """From now on without these batches, [step, how many], all that were ever left out of this run."""
        self.close()
        self.batches.leave_out(ranges)

    def set_state(self, state: dict[str, Any]) -> str:
        """Go on where the state was taken; UserError where data, tokenizer, seed or batch shape are not the
        same. Gives a note where those of phases to come are not. A state of `forked` may be of other data.
        """
        note, step, ranges = "", int(state["step"]), [list(one) for one in state.get("left_out", [])]
        if state.get("past") not in (None, self.batches.past):
            note = self.batches.go_on(state["past"])
        if self.batches.left_out_until(step) != ranges:  # what comes later may have been decided already
            self.batches.leave_out(ranges)
        if "fingerprint" not in state:
            self.close()
            self._step = int(state["step"])
            return note
        if state.get("order") != order.VERSION:
            raise UserError(
                f"this checkpoint was written when data came in another order (version {state.get('order', 1)}, this "
                f"program has {order.VERSION}), so the run cannot go on exactly; go on with the program that wrote it, "
                "or begin a new workdir with config.run.init_from naming this run's folder"
            )
        expected = self.batches.fingerprint(int(state["step"]))
        if state.get("fingerprint") != expected:
            raise UserError(
                f"the data is not what this run began with (fingerprint {expected}, its checkpoint has "
                f"{state.get('fingerprint')}): corpus, tokenizer, run.seed or a key that decides "
                f"batches differs, or a phase to come of the running one's context and packing, which share one "
                f"order; restore them, or start a new workdir"
            )
        self.close()
        self._step = int(state["step"])
        if state.get("whole") in (None, self.batches.fingerprint(len(self.batches))):
            return ""
        return "note: the batches of phases that have not begun are not what they were: other data, or other sizes"

    def counters(self) -> dict[str, int]:
        """What reading has met so far in this process and its workers."""
        found = [self.batches.counters(), self._of_workers]
        if isinstance(self._iterator, workers.Workers):
            found.append(self._iterator.counters())
        return {name: sum(c[name] for c in found) for name in found[0]}

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
        counters = self.counters()
        return {**out, "data/retries": counters["retries"], "data/corrupt": counters["corrupt"]}

    def close(self) -> None:
        """Stop reading ahead; the stream can go on afterwards."""
        if isinstance(self._iterator, workers.Workers):
            ended = self._iterator.counters()
            self._of_workers = {name: self._of_workers[name] + ended[name] for name in ended}
        if self._iterator is not None and hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = None

    def _start(self) -> Iterator[Batch]:
        if self._num_workers:
            return workers.Workers(self.batches, self._num_workers, self._step, PREFETCH_BATCHES)
        import grain  # brings jax and orbax, 1.3 s of a core, which a data worker must not pay to read its part

        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH_BATCHES)
        dataset = grain.MapDataset.source(self.batches)[self._step :].to_iter_dataset(ahead)
        return iter(dataset)


def forked(state: dict[str, Any]) -> dict[str, Any]:
    """The state with which a fork begins, from its parent's."""
    return {"step": state["step"], "past": state.get("eras", [])}


def _left_out(eras: list[Era], ranges: Sequence[Sequence[int]]) -> list[Era]:
    """The same without these batches, one range after the other."""
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


def _numbered(eras: list[Era], number: int) -> list[Era]:
    return [dataclasses.replace(era, number=number + i) for i, era in enumerate(eras)]


def train_stream(config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1)) -> Stream:
    """The training batches of a config; `process` is (index, count), and each gets its rows of every global
    batch.
    """
    check_tokenizer(config, tokenizer)
    return Stream(Batches(config, tokenizer, process), config.data.workers)


def eval_batches(
    config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1), rows: int | None = None
) -> list[Batch]:
    """Fixed held-out batches of `eval.windows` windows, an equal share from each source, spread evenly over its text.

    A batch has `rows` rows over all processes (otherwise the global batch's). The last is filled up with empty rows;
    without held-out text the list is empty.
    """
    check_tokenizer(config, tokenizer)
    stores = [open_stores(config, path, tokenizer)[1] for path in plan_sources(config)[0]]
    return windows(config, [s for s in stores if s.num_tokens], tokenizer.pad_id, process, rows)


def windows(
    config: Config, stores: list[TokenStore], pad_id: int, process: tuple[int, int], rows: int | None
) -> list[Batch]:
    """`eval_batches` of these stores."""
    count, chosen = config.eval.windows, list[tuple[TokenStore, list[Span]]]()
    for k, store in enumerate(stores):
        layout: order.Tape | order.Packed = order.Tape(store.num_tokens, config.data.seq_len)
        if config.data.chats:  # an answer is judged with all that it answers
            layout = order.Packed(store, config.data.seq_len, "best_fit")
        share = min(count * (k + 1) // len(stores) - count * k // len(stores), layout.num_rows)
        chosen += [(store, layout.spans(n * layout.num_rows // share)) for n in range(share)]
    mine = local_rows(rows := rows or config.data.global_batch, process)
    batches = []
    for begin in range(0, len(chosen), rows):
        filled = pack.Rows(len(mine), config.data.seq_len, pad_id)
        for row, (store, spans) in enumerate(chosen[begin : begin + rows][mine.start : mine.stop]):
            fill(store, filled, [row], [spans])
        batches.append(pack.finish(filled, config.data.cross_documents))
    return batches


def eval_config(config: Config, phase: Phase) -> Config:
    """The config as evaluation sees it in a phase: its window's length, and the sources of the whole run.

    Without the phases: those that leave a key open would take it from this one.
    """
    here = schedule.phase_config(config, phase)
    every = tuple(f"{path}=1" for path in plan_sources(config)[0])
    data = dataclasses.replace(here.data, seq_len=phase.eval_seq_len, mixture=every)
    return dataclasses.replace(here, data=data, schedule=dataclasses.replace(here.schedule, phases=()))


def plan_sources(config: Config) -> tuple[list[str], list[tuple[int, str, mix.Stretch]]]:
    """(paths of all sources, (context length, packing, stretch) of each part of the run) from data.* and
    schedule.phases.
    """
    default = mix.parse(config.data.mixture) or {config.data.path: 1.0}
    if not config.schedule.phases:
        stretch = mix.Stretch(config.run.fork_step, config.data.global_batch, tuple(default.values()))
        return list(default), [(config.data.seq_len, config.data.packing, stretch)]
    segments = schedule.make_plan(config).segments
    named = [
        mix.parse(phase.mixture, f"config.schedule.phases[{i}].mixture") or default
        for i, phase in enumerate(config.schedule.phases)
    ]
    left = {path for segment in segments for path in named[segment.phase_index]}
    # In the order of the whole run, by which a mixture breaks ties, also where a fork has only some phases left.
    paths = [path for path in dict.fromkeys(path for weights in named for path in weights) if path in left]
    stretches = []
    for segment in segments:
        weights = named[segment.phase_index]
        row = tuple(weights.get(path, 0.0) for path in paths)
        stretch = mix.Stretch(segment.first_step - 1, segment.sequences, row)
        stretches.append((segment.phase.seq_len, segment.phase.packing, stretch))
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
