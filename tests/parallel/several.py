"""What test_multihost runs as several processes: `several.py SCENE`, each scene one behaviour of multihost."""

import os
import signal
import sys
import time

import numpy as np

from zaya_jax import cli
from zaya_jax.config import StorageError, UserError
from zaya_jax.parallel import multihost


def main() -> int:
    """Plays the scene that the command line names."""
    import jax

    index = jax.process_index()
    print(f"here {index} of {jax.process_count()}", flush=True)
    match sys.argv[1]:
        case "meet":
            print("first:", multihost.from_first("name", lambda: {"who": index}))
            print("again:", multihost.from_first("name", lambda: [index, "twice"]))
            figures = {"worst": float(index), "mean": float(index), "sum": 1.0}
            print("all:", multihost.over_processes(figures, {"worst": np.max, "sum": np.sum}))
            for _ in range(2):
                multihost.barrier("crossing")
            print("crossed", flush=True)
            if index != 1:
                multihost.barrier("supper", 2)
            time.sleep(60)  # ended by the others
        case "stop":
            stop = multihost.StopSignal()
            for step in range(1, 100_000):
                multihost.from_first("step", lambda step=step: step)  # like a step's figures: nobody is ahead
                multihost.barrier("step")
                print("step", step, flush=True)
                if stop.after(step):
                    print(f"stopped after {step} by {stop.asked}")
                    return cli.PREEMPTED
        case "bad input":
            if index == 1:
                raise UserError("the cheese is missing; bring some")
            multihost.barrier("supper")
        case "killed":
            if index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            multihost.barrier("supper", 2)
        case "storage":
            if index == 0:
                raise StorageError("the shelf fell down")
            time.sleep(60)
        case "bug":
            if index == 1:
                raise ZeroDivisionError("by none")
            time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(cli.exit_code(lambda: multihost.together(main)))
