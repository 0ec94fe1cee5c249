"""The programs' common parts: options, a config among them, and mistakes as one line with an exit
code."""

import argparse
import io
import itertools
import math
import signal
import sys
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from zaya_jax import config as config_lib
from zaya_jax.cluster import leaving
from zaya_jax.cluster.leaving import BAD_INPUT, DONE, HARDWARE, PREEMPTED, STORAGE, UNHEALTHY  # noqa: F401
from zaya_jax.config import StorageError, UserError, fields, page, shown
from zaya_jax.hardware import sizing


def exit_code(main: Callable[[], int]) -> int:
    """The code that `main` returns; an error that a person can mend becomes one line and its code.

    Every program calls this before it asks for a device, so the compiler gets its flags here.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # experiments/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # an encoding may lack a character of a prompt or a path
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sizing.set_for_platform()
    try:
        code = main()
        if code == DONE:  # at the interpreter's end a full disk would make the code 120
            sys.stdout.flush()
        return code
    except (UserError, StorageError, OSError, RuntimeError, KeyboardInterrupt) as error:
        code, line = leaving.code_of(error)
        if code == leaving.FAILED and not leaving.is_out_of_memory(error):
            raise
    leaving.complain(f"error: {_option_of(line, sys.argv[1:])}{line}")
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try again at its end, and its code would be 120
        leaving.silence(sys.stdout)
    return code


def _option_of(line: str, arguments: list[str]) -> str:
    """The option, with `=`, of the value that an error's line begins with; "" if no option gave it,
    or several did.

    The library's errors begin with what was given, and do not know the options of programs. A
    plain number counts something: "3 saves failed".
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    options = {
        f"{option}="
        for option, value in itertools.pairwise(words)
        if option.startswith("--")
        and not value.isdigit()
        and line.startswith((f"{value} ", f"{value}: "))
    }
    return options.pop() if len(options) == 1 else ""


def leave(code: int) -> NoReturn:
    """Ends the process; at once if storage failed, since threads may wait for ever for a disk that
    hangs."""
    if code not in (STORAGE, leaving.SIGNALLED + signal.SIGINT):
        sys.exit(code)
    leaving.now(code)


class Parser(argparse.ArgumentParser):
    """argparse with whole option names only, UserErrors for complaints, and configs."""

    _has_config = False

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def add_config(self, default: str) -> None:
        """--config=FILE or FILE:ARGUMENT, and --config.KEY=VALUE of each key; parsed, `config` is
        checked."""
        file = str(config_lib.SHIPPED / default)
        self.add_argument("--config", default=file, metavar="FILE", help="Python with get_config()")
        self.epilog, self._has_config = page.listing(), True

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, --config.KEY=VALUE included."""
        words = sys.argv[1:] if args is None else list(args)
        if not self._has_config:
            return super().parse_args(words, namespace)
        changes = [word for word in words if word.startswith("--config.")]
        options = super().parse_args([word for word in words if word not in changes], namespace)
        config = config_lib.read_config_dict(options.config)
        for change in changes:
            _change(config, change)
        options.config = config_lib.check(config)
        if options.config.model.layer or options.config.model.router:
            from zaya_jax.model.own_parts import as_named  # brings JAX, 1 s

            options.config = as_named(options.config)
        sizing.set_for_platform(options.config)
        return options

    def add_own_parts(self) -> None:
        """--layer, --router and --changed_source, which `own_parts` gives to `library.load`."""
        for part in ("layer", "router"):
            self.add_argument(
                f"--{part}",
                metavar="MODULE:CLASS",
                help=f"the {part} of your own that the run was trained with",
            )
        self.add_argument(
            "--changed_source",
            action="store_true",
            help="load it although the file of the --layer or --router has changed since",
        )

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage and another prefix."""
        raise UserError(f"{message} (--help lists the options)")


def own_parts(args: argparse.Namespace) -> dict[str, Any]:
    """What the options of `add_own_parts` say."""
    return {name: getattr(args, name) for name in ("layer", "router", "changed_source")}


def _change(config: ConfigDict, change: str) -> None:
    """Applies --config.KEY=VALUE; the value is read as the type that the key has."""
    key, _, value = change.removeprefix("--config.").partition("=")
    *groups, last = key.split(".")
    try:
        for group in groups:
            config = config[group]
        kind = config.get_type(last)
    except (AttributeError, KeyError, TypeError):
        raise UserError(
            f"unknown config key config.{key}{fields.nearest(key, config_lib.all_keys())}"
        ) from None
    try:
        if kind is bool:
            config[last] = {"true": True, "false": False}[value.lower()]
        elif kind is not tuple:
            config[last] = kind(value)
        elif value.startswith(("(", "[")):
            config[last] = tuple(literal_eval(value))
        else:  # one string may stand alone: --config.kernels=none
            config[last] = (value,)
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError):  # also of a group
        expected = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            ConfigDict: f"one of its keys, --config.{key}.KEY=VALUE",
        }
        raise UserError(f"{change}: expected {expected.get(kind, kind.__name__)}") from None


# ################################################################################################
# Types of options
# ##################################################################################################


def path(value: str) -> Path:
    """A path of this machine; an address is refused before any file is looked for."""
    return Path(_checked(value, fields.path_problem(value)))


def path_or_address(value: str) -> str:
    """A path of this machine, or an address such as s3://bucket/run."""
    return _checked(value, fields.path_problem(value, addresses=True))


def number(
    kind: type[int] | type[float], least: float, most: float = math.inf
) -> Callable[[str], Any]:
    """A finite number within these bounds."""

    def parse(value: str) -> int | float:
        above = f" and at most {most:,}" if most < math.inf else ""
        try:
            parsed = kind(value)
        except ValueError:
            _checked(value, f"is not a {'whole number' if kind is int else 'number'}")
        if not math.isfinite(parsed) or not least <= parsed <= most:
            _checked(value, f"must be at least {least:,}{above}")
        return parsed

    return parse


def mesh(value: str) -> dict[str, int]:
    """Sizes of axes, such as data=2,expert=4."""
    sizes: dict[str, int] = {}
    for part in value.split(","):
        axis, _, size = part.partition("=")
        if axis in sizes or not size.isdecimal():
            _checked(value, "is not AXIS=N,..., each axis once, such as data=2,expert=4")
        sizes[axis] = int(size)
    return sizes


def _checked(value: str, problem: str) -> str:
    if problem:
        raise argparse.ArgumentTypeError(f"{shown(value)} {problem}")
    return value


def out_folder(folder: str | None, what: str) -> Path:
    """The folder of --out, which may not exist yet; UserError if it is missing or cannot be
    written."""
    if not folder:
        raise UserError(f"--out=DIR is missing: the folder for {what}")
    from zaya_jax.checkpoint.run import claims  # brings JAX, 1 s, which --help does not need

    fields.check_path("--out", folder)
    claims.require_writable(folder)
    return Path(folder)
