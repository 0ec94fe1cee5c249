"""Prepared shards wherever they lie: one store over local files and anything that fsspec reaches
(s3://, gs://, ...).

A start reads the manifest and the table of shards, some fifty bytes per shard; a shard's own tables
are read when they are needed. A failed read is retried with a growing pause and counted. Only bytes
prove damage: a record that differs from the one written is named, and then either ends the run or
becomes padding, as the caller chose.
"""

import collections
import concurrent.futures
import dataclasses
import errno
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
from zaya_jax.data.pack import Piece, Span
from zaya_jax.text import chat_template, tokenizers
from zaya_jax.text import tokens as tokens_lib
from zaya_jax.text.sources import Bundle
from zaya_jax.text.tokens import CorruptRecord

ATTEMPTS, FIRST_PAUSE, GREATEST_PAUSE = 6, 0.25, 8.0
READ_THREADS = 16
CACHE_BYTES = 256 << 20
TABLES = 256  # shards whose tables of bundles stay in memory, some tens of KiB each
LENGTHS = 16 << 20  # documents whose lengths stay in memory, 8 bytes each
# Failures that waiting does not mend.
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
FINAL_NUMBERS = (errno.ELOOP, errno.ENAMETOOLONG)
_log = logging.getLogger(__name__)
_counting = threading.Lock()
_readers = concurrent.futures.ThreadPoolExecutor(READ_THREADS, "bundles")


@dataclasses.dataclass
class Counters:
    """Counts of reading so far."""

    records: int = 0
    retries: int = 0
    corrupt: set[str] = dataclasses.field(default_factory=set)  # pieces of data, each once

    def __add__(self, other: "Counters") -> "Counters":
        retries = self.retries + other.retries
        return Counters(self.records + other.records, retries, self.corrupt | other.corrupt)


class Lru[K, V]:
    """A thread-safe cache that forgets the value used longest ago once the sum of all sizes is
    above `limit`.

    Pickled, it is empty.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[K, tuple[V, int]] = collections.OrderedDict()
        self._size = 0

    def __reduce__(self):
        return Lru, (self.limit,)

    def get(self, key: K) -> V | None:
        """The value of a key, now the last used."""
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Hold a value; the last one stays, whatever its size."""
        with self._lock:
            self._size += size - self._held.pop(key, (None, 0))[1]
            self._held[key] = value, size
            while self._size > self.limit and len(self._held) > 1:
                self._size -= self._held.popitem(last=False)[1][1]


def read_ranges(url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of each (start, stop) of a file; fewer where it ends before."""
    if is_local(url):
        parts = []
        with open(url, "rb") as file:
            for start, stop in ranges:
                file.seek(start)
                parts.append(file.read(stop - start))
        return parts
    files, path = fsspec.core.url_to_fs(url)
    starts, stops = zip(*ranges, strict=True)
    raws = files.cat_ranges([path] * len(ranges), list(starts), list(stops))
    for raw in raws:
        if isinstance(raw, Exception):
            raise raw
    return [bytes(raw) for raw in raws]


class Prepared:
    """One split of a prepared directory as a tape of tokens, with retries, checksums and a bounded
    cache."""

    files: frozenset[object] = frozenset()  # of its input: not known

    def __init__(
        self,
        directory: str,
        split: str = "train",
        on_corrupt: str = "stop",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.name, self.split, self.on_corrupt = directory, split, on_corrupt
        self.manifest = load_manifest(directory)
        table = load_shards(directory, self.manifest)
        self.shards = table[table["split"] == tokens_lib.SPLITS.index(split)]
        self.first_token = np.append(0, np.cumsum(self.shards["tokens"].astype(np.int64)))
        self.bundle_tokens = int(self.manifest["bundle_tokens"])
        # Of its content, not of its input's place: prepared again, it is the same.
        names = ("version", "corpus", "tokenizer", "token_bytes", "totals", "shards_crc32c")
        facts = tokens_lib.manifest_hash({name: self.manifest[name] for name in names})
        self.fingerprint = f"{facts}/{split}"
        # The context to which its chats were fitted; 0 without any, or if they were not.
        self.fitted_to: int = (self.manifest.get("trim") or {}).get("context", 0)
        self.counters = Counters()
        self.cache: Lru[tuple[int, int], Bundle] = Lru(cache_bytes)
        self.places: Lru[int, tuple[np.ndarray, np.ndarray]] = Lru(TABLES)
        self._lengths: Lru[int, np.ndarray] = Lru(LENGTHS)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"counters": Counters()}  # a worker counts its own reads

    def require_tokenizer(self, tokenizer: tokenizers.Tokenizer, given: str) -> None:
        """UserError where this was prepared with another tokenizer than the one that is `given`, or
        holds chats in another template than its."""
        made, copied = self.manifest["tokenizer"], "" if is_local(self.name) else "a copy of "
        if made["sha256"] != tokenizer.sha256:
            raise UserError(
                f"{self.name} was prepared with another tokenizer ({made['kind']},"
                f" {made['vocab_size']} ids) than {given} ({tokenizer.kind}, {tokenizer.vocab_size}"
                f" ids); give {copied}{join(self.name, 'tokenizer')} instead, or prepare the text"
                " again"
            )
        form = (self.manifest.get("chats") or {}).get("template")
        if form not in (None, chat_template.fingerprint(tokenizer)):
            raise UserError(
                f"{self.name} holds chats in another chat template than {given} has; prepare them"
                " again, into another directory, with the model's folder as --tokenizer"
            )

    def require_context(self, seq_len: int) -> None:
        """UserError where its chats were fitted to more tokens than a row has."""
        if self.fitted_to > seq_len:
            raise UserError(
                f"{self.name} was prepared for a context of {self.fitted_to}, and rows of"
                f" {seq_len} tokens would cut its chats; prepare it with --context={seq_len}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens on the tape."""
        return int(self.first_token[-1])

    @property
    def num_shards(self) -> int:
        """Shards of this split."""
        return len(self.shards)

    def file(self, shard: int) -> str:
        """A shard's file name."""
        return tokens_lib.shard_name(
            int(self.shards["split"][shard]), int(self.shards["task"][shard])
        )

    def lengths(self, shard: int) -> np.ndarray:
        """The tokens of each document of a shard."""
        found = self._lengths.get(shard)
        if found is None:
            entry = self.shards[shard]
            try:
                found = self._table(
                    shard, tokens_lib.LENGTHS, int(entry["lengths_at"]), int(entry["documents"])
                )
            except CorruptRecord as error:
                raise StorageError(
                    f"{self.name}: {error}; packing needs this table: restore the shard"
                ) from error
            self._lengths.put(shard, found, len(found))
        return found

    def parts(self, spans: Sequence[Span]) -> list[list[Piece]]:
        """For each (start, stop) of the tape: the pieces of bundles that it is, one after
        another."""
        wanted = [list(self._bundles_of(*span)) for span in spans]
        bundles = self._read([key for pieces in wanted for key, _, _ in pieces])
        return [[(bundles[key], start, stop) for key, start, stop in pieces] for pieces in wanted]

    def _bundles_of(self, start: int, stop: int) -> Iterator[tuple[tuple[int, int], int, int]]:
        """((shard, bundle), start, stop) of each bundle that a stretch of the tape touches."""
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
        return min(
            self.bundle_tokens, int(self.shards["tokens"][shard]) - bundle * self.bundle_tokens
        )

    def _read(self, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Bundle]:
        """Bundles from the cache or from storage (many shards at once)."""
        out: dict[tuple[int, int], Bundle] = {}
        by_shard: dict[int, list[int]] = {}
        for key in dict.fromkeys(keys):
            if (held := self.cache.get(key)) is not None:
                out[key] = held
            else:
                by_shard.setdefault(key[0], []).append(key[1])
        for part in _readers.map(lambda item: self._read_shard(*item), by_shard.items()):
            out.update(part)
            for key, bundle in part.items():
                # targets share tokens' memory
                size = bundle.tokens.nbytes + bundle.starts.nbytes + bundle.learn.nbytes
                self.cache.put(key, bundle, size)
        return out

    def _read_shard(self, shard: int, bundles: list[int]) -> dict[tuple[int, int], Bundle]:
        try:
            return self._read_bundles(shard, bundles)
        except CorruptRecord as error:  # the transfer may have damaged it, or the file was restored
            with _counting:
                self.counters.retries += 1
            _log.warning("%s: %s; it is read once more", self.name, error)
        found: dict[tuple[int, int], Bundle] = {}
        for bundle in bundles:  # one by one, to blame no sound neighbour
            try:
                found |= self._read_bundles(shard, [bundle])
            except CorruptRecord as error:
                found[shard, bundle] = self._corrupt(shard, bundle, error)
        return found

    def _read_bundles(self, shard: int, bundles: list[int]) -> dict[tuple[int, int], Bundle]:
        places, crcs = self._places_of(shard)
        records = self._with_retries(shard, [(int(places[b]), int(places[b + 1])) for b in bundles])
        with _counting:
            self.counters.records += len(records)
        name = self.file(shard)
        return {
            (shard, b): tokens_lib.decode_bundle(record, name, b, int(crcs[b]))
            for b, record in zip(bundles, records, strict=True)
        }

    def _places_of(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each bundle of a shard begins in its file, and the last one ends; and the checksum
        of each."""
        found = self.places.get(shard)
        if found is None:
            entry = self.shards[shard]
            count = int(entry["bundles"])
            numbers = self._table(shard, tokens_lib.PLACES, int(entry["places_at"]), 2 * count + 1)
            found = numbers[: count + 1], numbers[count + 1 :]
            self.places.put(shard, found, 1)
        return found

    def _table(self, shard: int, magic: bytes, at: int, count: int) -> np.ndarray:
        """One of the tables behind a shard's bundles."""
        name = "places_crc32c" if magic == tokens_lib.PLACES else "lengths_crc32c"
        crc = int(self.shards[name][shard])
        (record,) = self._with_retries(shard, [(at, at + tokens_lib.numbers_size(count))])
        return tokens_lib.decode_numbers(record, magic, self.file(shard), crc)

    def _corrupt(self, shard: int, bundle: int, error: CorruptRecord) -> Bundle:
        with _counting:
            self.counters.corrupt.add(f"{self.fingerprint} {shard} {bundle}")
        if self.on_corrupt != "skip":
            raise StorageError(
                f"{error} ({self.name}); restore the shard (--verify of prepare_data checks all),"
                " or set data.on_corrupt to 'skip'"
            ) from error
        count = self._size(shard, bundle)
        _log.warning("%s: %s; its %d tokens become padding", self.name, error, count)
        nothing = np.zeros(count, bool)
        zeros = np.zeros(count, np.uint16)
        return Bundle(zeros, zeros, nothing, nothing, real=False)

    def _with_retries(self, shard: int, ranges: list[tuple[int, int]]) -> list[bytes]:
        def count() -> None:
            with _counting:
                self.counters.retries += 1

        url = join(self.name, self.file(shard))
        return retried(
            lambda: read_ranges(url, ranges), f"shard {self.file(shard)} of {self.name}", count
        )


def retried[T](read: Callable[[], T], what: str, count: Callable[[], None] = lambda: None) -> T:
    """The result of `read`, tried again, and counted by `count`, where it fails; StorageError at
    the end."""
    pause = FIRST_PAUSE
    for attempt in range(2, ATTEMPTS + 2):
        try:
            return read()
        except (UserError, StorageError, ImportError):
            raise
        except Exception as error:  # storage clients raise errors of any type
            why = first_line(error)
            final = isinstance(error, FINAL) or getattr(error, "errno", None) in FINAL_NUMBERS
            if attempt > ATTEMPTS or final:
                raise StorageError(f"cannot read {what}: {why}") from None
            count()
            _log.warning(
                "reading %s failed (%s); attempt %d follows in %.2f s", what, why, attempt, pause
            )
            time.sleep(pause)
            pause = min(2 * pause, GREATEST_PAUSE)
    raise AssertionError


def lengths_of_all(store: Any) -> Iterator[np.ndarray]:
    """The documents' lengths of each shard, read many at a time."""
    for shards in itertools.batched(range(store.num_shards), READ_THREADS):
        yield from _readers.map(store.lengths, shards)


def is_local(url: str) -> bool:
    """Whether an address is a path of this machine."""
    return "://" not in url


def join(directory: str, name: str) -> str:
    """The address of a file in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def is_prepared(directory: str) -> bool:
    """Whether an address is a directory that prepare_data wrote; UserError where it is one left
    unfinished."""
    if not is_local(directory):
        return True  # text corpora are local
    path = pathlib.Path(directory)
    if (path / tokens_lib.MANIFEST).is_file():
        return True
    if (path / ".work").is_dir():
        raise UserError(
            f"{directory} is a preparation that has not finished; run the same prepare_data command"
            " again, it continues"
        )
    return False


def load_manifest(directory: str) -> dict[str, Any]:
    """The manifest of a prepared directory."""
    return tokens_lib.check_manifest(
        _fetch(directory, tokens_lib.MANIFEST), join(directory, tokens_lib.MANIFEST)
    )


def load_shards(directory: str, manifest: dict[str, Any]) -> np.ndarray:
    """One entry per shard, checked against the manifest."""
    content = _fetch(directory, tokens_lib.SHARDS)
    if google_crc32c.value(content) != manifest["shards_crc32c"]:
        raise StorageError(
            f"{join(directory, tokens_lib.SHARDS)} is damaged: its CRC32C differs from the"
            " manifest's"
        )
    return np.frombuffer(content, tokens_lib.SHARD_TYPE)


def verify(directory: str) -> list[str]:
    """Every difference between a prepared directory and its manifest: files, sizes, and each
    record's checksum."""
    # a place that does not answer is an error, no difference
    _fetch(directory, tokens_lib.MANIFEST)
    try:
        stores = [Prepared(directory, split, cache_bytes=0) for split in tokens_lib.SPLITS]
    except (StorageError, UserError) as error:
        return [str(error)]
    manifest, problems = stores[0].manifest, list[str]()
    known = {store.file(number) for store in stores for number in range(store.num_shards)}
    # Preparations before 25 November 2026 listed their input files in sources.jsonl.
    known |= {tokens_lib.MANIFEST, tokens_lib.SHARDS, tokens_lib.TOKENIZER, "sources.jsonl"}
    files, root = fsspec.core.url_to_fs(directory)
    sizes = {
        entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["size"]
        for entry in files.ls(root, detail=True)
    }
    problems += [
        f"{name} does not belong to the prepared directory" for name in sorted(sizes.keys() - known)
    ]
    # elsewhere a run reads its tokenizer from a local copy, and compares that
    if is_local(directory):
        try:
            if (
                tokenizers.load(join(directory, tokens_lib.TOKENIZER)).sha256
                != manifest["tokenizer"]["sha256"]
            ):
                problems.append(f"{tokens_lib.TOKENIZER} is not the manifest's")
        except (UserError, OSError, ValueError) as error:
            problems.append(f"{tokens_lib.TOKENIZER} cannot be read: {error}")
    for store in stores:
        for number in range(store.num_shards):
            problems += _verify_shard(store, number, sizes)
    return problems


def _verify_shard(store: Prepared, number: int, sizes: dict[str, int]) -> list[str]:
    """The records follow one another without a gap, so that their checksums and the size say all of
    the file."""
    size, name = int(store.shards["bytes"][number]), store.file(number)
    if name not in sizes:
        return [f"shard {name} is missing"]
    problems = (
        [] if sizes[name] == size else [f"shard {name} has {sizes[name]} bytes instead of {size}"]
    )
    begin, end = store.first_token[number : number + 2].tolist()
    reads: list[Callable[[], object]] = [
        functools.partial(store.parts, [(start, min(start + store.bundle_tokens, end))])
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
            if name != tokens_lib.MANIFEST:
                raise StorageError(
                    f"{directory} has no {name}, which its manifest names; restore it"
                ) from None
            raise UserError(f"{directory} is not a prepared directory: it has no {name}") from None
        except ImportError as error:
            raise UserError(f"{url} needs another package: {error}") from None

    return retried(read, url)
