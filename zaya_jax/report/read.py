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

# A metric while its file is read: the shape of a step's array, () for numbers; the steps; the values.
Column = tuple[tuple[int, ...], array.array, array.array]
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

    def course(self) -> list[tuple[float, float]]:
        """The means as points of a curve."""
        return list(zip(self.steps, self.means.tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class Series:
    """A metric by step: of each step a number, [T], or an array of one shape, [T, L] or
    [T, L, E+1]."""

    steps: np.ndarray  # rising
    values: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[Any] | np.ndarray) -> "Series":
        """The series of these values, sorted by step; of several values of a step the last counts."""
        rising, place = np.unique(np.asarray(steps, np.int64)[::-1], return_index=True)
        return cls(rising, np.asarray(values, float)[::-1][place])

    @property
    def good(self) -> np.ndarray:
        """The values, with NaN in place of each that is not finite."""
        return np.where(np.abs(self.values) < LARGEST, self.values, np.nan)

    @property
    def finite(self) -> np.ndarray:
        """The finite values, without their steps."""
        return self.good[np.isfinite(self.good)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one step's array; () for numbers."""
        return self.values.shape[1:]

    @property
    def zero(self) -> bool:
        """Whether the value of every step is zero."""
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
        """The mean of the finite numbers of steps `first` to `last`, both included."""
        values = self.good[(first <= self.steps) & (self.steps <= last)]
        values = values[np.isfinite(values)]
        return float(values.mean()) if values.size else math.nan

    @property
    def least(self) -> float:
        """The least finite number; NaN without one."""
        return float(np.fmin.reduce(self.good, axis=None))

    @property
    def greatest(self) -> float:
        """The greatest finite number; NaN without one."""
        return float(np.fmax.reduce(self.good, axis=None))

    def width_for(self, most: int) -> int:
        """The least width of a bin in steps, a power of two, with which there are at most `most`."""
        width = 1
        while 1 + np.count_nonzero(np.diff(self.steps // width)) > most:
            width *= 2
        return width

    def merged(self, width: int) -> Bins:
        """Bins of `width` steps each; a bin without a recorded step is left out."""
        starts = np.flatnonzero(np.diff(self.steps // width, prepend=-1))
        counts = np.add.reduceat(np.isfinite(self.good), starts, axis=0, dtype=int)
        sums = np.add.reduceat(np.nan_to_num(self.good), starts, axis=0)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        lengths = np.diff(starts, append=len(self.steps))
        steps = np.add.reduceat(self.steps, starts, dtype=float) / lengths
        low = np.fmin.reduceat(self.good, starts, axis=0)
        high = np.fmax.reduceat(self.good, starts, axis=0)
        return Bins(steps.tolist(), counts, means, low, high)

    def coarse(self, most: int) -> Bins:
        """At most `most` bins, as narrow as that allows."""
        return self.merged(self.width_for(most))

    def end(self) -> np.ndarray:
        """The mean over the last twentieth of the recorded steps, NaN where no value is finite."""
        last = self.good[-math.ceil(len(self.steps) / 20) :]
        return np.ma.masked_invalid(last).mean(axis=0).filled(np.nan)


@dataclasses.dataclass
class Workdir:
    """What a run's folder holds; `omissions` say what of it could not be read."""

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
    omissions: list[str] = dataclasses.field(default_factory=list)

    @property
    def first_step(self) -> int:
        """The first recorded step; 0 without one."""
        return int(self.recorded[0]) if self.recorded.size else 0

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 without one."""
        return int(self.recorded[-1]) if self.recorded.size else 0

    @property
    def steps(self) -> tuple[float, float]:
        """The first and the last step, which all pictures of the whole run have in common."""
        return float(self.first_step), float(self.last_step)

    def setting(self, path: str) -> Any:
        """A key of the recorded config by its dotted path, None where it is not there."""
        value: Any = self.config
        for part in path.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(part)
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
        """The mean of `last_losses`; NaN if the last step's loss is not finite."""
        losses = self.last_losses
        if not losses.size or not math.isfinite(losses[-1]):
            return math.nan
        return float(losses[np.isfinite(losses)].mean())

    @property
    def seconds(self) -> float:
        """The time that all recorded steps took together."""
        if "step_seconds" not in self.series:
            return math.nan
        return float(self.series["step_seconds"].finite.sum())


def read_workdir(path: pathlib.Path) -> Workdir:
    """Reads metrics.jsonl, the JSON files and the sample, as far as they are there."""
    run = Workdir(path)
    run.config = _json_object(path / "config.json", run.omissions)
    run.environment = _json_object(path / "environment.json", run.omissions)
    run.lineage = run.environment.pop("forked", [])
    if (path / "sample.txt").is_file():
        run.sample = (path / "sample.txt").read_text("utf-8", errors="replace")
    metrics_file = path / "metrics.jsonl"
    if not metrics_file.is_file():
        run.omissions.append("There is no metrics.jsonl in this workdir.")
        return run
    run.recorded, all_series = _read_metrics(metrics_file, run.omissions)
    for key, series in all_series.items():
        if series.shape == ():
            run.series[key] = series
        elif len(series.shape) == 1 + (key == "load"):
            run.vectors[key] = series
        else:
            run.omissions.append(f"{key} is not drawn: it has not one number for each layer.")
    return run


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
    omissions: list[str] = []
    steps, all_series = _read_metrics(path, omissions)
    if omissions:
        warnings.warn(" ".join(omissions), stacklevel=2)
    table = {"step": steps}
    for name, series in all_series.items():
        table[name] = np.full((len(steps), *series.shape), np.nan)
        table[name][np.searchsorted(steps, series.steps)] = series.values
    return table


def _read_metrics(path: pathlib.Path, omissions: list[str]) -> tuple[np.ndarray, dict[str, Series]]:
    """The recorded steps, and the metrics by name.

    A last line without its end is being written, and waits for the next time.
    """
    recorded: set[int] = set()
    columns: dict[str, Column] = {}
    unreadable, odd = 0, set[str]()
    with path.open("rb", 1 << 20) as file:
        for line in file:
            record = _record(line)
            if record is not None:
                step = int(record.pop("step"))
                recorded.add(step)
                for key, value in record.items():
                    row = _row(value)
                    fresh = row.shape, array.array("q"), array.array("d")
                    shape, steps, values = columns.setdefault(key, fresh)
                    if row.size and row.shape == shape:
                        steps.append(step)
                        values.extend(row.flat)
                    else:
                        odd.add(key)
            elif line.strip() and line.endswith(b"\n"):
                unreadable += 1
    if not recorded:
        omissions.append("metrics.jsonl holds no complete step yet.")
    if unreadable:
        omissions.append(f"Left out of metrics.jsonl: {counted(unreadable, 'unreadable line')}.")
    if odd:
        keys = ", ".join(sorted(odd)[:8])
        omissions.append(
            f"Left out of {keys}: what is not numbers, or has another shape than the first one."
        )
    all_series: dict[str, Series] = {}
    for key in list(columns):
        # Its memory is free as soon as the series is made.
        shape, steps, values = columns.pop(key)
        if steps:
            all_series[key] = Series.of(steps, np.asarray(values).reshape(-1, *shape))
    return np.array(sorted(recorded), int), all_series


def _row(value: object) -> np.ndarray:
    """One step's number or array, None in it as NaN; an empty one where it is none."""
    try:
        return np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError):
        return np.empty(0)


def _record(line: bytes) -> dict | None:
    """A line of metrics.jsonl; None where it is none."""
    try:
        record = json.loads(line, parse_int=float)  # an integer may be beyond any float: infinite
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if isinstance(step, float) and 0 <= step <= LAST_STEP and step.is_integer():
        return record
    return None


def _json_object(path: pathlib.Path, omissions: list[str]) -> dict:
    if not path.is_file():
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(path.read_bytes()), dict):
            return value
    omissions.append(f"{path.name} is not a readable JSON object and is left out.")
    return {}
