"""Programs a person runs."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # `python -m experiments.NAME` begins: while it imports, Ctrl-C ends it without some import's traceback. What a
    # program does with it from then on is `zaya_jax.cli.exit_code`'s.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
