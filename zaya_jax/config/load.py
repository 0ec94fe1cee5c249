"""Configs from config files: Python with get_config(), named as FILE or FILE:ARGUMENT."""

import re
import runpy
import traceback
from pathlib import Path

from ml_collections import ConfigDict

from zaya_jax.config import Config, UserError, all_keys, check, fields

# Configs of the repository, or in site-packages.
SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "configs"


def read_config(given: str) -> Config:
    """The checked config of a file."""
    return check(config_dict(given))


def config_dict(given: str) -> ConfigDict:
    """The ConfigDict of a file; experiments/configs/NAME.py is found from any folder."""
    fields.check_path("--config", given)
    file, _, argument = given.partition(":")
    path = Path(file)
    if not path.is_file() and path.parts[:-1] == ("experiments", "configs"):
        path = SHIPPED / path.name
    if not path.is_file():
        raise UserError(f"--config={given} is not a file; give a Python file with get_config(), see {SHIPPED}")
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
    """The error of a config file in a few words, with its line."""
    if isinstance(error, KeyError) and error.args == ("get_config",):
        return "it has no get_config()"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f" in line {line}" if line else ""
    if unknown := re.match(r"'?Key \"(\w+)\" does not exist", str(error)):
        names = [key.rpartition(".")[2] for key in all_keys()]
        return f"unknown config key {unknown[1]!r}{where}{fields.nearest(unknown[1], names)}"
    return f"{type(error).__name__}{where}: {fields.first_line(error)}"
