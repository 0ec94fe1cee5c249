"""Outputs that cannot be written: the exit code says what became of the work, and nobody's file is
replaced."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import check_error, raising

from zaya_jax import cli
from zaya_jax.cluster import leaving
from zaya_jax.config import files

ROOT = Path(__file__).resolve().parent.parent
STORAGE = "error: No space left on device; mend the storage and start the same command again\n"
UNREAD = "error: broken pipe: the output is no longer read\n"
PROGRAM = """
import sys
from zaya_jax import cli
from zaya_jax.config import UserError

def refuse():
    raise UserError("bad")

def say():
    from zaya_jax.training import logs
    for _ in range(5):
        logs.say("text")
    return 75

doing = {
    "said": say,
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


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    files.write(tmp_path / "link", b"text")
    assert (tmp_path / "link").read_text() == "text" and (tmp_path / "file").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_what_is_in_the_way_is_a_line_with_its_name(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "file").write_text("")

    for stumble in (
        lambda: (tmp_path / "metrics.jsonl").read_bytes(),
        lambda: (tmp_path / "file" / "x").read_bytes(),
        lambda: (tmp_path / "file").mkdir(),
    ):
        assert cli.exit_code(stumble) == cli.STORAGE
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and str(tmp_path) in err
    nameless = raising(PermissionError(errno.EACCES, "of a library's own"))
    check_error(PermissionError, "", cli.exit_code, nameless)
    assert leaving.code_of(FileNotFoundError(errno.ENOENT, "gone", "x"))[0] == leaving.FAILED


def test_a_device_without_room_is_a_line_with_the_way_out(capsys):
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
    assert cli.exit_code(raising(RuntimeError(full))) == leaving.FAILED
    err = capsys.readouterr().err
    assert err.startswith(f"error: {full}; take a smaller data.micro_batch")
    assert err.count("\n") == 1 and (ROOT / "docs/howto/out_of_memory.md").exists()
    another = raising(RuntimeError("INTERNAL: another"))
    check_error(RuntimeError, "INTERNAL", cli.exit_code, another)


@pytest.mark.parametrize(
    ("line", "option"), [("runs/x is in use", "--workdir="), ("3 saves failed in a row", "")]
)
def test_an_error_names_the_option_of_the_value_that_it_begins_with(
    line, option, monkeypatch, capsys
):
    words = ["program", "--workdir=runs/x", "--config.checkpoint.every_steps=3"]
    monkeypatch.setattr(sys, "argv", words)
    assert cli.exit_code(raising(cli.UserError(line))) == cli.BAD_INPUT
    assert capsys.readouterr().err == f"error: {option}{line}\n"
