"""Reports of one run and of several on one page: differences of their configs, omissions, and one
clear line for a run that cannot be drawn."""

import functools
import json
import math
import re

import pytest
from made_run import checked, figure, write_run

from experiments.report import __main__ as report
from experiments.report import compare
from zaya_jax.report.read import read_workdir


def write(folder, steps, config=None, name="run", first=1, **figures):
    """A small run: `figures` are functions of the step."""
    folder.mkdir(parents=True)
    settings = {"name": name, "run": {"num_steps": 50}, **(config or {})}
    (folder / "config.json").write_text(json.dumps(settings))
    lines = ""
    for step in range(first, steps + 1):
        lines += json.dumps({"step": step, **{k: f(step) for k, f in figures.items()}}) + "\n"
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def compared(*folders):
    """The page's source and its text."""
    source = compare.comparison([read_workdir(folder) for folder in folders]).html()
    return source, checked(source)


def loss(step):
    return 2 + 4 / step


def test_curves_of_runs_of_different_length_and_metrics(tmp_path):
    whole = write_run(tmp_path / "whole", 40, layers=2)
    short = write(
        tmp_path / "short",
        12,
        name='short <&">',
        loss=loss,
        tokens=lambda s: 100 * s,
        mine=lambda s: s,
    )
    source, text = compared(whole, short)
    titles = re.findall("<figcaption>(.*?)</figcaption>", source)
    expected = {"Held-out loss", "Learning rate", "Time waiting for data"}
    assert expected | {"load_entropy, mean of the layers"} <= {*titles}
    for title in ("Train loss over tokens", "Train loss"):
        assert figure(source, title).count("<polyline") == 2
    assert "Not recorded by tiny." in figure(source, "mine")
    assert "Not recorded by short &lt;&amp;&quot;&gt;." in figure(source, "Gradient norm")
    for words in (
        'short <&">',
        "12, of 50 planned",
        "40, complete",
        "train loss near step 12, the last that all have",
        "Figures of each layer and expert are on each run's own page.",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("steps", "first", "compared_steps"),
    [
        ((60, 48), 1, range(39, 49)),
        ((3000, 1000, 600), 1, range(589, 601)),
        ((100, 60), 55, range(55, 61)),  # a fork has no steps before
    ],
)
def test_losses_near_the_last_common_step_are_of_the_same_steps(
    tmp_path, steps, first, compared_steps
):
    folders = [
        write(tmp_path / f"{i}", count, name=f"{i}", first=first if i else 1, loss=loss)
        for i, count in enumerate(steps)
    ]
    label, values = compare.near_common_step([read_workdir(folder) for folder in folders])
    of = f"(mean of steps {compared_steps[0]} to {compared_steps[-1]})"
    assert label == f"train loss near step {steps[-1]}, the last that all have {of}"
    mean = sum(map(loss, compared_steps)) / len(compared_steps)
    assert values == pytest.approx([mean] * len(steps))
    assert label in compared(*folders)[1]


def test_only_differing_keys_are_shown_and_types_count(tmp_path):
    configs = [
        {
            "a": {"same": 1, "x": value},
            "schedule": {"phases": [{"name": "p", "lr": i}, {"name": "q"}]},
        }
        for i, value in enumerate((1, "1", True, 1.0, None, [1], {"deep": 1}))
    ]
    del configs[-1]["schedule"]
    folders = [
        write(tmp_path / f"r{i}", 3, config, f"r{i}", loss=loss) for i, config in enumerate(configs)
    ]
    source, _ = compared(*folders)
    cells = {
        key: re.findall("<td>(.*?)</td>", row)
        for key, row in re.findall('<th scope="row">(.*?)</th>(.*?)</tr>', source)
    }
    assert cells["a.x"] == ["1", "&quot;1&quot;", "true", "1.0", "null", "[1]", "–"]
    assert cells["a.x.deep"] == ["–"] * 6 + ["1"]
    assert cells["schedule.phases.[0].lr"][-2:] == ["5", "–"] and "a.same" not in source


def test_sixteen_runs_of_many_metrics_stay_small(tmp_path):
    many = {f"m/{i:02}": lambda s, i=i: math.sin(s * i) for i in range(1, 30)}
    folders = [
        write(
            tmp_path / f"r{i}",
            40,
            None,
            "a" * 300 if i else "b",
            loss=loss,
            tokens=lambda s: s,
            **many,
        )
        for i in range(compare.MOST_RUNS)
    ]
    source, _ = compared(*folders)
    assert len(source) < 1_000_000
    assert source.count("<figure") == 31
    keys = re.findall(r'<i class="key line ([^"]*)">', source.split("</thead>")[0])
    assert len(set(keys)) == len(keys) == compare.MOST_RUNS


def test_figures_that_are_zero_in_all_runs_take_no_picture(tmp_path):
    zero, once = (lambda s: 0), (lambda s: int(s == 3))
    a = write(tmp_path / "a", 5, None, "a", loss=loss, skipped=zero, **{"data/retries": zero})
    b = write(tmp_path / "b", 5, None, "b", loss=loss, skipped=once, **{"data/retries": zero})
    source, text = compared(a, b)
    assert figure(source, "Skipped updates") and "Data: retries" not in source
    assert (
        "Zero at every step of all runs: data/retries." in text
        and "cannot be compared" not in source
    )


def test_losses_of_different_units_are_not_compared_in_silence(tmp_path):
    a = write(tmp_path / "a", 3, {"data": {"tokenizer": "bytes"}}, "a", loss=loss)
    b = write(tmp_path / "b", 3, {"data": {"tokenizer": "x.json"}}, "b", loss=loss)
    _, text = compared(a, b)
    units = "nats per byte: a; nats per token: b."
    assert f"Losses have different units and cannot be compared: {units}" in text


@pytest.fixture
def run(called, tmp_path, monkeypatch):
    """Calls the program in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(called, report)


def make(folder, steps=3, name="a"):
    return write(folder, steps, name=name, loss=loss, tokens=lambda step: step)


def test_one_run_makes_its_page_anew(run, tmp_path):
    folder = make(tmp_path / "a")
    assert run("a") == (0, "Report: a/report.html\n", "")
    first = (folder / "report.html").read_bytes()
    assert run("a", "--out=other.html")[0] == 0
    assert (tmp_path / "other.html").read_bytes() == first and b"training report" in first


def test_several_runs_are_on_one_page(run, tmp_path):
    make(tmp_path / "a"), make(tmp_path / "b", 5, "b")
    assert run("a", "b") == (0, "Report: comparison.html\n", "")
    assert "<title>2 runs compared</title>" in (tmp_path / "comparison.html").read_text()
    # still going
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert run("a", "b", "--out=b/x.html")[0] == 0 and not (tmp_path / "b" / "report.html").exists()
    assert "Left out of metrics.jsonl" not in (tmp_path / "b" / "x.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "arguments are required: RUN"),
        (["nowhere"], "RUN 'nowhere' has no metrics"),
        (["plain"], "RUN 'plain' has no metrics"),
        (["a", "begun"], "RUN 'begun' has no metrics"),
        (["half"], "RUN 'half' has no metrics"),
        (["a", "--out=metrics.txt"], "does not end in .html"),
        (["a", "--out=no/page.html"], "no report: 'no/"),
        (["a", "--out=page.html/"], "page.html replaceable"),
        ([f"r{i}" for i in range(17)], "17 runs are too many for one page; give at most 16"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_is_written(run, tmp_path, arguments, expected):
    make(tmp_path / "a")
    (tmp_path / "plain").mkdir()
    (tmp_path / "page.html").mkdir()
    make(tmp_path / "begun", 0)
    make(tmp_path / "half", 0)
    (tmp_path / "half" / "metrics.jsonl").write_text('{"step": 1, "lo')
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and expected in err and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
