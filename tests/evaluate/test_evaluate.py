"""The program: its files, its refusals before anything is written, several processes."""

import dataclasses
import functools
import json
import re

import jax
import multiprocess_runs
import numpy as np
import pytest

from experiments.evaluate import __main__ as evaluate
from zaya_jax import cli, progress
from zaya_jax.cluster import multihost


@pytest.fixture
def call(called, monkeypatch):
    # It takes the signals.
    monkeypatch.setattr(multihost, "run_distributed", lambda program: program())
    return functools.partial(called, evaluate)


@pytest.fixture
def score(call, folder, tmp_path):
    """The output for valid paths and options, and the rows of evaluation.json."""

    def scored(*options, model=folder):
        code, out, err = call(f"--model={model}", f"--out={tmp_path / 'out'}", *options)
        assert (code, err) == (cli.DONE, "")
        found = json.loads(
            (tmp_path / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail
        )
        return out, found["data"]

    return scored


@pytest.fixture
def data(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "in" / f"{name}.txt").write_text(f"some words of {name}, " * 5)
    return tmp_path / "in"


def test_a_row_for_each_data_and_one_for_all(score, data, tmp_path):
    out, found = score(
        f"--data={data}/a.txt", f"--data={data}/[bc].txt", "--limit=1", "--context=99"
    )
    assert list(found) == ["all", f"{data}/a.txt", f"{data}/[bc].txt"]
    rows = list(found.values())
    assert [row["documents"] for row in rows] == [2, 1, 1] and rows[0]["tokens"] == 2 * rows[1][
        "tokens"
    ]
    names = ["evaluation.html", "evaluation.json", "evaluation.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    table, page = (
        (tmp_path / "out" / name).read_text() for name in ("evaluation.md", "evaluation.html")
    )
    assert table in out and f"| {rows[1]['loss']:.4f} |" in table
    assert "is above the model's 64 tokens: 64 are used" in out and "--limit=1" in out
    assert "<svg" in page and f"{rows[1]['loss']:.4f}" in page
    assert "http://" not in page.replace("http://www.w3", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model={golden}", "--data={data}"], "has no tokenizer"),
        (["--model={golden}"], "has no held-out text; give --data or --tasks"),
        (["--model={data}", "--data={data}"], "holds no model; give a run's folder"),
        (["--data=nowhere.txt"], r"--data=nowhere\.txt names no file"),
        (
            ["--data={data}/a.txt", "--data={data}/../in/a.txt"],
            r"is the same as --data=.*name it once",
        ),
        (["--mesh=rows=2", "--data={data}"], "rows"),
        (["--context=0", "--data={data}"], "must be at least 1"),
        (["--data={data}/empty.txt"], r"empty\.txt has no token to predict"),
        (["--data=all", "--data={data}"], "has the name of the common row; write --data=./all"),
        (["--bos", "--data={data}"], "--bos applies to tasks; give --tasks or omit it"),
    ],
)
def test_wrong_options_are_one_line_and_nothing_is_written(
    call, folder, data, golden_dir, tmp_path, given, message
):
    (data / "empty.txt").write_text("")
    given = [option.format(data=data, golden=golden_dir / "base") for option in given]
    code, _, err = call(f"--model={folder}", f"--out={tmp_path / 'out'}", *given)
    assert code == cli.BAD_INPUT and err.count("\n") == 1 and re.search(message, err), err
    assert not (tmp_path / "out").exists()


def test_text_in_two_rows_is_summed_in_none(score, data, monkeypatch):
    """A hard link's text too."""
    monkeypatch.chdir(data)
    (data / "a|b.txt").hardlink_to(data / "a.txt")
    out, found = score("--data=a.txt", "--data=[a]|b.txt", "--data=b.txt")
    assert list(found) == ["a.txt", "[a]|b.txt", "b.txt"]
    assert "No row of all: a|b.txt is in a.txt and in [a]|b.txt." in out
    assert r"| [a]\|b.txt |         1 |" in out


def test_samples_are_of_the_evaluation_beside_them(call, folder, data, tmp_path):
    out, options = tmp_path / "out", [f"--model={folder}", f"--data={data}/a.txt"]
    out.mkdir()
    (out / "samples.jsonl").write_text("of another user\n")
    for kept in (True, False):  # now it is of an evaluation
        assert (
            call(*options, f"--out={out}")[0] == cli.DONE
            and (out / "samples.jsonl").exists() == kept
        )


def test_answers_that_stand_for_no_byte_have_no_bits_per_byte(score, data):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    (data / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    out, found = score(f"--data={data}/chat.jsonl")
    (row,) = found.values()
    assert row["tokens"] > row["bytes"] == 0 and row["bits_per_byte"] is None
    assert f"{row['perplexity']:,.3f} |             – |" in out


def test_a_model_of_nan_is_said_and_the_files_are_read_by_all(score, model, data, tmp_path):
    broken = dataclasses.replace(
        model, params=jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    )
    out, found = score(f"--data={data}/a.txt", model=broken.save(tmp_path / "broken"))
    assert f"No finite loss, null in evaluation.json: {data}/a.txt." in out
    (row,) = found.values()
    assert row["loss"] is None and row["by_position"][0]["loss"] is None and row["tokens"] > 0
    assert "<svg" not in (tmp_path / "out" / "evaluation.html").read_text()


@pytest.mark.slow
def test_two_processes_share_the_work_and_one_writes(call, folder, data, tmp_path):
    options = [f"--model={folder}", f"--data={data}", "--tokens=64"]
    assert call(*options, f"--out={tmp_path / 'alone'}")[0] == cli.DONE
    program = ["-m", "experiments.evaluate", *options, f"--out={tmp_path / 'both'}"]
    with multiprocess_runs.start(program, 2, tmp_path / "said") as run:
        results = run.wait()
    assert [result.code for result in results] == [0, 0], results
    assert "| documents |" in results[0].out and results[1].out == ""
    alone, both = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("alone", "both")
    )
    assert both["device"].startswith("2 x ")
    for key in ("documents", "tokens", "bytes", "accuracy"):
        assert [row[key] for row in both["data"].values()] == [
            row[key] for row in alone["data"].values()
        ]
    (here,), (there,) = alone["data"].values(), both["data"].values()
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)


def test_a_log_has_a_line_of_progress_each_minute(call, folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    code, _, err = call(
        f"--model={folder}", f"--data={data}", f"--out={tmp_path / 'out'}", "--tokens=128"
    )
    found = [
        re.fullmatch(rf"{data}: ([\d.]+)(k?) tokens \[.*tokens/s\]", line)
        for line in err.splitlines()
    ]
    done = [float(line[1]) * (1000 if line[2] else 1) for line in found]
    assert code == cli.DONE and len(done) > 2 and done == sorted(done)
    tokens = json.loads((tmp_path / "out" / "evaluation.json").read_text())["data"][str(data)][
        "tokens"
    ]
    assert done[-1] == pytest.approx(tokens, rel=0.01)
