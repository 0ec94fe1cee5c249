"""Several runs on one page: of any length, names and metrics, what differs in their configs, what is left out."""

import json
import math
import re

import pytest
from conftest import write_run
from test_page import checked

from zaya_jax.report import compare, page, svg
from zaya_jax.report.read import read_workdir


def write(folder, steps, config=None, name="run", first=1, **figures):
    """A small run: `figures` are functions of the step."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"name": name, "run": {"num_steps": 50}, **(config or {})})
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(first, steps + 1):
            file.write(json.dumps({"step": step, **{k: f(step) for k, f in figures.items()}}) + "\n")
    return folder


def compared(tmp_path, *folders):
    runs = [read_workdir(folder) for folder in folders]
    target = tmp_path / "page.html"
    page.write_page(target, lambda: page.shell(compare.title(runs), compare.parts(runs)))
    return checked(target)


def figure(source, title, over="step"):
    part = source.split('class="grid2 over-tokens"')[0 if over == "step" else 1]
    return next(f for f in re.findall("<figure.*?</figure>", part, re.S) if f"<figcaption>{title}<" in f)


def table_row(source, label):
    return re.search(f'<th scope="row">{label}</th>(.*?)</tr>', source)[1]


def loss(step):
    return 2 + 4 / step


def test_curves_of_runs_of_different_length_and_metrics(tmp_path):
    whole = write_run(tmp_path / "whole", 40, layers=2)
    short = write(
        tmp_path / "short", 12, name='short <&">', loss=loss, tokens=lambda s: 100 * s, mine=lambda s: s
    )
    source, text = compared(tmp_path, whole, short)
    for title in ("Train loss", "Held-out loss", "Gradient norm", "Learning rate", "Tokens per second",
                  "Time waiting for data", "load_entropy, mean of the layers", "mine"):  # fmt: skip
        assert figure(source, title), title
    assert "Not recorded by tiny." in figure(source, "mine")
    assert "Not recorded by short &lt;&amp;&quot;&gt;." in figure(source, "Gradient norm")
    assert figure(source, "Train loss").count("<g data-line=") == 2
    assert 'short <&">' in text and "12, of 50 planned" in text and "40, complete" in text
    assert "train loss near step 12, the last that all have" in text
    assert "Left out are figures of each layer or expert (bias_change, load, load_entropy)" in text


def test_over_tokens_a_curve_ends_at_its_tokens(tmp_path):
    few = write(tmp_path / "few", 20, loss=loss, tokens=lambda s: 100 * s)
    many = write(tmp_path / "many", 20, loss=loss, tokens=lambda s: 100 * min(s, 10) + 300 * max(0, s - 10))
    without = write(tmp_path / "without", 20, loss=loss)
    source, text = compared(tmp_path, few, many, without)
    drawn = figure(source, "Train loss", "tokens")
    low, high, left, right = map(float, re.search('data-x="([^"]*)"', drawn)[1].split()[:4])
    assert (low, high) == (100, 4000)
    ends = [float(p.split()[-1].split(",")[0]) for p in re.findall(r'<polyline[^>]*points="([^"]*)"', drawn)]
    assert [low + (e - left) / (right - left) * (high - low) for e in ends] == pytest.approx(
        [2000, 4000], abs=5
    )
    assert "No tokens are recorded by run (without)" in text
    assert figure(source, "Train loss").count("<g data-line=") == 3


def test_over_tokens_the_ends_of_a_long_run_are_its_own(tmp_path):
    """A bin of a long run has the mean of its steps: the last held-out loss stood before the run's last token."""
    long = write(tmp_path / "a", 5_000, tokens=lambda s: 1000 * s, loss=loss)
    run = read_workdir(long)
    found = compare._tokens_at(run, [1, 2500, 4999, 5000])
    assert found == pytest.approx([1000, 2.5e6, 4.999e6, 5e6], rel=1e-12)


def test_two_runs_that_do_the_same_are_drawn_the_same_whatever_their_lengths(tmp_path):
    wild = {"loss": lambda s: loss(s) + 0.3 * math.sin(37 * s), "lr": lambda s: 1e-3 * s}
    long, short = write(tmp_path / "long", 1000, **wild), write(tmp_path / "short", 500, **wild)
    source, _ = compared(tmp_path, long, short)
    for title in ("Train loss", "Learning rate"):
        a, b = (p.split() for p in re.findall(r'<polyline[^>]*points="([^"]*)"', figure(source, title)))
        same = len(b) - 5  # the end of the shorter one is smoothed over fewer
        assert len(a) > len(b) > 100 and a[:same] == b[:same]


@pytest.mark.parametrize(
    ("steps", "first", "compared_steps"),
    [
        ((60, 48), 1, range(39, 49)),
        ((30_000, 48), 1, range(1, 32)),  # bins of 32 steps: steps 32 to 63 are one, of which it has not all
        ((30_000, 130), 1, range(96, 128)),
        ((30_000, 600, 80), 1, range(32, 64)),
        ((100, 60), 55, range(55, 61)),  # a fork has no steps before
        ((30_000, 20), 1, None),
    ],
)
def test_losses_near_the_last_common_step_are_of_the_same_steps(tmp_path, steps, first, compared_steps):
    """The same run, longer and shorter: its bins reached beyond the other's end, so that it looked better."""
    folders = [
        write(tmp_path / f"{i}", count, name=f"{i}", first=first if i else 1, loss=loss)
        for i, count in enumerate(steps)
    ]
    source, text = compared(tmp_path, *folders)
    if compared_steps is None:
        assert (
            f"near step {steps[-1]}, the last that all have, are not compared: of the longest run means"
            in text
        )
        assert "means of 32 steps are known" in text and "(mean of steps" not in text
        return
    label = f"the last that all have (mean of steps {compared_steps[0]} to {compared_steps[-1]})"
    assert f"train loss near step {steps[-1]}, {label}" in text
    row = re.search(r'<th scope="row">train loss near step.*?</th>(.*?)</tr>', source)[1]
    expected = sum(map(loss, compared_steps)) / len(compared_steps)
    cells = re.findall("<td>(.*?)</td>", row)
    assert cells == [svg.number(expected)] * len(steps)


def test_what_differs_is_told_by_kind_too_and_nothing_else(tmp_path):
    configs = [
        {"a": {"same": 1, "x": value}, "schedule": {"phases": [{"name": "p", "lr": i}, {"name": "q"}]}}
        for i, value in enumerate((1, "1", True, 1.0, None, [1], {"deep": 1}))
    ]
    del configs[-1]["schedule"]
    folders = [write(tmp_path / f"r{i}", 3, config, f"r{i}", loss=loss) for i, config in enumerate(configs)]
    source, _ = compared(tmp_path, *folders)
    cells = re.findall("<code>(.*?)</code>", table_row(source, "<code>a.x</code>"))
    assert cells == ["1", "&quot;1&quot;", "true", "1.0", "null", "[1]", "–"]
    assert re.findall("<code>(.*?)</code>", table_row(source, "<code>a.x.deep</code>")) == ["–"] * 6 + ["1"]
    assert re.findall("<code>(.*?)</code>", table_row(source, r"<code>schedule.phases.\[0\].lr</code>"))[
        -2:
    ] == ["5", "–"]
    assert "<code>a.same</code>" not in source


def test_the_same_config_is_said_to_be_the_same_and_a_missing_one_missing(tmp_path):
    a, b = write(tmp_path / "a", 3, loss=loss), write(tmp_path / "b", 3, loss=loss)
    assert "No key differs between the runs." in compared(tmp_path, a, b)[1]
    (b / "config.json").unlink()
    _, text = compared(tmp_path, a, b)
    assert "b: no config is recorded." in text


def test_a_fork_is_named_by_its_parent_here(tmp_path):
    parent = write(tmp_path / "parent", 30, name="parent", loss=loss)
    fork = write(tmp_path / "fork", 50, name="fork", first=21, loss=loss)
    told = {"forked": [{"folder": str(parent), "run": "1", "step": 20, "tokens": 5, "changed": {}}]}
    (fork / "lineage.json").write_text(json.dumps(told))
    source, text = compared(tmp_path, parent, fork)
    assert "parent at step 20" in table_row(source, "comes from")
    assert "from 21 to 50, complete" in text and "30, of 50 planned" in text
    told["forked"][0]["folder"] = "\0gone"
    (fork / "lineage.json").write_text(json.dumps(told))
    assert "gone at step 20" in compared(tmp_path, parent, fork)[1]


def test_nan_infinity_one_step_and_nothing(tmp_path):
    bad = write(
        tmp_path / "bad",
        20,
        name="bad",
        loss=lambda s: math.nan if s % 3 else math.inf,
        grad_norm=lambda s: 1e299,
    )
    one = write(tmp_path / "one", 1, name="one", loss=loss)
    none = write(tmp_path / "none", 0, name="none")
    good = write(tmp_path / "good", 20, name="good", loss=lambda s: math.nan if s == 7 else 2.0)
    source, text = compared(tmp_path, bad, one, none, good)
    assert "none: metrics.jsonl holds no complete step yet." in text and "none yet" in text
    assert figure(source, "Train loss").count('<g class="bad">') == 20
    assert re.findall("<td>(.*?)</td>", table_row(source, "losses not finite")) == ["20", "–", "–", "1"]
    assert (
        compared(tmp_path, bad, write(tmp_path / "bad2", 3, loss=lambda s: math.nan))[0].count("<figure") == 1
    )


def test_sixteen_runs_of_many_metrics_stay_small_and_what_is_left_out_is_said(tmp_path):
    many = {f"m/{i:02}": (lambda s, i=i: math.sin(s * i)) for i in range(29)}
    folders = [
        write(tmp_path / f"r{i}", 40, None, "a" * 300 if i else "b", loss=loss, tokens=lambda s: s, **many)
        for i in range(compare.MOST_RUNS)
    ]
    source, text = compared(tmp_path, *folders)
    assert len(source) < 1_000_000
    assert "Of 30 metrics 6 are left out: m/23, m/24" in text
    keys = re.findall(r'<i class="key line ([^"]*)">', source.split("</thead>")[0])
    assert len(set(keys)) == len(keys) == compare.MOST_RUNS


def test_losses_of_different_units_are_not_compared_in_silence(tmp_path):
    a = write(tmp_path / "a", 3, {"data": {"tokenizer": "bytes"}}, "a", loss=loss)
    b = write(tmp_path / "b", 3, {"data": {"tokenizer": "x.json"}}, "b", loss=loss)
    assert (
        "Losses are not of one unit and cannot be compared: nats per byte: a; nats per token: b."
        in compared(tmp_path, a, b)[1]
    )
