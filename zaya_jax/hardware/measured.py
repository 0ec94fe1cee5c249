"""Measured figures: a file that `experiments.characterize` writes and plans read; docs/hardware.md
has its format.

    figures = measured.load("out/all.json")
    figures.memory_bandwidth(), figures.rows_knee(), figures.best("all-gather", 8, 1)
"""

import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pallas_kernels.timing import Timing, knee
from zaya_jax.config import UserError, files

FORMAT = 2

# Bus bandwidth over algorithm bandwidth for n devices, and the bytes that count: nccl-tests,
# doc/PERFORMANCE.md.
BUS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,  # bytes that each device puts in, and gets
    "reduce-scatter": lambda n: (n - 1) / n,  # that each puts in; it gets one n-th
    "all-gather": lambda n: (n - 1) / n,  # that each gets; it puts in one n-th
    "all-to-all": lambda n: (n - 1) / n,  # that each puts in, its own n-th counted, and gets
    "neighbour": lambda n: 1.0,  # that each sends to the next
    "broadcast": lambda n: 1.0,  # that each gets from the first
}


@dataclasses.dataclass(frozen=True)
class CollectiveTiming:
    """One collective over some devices."""

    name: str
    num_devices: int
    num_nodes: int
    bytes: int
    seconds: Timing

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second through each device's link, whatever the number of devices."""
        return self.bytes / self.seconds.median * BUS[self.name](self.num_devices)


@dataclasses.dataclass(frozen=True, order=True)
class ProductShape:
    """One matrix product [m, k] x [k, n], or that of `groups` of `m` rows, each with its own
    matrices.

    A grouped one is the operator pallas_kernels.grouped_mlp: k is the model's width, n the
    experts'.
    """

    name: str  # dense, grouped forward, grouped backward
    label: str  # whose shape it is
    m: int
    n: int
    k: int
    groups: int

    @property
    def flops(self) -> float:
        """FLOPs of one call."""
        product = 2.0 * self.m * self.n * self.k * self.groups
        return product * {"dense": 1, "grouped forward": 3, "grouped backward": 6}[self.name]


@dataclasses.dataclass(frozen=True)
class Product(ProductShape):
    """A product with its measured time."""

    dtype: str
    seconds: Timing

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds.median


@dataclasses.dataclass(frozen=True)
class MemoryCopy:
    """An array copied in a device's memory."""

    bytes: int
    seconds: Timing

    @property
    def bandwidth(self) -> float:
        """Bytes read and written a second."""
        return 2 * self.bytes / self.seconds.median


LISTS: dict[str, type] = {
    "collectives": CollectiveTiming,
    "products": Product,
    "copies": MemoryCopy,
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """All that one run of characterize measured, and the machine."""

    device: str  # JAX's device_kind
    platform: str
    num_devices: int
    num_nodes: int
    num_processes: int
    jax: str
    date: str
    peak: float | None = None  # FLOP/s of a device for bfloat16, where chips.py knows it
    collectives: tuple[CollectiveTiming, ...] = ()
    products: tuple[Product, ...] = ()
    copies: tuple[MemoryCopy, ...] = ()

    def memory_bandwidth(self) -> float | None:
        """The bandwidth of copying, the median of the three largest arrays: of memory, not of a
        cache."""
        copies = sorted(self.copies, key=lambda copy: copy.bytes)
        return statistics.median(copy.bandwidth for copy in copies[-3:]) if copies else None

    @property
    def node(self) -> int:
        """How many devices the largest measured set in one node has; 0 where none was measured."""
        return max((c.num_devices for c in self.collectives if c.num_nodes == 1), default=0)

    def series(self, name: str, num_devices: int, num_nodes: int) -> list[CollectiveTiming]:
        """One collective over one set of devices, small messages first."""
        wanted = (name, num_devices, num_nodes)
        series = [c for c in self.collectives if (c.name, c.num_devices, c.num_nodes) == wanted]
        return sorted(series, key=lambda c: c.bytes)

    def best(self, name: str, num_devices: int, num_nodes: int) -> float | None:
        """The best bus bandwidth of that series; None where it was not measured."""
        series = self.series(name, num_devices, num_nodes)
        return max((c.bus_bandwidth for c in series), default=None)

    def bytes_near_best(self, names: Iterable[str]) -> int | None:
        """The bytes from which each of these is near its best rate over the largest set."""
        if not self.collectives:
            return None
        largest = max((c.num_devices, c.num_nodes) for c in self.collectives)
        sizes = [bytes_near_best(self.series(name, *largest)) for name in names]
        return max(filter(None, sizes), default=None)

    def ring_step(self) -> float | None:
        """Seconds that a ring's step takes to begin inside a node: the smallest reduce-scatter
        of all its devices takes one for each but the first."""
        series = self.series("reduce-scatter", self.node, 1)
        return series[0].seconds.median / (self.node - 1) if series else None

    def product_knee(self) -> float | None:
        """GFLOP from which a dense product is within 20% of the best."""
        return knee((p.flops / 1e9, p.rate) for p in self.products if p.name == "dense")

    def rows_knee(self) -> int | None:
        """Rows of an expert from which on a grouped product is within 20% of its best."""
        return knee((p.m, p.rate) for p in self.products if p.name == "grouped forward")


def bytes_near_best(series: Iterable[CollectiveTiming]) -> int | None:
    """The bytes from which a collective is within 10% of its best rate."""
    return knee(((c.bytes, c.bus_bandwidth) for c in series), 0.9)


def to_json(figures: Measured) -> str:
    """The text of a file of figures."""
    return json.dumps({"format": FORMAT} | dataclasses.asdict(figures), indent=1) + "\n"


@functools.cache  # all of a start goes by one reading
def load(path: str | os.PathLike) -> Measured:
    """The figures of a file, or of all.json in a folder; UserError where it holds none."""
    path = Path(path)
    if path.is_dir():
        path /= "all.json"
    try:
        record = files.read_json(path)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r}, expected {FORMAT}")
        fields = {field.name: record[field.name] for field in dataclasses.fields(Measured)}
        for name, kind in LISTS.items():
            fields[name] = tuple(_read(kind, entry) for entry in record[name])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as figures of experiments.characterize ({type(error).__name__}:"
            f" {error}); give its all.json, collectives.json, matmul.json or memory.json, or"
            " measure again"
        ) from None
    return Measured(**fields)


def _read(kind: type, entry: dict[str, Any]) -> Any:
    fields = {field.name: entry[field.name] for field in dataclasses.fields(kind)}
    fields["seconds"] = Timing(*entry["seconds"])
    return kind(**fields)
