"""What the programs share: flags with a config among them, and bad input as one line with exit code 2."""

import argparse
import contextlib
import errno
import inspect
import math
import os
import re
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from zaya_jax import config as config_lib
from zaya_jax.checkpoint import writing
from zaya_jax.cluster import leaving
from zaya_jax.config import StorageError, UserError, fields, files, page
from zaya_jax.hardware import flags as xla_flags
from zaya_jax.hardware import host

DONE, BAD_INPUT, UNHEALTHY, STORAGE, HARDWARE, PREEMPTED, INTERRUPTED = 0, 2, 3, 4, 5, 75, 130


LONGEST = 200  # characters of another program's message
HELP = ("-h", "-help", "--help", "-helpfull", "--helpfull", "-helpshort", "--helpshort")

_default_config: list[str] = []
_INSTALLED = Path(__file__).resolve().parent.parent  # the repository, or site-packages


def define_config(default: str) -> flags.FlagHolder:
    """The --config flag: a Python file with get_config(), its keys overridden by --config.KEY=VALUE.

    --config=FILE:ARGUMENT calls get_config(ARGUMENT).
    """
    _default_config.append(default)
    holder = config_flags.DEFINE_config_file(
        "config", None, f"a Python file with get_config(); by default {_below(default)}", lock_config=True
    )
    flags.FLAGS["config"].parser = _ConfigFiles(flags.FLAGS["config"].parser)
    return holder


class _NoConfig(Exception):
    """What get_config() gives will not do. No ValueError: absl would make its own words of that."""


class _ConfigFiles(flags.ArgumentParser):
    """ml_collections' parser of config files, which looks at what get_config() gives before keys are changed in it."""

    def __init__(self, inner: flags.ArgumentParser):
        self._inner, self.changed = inner, list[str]()

    def parse(self, argument: str) -> ConfigDict:
        """The config of a file; _NoConfig where it is none, or has no place for a key that is to be changed."""
        found = self._inner.parse(argument)
        getattr(found, "lock", None)  # where the file could not be read, any name raises why
        begin = "begin it with zaya_jax.config.default() and return that, see experiments/configs"
        if not isinstance(found, ConfigDict):
            given = type(found).__name__
            if inspect.iscoroutine(found):
                found.close()  # otherwise Python warns that nobody awaited it
            raise _NoConfig(f"--config={argument}: get_config() returns {given}, not a ConfigDict; {begin}")
        for key in self.changed:
            group: Any = found
            *groups, last = key.split("[")[0].split(".")
            for name in groups:
                group = group[name] if isinstance(group, ConfigDict) and name in group else None
            if not isinstance(group, ConfigDict) or last not in group:
                raise _NoConfig(
                    f"--config={argument}: what get_config() returns has no {key}, which --config.{key} is to "
                    f"change; {begin}"
                )
        return found

    def flag_type(self) -> str:
        """For --help."""
        return self._inner.flag_type()


def find_config(given: str) -> str:
    """FILE or FILE:ARGUMENT of --config; experiments/configs/NAME.py, which is installed, from any folder."""
    path, colon, argument = given.partition(":")
    if _is_file(Path(path)):
        return given
    shipped = _INSTALLED / "experiments" / "configs"
    if Path(path).parts[:-1] == ("experiments", "configs") and _is_file(shipped / Path(path).name):
        return f"{shipped / Path(path).name}{colon}{argument}"
    raise UserError(
        f"--config={given} is no file; give a Python file with get_config(), see {_below(str(shipped))}"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def read_config(file: str) -> config_lib.Config:
    """The config of a file, for a program without flags; UserError where it gives none."""
    fields.check_path("--config", file)
    file = find_config(file)
    path, *argument = file.split(":", 1)
    try:
        found = runpy.run_path(path)["get_config"](*argument)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a config file is a program, and may do anything
        raise _no_config(file, error) from None
    if not isinstance(found, ConfigDict):
        raise UserError(f"--config={file}: get_config() returns {type(found).__name__}, not a ConfigDict")
    return config_lib.check(found)


def _below(path: str) -> str:
    """A path as it is written from the current folder, where it lies below."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def run(main: Callable[[], int], argv: Sequence[str] | None = None) -> int:
    """Parses the flags, runs `main`, and gives the exit code; a UserError becomes one line."""
    argv = list(sys.argv if argv is None else argv)
    if any(arg in HELP for arg in argv[1:]):
        return exit_code(lambda: print(help_text(main)) or DONE)
    host.keep_memory()

    def parse_and_run() -> int:
        _parse(argv)
        return main()

    return exit_code(parse_and_run)


def help_text(main: Callable) -> str:
    """What a program with flags is for, its options, and the keys of its config if it has one."""
    module = sys.modules[main.__module__]
    ours = {module.__name__, sys.argv[0], getattr(module, "__file__", None)}
    lines = [(module.__doc__ or "").strip(), "", "options:"]
    for name, found in flags.FLAGS.flags_by_module_dict().items():
        for flag in found if name in ours or name.startswith("zaya_jax.") else ():
            default = "" if flag.default in (None, []) else f" [{flag.default}]"
            kind = "file" if flag.name == "config" else flag.parser.flag_type() or "string"
            value = "" if flag.boolean else f"={kind.split()[-1].upper()}"
            lines += [f"  --{flag.name}{value}", f"      {' '.join(flag.help.split())}{default}"]
    return "\n".join([*lines, *(["", page.listing()] if _default_config else [])])


class Parser(argparse.ArgumentParser):
    """For programs without a config: argparse with whole option names only, whose complaints are UserErrors."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{**kwargs, "allow_abbrev": False, "add_help": False})
        self.add_argument("-h", "--help", "--helpfull", action="help", help="say this")

    def print_help(self, file: Any = None) -> None:
        """As argparse does, but a disk that is full is not passed over."""
        print(self.format_help(), end="", file=file)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse does, but `--name=--` gives "--", not the list without anything that Python 3.12.1 gives."""
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage and another prefix."""
        raise UserError(f"{_brief(message)} (--help lists the options)")


def path(value: str) -> Path:
    """For `type` of an option that is a path, so that each is refused by its name before anybody looks for it."""
    return Path(place(value))


def place(value: str) -> str:
    """Likewise of one that may be a URL."""
    wrong = fields.path_problem(value)
    if wrong:
        raise argparse.ArgumentTypeError(f"{fields.shown(value)} {wrong}")
    return value


def out_folder(given: str | None, what: str) -> Path:
    """The folder of --out, which may have to be made; UserError where it is not given, or could not be written."""
    if not given:
        raise UserError(f"--out=DIR is missing: the folder for {what}")
    fields.check_path("--out", given)
    folder = Path(given)
    writing.require_writable(folder, f"--out={given}")
    there = files.existing(folder)
    try:  # some systems of files say that they can be written and cannot; minutes of work would find that out
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        raise UserError(
            f"--out={given} cannot be written ({error.strerror} in {there}); give a folder that can"
        ) from None
    return folder


def number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], Any]:
    """Likewise of one that is a number; at least and at most these, and finite."""

    def parse(value: str) -> int | float:
        try:
            found = kind(value)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{fields.shown(value)} is no {what}") from None
        if not (math.isfinite(found) and least <= found <= most):
            above = "" if most == math.inf else f" and at most {most:,}"
            raise argparse.ArgumentTypeError(f"{fields.shown(value)} must be at least {least:,}{above}")
        return found

    return parse


def exit_code(main: Callable[[], int]) -> int:
    """What `main` gives; an error that a person can mend becomes one line and its code.

    Every program comes through here before it asks for a device, so here the compiler gets its flags.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # experiments/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    xla_flags.set_for_platform()
    with outlive_readers():
        return _code(main)


def _code(main: Callable[[], int]) -> int:
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse's, after --help
            if end.code:
                raise
            code = DONE
        if code == DONE:  # now, since at the interpreter's end a full disk would be exit code 120
            sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {fields.on_a_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except StorageError as error:
        print(f"error: {fields.on_a_line(error)}", file=sys.stderr)
        return STORAGE
    except OSError as error:
        reason = leaving.storage_reason(error)
        if not reason:
            raise
        print(f"error: {reason}", file=sys.stderr)
        return STORAGE
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED


def leave(code: int) -> NoReturn:
    """Ends the process; at once where storage failed, since threads may wait for ever for a disk that hangs."""
    if code not in (STORAGE, INTERRUPTED) and not leaving.some_left():
        sys.exit(code)
    leaving.now(code)
    raise AssertionError("not reached")


@contextlib.contextmanager
def outlive_readers() -> Iterator[None]:
    """Whoever reads what a program prints may go, as `head` does or a terminal: it works on, and says no more."""
    for number in range(3):  # else the next file that is opened would take the place of one that was closed
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    closed_input = None if sys.stdin else open(os.devnull)  # noqa: SIM115
    sys.stdin = sys.stdin or closed_input
    streams = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    # What cannot be said on stderr can be said nowhere: the exit code is left, and must not change for it.
    guarded = [
        cast(TextIO, _Outliving(stream, last)) for stream, last in zip(streams, (False, True), strict=True)
    ]
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        for stream in guarded:
            with contextlib.suppress(OSError):
                stream.flush()
        sys.stdout, sys.stderr = streams
        if closed_input:
            sys.stdin = cast(TextIO, None)
            closed_input.close()


class _Outliving:
    """A text stream that nobody may be reading, or whose disk may be full; `silent`: then that is no error either."""

    def __init__(self, stream: TextIO, silent: bool):
        self._stream, self._silent = stream, silent

    def write(self, text: str) -> int:
        """As the stream does; a character that its encoding has not is spelt out."""
        try:
            self._try(self._stream.write, text)
        except UnicodeEncodeError:
            code = self._stream.encoding
            self._try(self._stream.write, text.encode(code, "backslashreplace").decode(code))
        return len(text)

    def flush(self) -> None:
        """As the stream does."""
        self._try(self._stream.flush)

    def _try(self, function: Callable, *args: Any) -> None:
        try:
            function(*args)
        except OSError as error:
            # What the stream still holds, and what C libraries print, must go somewhere too.
            gone = error.errno in (errno.EPIPE, errno.EIO)
            self._forget(for_good=gone)
            if not gone and not self._silent:  # a full disk is not to be taken for a reader that went
                raise OSError(error.errno, error.strerror, self._stream.name) from None

    def _forget(self, for_good: bool) -> None:
        """Drops what the stream still holds, which its next write, and the interpreter's end, would try again."""
        number, nowhere = self._stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        there = os.dup(number)
        os.dup2(nowhere, number)
        with contextlib.suppress(OSError):
            self._stream.flush()
        if not for_good:
            os.dup2(there, number)
        os.close(there)
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _parse(argv: list[str]) -> None:
    # ml_collections reads --config before its overrides, wherever the user wrote it.
    config_file = [a for a in argv[1:] if a.startswith(("--config=", "-config="))]
    others = [a for a in argv[1:] if a not in config_file]
    # As the flag's own default it would be parsed, and fail, at import.
    if not config_file and _default_config:
        config_file = [f"--config={_default_config[-1]}"]
    for i, path in enumerate(config_file):
        option, name = path.split("=", 1)
        fields.check_path("--config", name)
        config_file[i] = f"{option}={find_config(name)}"
    known, changed = set(config_lib.all_keys()), []
    for arg in others:
        if arg.lstrip("-").startswith("config."):
            key = arg.lstrip("-").removeprefix("config.").split("=", 1)[0]
            if key not in known and key.split("[")[0] not in known:
                raise config_lib.unknown_key(key)
            changed.append(key)
    if config_file:
        cast(_ConfigFiles, flags.FLAGS["config"].parser).changed = changed
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # what is wrong with a config file is said once, below
    try:
        sys.argv = [argv[0], *config_file, *others]  # ml_collections looks there too
        rest = flags.FLAGS(sys.argv)
    except KeyboardInterrupt:
        raise
    except _NoConfig as error:
        raise UserError(str(error)) from None
    except BaseException as error:  # a config file is a program, and may do anything
        file = config_file[-1].split("=", 1)[1] if config_file else ""
        if file and (not isinstance(error, flags.Error) or f"={file}: Error whilst" in fields.words(error)):
            raise _no_config(file, error) from None
        if not isinstance(error, flags.Error | TypeError | ValueError | AttributeError | KeyError):
            raise
        raise UserError(f"{_brief(fields.first_line(error))} (--help lists the options)") from None
    finally:
        logging.set_verbosity(verbosity)
    if len(rest) > 1:
        raise UserError(f"unexpected argument {config_lib.shown(rest[1])}; options begin with --")


def _no_config(file: str, error: BaseException) -> UserError:
    """What a config file did in place of giving a config, and where in it."""
    path = file.split(":", 1)[0]  # behind it stands get_config()'s argument
    where, first, seen = "", error, set[int]()
    while True:
        seen.add(id(first))
        for frame in traceback.extract_tb(first.__traceback__):
            if os.path.exists(frame.filename) and os.path.samefile(frame.filename, path):
                where = f" in line {frame.lineno}"
        below = first.__cause__ or (None if first.__suppress_context__ else first.__context__)
        if below is None or id(below) in seen:  # causes may go round
            break
        first = below
    if isinstance(first, UserError):  # it says itself what is wrong
        return first
    if isinstance(first, SyntaxError) and first.lineno:
        where = f" in line {first.lineno}"
    if _is_json(file):
        return UserError(
            f"--config={file} is JSON, but a config file is Python with get_config(); one that returns "
            "zaya_jax.config.editable(zaya_jax.train.workdir.read_config(WORKDIR)) has what a run recorded"
        )
    if "no attribute 'get_config'" in fields.words(first) or fields.words(first) == "'get_config'":
        what = "it has no get_config()"
    else:
        what = f"{type(first).__name__}{where}: {fields.first_line(first)[:LONGEST]}"
        missing = re.match(r"['\"]+Key [\"\\]+(\w+)[\"\\]+ does not exist", fields.words(first))
        if missing:
            last_parts = [key.rpartition(".")[2] for key in config_lib.all_keys()]
            what = f"unknown config key {missing[1]!r}{where}{fields.nearest(missing[1], last_parts)}"
    return UserError(
        f"--config={file} gives no config ({what}); expected a Python file with get_config(), see experiments/configs"
    )


def _brief(message: str) -> str:
    """A message on one line in which a value that nobody would read to its end is cut in its middle."""
    message = " ".join(message.split())
    return message if len(message) <= 2 * LONGEST else f"{message[:LONGEST]} ... {message[-LONGEST:]}"


def _is_json(file: str) -> bool:
    try:
        return isinstance(files.read_json(file), dict)
    except (OSError, ValueError):
        return False
