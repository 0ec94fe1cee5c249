"""Prepared shards in any storage: one store over local files and anything that fsspec reaches
(s3://, gs://, ...).

A start reads the manifest and the table of shards, 68 bytes per shard; a shard's own tables are
read when they are needed. A failed read is retried with a growing pause and counted. A bundle
counts as damaged only if its bytes are not those that were written; it is logged, and either stops
the run or is replaced by padding (`on_corrupt`).
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fsspec
import google_crc32c
import numpy as np

from zaya_jax.config import StorageError, UserError, first_line
from zaya_jax.data.pack import Span
from zaya_jax.text import chat_template, shard_format, token_block, tokenizers
from zaya_jax.text.shard_format import CorruptRecord
from zaya_jax.text.token_block import TokenBlock

PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0)  # seconds between attempts
READ_THREADS = 16
CACHE_BYTES = 256 << 20
CACHED_BUNDLE_TABLES = 256  # of shards, some tens of KiB each
CACHED_LENGTHS = 16 << 20  # of documents, 8 bytes each
# Errors that a retry cannot fix.
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_log = logging.getLogger(__name__)
_counter_lock = threading.Lock()
_readers = concurrent.futures.ThreadPoolExecutor(READ_THREADS, "bundles")


class Lru[K, V]:
    """A thread-safe cache that forgets the value used longest ago once the sum of all sizes is
    above `limit`.

    Pickled, it is empty.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[K, tuple[V, int]] = collections.OrderedDict()
        self._size = 0

    def __reduce__(self) -> tuple:
        return Lru, (self.limit,)

    def get(self, key: K) -> V | None:
        """The value of a key, now the last used."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Add a value; the last one stays, whatever its size."""
        with self._lock:
            self._size += size - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = value, size
            while self._size > self.limit and len(self._entries) > 1:
                self._size -= self._entries.popitem(last=False)[1][1]


class PreparedStore:
    """One split of a prepared directory as a tape of tokens, with retries, checksums and a bounded
    cache."""

    note, files = "", frozenset[object]()  # those of its input are not known

    def __init__(
        self,
        directory: str,
        split: str = "train",
        on_corrupt: str = "stop",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.name = directory
        self.split = split
        self.on_corrupt = on_corrupt
        self.manifest = load_manifest(directory)
        self._files, self._root = fsspec.core.url_to_fs(directory)
        content = _fetch(directory, shard_format.SHARDS)
        if google_crc32c.value(content) != self.manifest["shards_crc32c"]:
            raise StorageError(
                f"{join(directory, shard_format.SHARDS)} is damaged: its CRC32C differs from the"
                " manifest's"
            )
        table = np.frombuffer(content, shard_format.SHARD_TYPE)
        self.shards = table[table["split"] == shard_format.SPLITS.index(split)]
        self.num_shards = len(self.shards)
        self.first_token = np.append(0, np.cumsum(self.shards["tokens"].astype(np.int64)))
        self.num_tokens = int(self.first_token[-1])
        self.bundle_tokens = int(self.manifest["bundle_tokens"])
        # Of its content, not of its input's place: prepared again, it is the same.
        names = ("version", "corpus", "tokenizer", "token_bytes", "totals", "shards_crc32c")
        facts = shard_format.json_sha256({name: self.manifest[name] for name in names})
        self.fingerprint = f"{facts}/{split}"
        # "chats" is None where there are none. No chat is longer than this context, unless it is 0.
        self.chat_context: int = (self.manifest["chats"] or {}).get("context", 0)
        self.retries = 0
        self.corrupt = set[str]()  # bundles, each once
        self.cache: Lru[tuple[int, int], TokenBlock] = Lru(cache_bytes)
        self.bundle_tables: Lru[int, tuple[np.ndarray, np.ndarray]] = Lru(CACHED_BUNDLE_TABLES)
        self._lengths: Lru[int, np.ndarray] = Lru(CACHED_LENGTHS)

    def require_tokenizer(self, tokenizer: tokenizers.Tokenizer, described_as: str) -> None:
        """UserError where this was prepared with another tokenizer, or holds chats in another
        template than this one's."""
        made_by = self.manifest["tokenizer"]
        if made_by["sha256"] != tokenizer.sha256:
            copied = "" if is_local(self.name) else "a copy of "
            raise UserError(
                f"{self.name} was prepared with another tokenizer ({made_by['kind']},"
                f" {made_by['vocab_size']} ids) than {described_as} ({tokenizer.kind},"
                f" {tokenizer.vocab_size} ids); prepare the text again with the latter, or for fresh"
                f" weights give {copied}{join(self.name, 'tokenizer')}"
            )
        chats = self.manifest["chats"]
        if chats and chats["template"] != chat_template.fingerprint(tokenizer):
            raise UserError(
                f"{self.name} holds chats in another chat template than that of {described_as};"
                " prepare them again, into another directory, with the model's folder as"
                " --tokenizer"
            )

    def require_context(self, seq_len: int) -> None:
        """UserError where its chats were fitted to more tokens than a row has."""
        if self.chat_context > seq_len:
            raise UserError(
                f"{self.name} was prepared for a context of {self.chat_context}, and rows of"
                f" {seq_len} tokens would cut its chats; prepare it with --context={seq_len}"
            )

    def shard_file(self, shard: int) -> str:
        """A shard's file name."""
        entry = self.shards[shard]
        return shard_format.shard_name(int(entry["split"]), int(entry["task"]))

    def lengths(self, shard: int) -> np.ndarray:
        """The tokens of each document of a shard."""
        lengths = self._lengths.get(shard)
        if lengths is None:
            entry = self.shards[shard]
            try:
                lengths = self._read_table(
                    shard,
                    shard_format.LENGTHS,
                    int(entry["lengths_at"]),
                    int(entry["documents"]),
                    int(entry["lengths_crc32c"]),
                )
            except CorruptRecord as error:
                raise StorageError(
                    f"{self.name}: {error}; packing needs this table: restore the shard"
                ) from error
            self._lengths.put(shard, lengths, len(lengths))
        return lengths

    def read_spans(self, spans: Sequence[Span]) -> list[TokenBlock]:
        """The tokens of each (start, stop) of the tape, out of the bundles that have them."""
        wanted = [list(self._bundles_of(*span)) for span in spans]
        bundles = self._cached_bundles([key for parts in wanted for key, _, _ in parts])
        return [
            token_block.join([bundles[key].part(start, stop) for key, start, stop in parts])
            for parts in wanted
        ]

    def _bundles_of(self, start: int, stop: int) -> Iterator[tuple[tuple[int, int], int, int]]:
        """((shard, bundle), start, stop) of each bundle that a span of the tape touches."""
        shard = int(np.searchsorted(self.first_token, start, side="right")) - 1
        while start < stop:
            if start >= self.first_token[shard + 1]:
                shard += 1
                continue
            first = int(self.first_token[shard])
            bundle, inside = divmod(start - first, self.bundle_tokens)
            size = min(stop - start, self._size(shard, bundle) - inside)
            yield (shard, bundle), inside, inside + size
            start += size

    def _size(self, shard: int, bundle: int) -> int:
        """Tokens of a bundle."""
        left = int(self.shards["tokens"][shard]) - bundle * self.bundle_tokens
        return min(self.bundle_tokens, left)

    def _cached_bundles(self, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], TokenBlock]:
        """Bundles from the cache or from storage (many at once)."""
        cached = {key: self.cache.get(key) for key in keys}
        bundles = {key: bundle for key, bundle in cached.items() if bundle is not None}
        missing = [key for key in cached if key not in bundles]
        # Each shard's table once, before its bundles ask for it at the same time.
        with contextlib.suppress(CorruptRecord):  # of which each of them tells
            list(_readers.map(self._bundle_table, {shard for shard, _ in missing}))
        for key, bundle in zip(missing, _readers.map(self._read_or_pad, missing), strict=True):
            bundles[key] = bundle
            # targets share tokens' memory
            size = bundle.tokens.nbytes + bundle.starts.nbytes + bundle.learn.nbytes
            self.cache.put(key, bundle, size)
        return bundles

    def _read_or_pad(self, key: tuple[int, int]) -> TokenBlock:
        """A bundle, or padding in its place."""
        try:
            return self._read_bundle(*key)
        except CorruptRecord as error:  # the transfer may have damaged it, or the file was restored
            self._count_retry()
            _log.warning("%s: %s; reading it again", self.name, error)
        try:
            return self._read_bundle(*key)
        except CorruptRecord as error:
            return self._padding(*key, error)

    def _read_bundle(self, shard: int, number: int) -> TokenBlock:
        offsets, crcs = self._bundle_table(shard)
        record = self._read(shard, *map(int, offsets[number : number + 2]))
        return shard_format.decode_bundle(record, self.shard_file(shard), number, int(crcs[number]))

    def _bundle_table(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """The offset of each bundle in a shard's file, and the end of the last; and the checksum of
        each."""
        table = self.bundle_tables.get(shard)
        if table is None:
            entry = self.shards[shard]
            count = int(entry["bundles"])
            numbers = self._read_table(
                shard,
                shard_format.OFFSETS,
                int(entry["places_at"]),
                2 * count + 1,
                int(entry["places_crc32c"]),
            )
            table = numbers[: count + 1], numbers[count + 1 :]
            self.bundle_tables.put(shard, table, 1)
        return table

    def _read_table(
        self, shard: int, magic: bytes, offset: int, count: int, crc: int
    ) -> np.ndarray:
        """One of a shard's two tables, of this many numbers."""
        record = self._read(shard, offset, offset + shard_format.numbers_size(count))
        return shard_format.decode_numbers(record, magic, self.shard_file(shard), crc)

    def _padding(self, shard: int, number: int, error: CorruptRecord) -> TokenBlock:
        """What takes a damaged bundle's place; StorageError where the run is to stop."""
        self.corrupt.add(f"{self.fingerprint} {shard} {number}")
        if self.on_corrupt != "skip":
            raise StorageError(
                f"{error} ({self.name}); restore the shard (--verify of prepare_data checks all),"
                " or set data.on_corrupt to 'skip'"
            ) from error
        count = self._size(shard, number)
        _log.warning("%s: %s; its %d tokens become padding", self.name, error, count)
        nothing = np.zeros(count, bool)
        zeros = np.zeros(count, np.uint16)
        return TokenBlock(zeros, zeros, nothing, nothing, nothing)

    def _read(self, shard: int, start: int, stop: int) -> bytes:
        """A range of bytes of a shard's file, fewer where it ends before, with retries."""
        name = self.shard_file(shard)
        path = join(self._root, name)
        return retried(
            lambda: self._files.cat_file(path, start=start, end=stop),
            f"shard {name} of {self.name}",
            self._count_retry,
        )

    def _count_retry(self) -> None:
        with _counter_lock:
            self.retries += 1


def retried[T](read: Callable[[], T], what: str, count: Callable[[], None] = lambda: None) -> T:
    """The result of `read`, tried again, and counted by `count`, where it fails; StorageError at
    the end."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except (UserError, StorageError, ImportError):
            raise
        except Exception as error:  # storage clients raise errors of any type
            reason = first_line(error)
            if pause is None or isinstance(error, PERMANENT_ERRORS):
                raise StorageError(f"cannot read {what}: {reason}") from None
            count()
            _log.warning("reading %s failed (%s); trying again in %.2f s", what, reason, pause)
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def lengths_of_all(store: Any) -> Iterator[np.ndarray]:
    """The lengths of the documents of each shard of a store, read for many shards at once."""
    for shards in itertools.batched(range(store.num_shards), READ_THREADS):
        yield from _readers.map(store.lengths, shards)


def is_local(url: str) -> bool:
    """Whether an address is a path of this machine."""
    return "://" not in url


def join(directory: str, name: str) -> str:
    """The address of a file in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def is_prepared(directory: str) -> bool:
    """Whether a path of the config is a directory that prepare_data wrote; UserError where it is one
    left unfinished."""
    if not is_local(directory):
        return True  # text corpora are local
    path = pathlib.Path(directory)
    if directory == "stdlib":
        return False  # Python's library, whatever a folder of this name holds
    if (path / shard_format.MANIFEST).is_file():
        return True
    if (path / shard_format.WORK).is_dir():
        raise UserError(
            f"{directory} is a preparation that has not finished; run the same prepare_data command"
            " again, it continues"
        )
    return False


def load_manifest(directory: str) -> dict[str, Any]:
    """The manifest of a prepared directory."""
    return shard_format.check_manifest(
        _fetch(directory, shard_format.MANIFEST), join(directory, shard_format.MANIFEST)
    )


def verify(directory: str) -> list[str]:
    """Every difference between a prepared directory and its manifest: files, sizes, and each
    record's checksum."""
    # unreachable storage is an error, not a finding
    _fetch(directory, shard_format.MANIFEST)
    try:
        stores = [PreparedStore(directory, split, cache_bytes=0) for split in shard_format.SPLITS]
    except (StorageError, UserError) as error:
        return [str(error)]
    expected = {shard_format.MANIFEST, shard_format.SHARDS, shard_format.TOKENIZER}
    for store in stores:
        expected |= {store.shard_file(number) for number in range(store.num_shards)}
    filesystem, root = fsspec.core.url_to_fs(directory)
    sizes = {
        entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["size"]
        for entry in filesystem.ls(root, detail=True)
    }
    problems = [
        f"{name} does not belong to the prepared directory"
        for name in sorted(sizes.keys() - expected)
    ]
    # with remote data a run loads a local copy of the tokenizer, and checks its hash there
    if is_local(directory):
        try:
            tokenizer = tokenizers.load(join(directory, shard_format.TOKENIZER))
            if tokenizer.sha256 != stores[0].manifest["tokenizer"]["sha256"]:
                problems.append(f"{shard_format.TOKENIZER} is not the manifest's")
        except UserError as error:
            problems.append(f"{shard_format.TOKENIZER} cannot be read: {error}")
    for store in stores:
        for number in range(store.num_shards):
            problems += _verify_shard(store, number, sizes)
    return problems


def _verify_shard(store: PreparedStore, number: int, sizes: dict[str, int]) -> list[str]:
    """The problems of a shard. Its records follow one another without a gap, so their checksums and
    the size say all of the file."""
    size = int(store.shards["bytes"][number])
    name = store.shard_file(number)
    if name not in sizes:
        return [f"shard {name} is missing"]
    problems = []
    if sizes[name] != size:
        problems.append(f"shard {name} has {sizes[name]} bytes instead of {size}")
    begin, end = store.first_token[number : number + 2].tolist()
    reads: list[Callable[[], object]] = [
        functools.partial(store.read_spans, [(start, min(start + store.bundle_tokens, end))])
        for start in range(begin, end, store.bundle_tokens)
    ]
    reads.append(functools.partial(store.lengths, number))
    for read in reads:
        try:
            read()
        except StorageError as error:
            problems.append(str(error.__cause__ or error))
    return list(dict.fromkeys(problems))  # a damaged table of bundles fails for each of them


def _fetch(directory: str, name: str) -> bytes:
    url = join(directory, name)

    def read() -> bytes:
        try:
            with fsspec.open(url, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            if name != shard_format.MANIFEST:
                raise StorageError(
                    f"{directory} has no {name}, which its manifest names; restore it"
                ) from None
            raise UserError(f"{directory} is not a prepared directory: it has no {name}") from None
        except ImportError as error:
            raise UserError(f"{url} needs another package: {error}") from None

    return retried(read, url)
