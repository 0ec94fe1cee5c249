"""Opens the data behind a path of the config as a store of tokens. Text and chats are tokenised once
per program, prepared shards opened at each call."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from zaya_jax.config import Config, UserError, fields
from zaya_jax.data import mix, pack, storage
from zaya_jax.data.pack import Piece, Span
from zaya_jax.text import chat, chat_template, chats, sources
from zaya_jax.text.sources import Bundle
from zaya_jax.text.tokenizers import Tokenizer
from zaya_jax.text.tokens import SPLITS

# {arguments: (the files that it was made of, the store)}
_tokenised: dict[tuple, tuple[tuple, object]] = {}


class Memory:
    """A store of one bundle that is in memory already."""

    bundle_tokens, num_shards = 0, 1

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        fingerprint: str,
        note: str = "",
        files: Iterable[object] = (),
    ) -> None:
        self.name, self.fingerprint, self.bundle = name, fingerprint, bundle
        self.note, self.files = note, frozenset(files)  # for the user; identities of its text's
        self.num_tokens = len(bundle)
        self.first_token = np.array([0, len(bundle)], np.int64)
        self._lengths: np.ndarray | None = None

    def lengths(self, shard: int) -> np.ndarray:
        """The tokens of each document."""
        if self._lengths is None:
            self._lengths = np.diff(np.append(np.flatnonzero(self.bundle.starts), len(self.bundle)))
        return self._lengths

    def parts(self, spans: Sequence[Span]) -> list[list[Piece]]:
        """Each span, as a piece of the one bundle."""
        return [[(self.bundle, start, stop)] for start, stop in spans]


TokenStore = Memory | storage.Prepared


def notes_on(stores: Iterable[TokenStore]) -> list[str]:
    """Notes for the user on how chats among these were fitted."""
    return [store.note for store in stores if isinstance(store, Memory) and store.note]


def tokenised[T](paths: Sequence[str], what: tuple, make: Callable[[], T]) -> T:
    """The result of `make` for the text of some paths, made once per program as long as their files
    do not change."""
    key, files = (*paths, *what), tuple(sources.stamp(path) for path in paths)
    if key not in _tokenised or _tokenised[key][0] != files:
        _tokenised[key] = files, make()
    return _tokenised[key][1]  # type: ignore[return-value]


def open_store(config: Config, path: str, tokenizer: Tokenizer, split: str = "train") -> TokenStore:
    """The store of one split of a path."""
    data = config.data
    if data.chats:
        chat_template.require_marks(tokenizer, f"config.data.tokenizer={data.tokenizer!r}")
    if path != "stdlib" and storage.is_prepared(path):
        shards = storage.Prepared(path, split, data.on_corrupt)
        shards.require_tokenizer(tokenizer, f"config.data.tokenizer={data.tokenizer!r}")
        if split == "train" and not shards.num_tokens:
            raise UserError(f"{path} holds no training tokens; prepare it with more input")
        if data.chats:
            require_prepared(path, shards, data.seq_len)
        return shards
    with fields.naming("config.data.path" if path == data.path else "a mixture's source"):
        if data.chats:
            both = _chats(config, path, tokenizer)
        else:
            both = tokenised(
                [path],
                (tokenizer.sha256,),
                lambda: _sides(path, *sources.text_corpus(path, tokenizer)),
            )
    return both[SPLITS.index(split)]


def require_prepared(path: str, shards: storage.Prepared, context: int) -> None:
    """UserError where a prepared directory holds no chats, or chats for another context."""
    found = shards.manifest.get("chats") and shards.manifest["trim"]
    totals = shards.manifest["totals"].values()
    again = f"prepare it with --context={context}"
    if not found:
        raise UserError(
            f"{path} was prepared from text and holds no chats, or by an earlier version of this"
            f" program, but config.data.chats is set; {again}"
        )
    texts = sum(split["documents"] for split in totals) - sum(
        found.get(outcome, 0) for outcome in (chat.KEPT, chat.TRIMMED, chat.REDUCED)
    )
    if texts:
        raise UserError(
            f"{path} holds {texts:,} texts beside its chats, but config.data.chats is set; prepare"
            " the chats alone"
        )
    if not shards.fitted_to:
        raise UserError(
            f"{path} was prepared for no context, config.data.seq_len={context} would cut its"
            f" chats; {again}"
        )
    shards.require_context(context)


def _chats(config: Config, path: str, tokenizer: Tokenizer) -> tuple[Memory, Memory]:
    """A chat is held out by the hash of its content, the same in all sources of the run."""
    context = config.data.seq_len
    paths = [
        one
        for one in mix.plan_sources(config)[0]
        if one == "stdlib" or not storage.is_prepared(one)
    ]

    def make() -> dict[str, tuple[Memory, Memory]]:
        found = {one: chats.read_chats(one, tokenizer, context) for one in paths}
        last = chats.last_held_out(found.values())
        return {one: _sides(one, *held.split(last)) for one, held in found.items()}

    what = tokenizer.sha256, chat_template.fingerprint(tokenizer), context
    return tokenised(paths, what, make)[path]


def _sides(path: str, train: Bundle, held_out: Bundle, note: str = "") -> tuple[Memory, Memory]:
    """The stores of both sides, each with a fingerprint over both: held-out data belong to the run,
    too."""
    held = hashlib.sha256()
    for side in (train, held_out):
        held.update(len(side).to_bytes(8, "little"))
        held.update(side.tokens)
        held.update(side.learn)
    first, second = (f"{held.hexdigest()}/{name}" for name in SPLITS)
    files = sources.identities(path)
    return Memory(path, train, first, note, files), Memory(path, held_out, second, note, files)


def fill(store: TokenStore, rows: pack.Rows, row_ids, spans: list[list[Span]]) -> None:
    """Read these spans and put them into these rows."""
    found = iter(store.parts([span for row in spans for span in row]))
    for row, pieces in zip(row_ids, spans, strict=True):
        for _ in pieces:
            rows.add(row, next(found))


def refuse_doubles(used: Sequence[TokenStore]) -> None:
    """UserError where two of these stores, which give rows to the same batches, hold the same."""
    for one, other in itertools.combinations(used, 2):
        both = one.files & other.files
        if both or one.fingerprint == other.fingerprint:
            raise UserError(
                f"a mixture of {one.name} and {other.name} has the same data twice"
                f"{f' ({len(both):,} files)' if both else ''}: batches would hold copies; name it"
                " once, with the sum of its weights"
            )


def local_rows(batch: int, process: tuple[int, int]) -> range:
    """The rows of a global batch that belong to process (index, count)."""
    index, count = process
    if batch % count:
        raise UserError(
            f"a global batch of {batch} sequences does not divide among {count} processes; give a"
            " multiple"
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
