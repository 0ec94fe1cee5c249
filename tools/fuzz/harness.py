"""Calls a program, in this process through its own main or in a process of its own, and checks how
it ends.

ended = call("generate", ["--model=x"], cwd)       code, output, and whether the tree is unchanged
ended.check()                                        the promise: see there
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings

from tools import reference
from zaya_jax import cli
from zaya_jax.hardware import host

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = int(os.environ.get("EXAMPLES", "1000"))
search = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    print_blob=True,
)


class Accepted(BaseException):
    """Raised by a test in the place where a program has found nothing wrong and would begin its
    work."""


@dataclasses.dataclass
class Ended:
    """How a call of a program ended."""

    what: str
    code: int
    out: str
    err: str
    changed: list[str]

    def check(self, codes: tuple[int, ...] = (0, 2, 4)) -> "Ended":
        """Exit code 0, 2 or 4; at most two lines on stderr; no traceback; after a 2 everything is
        as it was."""
        words = (
            f"{self.what}\ncode {self.code}, stdout {self.out[-500:]!r}, stderr"
            f" {self.err[-3000:]!r}"
        )
        assert self.code in codes, words
        assert stat.S_ISCHR(os.stat(os.devnull).st_mode), words  # root can replace it
        lines = self.err.splitlines()
        assert len(lines) <= 2 and "Traceback" not in self.err, words
        if self.code == cli.BAD_INPUT:
            assert lines[-1].startswith("error: ") and len(lines[-1]) < 2000, words
            assert self.changed == [], f"{words}\nchanged: {self.changed[:10]}"
        return self


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for a while, in memory where there is such a place: fsync on a disk would be most of
    the time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as here:
        yield Path(here)


def tree(folder: Path) -> dict[str, tuple]:
    """Everything below a folder: kind, mode and content, links not followed."""
    found: dict[str, tuple] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            about = os.lstat(path)
            if os.path.islink(path):
                content = os.readlink(path)
            elif name in files and os.path.isfile(path):
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            else:
                content = ""
            found[os.path.relpath(path, folder)] = about.st_mode, content
    return found


def call(program: str, options: list[str], sandbox: Path) -> Ended:
    """Calls a program in this process, with its current folder in the sandbox."""
    module = reference.program(program)
    return _call(program, lambda: _run(program, module, options), options, sandbox)


def call_process(program: str, options: list[str], sandbox: Path, seconds: float = 300) -> Ended:
    """Starts a program as a person does."""
    before = tree(sandbox)
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{program}", *options],
        cwd=sandbox,
        capture_output=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    out, err = (raw.decode(errors="replace") for raw in (done.stdout, done.stderr))
    return Ended(f"{program} {options}", done.returncode, out, err, _changes(before, tree(sandbox)))


def _call(program: str, run: Any, options: list[str], sandbox: Path) -> Ended:
    before, out, err, where = tree(sandbox), io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(sandbox)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run()
    except Accepted:
        code = cli.DONE
    except SystemExit as error:  # argparse, after --help
        code = error.code or 0
    except BaseException as error:
        error.add_note(f"{program} {options}")
        raise
    finally:
        os.chdir(where)
    return Ended(
        f"{program} {options}",
        code,
        out.getvalue(),
        err.getvalue(),
        _changes(before, tree(sandbox)),
    )


def _run(program: str, module: Any, options: list[str]) -> int:
    argv = [program, *options]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(host, "keep_memory"):
        return cli.exit_code(module.main)


def _changes(before: dict[str, tuple], after: dict[str, tuple]) -> list[str]:
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
