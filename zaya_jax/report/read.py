"""Reads a workdir for the report: metrics.jsonl streamed into bins, and the small files beside it.

A run may have a million steps, so no list of steps is kept: every metric is a `Series` (or `VectorSeries`, for
one number per layer or expert) of at most a fixed number of bins, whose width in steps doubles whenever
they would be exceeded. Files may be missing, cut short or hold NaN: what cannot be used is counted and
said, never fatal.
"""

import dataclasses
import json
import math
import pathlib
from collections import deque
from typing import Any

import numpy as np

SERIES_BINS = 1024
VECTOR_BINS = 240
MAX_KEYS = 256
MAX_ENTRIES = 1 << 16  # of one array: 64 layers of 1,023 experts and the skip class
MAX_LINE_BYTES = 1 << 26
MAX_TEXT_BYTES = 1 << 16
MAX_SAMPLES_BYTES = 1 << 20
LARGEST = 1e300  # beyond this a sum may overflow: counted as non-finite
LAST_LOSSES = 20  # steps averaged for the headline: one batch's loss is noisy


@dataclasses.dataclass(slots=True)
class Bin:
    """Neighbouring steps of one metric: how many values, their mean and range, how many were not finite."""

    count: int = 0
    mean: float = math.nan
    step: float = math.nan  # mean step of the values
    low: float = math.inf
    high: float = -math.inf
    bad: int = 0
    bad_step: int = -1  # the first step whose value was not finite

    def add(self, other: "Bin") -> None:
        """Takes in the values of another bin."""
        if other.bad and (not self.bad or other.bad_step < self.bad_step):
            self.bad_step = other.bad_step
        self.bad += other.bad
        if other.count:
            total = self.count + other.count
            part = other.count / total
            self.mean = other.mean if not self.count else self.mean + (other.mean - self.mean) * part
            self.step = other.step if not self.count else self.step + (other.step - self.step) * part
            self.low, self.high = min(self.low, other.low), max(self.high, other.high)
            self.count = total


class Series:
    """One number per step as at most `capacity` bins of equal width, with its extremes and last value."""

    def __init__(self, capacity: int = SERIES_BINS):
        self.capacity, self.width = capacity, 1
        self.bins: dict[int, Bin] = {}
        self.last_step, self.last = -1, math.nan
        self.low, self.low_step, self.high, self.high_step = math.inf, -1, -math.inf, -1

    def add(self, step: int, value: float) -> None:
        """Records a step's value; NaN and infinities are counted apart."""
        if -LARGEST < value < LARGEST:
            one = Bin(1, value, step, value, value)
            if value < self.low:
                self.low, self.low_step = value, step
            if value > self.high:
                self.high, self.high_step = value, step
        else:
            one = Bin(bad=1, bad_step=step)
        if step >= self.last_step:
            self.last_step, self.last = step, value
        index = step // self.width
        if index in self.bins:
            self.bins[index].add(one)
            return
        self.bins[index] = one
        while len(self.bins) > self.capacity:
            self.width *= 2
            self.bins = _merged(self.bins, 2, Bin)

    @property
    def total(self) -> Bin:
        """All bins in one."""
        total = Bin()
        for part in self.bins.values():
            total.add(part)
        return total

    def coarse(self, most: int) -> list[Bin]:
        """The bins in order of steps, merged until there are at most `most`."""
        return self.merged(self.width_for(most))

    def width_for(self, most: int) -> int:
        """The least width in steps of at most `most` bins."""
        factor = 1
        while len({index // factor for index in self.bins}) > most:
            factor *= 2
        return self.width * factor

    def merged(self, width: int) -> list[Bin]:
        """Bins of that width, in order of steps; one that `width_for` gives, of this series or of a longer one."""
        bins = self.bins if width <= self.width else _merged(self.bins, width // self.width, Bin)
        return [bins[i] for i in sorted(bins)]


class VectorBin:
    """Some neighbouring steps of an array of metrics: sums and counts of its finite entries."""

    def __init__(self) -> None:
        self.steps, self.step = 0, math.nan
        self.sum: Any = 0.0
        self.count: Any = 0

    def add(self, other: "VectorBin") -> None:
        """Takes in the arrays of another bin."""
        total = self.steps + other.steps
        self.step = (
            other.step if not self.steps else self.step + (other.step - self.step) * other.steps / total
        )
        self.steps = total
        self.sum, self.count = self.sum + other.sum, self.count + other.count

    @property
    def mean(self) -> np.ndarray:
        """The mean of the finite values, entry by entry; NaN where there was none."""
        return np.where(self.count > 0, self.sum / np.maximum(self.count, 1), np.nan)


class VectorSeries:
    """An array of fixed shape per step ([L] or [L, E+1]) as at most `capacity` bins of equal width."""

    def __init__(self, shape: tuple[int, ...], capacity: int = VECTOR_BINS):
        self.shape, self.capacity, self.width = shape, capacity, 1
        self.bins: dict[int, VectorBin] = {}

    def add(self, step: int, value: np.ndarray) -> None:
        """Records a step's array; entries that are not finite count as missing."""
        good = np.isfinite(value) & (np.abs(value) < LARGEST)
        one = VectorBin()
        one.steps, one.step, one.sum, one.count = 1, step, np.where(good, value, 0.0), good.astype(np.int64)
        self.bins.setdefault(step // self.width, VectorBin()).add(one)
        while len(self.bins) > self.capacity:
            self.width *= 2
            self.bins = _merged(self.bins, 2, VectorBin)

    def coarse(self, most: int) -> tuple[list[float], np.ndarray]:
        """Steps [T] and means [T, ...] in order, merged until there are at most `most`."""
        bins, factor = self.bins, 1
        while len(bins) > most:
            factor *= 2
            bins = _merged(self.bins, factor, VectorBin)
        order = sorted(bins)
        return [bins[i].step for i in order], np.stack([bins[i].mean for i in order])

    def end(self, fraction: float = 0.05) -> tuple[np.ndarray, int]:
        """The mean over the last part of the run, and how many recorded steps that is."""
        order = sorted(self.bins)
        whole, wanted = VectorBin(), max(1, fraction * sum(b.steps for b in self.bins.values()))
        while order and whole.steps < wanted:
            whole.add(self.bins[order.pop()])
        return whole.mean, whole.steps


def _merged(bins: dict[int, Any], factor: int, kind: type) -> dict[int, Any]:
    out: dict[int, Any] = {}
    for index, item in bins.items():
        out.setdefault(index // factor, kind()).add(item)
    return out


@dataclasses.dataclass
class Sample:
    """What the model wrote at a step: the prompt, and all of the text with it."""

    step: int
    prompt: str
    text: str


@dataclasses.dataclass
class Workdir:
    """What the report knows of a run."""

    path: pathlib.Path
    series: dict[str, Series] = dataclasses.field(default_factory=dict)
    vectors: dict[str, VectorSeries] = dataclasses.field(default_factory=dict)
    config: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)
    # Of a fork: what it comes from, the nearest first.
    lineage: list = dataclasses.field(default_factory=list)
    sample: str = ""
    prompt: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    lines: int = 0
    first_step: int = 0
    last_step: int = 0
    last_losses: deque = dataclasses.field(default_factory=lambda: deque(maxlen=LAST_LOSSES))
    # What could not be used of metrics.jsonl.
    unreadable: int = 0
    odd: set[str] = dataclasses.field(default_factory=set)
    left_out: bool = False

    def setting(self, path: str) -> Any:
        """A key of the recorded config by its dotted path, None where it is not there."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def name(self) -> str:
        """The config's name, otherwise the folder's."""
        return str(self.setting("name") or self.path.resolve().name)

    @property
    def unit(self) -> str:
        """What the losses are measured in."""
        return "nats per byte" if self.setting("data.tokenizer") == "bytes" else "nats per token"

    def last(self, key: str) -> float:
        """The last recorded value of a metric, NaN where there is none."""
        return self.series[key].last if key in self.series else math.nan

    @property
    def train_loss(self) -> float:
        """The mean loss of the last steps; NaN if the last one was not finite."""
        if not self.last_losses or not math.isfinite(self.last_losses[-1]):
            return math.nan
        good = [v for v in self.last_losses if math.isfinite(v)]
        return sum(good) / len(good)

    @property
    def seconds(self) -> float:
        """The time that all recorded steps took together."""
        total = self.series["step_seconds"].total if "step_seconds" in self.series else Bin()
        return total.mean * total.count if total.count else math.nan


def read_workdir(path: pathlib.Path) -> Workdir:
    """Reads metrics.jsonl, config.json, environment.json, lineage.json and the samples, as far as they are there."""
    out = Workdir(path)
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        with metrics.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                take(out, line)
    return finish(out)


def finish(out: Workdir) -> Workdir:
    """Reads what is beside metrics.jsonl, anew, and says what could not be used."""
    path, notes = out.path, list[str]()
    out.notes = notes
    out.config = _json_object(path / "config.json", notes)
    out.environment = _json_object(path / "environment.json", notes)
    forked = _json_object(path / "lineage.json", notes).get("forked")
    out.lineage = [run for run in forked if isinstance(run, dict)] if isinstance(forked, list) else []
    out.sample = _text(path / "sample.txt", notes)
    prompt = out.setting("log.sample_prompt")
    out.prompt = prompt if isinstance(prompt, str) and out.sample.startswith(prompt) else ""
    out.samples = _samples(path / "samples.jsonl", notes)
    if not (path / "metrics.jsonl").is_file():
        notes.append("There is no metrics.jsonl in this workdir.")
        return out
    if not out.lines:
        notes.append("metrics.jsonl holds no complete step yet.")
    if out.unreadable:
        lines = "1 line" if out.unreadable == 1 else f"{out.unreadable} lines"
        are = "is" if out.unreadable == 1 else "are"
        notes.append(f"{lines} of metrics.jsonl could not be read and {are} left out.")
    if out.odd:
        keys = ", ".join(sorted(out.odd)[:8])
        notes.append(
            f"Left out of {keys}: lists of something else than numbers, too long or of another shape."
        )
    if out.left_out:
        notes.append(f"Only the first {MAX_KEYS} metrics are shown.")
    return out


def take(out: Workdir, line: bytes) -> None:
    """Takes in a line of metrics.jsonl."""
    if not line.strip():
        return
    record = _parse(line)
    if record is None:
        out.unreadable += 1
        return
    step = int(record.pop("step"))
    out.first_step = step if not out.lines else min(out.first_step, step)
    out.last_step = max(out.last_step, step)
    out.lines += 1
    for key, value in record.items():
        known = key in out.series or key in out.vectors
        if not known and len(out.series) + len(out.vectors) + len(out.odd) >= MAX_KEYS:
            out.left_out = True
        elif isinstance(value, list):
            _add_vector(out, out.odd, key, step, value)
        else:
            _add_number(out, key, step, value)


def _parse(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int | float) or isinstance(step, bool) or not 0 <= step < 2**53:
        return None
    return record if step == int(step) else None


def _number(value: Any) -> float | None:
    """A float where the value is a number, or a string or null that stands for a non-finite one."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return math.nan
    return None


def _add_number(out: Workdir, key: str, step: int, value: Any) -> None:
    number = _number(value)
    if number is None and key == "loss" and value is None:
        number = math.nan  # how strict JSON writers put it
    if number is None:
        return
    out.series.setdefault(key, Series()).add(step, number)
    if key == "loss":
        out.last_losses.append(number)


def _add_vector(out: Workdir, odd: set[str], key: str, step: int, value: list) -> None:
    try:
        array = np.asarray(value, dtype=np.float64)  # None becomes NaN
    except (ValueError, TypeError, OverflowError):
        odd.add(key)
        return
    right_shape = array.ndim == 2 and array.shape[1] > 1 if key == "load" else array.ndim == 1
    if right_shape and 0 < array.size <= MAX_ENTRIES:
        vectors = out.vectors.setdefault(key, VectorSeries(array.shape))
        if vectors.shape == array.shape:
            vectors.add(step, array)
            return
    odd.add(key)


def _json_object(path: pathlib.Path, notes: list[str]) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a readable JSON object and is left out.")
        return {}
    return value


def _text(path: pathlib.Path, notes: list[str], most: int = MAX_TEXT_BYTES) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        notes.append(f"{path.name} is long: its first {most // 1024} KiB are shown.")
    return raw[:most].decode("utf-8", errors="replace")


def _samples(path: pathlib.Path, notes: list[str]) -> list[Sample]:
    """The samples of all ends of a run, by step; of several of one step the last."""
    found: dict[int, Sample] = {}
    bad = 0
    for line in _text(path, notes, MAX_SAMPLES_BYTES).splitlines():
        record = _parse(line.encode(errors="replace"))
        text, prompt = (record.get(key) if record else None for key in ("text", "prompt"))
        if record and isinstance(text, str) and isinstance(prompt, str):
            step = int(record["step"])
            found[step] = Sample(step, prompt if text.startswith(prompt) else "", text[:MAX_TEXT_BYTES])
        else:
            bad += 1
    if bad:
        notes.append(
            f"{bad} {'line' if bad == 1 else 'lines'} of {path.name} could not be read and are left out."
        )
    return [found[step] for step in sorted(found)]
