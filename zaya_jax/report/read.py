"""Reads a workdir for the report: metrics.jsonl streamed into bins, and the small files next to it.

A run may have a million steps, so no list of steps is kept: every metric is a `Series` (or `VectorSeries`, for
one number per layer or expert) with a fixed maximum of bins, whose width in steps doubles when there would be
more. Files may be missing, cut short or hold NaN: unusable parts are counted and reported, never fatal.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.config import files
from zaya_jax.report.text import counted

SERIES_BINS = 1024
VECTOR_BINS = 240
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


class _Binned:
    """Neighbouring steps in at most `capacity` bins of equal width, which doubles whenever there would be more."""

    def __init__(self, capacity: int):
        self.capacity, self.width, self.zero = capacity, 1, True  # zero: so far each value is one
        self.bins: dict[int, Any] = {}

    def _put(self, step: int, one: Any) -> None:
        index = step // self.width
        if index in self.bins:
            self.bins[index].add(one)
            return
        self.bins[index] = one
        while len(self.bins) > self.capacity:
            self.width *= 2
            self.bins = _merged(self.bins, 2)

    def width_for(self, most: int) -> int:
        """The least width in steps of at most `most` bins."""
        factor = 1
        while len({index // factor for index in self.bins}) > most:
            factor *= 2
        return self.width * factor

    def merged(self, width: int) -> list[Any]:
        """Bins of that width, in order of steps; one that `width_for` gives, of this series or of a longer one."""
        bins = self.bins if width <= self.width else _merged(self.bins, width // self.width)
        return [bins[i] for i in sorted(bins)]


def _merged(bins: dict[int, Any], factor: int) -> dict[int, Any]:
    out: dict[int, Any] = {}
    for index, item in bins.items():
        out.setdefault(index // factor, type(item)()).add(item)
    return out


class Series(_Binned):
    """One number per step, with its extremes and last value."""

    def __init__(self, capacity: int = SERIES_BINS):
        super().__init__(capacity)
        self.last_step, self.last = -1, math.nan
        self.low, self.low_step, self.high, self.high_step = math.inf, -1, -math.inf, -1

    def add(self, step: int, value: float) -> None:
        """Records a step's value; NaN and infinities are counted apart."""
        self.zero &= value == 0
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
        self._put(step, one)

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


@dataclasses.dataclass(slots=True)
class VectorBin:
    """Some neighbouring steps of an array of metrics: sums and counts of its finite entries."""

    steps: int = 0
    step_sum: float = 0.0
    sum: Any = 0.0
    count: Any = 0

    def add(self, other: "VectorBin") -> None:
        """Takes in the arrays of another bin."""
        self.steps, self.step_sum = self.steps + other.steps, self.step_sum + other.step_sum
        self.sum, self.count = self.sum + other.sum, self.count + other.count

    @property
    def mean(self) -> np.ndarray:
        """The mean of the finite values, entry by entry; NaN where there was none."""
        return np.where(self.count > 0, self.sum / np.maximum(self.count, 1), np.nan)


class VectorSeries(_Binned):
    """An array of fixed shape per step, [L] or [L, E+1]."""

    def __init__(self, shape: tuple[int, ...], capacity: int = VECTOR_BINS):
        super().__init__(capacity)
        self.shape = shape

    def add(self, step: int, value: np.ndarray) -> None:
        """Records a step's array; entries that are not finite count as missing."""
        self.zero &= not value.any()
        good = np.isfinite(value) & (np.abs(value) < LARGEST)
        self._put(step, VectorBin(1, step, np.where(good, value, 0.0), good.astype(np.int64)))

    def coarse(self, most: int) -> tuple[list[float], np.ndarray]:
        """Steps [T] and means [T, ...] in order, merged until there are at most `most`."""
        bins = self.merged(self.width_for(most))
        return [b.step_sum / b.steps for b in bins], np.stack([b.mean for b in bins])

    def end(self, fraction: float = 0.05) -> tuple[np.ndarray, int]:
        """The mean over the last part of the run, and how many recorded steps that is."""
        order = sorted(self.bins)
        whole, wanted = VectorBin(), max(1, fraction * sum(b.steps for b in self.bins.values()))
        while order and whole.steps < wanted:
            whole.add(self.bins[order.pop()])
        return whole.mean, whole.steps


class Sample(NamedTuple):
    """The text that the model wrote at a step, its prompt included."""

    step: int
    prompt: str
    text: str


@dataclasses.dataclass
class Workdir:
    """The report's data of a run."""

    path: pathlib.Path
    series: dict[str, Series] = dataclasses.field(default_factory=dict)
    vectors: dict[str, VectorSeries] = dataclasses.field(default_factory=dict)
    config: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)
    kernels: dict = dataclasses.field(default_factory=dict)
    lineage: list = dataclasses.field(default_factory=list)  # of a fork: its ancestors, the nearest first
    sample: str = ""
    prompt: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    lines: int = 0
    first_step: int = 0
    last_step: int = 0
    last_losses: deque = dataclasses.field(default_factory=lambda: deque(maxlen=LAST_LOSSES))

    @property
    def steps(self) -> tuple[float, float]:
        """The first and the last step, which all pictures of the whole run have in common."""
        return float(self.first_step), float(self.last_step)

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
        """The unit of the losses."""
        return "nats per byte" if self.setting("data.tokenizer") == "bytes" else "nats per token"

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
    """Reads metrics.jsonl, the JSON files and the samples, as far as they are there."""
    out, notes = Workdir(path), list[str]()
    out.config = _json_object(path / "config.json", notes)
    out.environment = _json_object(path / "environment.json", notes)
    out.kernels = _json_object(path / "kernels.json", notes)
    forked = _json_object(path / "lineage.json", notes).get("forked")
    out.lineage = [run for run in forked if isinstance(run, dict)] if isinstance(forked, list) else []
    out.sample = _text(path / "sample.txt", notes)
    prompt = out.setting("log.sample_prompt")
    out.prompt = prompt if isinstance(prompt, str) and out.sample.startswith(prompt) else ""
    out.samples = _samples(path / "samples.jsonl", notes)
    _read_metrics(out, path / "metrics.jsonl", notes)
    out.notes = notes
    return out


def _read_metrics(out: Workdir, metrics: pathlib.Path, notes: list[str]) -> None:
    """Takes in the lines one by one. A last one without its end is being written, and waits for the next time."""
    if not metrics.is_file():
        notes.append("There is no metrics.jsonl in this workdir.")
        return
    unreadable, odd = 0, set[str]()
    with files.opened(metrics, 1 << 20) as file:
        for line in file:
            record = parse(line)
            if record is not None:
                _take(out, record, odd)
            elif line.strip() and line.endswith(b"\n"):
                unreadable += 1
    if not out.lines:
        notes.append("metrics.jsonl holds no complete step yet.")
    if unreadable:
        notes.append(_left_out(unreadable, "metrics.jsonl"))
    if odd:
        keys = ", ".join(sorted(odd)[:8])
        notes.append(f"Left out of {keys}: lists that are not numbers, or have another shape.")


def _left_out(lines: int, name: str) -> str:
    return f"{counted(lines, 'line')} of {name} could not be read and {'is' if lines == 1 else 'are'} left out."


def _take(out: Workdir, record: dict, odd: set[str]) -> None:
    """Takes in one step; adds the keys whose lists are of no use to `odd`."""
    step = int(record.pop("step"))
    out.first_step = step if not out.lines else min(out.first_step, step)
    out.last_step = max(out.last_step, step)
    out.lines += 1
    for key, value in record.items():
        if isinstance(value, list):
            _add_vector(out, odd, key, step, value)
        elif isinstance(value, int | float) or (value is None and key == "loss"):
            number = math.nan if value is None else float(value)  # null is how strict JSON writers put NaN
            out.series.setdefault(key, Series()).add(step, number)
            if key == "loss":
                out.last_losses.append(number)


def parse(line: bytes) -> dict | None:
    """A line of metrics.jsonl; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int | float) or isinstance(step, bool) or not 0 <= step < 2**53:
        return None
    return record if step == int(step) else None


def _add_vector(out: Workdir, odd: set[str], key: str, step: int, value: list) -> None:
    try:
        array = np.asarray(value, dtype=np.float64)  # None becomes NaN
    except (ValueError, TypeError, OverflowError):
        array = np.empty(0)
    right_shape = array.ndim == 2 and array.shape[1] > 1 if key == "load" else array.ndim == 1
    if right_shape and array.size and out.vectors.setdefault(key, VectorSeries(array.shape)).shape == array.shape:
        out.vectors[key].add(step, array)
    else:
        odd.add(key)


def _json_object(path: pathlib.Path, notes: list[str]) -> dict:
    if not path.is_file():
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(path.read_bytes()), dict):
            return value
    notes.append(f"{path.name} is not a readable JSON object and is left out.")
    return {}


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
    found, bad = dict[int, Sample](), 0
    for line in _text(path, notes, MAX_SAMPLES_BYTES).splitlines():
        record = parse(line.encode(errors="replace")) or {}
        text, prompt = record.get("text"), record.get("prompt")
        if isinstance(text, str) and isinstance(prompt, str):
            step = int(record["step"])
            found[step] = Sample(step, prompt if text.startswith(prompt) else "", text[:MAX_TEXT_BYTES])
        else:
            bad += 1
    if bad:
        notes.append(_left_out(bad, path.name))
    return [found[step] for step in sorted(found)]
