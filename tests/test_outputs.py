"""A program's output may find a full disk or no reader: the exit code reports the work's success, and is never 120."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_jax import cli

ROOT = Path(__file__).resolve().parent.parent
STORAGE = "error: No space left on device; mend the storage and start the same command again\n"
UNREAD = "error: broken pipe: the output is no longer read\n"
PROGRAM = """
import sys
from zaya_jax import cli
from zaya_jax.config import UserError
from zaya_jax.training import logs

def refuse():
    raise UserError("bad")

doing = {
    "said": lambda: [logs.say("text") for _ in range(5)] and 75,
    "printed": lambda: print("text") or 0,
    "bad input": refuse,
}
cli.leave(cli.exit_code(doing[sys.argv[1]]))
"""


def unwritable(kind: str) -> int:
    """A descriptor of a full disk, or of a pipe without a reader."""
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("kind", "case", "output", "code", "other"),
    [
        ("full", "said", "stdout", 75, ""),  # the log file has it too
        ("full", "printed", "stdout", 4, STORAGE),
        ("full", "bad input", "stderr", 2, ""),
        ("closed", "printed", "stdout", 128 + signal.SIGPIPE, UNREAD),
    ],
)
def test_an_output_that_cannot_be_written_changes_no_exit_code(kind, case, output, code, other):
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, output: unwritable(kind)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, case]
    done = subprocess.run(command, cwd=ROOT, text=True, timeout=120, **outputs)
    os.close(outputs[output])
    assert (done.returncode, done.stderr if output == "stdout" else done.stdout) == (code, other)


def test_a_character_that_an_output_lacks_is_spelt_out(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "latin-1"))
    assert cli.exit_code(lambda: print("caf\xe9 \u20ac") or 0) == 0
    assert written.getvalue() == b"caf\xe9 \\u20ac\n"
