"""The program: its files, what it refuses before anything is written, several processes."""

import json
import re

import multiprocess_runs
import pytest

from experiments import evaluate
from zaya_jax import cli
from zaya_jax.cluster import multihost


@pytest.fixture
def call(monkeypatch, capsys):
    """The program's exit code, and what it printed."""

    def program(*arguments):
        monkeypatch.setattr("sys.argv", ["evaluate", *map(str, arguments)])
        monkeypatch.setattr(multihost, "together", lambda program: program())  # which takes the signals
        code = cli.exit_code(evaluate.main)
        return code, *capsys.readouterr()

    return program


@pytest.fixture
def data(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "in" / f"{name}.txt").write_text(f"some words of {name}, " * 5)
    return tmp_path / "in"


def test_a_row_for_each_data_and_one_for_all(call, folder, data, tmp_path):
    code, out, err = call(
        f"--model={folder}",
        f"--out={tmp_path / 'out'}",
        f"--data={data}/a.txt",
        f"--data={data}/[bc].txt",
        "--limit=1",
    )
    assert (code, err) == (cli.DONE, "")
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert list(found["data"]) == ["all", f"{data}/a.txt", f"{data}/[bc].txt"]
    rows = list(found["data"].values())
    assert [row["documents"] for row in rows] == [2, 1, 1] and rows[0]["tokens"] == 2 * rows[1]["tokens"]
    assert any("--limit=1" in note for note in found["notes"]) and found["context"] == 32
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "evaluation.html",
        "evaluation.json",
        "evaluation.md",
    ]
    table = (tmp_path / "out" / "evaluation.md").read_text()
    assert table in out and f"| {rows[1]['loss']:.4f} |" in table
    page = (tmp_path / "out" / "evaluation.html").read_text()
    assert (
        "<svg" in page
        and f"{rows[1]['loss']:.4f}" in page
        and "http://" not in page.replace("http://www.w3", "")
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--data=nowhere.txt"], r"--data=nowhere\.txt names no file"),
        (["--data={data}/a.txt", "--data={data}/../in/a.txt"], r"is the same as --data=.*name it once"),
        (["--mesh=data=2,data=4", "--data={data}"], "is no AXIS=N, each once"),
        (["--mesh=rows=2", "--data={data}"], "rows"),
        (["--context=0", "--data={data}"], "must be at least 1"),
        (["--data={data}/empty.txt"], r"empty\.txt: there is no token to predict"),
        (["--tasks=,"], "--tasks=, names none"),
        (["--include_path={data}/a.txt", "--tasks=x"], "--include_path=.* is no folder"),
        (["--data={data}/wide.jsonl"], r"text_field|no field|text"),
    ],
)
def test_what_will_not_do_is_one_line_and_nothing_is_written(call, folder, data, tmp_path, given, said):
    (data / "empty.txt").write_text("")
    (data / "wide.jsonl").write_text('{"words": "a"}\n')
    given = [option.format(data=data) for option in given]
    code, _, err = call(f"--model={folder}", f"--out={tmp_path / 'out'}", *given)
    assert code == cli.BAD_INPUT and err.count("\n") == 1 and re.search(said, err), err
    assert not (tmp_path / "out").exists()


def test_models_that_will_not_do(call, folder, data, golden_dir, tmp_path):
    for model, said in [
        (golden_dir / "base", "has no tokenizer"),
        (tmp_path / "none", "is no folder"),
        (f"{folder}@7", "7"),
        (data, "neither a run's folder"),
    ]:
        code, _, err = call(f"--model={model}", f"--out={tmp_path / 'out'}", f"--data={data}")
        assert code == cli.BAD_INPUT and err.count("\n") == 1 and said in err, err
    code, _, err = call(f"--model={golden_dir / 'base'}", f"--out={tmp_path / 'out'}")
    assert code == cli.BAD_INPUT and "has held nothing out; give --data or --tasks" in err
    assert not (tmp_path / "out").exists()


def test_a_context_above_the_model_s_is_said(call, folder, data, tmp_path):
    code, out, _ = call(
        f"--model={folder}", f"--out={tmp_path / 'out'}", f"--data={data}/a.txt", "--context=99"
    )
    assert code == cli.DONE and "is above the model's 64 tokens: 64 are taken" in out


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
        assert [row[key] for row in both["data"].values()] == [row[key] for row in alone["data"].values()]
    (here,), (there,) = alone["data"].values(), both["data"].values()
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
