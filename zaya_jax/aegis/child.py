"""Becomes a program that does not outlive who started it: `python -I -S child.py PARENT COMMAND ...`.

The system kills it when the agent ends, however that ends: nothing trains on alone. This is no function that is called
between fork and exec, since the agent has threads, one of which may hold a lock at that moment.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it ended before
        sys.exit(1)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"error: {sys.argv[2]} does not start: {error.strerror}", file=sys.stderr)
        sys.exit(2)
