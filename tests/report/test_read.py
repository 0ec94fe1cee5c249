"""The workdir's reader: exact in what it keeps, and patient with damaged files."""

import json
import math

import numpy as np
import pytest
from made_run import write_run

from zaya_jax.report.read import LAST_LOSSES, Series, metrics, read_workdir


def lines(*records):
    return "".join(json.dumps(r) + "\n" for r in records)


def test_bins_keep_means_and_extremes():
    values = np.random.default_rng(0).normal(5, 2, 5000)
    series = Series.of(range(1, 5001), values)
    assert series.mean() == pytest.approx(values.mean(), rel=1e-12)
    assert series.low == (values.min(), values.argmin() + 1) and series.high == (
        values.max(),
        values.argmax() + 1,
    )
    bins = series.coarse(10)
    assert len(bins.steps) == 10 and bins.steps == sorted(bins.steps) and bins.counts.sum() == 5000
    assert (bins.low.min(), bins.high.max()) == (values.min(), values.max())
    assert bins.means[3] == pytest.approx(values[3 * 512 - 1 : 4 * 512 - 1].mean(), rel=1e-12)
    assert series.mean(11, 20) == pytest.approx(values[10:20].mean(), rel=1e-12)


def test_what_is_not_finite_is_no_part_of_a_mean():
    values = [
        math.nan if step == 7 else math.inf if step == 30 else 1e305 if step == 31 else 2.0
        for step in range(40)
    ]
    series = Series.of(range(40), values)
    assert series.bad_steps == [7, 30, 31] and series.mean() == 2.0 and series.finite.size == 37
    assert series.coarse(5).counts.tolist() == [7, 8, 8, 6, 8] and set(series.coarse(5).means) == {
        2.0
    }
    never = Series.of([3, 4], [math.nan, math.inf])
    assert (
        never.low[1] == -1
        and np.isnan(never.coarse(1).means).all()
        and never.coarse(1).steps == [3.5]
    )


def test_arrays_average_over_bins_and_skip_missing_entries():
    series = Series.of(range(16), [[step, math.nan if step % 2 else 1.0] for step in range(16)])
    bins = series.coarse(4)
    assert bins.steps == [1.5, 5.5, 9.5, 13.5]
    np.testing.assert_allclose(bins.means, [[1.5, 1], [5.5, 1], [9.5, 1], [13.5, 1]])
    end, recorded = series.end(0.25)
    assert recorded == 4
    np.testing.assert_allclose(end, [13.5, 1])


def test_the_made_up_run_is_read_whole(tmp_path):
    run = read_workdir(write_run(tmp_path / "run", 50, load_every=5))
    assert (len(run.recorded), run.steps, run.notes) == (50, (1, 50), [])
    assert len(run.vectors["load"].steps) == 10 and run.vectors["load"].shape == (6, 9)
    assert run.series["eval/loss"].finite.size == 8
    assert (run.prompt, run.unit, run.name) == ("def ", "nats per byte", "tiny")
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert run.seconds == pytest.approx(sum(r["step_seconds"] for r in records))
    assert run.train_loss == pytest.approx(np.mean([r["loss"] for r in records[-LAST_LOSSES:]]))


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    good = lines({"step": 1, "loss": 2.0}, {"step": 3, "loss": 1.0})
    bad = (
        '[1]\n7\nnull\n{"loss": 1}\n{"step": "4"}\n{"step": -1}\n{"step": 1.5}\n{"step":'
        ' NaN}\n{"step": true}\n'
    )
    (tmp_path / "metrics.jsonl").write_bytes(
        (good + bad).encode() + b'\xff\xfe\x00\n\n{"step": 9, "lo'
    )
    run = read_workdir(tmp_path)
    assert run.recorded.tolist() == [1, 3]
    assert run.series["loss"].mean() == 1.5
    # The last one, which is being written, waits for the next time.
    assert run.notes == ["Left out of metrics.jsonl: 10 unreadable lines."]


def test_of_several_lines_of_a_step_the_last_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        lines(
            {"step": 2, "loss": 9.0, "a": [1]}, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}
        )
    )
    found = metrics(tmp_path)
    assert found["step"].tolist() == [1, 2] and found["loss"].tolist() == [3.0, 2.0]
    np.testing.assert_array_equal(found["a"], [[math.nan], [1]])


def test_unusable_small_files_are_said(tmp_path):
    (tmp_path / "config.json").write_text('{"model": ')
    (tmp_path / "environment.json").write_text("[]")
    (tmp_path / "sample.txt").write_bytes(b"ok \xff")
    run = read_workdir(tmp_path)
    assert run.config == {}
    assert len(run.notes) == 3
    assert run.notes[0].startswith("config.json is not a readable JSON object")
    assert run.sample == "ok �"
