"""The page of a run: complete, small, of any subset of the files and metrics that a run may have
left; its reader: exact in what it keeps, and patient with damaged files."""

import json
import math
import re

import numpy as np
import pytest
from made_run import checked, figure, write_run

from zaya_jax.aegis import accounts
from zaya_jax.cluster.events import FOLDER, OF_AGENT, RunEvent
from zaya_jax.report import supervised, write_report
from zaya_jax.report.read import LAST_LOSSES, Series, metrics, read_workdir
from zaya_jax.report.text import duration, percent


def drawn(workdir):
    """The page's source and its text."""
    source = write_report(workdir).read_text(encoding="utf-8")
    return source, checked(source)


def with_other_figures(path, figures):
    """Puts other figures into lines of a run's metrics, by the lines' numbers from 0."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for number, more in figures.items():
        records[number] |= more
    (path / "metrics.jsonl").write_text(lines(*records))
    return path


def test_report_of_a_run_has_all_its_parts(tmp_path):
    source, text = drawn(write_run(tmp_path / "run", 300))
    assert re.findall("<figcaption>(.*?)</figcaption>", source) == [
        "Loss",
        "Loss, second half",
        "Balance of each layer",
        "Experts of layer 0",
        "Experts of layer 2",
        "Experts of layer 3",
        "Experts of layer 5",
        "Experts of all layers at the end",
        "Learning rate",
        "Gradient norm",
        "Skipped updates",
        "Gradient norm by group",
        "Seconds per step",
        "Tokens per second",
        "Time waiting for data",
        "Model FLOPs utilisation",
        "Norm of the weights",
        "Change of the balancing biases",
    ]
    headings = "Loss, Expert load, Optimisation, Speed, Other metrics, Sample, Numbers, Config"
    assert re.findall("<h2>(.*?)</h2>", source) == headings.split(", ")
    assert source.count('role="img"') == source.count("aria-label=") == source.count("<figure")
    for words in ("tiny training report", "2 CPU cores", "complete", "tokens per step"):
        assert words in text, words
    for words in ("Interruptions", "Lineage", "Checkpoints"):
        assert words not in text, words
    assert "prefers-color-scheme:dark" in source.replace(" ", "") and len(source) < 250_000
    # the same run gives the same page
    assert write_report(write_run(tmp_path / "run", 300)).read_text() == source


def test_of_phases_nothing_is_said_that_only_some_have(tmp_path):
    # phases end the run before, and each has a batch of its own
    phases = [{"tokens": 300 * 16 * 256, "global_batch": 16}]
    settings = {"run": {"num_steps": 1000}, "schedule": {"phases": phases}}
    _, text = drawn(write_run(tmp_path / "run", 300, settings=settings))
    assert "complete" not in text and "planned" not in text and "tokens per step" not in text


def test_sample_settings_and_parents_are_shown_and_escaped(tmp_path):
    settings = {"optim": {"lr": 0.25, "b1": 0.9}, "extra": {"<key>": "\ud800"}}
    path = write_run(tmp_path / "run", 5, settings=settings)
    (path / "sample.txt").write_text("def <x>('y') & \x07")
    parent = {"folder": "/runs/<a>", "run": "1", "step": 20, "tokens": 5000}
    changed = {"changed": {"optim.lr": [0.1, 0.2]}}
    (path / "environment.json").write_text(json.dumps({"forked": [parent | changed]}))
    source, text = drawn(path)
    assert "<pre>def &lt;x&gt;(&#x27;y&#x27;) &amp; ␇</pre>" in source
    assert "Forked from /runs/<a> (run 1) at step 20, 5,000 tokens." in text
    assert '<th scope="row">optim.lr</th><td>0.1</td><td>0.2</td>' in source
    # what differs from the defaults stands first
    differing = source[source.index("Differences from the defaults") : source.index("All keys")]
    assert '<th scope="row">optim.lr</th><td>0.25</td><td>0.001</td></tr>' in differing
    assert "extra.&lt;key&gt;" in differing and "optim.b1" not in differing and "optim.b1" in text


NOT_FINITE = {19: {"loss": math.nan}, 20: {"loss": math.inf}, 40: {"loss": None}}


@pytest.mark.parametrize(
    ("figures", "picture", "shown"),
    [
        (NOT_FINITE, "Loss", {'<g class="bad">': 3, "not finite at step 20": 1}),
        (NOT_FINITE, None, {"loss was not finite at 3 steps, first at step 20.": 1}),
        # A spike is left out of the picture and said; the loss before training is in it.
        (
            {59: {"loss": 5e8}},
            "Loss",
            {"Beyond the picture: train, each step (500M at step 60)": 1},
        ),
        (
            {0: {"step": 0, "eval/loss": 40.0}},
            "Loss",
            {"held-out at step 0: 40": 1, ">40</text>": 1},
        ),
    ],
)
def test_what_a_picture_shows_of_losses(tmp_path, figures, picture, shown):
    source, text = drawn(with_other_figures(write_run(tmp_path / "run", 100), figures))
    searched = figure(source, picture) if picture else text
    assert {words: searched.count(words) for words in shown} == shown


@pytest.mark.parametrize(
    ("losses", "best"),
    [((3, 1, 2, 1), "best 1 at step 2"), ((3, 2, 1), ""), ((math.nan, math.nan), "")],
)
def test_the_best_held_out_loss_is_named_where_it_is_not_the_last(tmp_path, losses, best):
    records = [{"step": step, "eval/loss": loss} for step, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text(lines(*records))
    assert re.findall(r"best [^<]*", drawn(tmp_path)[0]) == [best] * bool(best)


def test_a_figure_that_is_always_zero_has_no_picture_and_is_named(tmp_path):
    zero = {
        "skipped": 0,
        "data/retries": 0,
        "data/efficiency": 0.9,
        "dead_experts": [0, 0],
        "skip_share": [0, 0],
    }
    path = with_other_figures(
        write_run(tmp_path / "run", 40, extras=False), dict.fromkeys(range(40), zero)
    )
    source, text = drawn(path)
    for title in ("Skipped updates", "Skipped tokens", "Experts without a token"):
        assert f"<figcaption>{title}<" not in source
    names = "Skipped updates; Data: retries; Experts without a token; Skipped tokens"
    assert f"Zero at every step: {names}." in text
    data = figure(source, "Data")
    assert "efficiency" in data and "retries" not in data
    once = drawn(with_other_figures(path, {7: {"skipped": 1, "data/retries": math.nan}}))[1]
    assert "Zero at every step: Experts without a token; Skipped tokens." in once


def test_updates_that_were_clipped_are_drawn_as_a_share(tmp_path):
    clipped = {n: {"clipped": float(n % 2 or n >= 60)} for n in range(120)}
    source, _ = drawn(with_other_figures(write_run(tmp_path / "run", 120), clipped))
    picture = figure(source, "Clipped gradients")
    points = re.search(r'<polyline[^>]*points="([^"]*)"', picture)[1].split()
    values = [float(point.split(",")[1]) for point in points]
    assert len(values) <= 25 and values[2] == values[6] > values[-2]
    assert "of the steps <b>100 %</b>" in picture


@pytest.mark.parametrize(
    "files", [{}, *({"metrics.jsonl": content} for content in ("", "\n\n", '{"step": 1, "lo'))]
)
def test_a_run_without_a_complete_step(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    source, text = drawn(tmp_path)
    assert "<figure" not in source and "metrics.jsonl" in text


@pytest.mark.parametrize(
    "record",
    [
        {"step": 5},
        {"step": 5, "eval/loss": 2.0},
        {"step": 5, "load_entropy": [0.9, 0.8]},
        {"step": 5, "load": [[0.0, 0.0, 1.0], [float("nan")] * 3]},
        {
            "step": 5,
            "loss": 0.0,
            "lr": 0.0,
            "grad_norm": 0.0,
            "step_seconds": 0.0,
            "tokens_per_second": 0.0,
        },
        {
            "step": 5,
            "loss": 1e299,
            "grad_norm": -1e299,
            "step_seconds": -1.0,
            "data/wait_fraction": 1.0,
        },
        {"step": 2**53 - 1, "loss": 5e-324, "tokens": 0, "data/wait_fraction": 0.5},
        {"step": 5, "eval/accuracy": 0.5, "a/b": 1.0, "a/": 2.0, "/b": 3.0, "": 4.0, "<x>": [1, 2]},
    ],
)
def test_any_subset_of_metrics_makes_a_page(tmp_path, record):
    (tmp_path / "metrics.jsonl").write_text(lines(record, {**record, "step": record["step"] + 1}))
    drawn(tmp_path)


def test_a_long_run_with_many_metrics_stays_small(tmp_path):
    path = write_run(tmp_path / "run", 3000, layers=40, experts=16, load_every=20)
    more = {n: {f"update_norm/{i}": math.sin(n * i) for i in range(60)} for n in range(3000)}
    source, _ = drawn(with_other_figures(path, more))
    assert "<figcaption>Norm of the update by group (10)<" in source and "mean and range" in source
    # each point is of several steps
    assert figure(source, "Learning rate").count('<polygon class="band c0"') == 1


def test_dead_experts_and_uneven_layers_are_named(tmp_path):
    load = [[0.5, 0.5, 0.0, 0.0], [0.3, 0.3, 0.3, 0.1]]
    record = {"step": 1, "load": load, "load_entropy": [0.631, 1.0]}
    (tmp_path / "metrics.jsonl").write_text(lines(record))
    said = "lies between 0.631 (layer 0) and 1.000 (layer 1); 1 is an even load. 1 expert received"
    assert f"{said} no token." in drawn(tmp_path)[1]


def spent(time, seconds, first, last, **sections):
    return RunEvent(
        "spent", time, step=last, seconds=seconds, facts={"from": first, "sections": sections}
    )


SPIKE = {"step": 70, "at": 80, "batches": 6}
BEFALLEN = [  # a run that died once, and had a spike
    RunEvent("started", 0.0, step=-1, facts={"start": 1}),
    spent(20, 20.0, 0, 0, start=8.0, compile=12.0),
    spent(90, 70.0, 0, 70, step=60.0, save=6.0, evaluate=4.0),
    RunEvent(
        "died",
        100.0,
        "critical",
        node="node1",
        process=1,
        step=40,
        seen="SIGKILL",
        concluded="disk full",
        done="restart",
        seconds=3.0,
        facts={"start": 1},
    ),
    RunEvent("started", 103.0, step=40, facts={"start": 2}),
    RunEvent("restarted", 111.0, step=40, seconds=12.0, facts={"stop": 1.0}),
    spent(123, 20.0, 40, 40, start=8.0, compile=12.0),
    spent(193, 70.0, 40, 110, step=60.0, save=6.0, evaluate=4.0),
    RunEvent("spike", 203.0, "numbers", step=80, seen="loss <9.1>", facts=SPIKE),
    RunEvent("ended", 204.0, step=80, facts={"code": 0}),
]


def test_tables_are_what_the_account_says(tmp_path):
    folder = write_run(tmp_path / "run", 20)
    (folder / FOLDER).mkdir()
    (folder / FOLDER / OF_AGENT).write_text("".join(event.line() for event in BEFALLEN))
    account = accounts.account_of(BEFALLEN)
    source, text = drawn(folder)[0], supervised.account_text(account)
    part = source[source.index("<h2>Interruptions") :].split("</section>")[0]
    rows, whole = accounts.by_cause(account), duration(account.end - account.begin)
    expected = ["Timeline", "Goodput", "Interruptions by cause", "Where the time went"]
    expected += [duration(row.lost) for row in rows] + [f"<td>{whole}</td><td>100 %</td>"]
    for row in rows:
        expected.append(f'<th scope="row">{row.label}</th><td>{row.group}</td><td>{row.count}</td>')
    assert [words for words in expected if words not in part] == []
    assert [row.label for row in rows if row.label not in text] == []
    assert re.search(rf"together +\| +{whole} \| +100 % \|", text)
    assert percent(account.goodput) in text.splitlines()[0]
    lost = sum(cause.lost for cause in account.interruptions)
    assert sum(row.lost for row in rows) == pytest.approx(lost, rel=1e-9)
    shares = supervised.binned(account)
    assert np.nansum(shares, axis=0) == pytest.approx(np.ones(supervised.BINS))
    assert supervised.account_text(None) == "No agent has recorded a start here.\n"


def lines(*records):
    return "".join(json.dumps(r) + "\n" for r in records)


def test_bins_keep_means_and_extremes():
    values = np.random.default_rng(0).normal(5, 2, 5000)
    series = Series.of(range(1, 5001), values)
    bins = series.coarse(10)
    assert len(bins.steps) == 10 and bins.steps == sorted(bins.steps) and bins.counts.sum() == 5000
    means = [series.mean(), series.mean(11, 20), bins.means[3]]
    stretches = [values, values[10:20], values[3 * 512 - 1 : 4 * 512 - 1]]
    assert means == pytest.approx([stretch.mean() for stretch in stretches], rel=1e-12)
    extremes = values.min(), values.max()
    assert (series.least, series.greatest) == (bins.low.min(), bins.high.max()) == extremes


def test_what_is_not_finite_is_no_part_of_a_mean():
    values = [
        math.nan if step == 7 else math.inf if step == 30 else 1e305 if step == 31 else 2.0
        for step in range(40)
    ]
    series = Series.of(range(40), values)
    assert series.bad_steps == [7, 30, 31] and series.mean() == 2.0 and series.finite.size == 37
    bins = series.coarse(5)
    assert bins.counts.tolist() == [7, 8, 8, 6, 8] and bins.means.tolist() == [2.0] * 5
    never = Series.of([3, 4], [math.nan, math.inf])
    bins = never.coarse(1)
    assert bins.steps == [3.5] and np.isnan([never.least, never.greatest, *bins.means]).all()


def test_arrays_average_over_bins_and_skip_missing_entries():
    series = Series.of(range(16), [[step, math.nan if step % 2 else 1.0] for step in range(16)])
    bins = series.coarse(4)
    assert bins.steps == [1.5, 5.5, 9.5, 13.5]
    np.testing.assert_allclose(bins.means, [[1.5, 1], [5.5, 1], [9.5, 1], [13.5, 1]])
    np.testing.assert_allclose(series.end(), [15, math.nan])


def test_the_made_up_run_is_read_whole(tmp_path):
    run = read_workdir(write_run(tmp_path / "run", 50, load_every=5))
    assert (len(run.recorded), run.steps, run.omissions) == (50, (1, 50), [])
    assert (run.unit, run.name) == ("nats per byte", "tiny")
    assert len(run.vectors["load"].steps) == 10 and run.vectors["load"].shape == (6, 9)
    assert run.series["eval/loss"].finite.size == 8
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert run.seconds == pytest.approx(sum(r["step_seconds"] for r in records))
    assert run.train_loss == pytest.approx(np.mean([r["loss"] for r in records[-LAST_LOSSES:]]))


HUGE = 10**400  # beyond all floats


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    good = lines({"step": 1, "loss": 2.0}, {"step": 3, "loss": 1.0})
    good += lines({"step": 4, "loss": HUGE, "a": [HUGE]})  # not finite
    bad = lines([1], 7, None, {"loss": 1}, {"step": math.nan}, {"step": HUGE})
    bad += lines(*({"step": step} for step in ("4", -1, 1.5, True)))
    (tmp_path / "metrics.jsonl").write_bytes(
        (good + bad).encode() + b'\xff\xfe\x00\n\n{"step": 9, "lo'
    )
    run = read_workdir(tmp_path)
    assert run.recorded.tolist() == [1, 3, 4]
    assert run.series["loss"].mean() == 1.5 and run.series["loss"].bad_steps == [4]
    assert not run.vectors["a"].finite.size
    # The last one, which is being written, waits for the next time.
    assert run.omissions == ["Left out of metrics.jsonl: 11 unreadable lines."]


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
    left_out = "is not a readable JSON object and is left out."
    assert run.omissions[:2] == [f"{name}.json {left_out}" for name in ("config", "environment")]
    assert (run.config, run.sample, len(run.omissions)) == ({}, "ok �", 3)
