"""Opens the data behind a path of the config as a store of tokens. Text and chats are tokenised
once per program; prepared shards are opened at each call."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from zaya_jax.config import Config, UserError, fields
from zaya_jax.data import mix
from zaya_jax.data.pack import BatchBuilder, Span
from zaya_jax.data.prepared_store import PreparedStore, is_prepared
from zaya_jax.text import chat, chat_template, memory, text_files
from zaya_jax.text.shard_format import SPLITS
from zaya_jax.text.token_block import TokenBlock
from zaya_jax.text.tokenizers import Tokenizer

# {arguments: (the stamps of the files that it was made of, the result)}
_tokenised: dict[tuple, tuple[tuple, object]] = {}


class MemoryStore:
    """A tape of tokens that is in memory, as one block. The two documents of a pair share a row."""

    bundle_tokens, num_shards = 0, 1  # 0: not stored in bundles

    def __init__(
        self,
        name: str,
        block: TokenBlock,
        fingerprint: str,
        note: str = "",
        files: Iterable[object] = (),
        are_pairs: bool = False,
    ) -> None:
        self.name = name
        self.block = block
        self.fingerprint = fingerprint
        self.note = note  # for the user, on how chats were fitted
        self.files = frozenset(files)  # the identities of the files that the text is from
        self.num_tokens = len(block)
        self.first_token = np.array([0, len(block)], np.int64)
        starts = np.flatnonzero(block.starts)[:: 2 if are_pairs else 1]
        self._lengths = np.diff(np.append(starts, len(block)))

    def lengths(self, shard: int) -> np.ndarray:
        """The tokens of each document, or of both of a pair."""
        return self._lengths

    def read_spans(self, spans: Sequence[Span]) -> list[TokenBlock]:
        """The tokens of each (start, stop) of the tape."""
        return [self.block.part(*span) for span in spans]


# Rows and batches use of both: name, fingerprint, note, files, num_tokens, bundle_tokens, num_shards,
# first_token (of each shard, and the end), lengths, read_spans.
TokenStore = MemoryStore | PreparedStore


def made_once[T](paths: Sequence[str], options: tuple, make: Callable[[], T]) -> T:
    """The result of `make` for the text of some paths, made once per program as long as their files
    do not change."""
    key = *paths, *options
    stamps = tuple(text_files.corpus_stamp(path) for path in paths)
    if key not in _tokenised or _tokenised[key][0] != stamps:
        _tokenised[key] = stamps, make()
    return _tokenised[key][1]  # type: ignore[return-value]


def open_store(config: Config, path: str, tokenizer: Tokenizer, split: str = "train") -> TokenStore:
    """The store of one split of a path."""
    data = config.data
    if data.chats:
        chat_template.require_turn_tokens(tokenizer, f"config.data.tokenizer={data.tokenizer!r}")
    if is_prepared(path):
        store = open_prepared(config, path, tokenizer, split)
        if split == "train" and not store.num_tokens:
            raise UserError(f"{path} holds no training tokens; prepare it with more input")
        if data.chats:
            require_chats(store, data.seq_len)
        return store
    with fields.naming("config.data.path" if path == data.path else "a mixture's source"):
        if data.chats:
            sides = _open_chats(config, path, tokenizer)
        else:
            sides = made_once(
                [path],
                (tokenizer.sha256,),
                lambda: _both_sides(path, *memory.split_texts(path, tokenizer)),
            )
    return sides[SPLITS.index(split)]


def open_prepared(config: Config, path: str, tokenizer: Tokenizer, split: str) -> PreparedStore:
    """The store of one split of a prepared directory; UserError where a run on pairs is given one,
    which holds none, or it was prepared with another tokenizer."""
    if config.run.takes_pairs:
        raise UserError(
            f"{path} is a prepared directory, but config.run.preference={config.run.preference!r}"
            " reads pairs from JSONL or Parquet; give their file, folder or glob"
        )
    store = PreparedStore(path, split, config.data.on_corrupt)
    store.require_tokenizer(tokenizer, f"config.data.tokenizer={config.data.tokenizer!r}")
    return store


def require_chats(store: PreparedStore, context: int) -> None:
    """UserError where a prepared directory holds no chats, others too, or chats for another
    context."""
    documents = sum(split["documents"] for split in store.manifest["totals"].values())
    outcomes = (chat.KEPT, chat.TRIMMED, chat.REDUCED)
    chats = sum(store.manifest["counts"].get(outcome, 0) for outcome in outcomes)
    if documents > chats or not store.chat_context:
        raise UserError(
            f"{store.name} holds {chats:,} chats and {documents - chats:,} texts, prepared for"
            f" --context={store.chat_context}, but config.data.chats is set; prepare chats alone,"
            f" with --context={context}"
        )
    store.require_context(context)


def _open_chats(config: Config, path: str, tokenizer: Tokenizer) -> tuple[MemoryStore, MemoryStore]:
    """A chat is held out by the hash of its content, the same in all sources of the run."""
    context = config.data.seq_len
    pairs = config.run.takes_pairs
    sources, _ = mix.plan_sources(config)
    paths = [source for source in sources if not is_prepared(source)]

    def make() -> dict[str, tuple[MemoryStore, MemoryStore]]:
        chats = {source: memory.read_chats(source, tokenizer, context, pairs) for source in paths}
        last = memory.last_held_out(list(chats.values()))
        return {source: _both_sides(source, *chats[source].split(last), pairs) for source in paths}

    options = tokenizer.sha256, chat_template.fingerprint(tokenizer), context, pairs
    return made_once(paths, options, make)[path]


def _both_sides(
    path: str, train: TokenBlock, held_out: TokenBlock, note: str = "", are_pairs: bool = False
) -> tuple[MemoryStore, MemoryStore]:
    """The stores of both sides, each with a fingerprint over both: a change of the held-out data
    also counts as a change of the run's data."""
    digest = hashlib.sha256()
    for block in (train, held_out):
        digest.update(len(block).to_bytes(8, "little"))
        digest.update(block.tokens)
        digest.update(block.learn)
    first, second = (f"{digest.hexdigest()}/{split}" for split in SPLITS)
    files = text_files.identities(path)
    return (
        MemoryStore(path, train, first, note, files, are_pairs),
        MemoryStore(path, held_out, second, note, files, are_pairs),
    )


def fill(
    store: TokenStore, rows: BatchBuilder, row_ids: Iterable[int], spans: list[list[Span]]
) -> None:
    """Read these spans and put them into these rows."""
    row_of_span = [row for row, of_row in zip(row_ids, spans, strict=True) for _ in of_row]
    blocks = store.read_spans([span for of_row in spans for span in of_row])
    for row, block in zip(row_of_span, blocks, strict=True):
        rows.append_span(row, block)


def refuse_doubles(used: Sequence[TokenStore]) -> None:
    """UserError where two of these stores, which give rows to the same batches, hold the same."""
    for store, other in itertools.combinations(used, 2):
        shared = store.files & other.files
        if shared or store.fingerprint == other.fingerprint:
            number = f" ({len(shared):,} files)" if shared else ""
            raise UserError(
                f"a mixture of {store.name} and {other.name} has the same data twice{number}:"
                " batches would hold copies; list it once, with the sum of the weights"
            )


def local_rows(batch: int, process: tuple[int, int]) -> range:
    """The rows of a global batch that belong to process (index, count)."""
    index, count = process
    if batch % count:
        raise UserError(
            f"a global batch of {batch} sequences does not divide among {count} processes; give a"
            " multiple"
        )
    rows = batch // count
    return range(index * rows, (index + 1) * rows)


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """UserError where the tokenizer has ids that the model's vocabulary lacks."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"config.data.tokenizer={config.data.tokenizer!r} has {tokenizer.vocab_size} ids, but "
            f"config.model.vocab_size={config.model.vocab_size}; raise the latter"
        )
