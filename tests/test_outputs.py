"""What a program prints may find a full disk or no reader: the exit code says what became of the work, never 120."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_jax import cli

ROOT = Path(__file__).resolve().parent.parent
STORAGE = "error: No space left on device; mend the storage and start the same command again\n"
# What is done, which output is replaced, the exit code, and what the other output gets.
CASES = {
    "said": ("stdout", 75, ""),  # the log file has it too
    "printed": ("stdout", 4, STORAGE),
    "printed much": ("stdout", 4, STORAGE),
    "help": ("stdout", 4, STORAGE),
    "bad input": ("stderr", 2, ""),
    "storage": ("stderr", 4, ""),
}

# In forks of one process, which end as an interpreter does: it flushes both outputs once more.
RUN = """
import os, sys
from experiments import pretrain
from zaya_jax import cli
from zaya_jax.config import StorageError, UserError
from zaya_jax.training import logs

def raising(error):
    raise error

doing = {
    "said": lambda: [logs.say("text") for _ in range(5)] and 75,
    "printed": lambda: print("text") or 0,
    "printed much": lambda: [print("text") for _ in range(9000)] and 0,
    "bad input": lambda: raising(UserError("bad")),
    "storage": lambda: raising(StorageError("gone")),
    "help": pretrain.main,
}
name, where = None, iter(sys.argv[2:])
kind = sys.argv[1]
for case, output in zip(where, where):
    child = os.fork()
    if not child:
        name = case
        if kind == "full":
            nowhere = os.open("/dev/full", os.O_WRONLY)
        else:
            reading, nowhere = os.pipe()
            os.close(reading)
        os.dup2(nowhere, 1 if output == "stdout" else 2)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"<<exit>> {code}", flush=True)
    print(f"<<exit>> {code}", file=sys.stderr, flush=True)
if name:
    sys.argv = ["pretrain", "--help"]
    cli.leave(cli.exit_code(doing[name]))
"""


def ended(kind):
    """(exit code, what the other output got) by case."""
    cases = [word for name, (where, _, _) in CASES.items() for word in (name, where)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, kind, *cases], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for output, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        parts = text.split("<<exit>> ")
        codes = [int(part.splitlines()[0]) for part in parts[1:]]
        texts = [parts[0], *(part.split("\n", 1)[1] for part in parts[1:-1])]
        for (name, (where, _, _)), code, said in zip(CASES.items(), codes, texts, strict=True):
            if where != output:
                found[name] = code, said
    return found


def test_a_full_disk_behind_an_output():
    assert ended("full") == {name: row[1:] for name, row in CASES.items()}


def test_an_output_without_a_reader():
    gone = 128 + signal.SIGPIPE, "error: broken pipe: nobody reads the output any more\n"
    expected = {name: gone if code == 4 else (code, "") for name, (_, code, _) in CASES.items()}
    assert ended("closed") == expected | {"storage": (4, "")}


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"caf\xe9 \u20ac"), ("latin-1", "caf\xe9 \\u20ac")])
def test_a_character_that_an_output_lacks_is_spelt_out(monkeypatch, encoding, shown):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    assert cli.exit_code(lambda: print("caf\xe9 \u20ac") or 0) == 0
    assert written.getvalue() == f"{shown}\n".encode(encoding)
