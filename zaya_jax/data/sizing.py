"""What storage must give for training never to wait, measured on a prepared directory.

The formula: G sequences of s tokens of b bytes in pages of P cost N = sigma·G·s·b/P page reads a step, so a
step of t seconds needs N/t page reads a second, and storage that can do I of them is the limit for steps
shorter than N/I.
"""

import dataclasses
import os
import pathlib
import resource
import time

from zaya_jax.config import Config, StorageError, UserError
from zaya_jax.data import pipeline, tokenizers
from zaya_jax.data.order import TURNS
from zaya_jax.data.tokens import PAGE_BYTES, SUFFIX


@dataclasses.dataclass(frozen=True)
class Reading:
    """One measurement of reading as training would."""

    cache: str  # cold or warm
    seconds: float
    tokens: int
    reads: int  # calls that read
    bytes_read: int  # by those calls
    bytes_device: int  # that came from the device, the kernel's own reading ahead included
    bytes_ideal: int  # of the tokens themselves
    minor_faults: int
    major_faults: int

    @property
    def tokens_per_second(self) -> float:
        """How fast batches came."""
        return self.tokens / self.seconds

    @property
    def reads_per_second(self) -> float:
        """Read calls per second."""
        return self.reads / self.seconds

    @property
    def pages_per_second(self) -> float:
        """Page reads a second: the formula's I, as far as this machine was asked for it."""
        return self.bytes_read / PAGE_BYTES / self.seconds

    @property
    def sigma(self) -> float:
        """Pages that were asked for over pages that the tokens fill; each call touches one page more than it
        fills.
        """
        return (self.bytes_read / PAGE_BYTES + self.reads) / (self.bytes_ideal / PAGE_BYTES)


@dataclasses.dataclass(frozen=True)
class Need:
    """The formula for one training step."""

    sigma: float
    global_batch: int
    seq_len: int
    token_bytes: int
    step_seconds: float

    @property
    def pages(self) -> float:
        """N: page reads per step."""
        return self.sigma * self.global_batch * self.seq_len * self.token_bytes / PAGE_BYTES

    @property
    def pages_per_second(self) -> float:
        """N/t."""
        return self.pages / self.step_seconds

    def break_even_seconds(self, budget: float) -> float:
        """The step time below which storage of `budget` page reads a second is the limit."""
        return self.pages / budget


def measure(config: Config, directory: str, seconds: float, cold: bool) -> Reading:
    """Read batches for some seconds, each bundle from its file, after emptying or filling the page cache."""
    if not os.path.exists("/proc/self/io"):
        raise UserError("this system has no /proc/self/io to count reads with; run it on Linux")
    data = dataclasses.replace(config.data, path=directory, mixture=())
    config = dataclasses.replace(config, data=data, schedule=dataclasses.replace(config.schedule, phases=()))
    tokenizer = tokenizers.load(pathlib.Path(directory) / "tokenizer")
    if tokenizer.vocab_size > config.model.vocab_size:
        model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
        config = dataclasses.replace(config, model=model)
    # As in a large source: blocks of several bundles, and what is open stays in memory.
    batches = pipeline.Batches(config, tokenizer, rounds=1)
    (store,) = batches.stores
    store.cache_bytes = 0
    source = batches.source(batches.eras[0], 0)
    for path in sorted(pathlib.Path(directory).glob(f"*{SUFFIX}")):
        try:
            _forget(path) if cold else path.read_bytes()
        except OSError as error:
            raise StorageError(
                f"{path} cannot be read ({error.strerror}); prepare_data --verify finds damage"
            ) from None
    epoch = source.layout.num_rows // data.global_batch
    turns = min(TURNS, epoch)
    begin_step = 3 * epoch  # all blocks begin together: measure from the start of an epoch
    for step in range(begin_step, begin_step + turns):  # opens shards, and the bundles of the moment
        batches[step]
    io, faults, begin, tokens, step = _io(), _faults(), time.perf_counter(), 0, begin_step + turns
    until = begin_step + epoch if cold else 1 << 40  # a second epoch is warm
    while time.perf_counter() - begin < seconds and step < until:
        tokens += batches[step]["tokens"].size
        step += 1
    elapsed = time.perf_counter() - begin
    if not tokens:
        raise UserError(
            f"{directory} is smaller than two batches of {data.global_batch} x {data.seq_len}; ask for less"
        )
    io_after, faults_after = _io(), _faults()
    return Reading(
        cache="cold" if cold else "warm",
        seconds=elapsed,
        tokens=tokens,
        reads=io_after["syscr"] - io["syscr"],
        bytes_read=io_after["rchar"] - io["rchar"],
        bytes_device=io_after["read_bytes"] - io["read_bytes"],
        bytes_ideal=tokens * store.manifest["token_bytes"],
        minor_faults=faults_after[0] - faults[0],
        major_faults=faults_after[1] - faults[1],
    )


def _forget(path: pathlib.Path) -> None:
    """Ask the kernel to drop a file's pages from its cache; written pages go to disk first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _io() -> dict[str, int]:
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _faults() -> tuple[int, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_majflt
