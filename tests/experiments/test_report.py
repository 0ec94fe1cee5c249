"""The program that draws reports: its files, and one clear line for a run that it cannot draw."""

import functools
import json

import pytest

from experiments.report import __main__ as report


@pytest.fixture
def run(called, tmp_path, monkeypatch):
    """Calls the program in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(called, report)


def make(folder, steps=3, name="a"):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"name": name}))
    lines = [
        json.dumps({"step": s, "loss": 1 / s, "tokens": s}) + "\n" for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


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
    for i in range(17):
        make(tmp_path / f"r{i}")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and expected in err and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
