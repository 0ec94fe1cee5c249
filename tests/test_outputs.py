"""What a program prints may find a full disk: the exit code says what became of the work, never 120 or a traceback."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_jax import cli

ROOT = Path(__file__).resolve().parent.parent
STORAGE = "error: No space left on device (<stdout>); mend the storage and start the same command again\n"
# What is done, where the full disk is, the exit code, and what is said on the other output.
CASES = {
    "said": ("stdout", 75, ""),  # the log file has it too
    "printed": ("stdout", 4, STORAGE),
    "printed much": ("stdout", 4, STORAGE),
    "flags' help": ("stdout", 4, STORAGE),
    "parser's help": ("stdout", 4, STORAGE),
    "bad input": ("stderr", 2, ""),
    "storage": ("stderr", 4, ""),
    "both": ("stderr", 0, "text\n"),
}

# In forks of one process, which end as an interpreter does: it flushes both outputs once more.
RUN = """
import os, sys
from experiments import checkpoint, pretrain
from zaya_jax import cli
from zaya_jax.config import StorageError, UserError
from zaya_jax.train import logs

def raising(error):
    raise error

def printed(code, times=1):
    for _ in range(times):
        print("text")
    return code

doing = {
    "said": lambda: [logs.say("text") for _ in range(5)] and 75,
    "printed": lambda: printed(0),
    "printed much": lambda: printed(0, 9000),
    "bad input": lambda: raising(UserError("bad")),
    "storage": lambda: raising(StorageError("gone")),
    "both": lambda: print("text", file=sys.stderr) or printed(0),
    "flags' help": lambda: cli.run(pretrain.main, ["pretrain", "--help"]),
    "parser's help": lambda: cli.exit_code(checkpoint.main),
}
name, where = None, iter(sys.argv[1:])
for case, output in zip(where, where):
    child = os.fork()
    if not child:
        name = case
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1 if output == "stdout" else 2)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"<<exit>> {code}", flush=True)
    print(f"<<exit>> {code}", file=sys.stderr, flush=True)
if name:
    sys.argv = ["checkpoint", "--help"]
    cli.leave(doing[name]() if "flags" in name else cli.exit_code(doing[name]))
"""


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["buffered", "unbuffered"]
)
def ended(request):
    """(exit code, what the output without the full disk got) by case."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environ |= {"PYTHONUNBUFFERED": "1"} if request.param else {}
    cases = [word for name, (where, _, _) in CASES.items() for word in (name, where)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *cases],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env=environ,
    )  # fmt: skip
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


@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_behind_an_output(ended, name):
    assert ended[name] == CASES[name][1:]


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", r"caf\xe9 \u20ac"), ("latin-1", "caf\xe9 \\u20ac")]
)
def test_a_character_that_an_output_has_not_is_spelt_out(monkeypatch, encoding, shown):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    assert cli.exit_code(lambda: print("caf\xe9 \u20ac") or 0) == 0
    assert written.getvalue() == f"{shown}\n".encode(encoding)


def test_a_closed_input_is_an_empty_one(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert cli.exit_code(lambda: len(sys.stdin.read())) == 0
