"""The programs, a module or a package each: `python -m experiments.NAME`, installed `zaya-NAME`."""

import os
import runpy
import signal
import sys

# While `python -m experiments.NAME` or `zaya-NAME` imports, Ctrl-C ends it without a traceback.
# After that `zaya_jax.cli.exit_code` handles it.
_started_as = os.path.basename((sys.argv or [""])[0])
if (_started_as == "-m" or _started_as.startswith("zaya-")) and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Runs the program that an installed command is called after, as `python -m` would."""
    name = os.path.splitext(_started_as)[0].removeprefix("zaya-").replace("-", "_")
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
