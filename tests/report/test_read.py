"""The workdir's reader: bounded, exact in what it keeps, and patient with damaged files."""

import json
import math
import random

import numpy as np
import pytest
from made_run import write_run

from zaya_jax.report.read import LAST_LOSSES, Series, VectorSeries, read_workdir


def lines(*records):
    return "".join(json.dumps(r) + "\n" for r in records)


def test_series_stays_bounded_and_keeps_means_and_extremes():
    rng = random.Random(0)
    series, values = Series(capacity=64), [rng.gauss(5, 2) for _ in range(5000)]
    for step, value in enumerate(values, 1):
        series.add(step, value)
        assert len(series.bins) <= 64
    assert (series.width, series.total.count) == (128, 5000)
    assert series.total.mean == pytest.approx(sum(values) / 5000, rel=1e-12)
    assert (series.total.low, series.total.high) == (min(values), max(values))
    assert series.low_step == values.index(min(values)) + 1
    bins = series.coarse(10)
    assert len(bins) <= 10
    assert sum(b.count for b in bins) == 5000
    assert [b.step for b in bins] == sorted(b.step for b in bins)
    assert min(b.low for b in bins) == min(values)
    width = series.width * 4
    inside = [v for s, v in enumerate(values, 1) if s // width == 3]
    assert bins[3].mean == pytest.approx(sum(inside) / len(inside), rel=1e-12)


def test_series_counts_what_is_not_finite_apart():
    series = Series(capacity=4)
    for step in range(1, 40):
        series.add(step, math.nan if step == 7 else math.inf if step == 30 else 1e305 if step == 31 else 2.0)
    assert (series.total.bad, series.total.bad_step) == (3, 7)
    assert series.total.mean == 2.0
    assert series.total.count == 36


def test_vectors_average_over_bins_and_skip_missing_entries():
    vectors = VectorSeries((2,), capacity=4)
    for step in range(16):
        vectors.add(step, np.array([step, np.nan if step % 2 else 1.0]))
    steps, means = vectors.coarse(4)
    assert steps == [1.5, 5.5, 9.5, 13.5]
    np.testing.assert_allclose(means, [[1.5, 1], [5.5, 1], [9.5, 1], [13.5, 1]])
    end, recorded = vectors.end(0.25)
    assert recorded == 4
    np.testing.assert_allclose(end, [13.5, 1])


def test_the_made_up_run_is_read_whole(tmp_path):
    run = read_workdir(write_run(tmp_path / "run", 50, load_every=5))
    assert (run.lines, run.steps, run.notes) == (50, (1, 50), [])
    assert len(run.vectors["load"].bins) == 10 and run.vectors["load"].shape == (6, 9)
    assert run.series["eval/loss"].total.count == 8
    assert (run.prompt, run.unit, run.name) == ("def ", "nats per byte", "tiny")
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert run.seconds == pytest.approx(sum(r["step_seconds"] for r in records))
    assert run.train_loss == pytest.approx(np.mean([r["loss"] for r in records[-LAST_LOSSES:]]))
    waits = [r["data/wait_fraction"] for r in records]
    assert run.series["data/wait_fraction"].total.mean == pytest.approx(np.mean(waits))


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    good = lines({"step": 1, "loss": 2.0}, {"step": 3, "loss": 1.0})
    bad = '[1]\n7\nnull\n{"loss": 1}\n{"step": "4"}\n{"step": -1}\n{"step": 1.5}\n{"step": NaN}\n{"step": true}\n'
    (tmp_path / "metrics.jsonl").write_bytes((good + bad).encode() + b'\xff\xfe\x00\n\n{"step": 9, "lo')
    run = read_workdir(tmp_path)
    assert (run.lines, run.last_step) == (2, 3)
    assert run.series["loss"].total.mean == 1.5
    # The last one, which is being written, waits for the next time.
    assert run.notes == ["10 lines of metrics.jsonl could not be read and are left out."]


def test_unusable_small_files_are_said(tmp_path):
    (tmp_path / "config.json").write_text('{"model": ')
    (tmp_path / "environment.json").write_text("[]")
    (tmp_path / "sample.txt").write_bytes(b"ok \xff" + b"x" * 200_000)
    run = read_workdir(tmp_path)
    assert run.config == {}
    assert len(run.notes) == 4
    assert run.notes[0].startswith("config.json is not a readable JSON object")
    assert run.sample.startswith("ok �x")
    assert len(run.sample) == 1 << 16
