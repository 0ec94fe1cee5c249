"""The notebooks of experiments/notebooks: their form as stored, and that they run, without Jupyter
and with it."""

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [
    "attention",
    "cluster",
    "design",
    "experts",
    "first_model",
    "one_change",
    "scaling",
    "transformers",
    "your_own_layer",
]
MOST_BYTES, MOST_LINES = 250_000, 24
# of one machine
A_PLACE = re.compile(r"(?<![\w.])/(?:tmp|root|home|Users|var|private|work|opt)/|[A-Z]:\\")
DATE_AND_HARDWARE = re.compile(
    r"\d{4}-\d\d-\d\d, \d+ seconds\n\d+ cores of \w+, JAX [\d.]+ on \w+\n"
)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(output):
    """The lines of an output that a person reads; a figure has none."""
    if output["output_type"] == "stream":
        return "".join(output["text"])
    return "".join(output["data"].get("text/plain", []))


def check_form(path):
    """A notebook as it is stored: small, run in order to its end, without errors."""
    cells, code = read(path)["cells"], code_of(read(path))
    assert path.stat().st_size < MOST_BYTES
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert 0 < len(cell["source"]) <= MOST_LINES, cell["id"]
        for output in cell["outputs"]:
            assert output["output_type"] != "error", cell["id"]
            assert output.get("name", "stdout") == "stdout", cell["id"]
            assert not A_PLACE.search(text_of(output)), cell["id"]
    assert cells[-1] == code[-1]
    assert DATE_AND_HARDWARE.fullmatch("".join(map(text_of, code[-1]["outputs"])))


def shape_of(notebook):
    """The kinds of outputs that each code cell has."""
    return [
        [(o["output_type"], *sorted(o.get("data", {}))) for o in cell["outputs"]]
        for cell in code_of(notebook)
    ]


def files_in(notebook):
    """The files that a notebook's outputs list, each line's first word."""
    text = "\n".join(text_of(output) for cell in code_of(notebook) for output in cell["outputs"])
    return re.findall(r"^\w+\.(?:html|jinja|jsonl?|safetensors|txt)\b", text, re.MULTILINE)


def run(path, folder):
    """The contents of a copy of a notebook, after a run by the tool on one device."""
    copy = folder / path.name
    copy.write_bytes(path.read_bytes())
    environment = {
        name: value for name, value in os.environ.items() if name != "ZAYA_NOTEBOOK_STEPS"
    }
    done = tool("--write", copy, env=environment | {"XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr
    return read(copy)


def tool(*arguments, env=None):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "run_notebooks.py", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )


# ################################################################################################
# As they are stored
# ##################################################################################################


def test_they_are_there_and_the_page_names_them():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.stem for path in NOTEBOOKS] == NAMES
    assert sorted(re.findall(r"\]\((\w+)\.ipynb\)", page)) == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_form(path):
    check_form(path)


# ################################################################################################
# Run
# ##################################################################################################


def test_the_plan_of_a_cluster_is_as_stored(tmp_path):
    """Formulas alone, so each line: where a formula changes, tools/run_notebooks.py --write stores
    the new one."""
    stored, again = (
        code_of(x)
        for x in (read(FOLDER / "cluster.ipynb"), run(FOLDER / "cluster.ipynb", tmp_path))
    )
    for before, after in zip(stored[:-1], again[:-1], strict=True):
        assert [text_of(o) for o in after["outputs"]] == [text_of(o) for o in before["outputs"]]
    date = text_of(again[-1]["outputs"][0])[:10]
    assert abs(datetime.date.fromisoformat(date) - datetime.date.today()) <= datetime.timedelta(
        days=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "cluster"])
def test_each_runs_at_its_size(name, tmp_path):
    stored, again = read(FOLDER / f"{name}.ipynb"), run(FOLDER / f"{name}.ipynb", tmp_path)
    check_form(tmp_path / f"{name}.ipynb")
    assert shape_of(again) == shape_of(stored) and files_in(again) == files_in(stored)


# ################################################################################################
# The tool
# ##################################################################################################


def test_a_cell_that_raises_is_named_and_nothing_is_written(tmp_path):
    about = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    cells = [
        about | {"id": f"c{number}", "source": [source]}
        for number, source in enumerate(("x = 1", "y = 0\nx / y", "print('later')"))
    ]
    path = tmp_path / "small.ipynb"
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    before = path.read_bytes()
    done = tool("--write", path)
    assert done.returncode == 1 and path.read_bytes() == before
    for words in (
        "small.ipynb: cell 2 failed; nothing is written",
        "    x / y",
        "ZeroDivisionError",
    ):
        assert words in done.stderr
    assert "later" not in done.stdout
