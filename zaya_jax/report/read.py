"""Reads a run's folder for its report and for notebooks: metrics.jsonl as series, and the small
files next to it.

Every number of a run is kept, 8 bytes each and 8 for its step; pictures are of neighbouring steps
in bins. Files may be missing, cut short or hold NaN: unusable parts are counted and reported, never
fatal.
"""

import array
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.report.text import counted

MAX_TEXT_BYTES = 1 << 16
LARGEST = 1e300  # beyond this a sum may overflow: counted as non-finite
LAST_STEP = 2**53 - 1  # that JSON readers agree on
LAST_LOSSES = 20  # steps averaged for the headline: one batch's loss is noisy


@dataclasses.dataclass(frozen=True)
class Bins:
    """Neighbouring steps of a metric: their mean step; of their finite values how many, the mean
    and the range."""

    steps: list[float]
    counts: np.ndarray
    means: np.ndarray  # NaN without a finite value, as are `low` and `high`
    low: np.ndarray
    high: np.ndarray

    def course(self, factor: float = 1.0) -> list[tuple[float, float]]:
        """The means as points of a curve."""
        return list(zip(self.steps, (self.means * factor).tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class Series:
    """A metric by step: one number each, [T], or one array of a fixed shape, [T, L] or [T, L,
    E+1]."""

    steps: np.ndarray  # rising
    values: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[Any] | np.ndarray) -> "Series":
        """In order of steps; of several values of one step the last counts."""
        rising, place = np.unique(np.asarray(steps, np.int64)[::-1], return_index=True)
        return cls(rising, np.asarray(values, float)[::-1][place])

    @property
    def good(self) -> np.ndarray:
        """The values; NaN in place of those that are not finite."""
        return np.where(np.abs(self.values) < LARGEST, self.values, np.nan)

    @property
    def finite(self) -> np.ndarray:
        """The finite values alone."""
        return self.good[np.isfinite(self.good)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one step's array."""
        return self.values.shape[1:]

    @property
    def zero(self) -> bool:
        """Whether each value is one."""
        return not self.values.any()

    @property
    def last(self) -> float:
        """The last step's number."""
        return float(self.values[-1])

    @property
    def bad_steps(self) -> list[int]:
        """The steps whose number is not finite."""
        return self.steps[np.isnan(self.good)].tolist()

    def mean(self, first: int = 0, last: int = LAST_STEP) -> float:
        """Of the finite numbers from one step to another, both included."""
        found = self.good[(first <= self.steps) & (self.steps <= last)]
        found = found[np.isfinite(found)]
        return float(found.mean()) if found.size else math.nan

    @property
    def low(self) -> tuple[float, int]:
        """The least finite number and its step; (NaN, -1) without one."""
        return self._first(np.nanargmin)

    @property
    def high(self) -> tuple[float, int]:
        """The greatest finite number and its step."""
        return self._first(np.nanargmax)

    def _first(self, place: Any) -> tuple[float, int]:
        if not self.finite.size:
            return math.nan, -1
        at = place(self.good)
        return float(self.values[at]), int(self.steps[at])

    def width_for(self, most: int) -> int:
        """The least width in steps, a power of two, of at most `most` bins."""
        width = 1
        while 1 + np.count_nonzero(np.diff(self.steps // width)) > most:
            width *= 2
        return width

    def merged(self, width: int) -> Bins:
        """Bins of so many steps; those without any step are left out."""
        starts = np.flatnonzero(np.diff(self.steps // width, prepend=-1))
        counts = np.add.reduceat(np.isfinite(self.good), starts, axis=0, dtype=int)
        sums = np.add.reduceat(np.nan_to_num(self.good), starts, axis=0)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        steps = np.add.reduceat(self.steps, starts, dtype=float) / np.diff(
            starts, append=len(self.steps)
        )
        low, high = (choose.reduceat(self.good, starts, axis=0) for choose in (np.fmin, np.fmax))
        return Bins(steps.tolist(), counts, means, low, high)

    def coarse(self, most: int) -> Bins:
        """Bins of equal width, at most `most`."""
        return self.merged(self.width_for(most))

    def end(self, share: float = 0.05) -> tuple[np.ndarray, int]:
        """The mean over the last part of the run, NaN where no value is finite, and how many
        recorded steps that is."""
        many = math.ceil(share * len(self.steps))
        return np.ma.masked_invalid(self.good[-many:]).mean(axis=0).filled(np.nan), many


@dataclasses.dataclass
class Workdir:
    """The report's data of a run."""

    path: pathlib.Path
    # the steps, rising
    recorded: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    series: dict[str, Series] = dataclasses.field(default_factory=dict)  # of numbers
    vectors: dict[str, Series] = dataclasses.field(default_factory=dict)  # of arrays
    config: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)
    # of a fork: its ancestors, the nearest first
    lineage: list = dataclasses.field(default_factory=list)
    sample: str = ""
    prompt: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def first_step(self) -> int:
        """The first recorded step; 0 without one."""
        return int(self.recorded[0]) if self.recorded.size else 0

    @property
    def last_step(self) -> int:
        """The last one."""
        return int(self.recorded[-1]) if self.recorded.size else 0

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
        if self.setting("run.preference") not in (None, "none"):
            return "nats per pair"
        return "nats per byte" if self.setting("data.tokenizer") == "bytes" else "nats per token"

    @property
    def last_losses(self) -> np.ndarray:
        """The training losses of the last steps."""
        return self.series["loss"].values[-LAST_LOSSES:] if "loss" in self.series else np.zeros(0)

    @property
    def train_loss(self) -> float:
        """Their mean; NaN if the last one is not finite."""
        good = self.last_losses[np.isfinite(self.last_losses)]
        return float(good.mean()) if good.size and math.isfinite(self.last_losses[-1]) else math.nan

    @property
    def seconds(self) -> float:
        """The time that all recorded steps took together."""
        return (
            float(self.series["step_seconds"].finite.sum())
            if "step_seconds" in self.series
            else math.nan
        )


def read_workdir(path: pathlib.Path) -> Workdir:
    """Reads metrics.jsonl, the JSON files and the sample, as far as they are there."""
    out, notes = Workdir(path), list[str]()
    out.config = _json_object(path / "config.json", notes)
    out.environment = _json_object(path / "environment.json", notes)
    forked = _json_object(path / "lineage.json", notes).get("forked")
    out.lineage = (
        [run for run in forked if isinstance(run, dict)] if isinstance(forked, list) else []
    )
    out.sample = _text(path / "sample.txt", notes)
    prompt = out.setting("log.sample_prompt")
    out.prompt = prompt if isinstance(prompt, str) and out.sample.startswith(prompt) else ""
    metrics_file = path / "metrics.jsonl"
    if metrics_file.is_file():
        out.recorded, out.series, arrays = _read_metrics(metrics_file, notes)
        out.vectors = {key: series for key, series in arrays.items() if _drawn(key, series.shape)}
        if other := sorted(arrays.keys() - out.vectors):
            notes.append(
                "Arrays of another shape than [L], or [L, E+1] of `load`, are not drawn:"
                f" {', '.join(other)}."
            )
    else:
        notes.append("There is no metrics.jsonl in this workdir.")
    out.notes = notes
    return out


def _drawn(key: str, shape: tuple[int, ...]) -> bool:
    """Whether the report has a picture for arrays of this shape."""
    return len(shape) == 2 and shape[1] > 1 if key == "load" else len(shape) == 1


def metrics(place: str | os.PathLike) -> dict[str, np.ndarray]:
    """A run's figures by name: "step", and one value a step, [T] or [T, L, ..]; NaN where a step
    has none.

    >>> table = zj.metrics(run)
    >>> table["step"].tolist(), table["loss"].shape, table["load_entropy"].shape
    ([1, 2, 3, 4], (4,), (4, 2))
    """
    path = pathlib.Path(place) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is not there; give the folder of a run")
    notes: list[str] = []
    steps, numbers, arrays = _read_metrics(path, notes)
    if notes:
        warnings.warn(" ".join(notes), stacklevel=2)
    table = {"step": steps}
    for name, series in (numbers | arrays).items():
        table[name] = np.full((len(steps), *series.shape), np.nan)
        table[name][np.searchsorted(steps, series.steps)] = series.values
    return table


def _read_metrics(
    path: pathlib.Path, notes: list[str]
) -> tuple[np.ndarray, dict[str, Series], dict[str, Series]]:
    """The recorded steps; the metrics that are numbers, and those that are arrays.

    A last line without its end is being written, and waits for the next time.
    """
    steps, unreadable, odd = set[int](), 0, set[str]()
    columns: tuple[dict[str, tuple], dict[str, tuple]] = {}, {}
    with path.open("rb", 1 << 20) as file:
        for line in file:
            record = parse(line)
            if record is not None:
                step = int(record.pop("step"))
                steps.add(step)
                _take(step, record, *columns, odd)
            elif line.strip() and line.endswith(b"\n"):
                unreadable += 1
    if not steps:
        notes.append("metrics.jsonl holds no complete step yet.")
    if unreadable:
        notes.append(_left_out(unreadable, "metrics.jsonl"))
    if odd:
        keys = ", ".join(sorted(odd)[:8])
        notes.append(
            f"Left out of {keys}: lists that are not numbers, or have another shape than the first"
            " one."
        )
    numbers, arrays = ({key: _series(*found.pop(key)) for key in list(found)} for found in columns)
    return np.array(sorted(steps), int), numbers, arrays


def _series(steps: array.array, values: array.array, shape: tuple[int, ...]) -> Series:
    return Series.of(steps, np.asarray(values).reshape(-1, *shape))


def _left_out(lines: int, name: str) -> str:
    return (
        f"{counted(lines, 'line')} of {name} could not be read and {'is' if lines == 1 else 'are'}"
        " left out."
    )


def _take(
    step: int, record: dict, numbers: dict[str, tuple], arrays: dict[str, tuple], odd: set[str]
) -> None:
    """Takes in one step; adds the keys whose lists are of no use to `odd`."""
    for key, value in record.items():
        if isinstance(value, list):
            row = _row(value)
            if row is None or (key in arrays and arrays[key][2] != row.shape):
                odd.add(key)
                continue
            at, values, _ = arrays.setdefault(key, (array.array("q"), array.array("d"), row.shape))
            values.extend(row.ravel())
        elif isinstance(value, int | float) or (value is None and key == "loss"):
            at, values, _ = numbers.setdefault(key, (array.array("q"), array.array("d"), ()))
            # null is how strict JSON writers put NaN
            values.append(math.nan if value is None else float(value))
        else:
            continue
        at.append(step)


def _row(value: list) -> np.ndarray | None:
    """One step's array; None where it is none."""
    try:
        row = np.asarray(value, dtype=np.float64)  # None becomes NaN
    except (ValueError, TypeError, OverflowError):
        return None
    return row if row.size else None


def parse(line: bytes) -> dict | None:
    """A line of metrics.jsonl; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int | float) or isinstance(step, bool) or not 0 <= step <= LAST_STEP:
        return None
    return record if step == int(step) else None


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
