"""Programs a person runs."""

import os
import signal
import sys

# `python -m experiments.NAME`, or the command `zaya-NAME`, begins: while it imports, Ctrl-C ends it without some
# import's traceback. What a program does with it from then on is `zaya_jax.cli.exit_code`'s.
_started_as = os.path.basename((sys.argv or [""])[0])
if (_started_as == "-m" or _started_as.startswith("zaya-")) and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
