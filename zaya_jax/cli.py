"""What the programs share: options, a config among them, and mistakes as one line with an exit code."""

import argparse
import io
import math
import os
import re
import runpy
import select
import signal
import sys
import traceback
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from zaya_jax import config as config_lib
from zaya_jax.checkpoint import claims
from zaya_jax.cluster import leaving
from zaya_jax.config import StorageError, UserError, fields, page, shown
from zaya_jax.hardware import flags as xla_flags

DONE, BAD_INPUT, UNHEALTHY, STORAGE, HARDWARE, PREEMPTED, INTERRUPTED = 0, 2, 3, 4, 5, 75, 130
READER_GONE = 128 + signal.SIGPIPE  # as a shell reports a program whose output was closed

# Of the repository, or in site-packages.
SHIPPED = Path(__file__).resolve().parents[1] / "experiments" / "configs"


def exit_code(main: Callable[[], int]) -> int:
    """The code that `main` returns; an error that a person can mend becomes one line and its code.

    Every program calls this before it asks for a device, so the compiler gets its flags here.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # experiments/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(3):  # a closed one's number would be the next file's, and libraries print into it
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an encoding may lack a character of a prompt or a path
            stream.reconfigure(errors="backslashreplace")
    xla_flags.set_for_platform()
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse's, after --help
            if end.code:
                raise
            code = DONE
        if code == DONE and sys.stdout:  # at the interpreter's end a full disk would make the code 120
            sys.stdout.flush()
        return code
    except UserError as error:
        return _failed(BAD_INPUT, fields.on_a_line(error))
    except StorageError as error:
        return _failed(STORAGE, fields.on_a_line(error))
    except BrokenPipeError:
        if not _unread(1):
            raise
        leaving.silence(sys.stdout)
        return READER_GONE
    except OSError as error:
        reason = leaving.storage_reason(error)
        if not reason:
            raise
        return _failed(STORAGE, reason)
    except KeyboardInterrupt:
        return _failed(INTERRUPTED, "interrupted")


def _failed(code: int, message: str) -> int:
    leaving.complain(f"error: {message}")
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try again at its end, and its code would be 120
        leaving.silence(sys.stdout)
    return code


def _unread(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def leave(code: int) -> NoReturn:
    """Ends the process; at once where storage failed, since threads may wait for ever for a disk that hangs."""
    if code not in (STORAGE, INTERRUPTED) and not leaving.some_left():
        sys.exit(code)
    leaving.now(code)
    raise AssertionError("not reached")


class Parser(argparse.ArgumentParser):
    """argparse with whole option names only, whose complaints are UserErrors, and with configs."""

    _has_config = False

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def add_config(self, default: str) -> None:
        """--config=FILE or FILE:ARGUMENT, and --config.KEY=VALUE of each key; parsed, `config` is checked."""
        self.add_argument(
            "--config", default=str(SHIPPED / default), metavar="FILE", help="Python with get_config()"
        )
        self.epilog, self._has_config = page.listing(), True

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does."""
        given = sys.argv[1:] if args is None else list(args)
        changes = [arg for arg in given if self._has_config and arg.startswith("--config.")]
        found = super().parse_args([arg for arg in given if arg not in changes], namespace)
        for change in changes:
            if (key := change.removeprefix("--config.").partition("=")[0]) not in config_lib.all_keys():
                raise config_lib.unknown_key(key)
        if self._has_config:
            config = config_dict(found.config)
            for change in changes:
                _change(config, change)
            found.config = config_lib.check(config)
        return found

    def print_help(self, file: Any = None) -> None:
        """As argparse does, but a full disk is an error."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage and another prefix."""
        raise UserError(f"{message} (--help lists the options)")


def path(value: str) -> Path:
    """The `type` of an option that is a path of this machine: it is refused before any file is looked for."""
    return Path(_unless(fields.path_problem(value), value))


def place(value: str) -> str:
    """The `type` of an option that may also be an address."""
    return _unless(fields.place_problem(value), value)


def number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], Any]:
    """The `type` of an option that is a finite number within these bounds."""

    def parse(value: str) -> int | float:
        try:
            found = kind(value)
        except ValueError:
            _unless(f"is no {'whole number' if kind is int else 'number'}", value)
        above = "" if most == math.inf else f" and at most {most:,}"
        inside = math.isfinite(found) and least <= found <= most
        _unless("" if inside else f"must be at least {least:,}{above}", value)
        return found

    return parse


def mesh(value: str) -> dict[str, int]:
    """The `type` of an option such as data=2,expert=4."""
    sizes = [part.partition("=") for part in value.split(",")]
    right = all(size.isdecimal() for *_, size in sizes) and len({axis for axis, *_ in sizes}) == len(sizes)
    _unless("" if right else "is no AXIS=N,..., each axis once, such as data=2,expert=4", value)
    return {axis: int(size) for axis, _, size in sizes}


def _unless(wrong: str, value: str) -> str:
    if wrong:
        raise argparse.ArgumentTypeError(f"{shown(value)} {wrong}")
    return value


def out_folder(given: str | None, what: str) -> Path:
    """The folder of --out, which may not exist yet; UserError where it is missing or cannot be written."""
    if not given:
        raise UserError(f"--out=DIR is missing: the folder for {what}")
    fields.check_path("--out", given)
    claims.require_writable(Path(given), f"--out={given}")
    return Path(given)


def _change(config: ConfigDict, change: str) -> None:
    """Applies --config.KEY=VALUE; the value is read as the type that the key has."""
    key, _, value = change.removeprefix("--config.").partition("=")
    *groups, last = key.split(".")
    try:
        for group in groups:
            config = config[group]
        kind = config.get_type(last)
    except (AttributeError, KeyError):
        raise UserError(f"{change}: get_config() returns no such key; begin with config.default()") from None
    try:
        if kind is tuple:  # one string may stand alone: --config.kernels=none
            config[last] = tuple(literal_eval(value)) if value.startswith(("(", "[")) else (value,)
        else:
            config[last] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (KeyError, SyntaxError, TypeError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UserError(f"{change}: expected {expected.get(kind, kind.__name__)}") from None


def read_config(given: str) -> config_lib.Config:
    """The checked config of FILE or FILE:ARGUMENT."""
    return config_lib.check(config_dict(given))


def config_dict(given: str) -> ConfigDict:
    """The ConfigDict of FILE or FILE:ARGUMENT; experiments/configs/NAME.py is found from any folder."""
    fields.check_path("--config", given)
    file, _, argument = given.partition(":")
    path = Path(file)
    if not path.is_file() and path.parts[:-1] == ("experiments", "configs"):
        path = SHIPPED / path.name
    if not path.is_file():
        raise UserError(f"--config={given} is no file; give a Python file with get_config(), see {SHIPPED}")
    try:
        found = runpy.run_path(str(path))["get_config"](*([argument] if argument else []))
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a config file is a program, and may do anything
        raise UserError(f"--config={given} gives no config ({_reason(error, path)})") from None
    if not isinstance(found, ConfigDict):
        raise UserError(f"--config={given}: get_config() returns {type(found).__name__}, not a ConfigDict")
    return found


def _reason(error: BaseException, path: Path) -> str:
    """What a config file did instead of returning a config, and in which of its lines."""
    if isinstance(error, KeyError) and error.args == ("get_config",):
        return "it has no get_config()"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f" in line {line}" if line else ""
    unknown = re.match(r"'?Key \"(\w+)\" does not exist", fields.words(error))
    if unknown:
        names = [key.rpartition(".")[2] for key in config_lib.all_keys()]
        return f"unknown config key {unknown[1]!r}{where}{fields.nearest(unknown[1], names)}"
    return f"{type(error).__name__}{where}: {fields.first_line(error)}"
