"""The stream of training batches, and the fixed batches of evaluation.

A batch is a pure function of (seed, config, step): row b of step t asks its source for a row number, and the source
knows what that row holds. Grain runs ahead of the training step in a thread; its element t is the batch of step t, so
a stream's whole state is one integer, and each process computes its own rows of the global batch and nothing else.
"""

import hashlib
import json
from collections.abc import Iterator

import grain
import numpy as np

from zaya_jax.config import Config, UserError
from zaya_jax.data import order, pack, shuffle, sources
from zaya_jax.data.pack import Batch
from zaya_jax.data.tokenizers import Tokenizer

PREFETCH_BATCHES = 4


class Batches:
    """Random access to the batches of a run: element t is this process's rows of the batch of step t."""

    def __init__(self, config: Config, tokenizer: Tokenizer, store: order.Store, rows: range) -> None:
        self.config, self.rows = config, rows
        self.pad_id = tokenizer.pad_id
        self.source = order.Windows(store, config.data.seq_len, shuffle.key(config.run.seed, 0))
        facts = [
            tokenizer.sha256,
            store.fingerprint,
            config.run.seed,
            config.data.seq_len,
            config.data.global_batch,
        ]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return 1 << 48  # epochs without end

    def __getitem__(self, step: int) -> Batch:
        rows = pack.Rows(len(self.rows), self.config.data.seq_len, self.pad_id)
        numbers = step * self.config.data.global_batch + np.arange(self.rows.start, self.rows.stop)
        self.source.fill(rows, np.arange(len(self.rows)), numbers)
        return pack.finish(rows)


class Stream(Iterator[Batch]):
    """An endless iterator over batches with an exact, small state."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._step = 0
        self._iterator: Iterator[Batch] | None = None

    def __next__(self) -> Batch:
        if self._iterator is None:
            ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH_BATCHES)
            self._iterator = iter(grain.MapDataset.source(self._batches)[self._step :].to_iter_dataset(ahead))
        batch = next(self._iterator)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, int | str]:
        """What `set_state` needs to go on after the last batch given, on any number of processes."""
        return {"step": self._step, "fingerprint": self._batches.fingerprint}

    def set_state(self, state: dict[str, int | str]) -> None:
        """Go on where the state was taken; UserError where data, tokenizer, seed or batch shape are not the same."""
        if state.get("fingerprint") != self._batches.fingerprint:
            raise UserError(
                f"the data is not what this run began with (fingerprint {self._batches.fingerprint}, its checkpoint has "
                f"{state.get('fingerprint')}): corpus, tokenizer, run.seed, data.seq_len or data.global_batch differ; "
                "restore them, or start a new workdir"
            )
        self._step = int(state["step"])
        self._iterator = None


def train_stream(config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1)) -> Stream:
    """The training batches of a config; `process` is (index, count), and each gets its rows of every global batch."""
    check_tokenizer(config, tokenizer)
    train, _ = _stores(config, tokenizer)
    return Stream(Batches(config, tokenizer, train, local_rows(config, process)))


def eval_batches(config: Config, tokenizer: Tokenizer, process: tuple[int, int] = (0, 1)) -> list[Batch]:
    """Fixed held-out batches: `eval.windows` windows spread evenly over all held-out text; the last has empty rows."""
    check_tokenizer(config, tokenizer)
    _, held_out = _stores(config, tokenizer)
    windows = order.Windows(held_out, config.data.seq_len, 0)
    num_windows = min(config.eval.windows, windows.num_rows)
    chosen = (np.arange(num_windows) * windows.num_rows) // num_windows
    mine = local_rows(config, process)
    batches = []
    for start in range(0, num_windows, config.data.global_batch):
        part = chosen[start : start + config.data.global_batch][mine.start : mine.stop]
        rows = pack.Rows(len(mine), config.data.seq_len, tokenizer.pad_id)
        windows.fill_windows(rows, np.arange(len(part)), part)
        batches.append(pack.finish(rows))
    return batches


def local_rows(config: Config, process: tuple[int, int]) -> range:
    """The rows of the global batch that belong to process (index, count)."""
    index, count = process
    if config.data.global_batch % count:
        raise UserError(
            f"config.data.global_batch={config.data.global_batch} does not divide among {count} processes; "
            "give a multiple of the process count"
        )
    share = config.data.global_batch // count
    return range(index * share, (index + 1) * share)


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """UserError where the tokenizer has ids that the model's vocabulary lacks."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"config.data.tokenizer={config.data.tokenizer!r} has {tokenizer.vocab_size} ids, but "
            f"config.model.vocab_size={config.model.vocab_size}; raise the latter"
        )


_text_stores: dict[tuple[str, str], tuple[order.Store, order.Store]] = {}


def _stores(config: Config, tokenizer: Tokenizer) -> tuple[order.Store, order.Store]:
    """(training, held-out) stores of data.path; a text corpus is tokenised once a program."""
    key = (config.data.path, tokenizer.sha256)
    if key not in _text_stores:
        sides = sources.text_corpus(config.data.path, tokenizer)
        train, held_out = (
            order.Memory(config.data.path, side, hashlib.sha256(side.tokens).hexdigest()) for side in sides
        )
        _text_stores.clear()
        _text_stores[key] = train, held_out
    return _text_stores[key]
