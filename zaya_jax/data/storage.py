"""Prepared shards wherever they lie: one store over local files, gs:// and anything that fsspec reaches
(s3://, ...).

Local files and gs:// are read by ArrayRecord; other addresses by byte ranges, whose places the index knows. A
failed read is retried with a growing pause and counted. A record that is not what was written is named, and
then either ends the run or leaves padding where its tokens were, as the caller chose.
"""

import collections
import concurrent.futures
import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import fsspec
import google_crc32c
import numpy as np
from array_record.python import array_record_module

from zaya_jax.config import StorageError, UserError
from zaya_jax.data import tokens as tokens_lib
from zaya_jax.data.sources import Bundle
from zaya_jax.data.tokens import CorruptRecord

# Record by record: larger buffers make ArrayRecord read up to 40% more than the record.
READER_OPTIONS, READER_BUFFER = "readahead_buffer_size:0,max_parallelism:0", 8 << 10
ATTEMPTS, FIRST_PAUSE, GREATEST_PAUSE = 6, 0.25, 8.0
READ_THREADS = 16
# ArrayRecord raises RuntimeErrors for damage and for failing storage alike; these words are of the latter.
PASSING = (
    "Input/output",
    "timed out",
    "Connection",
    "temporar",
    "UNAVAILABLE",
    "DEADLINE",
    "EXHAUSTED",
    "No such file",
)
CACHE_BYTES = 256 << 20
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Counters:
    """What reading has met so far."""

    records: int = 0
    bytes: int = 0
    retries: int = 0
    corrupt: int = 0


class Shard(Protocol):
    """One shard's records, by number or all of them by place."""

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The records of these numbers."""
        ...


class ArrayRecordShard:
    """A shard that ArrayRecord opens itself."""

    def __init__(self, url: str, num_records: int, num_bytes: int) -> None:
        if is_local(url):
            found = pathlib.Path(url).stat().st_size
            if found != num_bytes:
                raise CorruptRecord(
                    url.rsplit("/", 1)[-1], -1, f"the shard has {found} bytes instead of {num_bytes}"
                )
        self._reader = array_record_module.ArrayRecordReader(
            url, READER_OPTIONS, file_reader_buffer_size=READER_BUFFER
        )
        found = self._reader.num_records()
        if found != num_records:
            self._reader.close()
            raise CorruptRecord(
                url.rsplit("/", 1)[-1], found, f"{found} records instead of {num_records}: truncated?"
            )
        self._lock = threading.Lock()

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The records of these numbers, in their order."""
        with self._lock:
            return self._reader.read(list(numbers))


class RangeShard:
    """A shard read by byte ranges through fsspec."""

    def __init__(self, url: str, offsets: np.ndarray, sizes: np.ndarray) -> None:
        self._files, self._path = fsspec.core.url_to_fs(url)
        self._offsets, self._sizes = offsets, sizes

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The records of these numbers, in their order, fetched together."""
        starts = [int(self._offsets[n]) for n in numbers]
        ends = [s + tokens_lib.raw_size(s, int(self._sizes[n])) for s, n in zip(starts, numbers, strict=True)]
        raws = self._files.cat_ranges([self._path] * len(starts), starts, ends)
        for raw in raws:
            if isinstance(raw, Exception):
                raise raw
        return [tokens_lib.strip_blocks(bytes(raw), start) for raw, start in zip(raws, starts, strict=True)]


class Prepared:
    """One split of a prepared directory: bundles by number, with retries, checksums and a bounded cache."""

    def __init__(
        self, directory: str, split: str = "train", on_corrupt: str = "stop", cache_bytes: int | None = None
    ) -> None:
        self.name, self.split, self.on_corrupt = directory, split, on_corrupt
        self.counters = Counters()
        self.manifest = load_manifest(directory)
        self.shards = [s for s in self.manifest["shards"] if s["split"] == split]
        index = load_index(directory, self.manifest)
        numbers = [i for i, s in enumerate(self.manifest["shards"]) if s["split"] == split]
        index = index[np.isin(index["shard"], numbers)]
        self.index = index
        self.lengths = index["tokens"].astype(np.int64)
        self.shard_of = np.searchsorted(np.array(numbers, np.int64), index["shard"])
        bundles = np.array([s["bundles"] for s in self.shards], np.int64)
        self.first_bundle = np.cumsum(bundles) - bundles
        self.fingerprint = f"{self.manifest['sha256']}/{split}"
        self.cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self.lane_bytes = 0  # the part of it that lanes asked for
        self._cache: collections.OrderedDict[int, Bundle] = collections.OrderedDict()
        self._cached_bytes = 0
        self._open: dict[int, Shard] = {}
        self._pieces: dict[int, list[np.ndarray]] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        fresh = {
            "_cache": collections.OrderedDict(),
            "_cached_bytes": 0,
            "_open": {},
            "_pool": None,
            "_lock": None,
        }
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def read(self, bundles: list[int]) -> dict[int, Bundle]:
        """The bundles of these numbers, from the cache or from storage (many shards at once)."""
        out: dict[int, Bundle] = {}
        with self._lock:
            for b in bundles:
                if b in self._cache:
                    self._cache.move_to_end(b)
                    out[b] = self._cache[b]
        by_shard: dict[int, list[int]] = {}
        for b in bundles:
            if b not in out:
                by_shard.setdefault(int(self.shard_of[b]), []).append(b)
        if len(by_shard) > 1:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(READ_THREADS, "bundles")
            parts = list(self._pool.map(lambda item: self._read_shard(*item), by_shard.items()))
        else:
            parts = [self._read_shard(*item) for item in by_shard.items()]
        for part in parts:
            out.update(part)
            self._keep(part)
        return out

    def piece_lengths(self, shard: int) -> np.ndarray:
        """The tokens of each document piece of a shard."""
        entry = self.shards[shard]
        try:
            record = self._with_retries(shard, lambda s: s.read([entry["bundles"]])[0])
            lengths = tokens_lib.decode_lengths(record, entry["file"], entry["bundles"])
        except CorruptRecord as error:
            raise StorageError(
                f"{self.name}: {error}; packing cannot do without it: restore the shard"
            ) from None
        return lengths

    def pieces(self, bundle: int) -> np.ndarray:
        """The tokens of each document piece of a bundle."""
        shard = int(self.shard_of[bundle])
        if shard not in self._pieces:
            first = int(self.first_bundle[shard])
            counts = self.index["pieces"][first : first + self.shards[shard]["bundles"]]
            self._pieces[shard] = np.split(self.piece_lengths(shard), np.cumsum(counts)[:-1])
        return self._pieces[shard][bundle - int(self.first_bundle[shard])]

    def _read_shard(self, shard: int, bundles: list[int], again: bool = False) -> dict[int, Bundle]:
        first = int(self.first_bundle[shard])
        entry = self.shards[shard]
        try:
            records = self._with_retries(shard, lambda s: s.read([b - first for b in bundles]))
            with self._lock:
                self.counters.records += len(records)
                self.counters.bytes += sum(map(len, records))
            found = [
                self._decode(entry["file"], b, b - first, r) for b, r in zip(bundles, records, strict=True)
            ]
            return dict(zip(bundles, found, strict=True))
        except CorruptRecord as error:
            if len(bundles) > 1:  # one by one, to blame no sound neighbour
                return {b: self._read_shard(shard, [b])[b] for b in bundles}
            if not again:  # the transfer may have damaged it
                self._open.pop(shard, None)
                return self._read_shard(shard, bundles, again=True)
            return {bundles[0]: self._corrupt(bundles[0], error)}

    def _decode(self, shard: str, bundle: int, number: int, record: bytes) -> Bundle:
        decoded = tokens_lib.decode_bundle(record, shard, number)
        if len(decoded) != self.lengths[bundle]:
            raise CorruptRecord(
                shard, number, f"{len(decoded)} tokens, the index says {self.lengths[bundle]}"
            )
        return decoded

    def _corrupt(self, bundle: int, error: CorruptRecord) -> Bundle:
        shard = int(self.shard_of[bundle])
        number = bundle - int(self.first_bundle[shard])
        what = f"corrupt record {number} of shard {self.shards[shard]['file']} in {self.name}: {error.why}"
        with self._lock:
            self.counters.corrupt += 1
        if self.on_corrupt != "skip":
            raise StorageError(
                f"{what}; restore the shard (--verify of prepare_data checks all), or set "
                f"data.on_corrupt to 'skip'"
            )
        _log.warning("%s; its %d tokens become padding", what, self.lengths[bundle])
        count = int(self.lengths[bundle])
        nothing = np.zeros(count, bool)
        zeros = np.zeros(count, np.uint16)
        return Bundle(zeros, zeros, nothing, nothing, real=False)

    def _with_retries(self, shard: int, read: Callable[[Shard], Any]) -> Any:
        entry = self.shards[shard]
        pause = FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return read(self._shard(shard))
            except CorruptRecord:
                raise
            except Exception as error:  # storage clients raise what they like
                self._open.pop(shard, None)
                why = " ".join(str(error).split())[:200] or type(error).__name__
                if isinstance(error, (RuntimeError, ValueError)) and not any(w in why for w in PASSING):
                    raise CorruptRecord(entry["file"], -1, why) from None  # ArrayRecord's word for damage
                if attempt == ATTEMPTS or "No such file" in why or isinstance(error, FileNotFoundError):
                    raise StorageError(f"cannot read shard {entry['file']} of {self.name}: {why}") from None
                with self._lock:
                    self.counters.retries += 1
                _log.warning(
                    "reading %s failed (%s); attempt %d follows in %.2f s",
                    entry["file"],
                    why,
                    attempt + 1,
                    pause,
                )
                time.sleep(pause)
                pause = min(2 * pause, GREATEST_PAUSE)
        raise AssertionError

    def _shard(self, shard: int) -> Shard:
        found = self._open.get(shard)
        if found is None:
            entry = self.shards[shard]
            url = join(self.name, entry["file"])
            if is_local(url) or url.startswith("gs://"):
                found = ArrayRecordShard(url, entry["bundles"] + 1, entry["bytes"])
            else:
                rows = self.index[self.shard_of == shard]
                offsets = np.append(rows["offset"].astype(np.int64), entry["lengths_offset"])
                found = RangeShard(
                    url, offsets, np.append(rows["size"].astype(np.int64), entry["lengths_size"])
                )
            self._open[shard] = found
        return found

    def _keep(self, part: dict[int, Bundle]) -> None:
        with self._lock:
            for b, bundle in part.items():
                if b not in self._cache:
                    self._cache[b] = bundle
                    self._cached_bytes += bundle.num_bytes
            while self._cached_bytes > self.cache_bytes and len(self._cache) > 1:
                _, old = self._cache.popitem(last=False)
                self._cached_bytes -= old.num_bytes


def is_local(url: str) -> bool:
    """Whether an address is a path of this machine."""
    return "://" not in url


def join(directory: str, name: str) -> str:
    """The address of a file in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def is_prepared(directory: str) -> bool:
    """Whether an address is a directory that prepare_data wrote; UserError where it is one left unfinished."""
    if not is_local(directory):
        return True  # text corpora are local
    path = pathlib.Path(directory)
    if (path / tokens_lib.MANIFEST).is_file():
        return True
    if (path / ".work").is_dir():
        raise UserError(
            f"{directory} is a preparation that has not finished; run the same prepare_data command "
            f"again, it continues"
        )
    return False


def load_manifest(directory: str) -> dict[str, Any]:
    """The manifest of a prepared directory."""
    return tokens_lib.check_manifest(
        _fetch(directory, tokens_lib.MANIFEST), join(directory, tokens_lib.MANIFEST)
    )


def load_index(directory: str, manifest: dict[str, Any]) -> np.ndarray:
    """One entry a bundle, in the manifest's order of shards, checked against the manifest."""
    content = _fetch(directory, tokens_lib.INDEX)
    if f"{google_crc32c.value(content):08x}" != manifest["index_crc32c"]:
        raise StorageError(
            f"{join(directory, tokens_lib.INDEX)} is damaged: its CRC32C differs from the manifest's"
        )
    return np.frombuffer(content, tokens_lib.INDEX_TYPE)


def verify(directory: str) -> list[str]:
    """Every difference between a prepared directory and its manifest: each file's size, checksum, and each
    record.
    """
    problems: list[str] = []
    manifest = load_manifest(directory)
    try:
        load_index(directory, manifest)
    except StorageError as error:
        return [str(error)]
    for split in tokens_lib.SPLITS:
        store = Prepared(directory, split, on_corrupt="stop", cache_bytes=0)
        for number, entry in enumerate(store.shards):
            problems += _verify_shard(store, number, entry)
    return problems


def _verify_shard(store: Prepared, number: int, entry: dict[str, Any]) -> list[str]:
    problems = []
    url = join(store.name, entry["file"])
    if is_local(url):
        if not pathlib.Path(url).is_file():
            return [f"shard {entry['file']} is missing"]
        crc, size = tokens_lib.checksum(pathlib.Path(url))
        if size != entry["bytes"]:
            problems.append(f"shard {entry['file']} has {size} bytes instead of {entry['bytes']}")
        if f"{crc:08x}" != entry["crc32c"]:
            problems.append(f"shard {entry['file']} has CRC32C {crc:08x} instead of {entry['crc32c']}")
    first = int(store.first_bundle[number])
    for bundle in range(first, first + entry["bundles"]):
        try:
            store.read([bundle])
        except StorageError as error:
            problems.append(str(error).split(";")[0])
    try:
        store.piece_lengths(number)
    except (StorageError, CorruptRecord) as error:
        problems.append(str(error).split(";")[0])
    return problems


def _fetch(directory: str, name: str) -> bytes:
    url = join(directory, name)
    pause = FIRST_PAUSE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with fsspec.open(url, "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise UserError(f"{directory} is not a prepared directory: it has no {name}") from None
        except ImportError as error:
            raise UserError(f"{url} needs another package: {error}") from None
        except Exception as error:  # storage clients raise what they like
            if attempt == ATTEMPTS:
                raise StorageError(f"cannot read {url}: {error}") from None
            time.sleep(pause)
            pause = min(2 * pause, GREATEST_PAUSE)
    raise AssertionError
