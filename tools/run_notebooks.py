"""Runs notebooks without Jupyter: their code cells from top to bottom, one process and one empty
folder for each.

    python tools/run_notebooks.py [--write] [NOTEBOOK.ipynb ...]      without a name: all of experiments/notebooks

The output is the cell's printed text, the value of its last line (unless that ends with a
semicolon, as in Jupyter) and its figures as PNG. With --write that becomes the notebook's stored
outputs. A training run's stderr goes to stderr and is not stored. A cell that raises ends with 1,
its notebook, number and traceback, and nothing is written.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "experiments" / "notebooks"


def main(arguments: list[str] | None = None) -> int:
    """Each notebook in a process of its own, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebooks")
    # a notebook's own process
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("notebooks", nargs="*", type=Path)
    args = parser.parse_args(arguments)
    notebooks = [path.resolve() for path in args.notebooks] or sorted(FOLDER.glob("*.ipynb"))
    for path in notebooks:
        if path.suffix != ".ipynb" or not path.is_file():
            parser.error(f"{path} is no notebook; give a file NAME.ipynb")
    if args.here:
        return _run(notebooks[0], args.write)
    failed = 0
    for path in notebooks:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, str(Path(__file__).resolve()), "--here", str(path)]
            # Python puts this file's folder first; the tree that the notebooks belong to must be
            # found.
            environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
            code = subprocess.run(
                command + ["--write"] * args.write, cwd=scratch, env=environment, check=False
            ).returncode
        failed += code != 0
        print(
            f"{path.name}: {'failed' if code else 'done'} in {time.monotonic() - began:.0f} s",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _run(path: Path, write: bool) -> int:
    """Runs one notebook in this process."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        source = "".join(cell["source"])
        try:
            outputs = execute(source, names, number)
        except (Exception, SystemExit):  # a cell that exits has not come to the end either
            traceback.print_exc()
            print(f"{path.name}: cell {number} failed; nothing is written", file=sys.stderr)
            return 1
        cell["execution_count"], cell["outputs"] = number, outputs
        for output in outputs:
            if "text" in output:
                print("".join(output["text"]), end="")
            elif "text/plain" in output["data"]:
                print("".join(output["data"]["text/plain"]))
    if write:
        written = path.with_suffix(".tmp")
        written.write_text(
            json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8"
        )
        written.replace(path)
    return 0


def execute(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Runs a cell in `names` and gives its outputs as nbformat 4 holds them."""
    file = f"<cell {number}>"
    # for tracebacks
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    body = ast.parse(source, file)
    last = body.body[-1] if body.body else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            body.body.pop()
        exec(compile(body, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())}
        )
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": _lines(repr(value))}
        outputs.append(
            {
                "output_type": "execute_result",
                "execution_count": number,
                "data": data,
                "metadata": {},
            }
        )
    return outputs + _figures()


def _figures() -> list[dict[str, Any]]:
    """The open figures, which are closed: a later cell begins its own."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    outputs = []
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        png = io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": None})
        data = {
            "image/png": base64.b64encode(png.getvalue()).decode() + "\n",
            "text/plain": ["<a figure>"],
        }
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    pyplot.close("all")
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    sys.exit(main())
