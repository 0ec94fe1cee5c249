"""Ends a process at once, without waiting for other processes or for a disk, after its last lines
are written.

code_of(error)             the exit code of a program that an error ends, and a line for a person
before(function)           calls a function on the way out
within(seconds, function)  whether a function ended in time
now(code, line)            ends the process
signals_as_they_were()     gives a caller its handlers back
at_signal(which, how)      calls a function at the first, or second, SIGTERM or SIGINT, whatever the process is doing
"""

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO

from zaya_jax.cluster.rank import LostProcess
from zaya_jax.config import StorageError, UserError
from zaya_jax.config.fields import first_line, on_a_line

# docs/exit_codes.md
DONE, FAILED, BAD_INPUT, UNHEALTHY, STORAGE, HARDWARE, PREEMPTED = (0, 1, 2, 3, 4, 5, 75)
SIGNALLED = 128  # and a signal's number, as a shell reports a program that the signal ended
PATIENCE = 10.0  # seconds, so that a hung disk cannot block the exit
STOPPING = (signal.SIGTERM, signal.SIGINT)
# Errors that are the storage's, whatever was being written: a full or failing disk, one that is
# gone or read-only.
OF_STORAGE = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN)
)
# Errors of something else in the place of a file, or of missing rights, where the error names a
# file.
IN_THE_WAY = frozenset(
    (
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
    )
)

_functions: list[Callable[[], None]] = []


def before(function: Callable[[], None]) -> None:
    """Has `now` call a function, in any thread."""
    _functions.append(function)


def forget(function: Callable[[], None]) -> None:
    """Removes the function given to `before`."""
    _functions[:] = [known for known in _functions if known != function]


def within(seconds: float, function: Callable[[], None]) -> bool:
    """Calls a function in a thread; False, with the thread left behind, if it takes longer."""
    thread = threading.Thread(target=function, name="leaving", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def now(code: int, line: str = "") -> NoReturn:
    """Ends the process."""

    def last_words() -> None:
        if line:
            with contextlib.suppress(OSError, ValueError):
                print(line, file=sys.stderr)
        for function in [
            *_functions,
            logging.shutdown,
            *(f.flush for f in (sys.stdout, sys.stderr) if f),
        ]:
            with contextlib.suppress(Exception):
                function()

    within(PATIENCE, last_words)
    os._exit(code)


def silence(stream: TextIO) -> None:
    """Sends a stream that cannot be written (no reader, a full disk) to nowhere, at the
    interpreter's end too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def complain(line: str) -> None:
    """Prints a line to stderr if possible: a failure must not change the exit code."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no room for a program or its arrays, in XLA's words."""
    return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def code_of(error: BaseException) -> tuple[int, str]:
    """The exit code of a program that an error ends, and a line with the reason; FAILED for
    unexpected errors."""
    match error:
        case UserError():
            return BAD_INPUT, on_a_line(error)
        case StorageError():
            return STORAGE, on_a_line(error)
        case LostProcess():
            return FAILED, str(error)
        case BrokenPipeError():
            return SIGNALLED + signal.SIGPIPE, "broken pipe: the output is no longer read"
        case OSError() if error.errno in OF_STORAGE or (
            error.errno in IN_THE_WAY and error.filename
        ):
            where = f" ({error.filename})" if error.filename else ""
            return (
                STORAGE,
                f"{error.strerror}{where}; mend the storage and start the same command again",
            )
        case RuntimeError() if is_out_of_memory(error):
            return (
                FAILED,
                f"{first_line(error)}; take a smaller data.micro_batch, more remat, or more devices"
                " (docs/howto/out_of_memory.md)",
            )
        case KeyboardInterrupt():
            number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
            return SIGNALLED + number, f"interrupted by {number.name}; nothing more was saved"
        case SystemExit(code=None):
            return DONE, "exit"
        case SystemExit():
            return error.code if isinstance(error.code, int) else FAILED, f"exit {error.code}"
    return FAILED, f"{type(error).__name__}: {first_line(error)}"


def at_signal(which: int, how: Callable[[signal.Signals], None]) -> None:
    """Calls `how` at the `which`-th SIGTERM or SIGINT from now on, in a thread: Python's own
    handlers wait while the main thread compiles, computes or writes. A handler must be set for
    both, if only one that does nothing."""
    listening, telling = os.pipe()
    os.set_blocking(telling, False)
    before_this = signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    if before_this >= 0:
        os.close(before_this)  # which ends the thread of the run before

    def watch() -> None:
        seen = 0
        while number := os.read(listening, 1):
            seen += number[0] in STOPPING
            if seen == which:
                how(signal.Signals(number[0]))
        os.close(listening)

    threading.Thread(target=watch, name="signals", daemon=True).start()


@contextlib.contextmanager
def signals_as_they_were() -> Iterator[None]:
    """Restores the caller's signal handlers after a run, which listens to signals until its process
    ends."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    before = signal.set_wakeup_fd(-1)  # an event loop's, which a run would close
    try:
        yield
    finally:
        ours = signal.set_wakeup_fd(before)
        if ours >= 0:
            os.close(ours)  # which ends the run's listening thread
        for number, handler in handlers.items():
            if handler is not None:  # one that Python did not set cannot be set again
                signal.signal(number, handler)
