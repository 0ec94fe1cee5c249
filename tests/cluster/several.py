"""The program that test_multihost runs as several processes: `several.py SCENE`, one behaviour of
multihost each."""

import sys
import time

import numpy as np

from zaya_jax import cli
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, UserError


def main() -> int:
    """Plays the scene that the command line names."""
    import jax

    index = jax.process_index()
    print(f"here {index} of {jax.process_count()}", flush=True)
    match sys.argv[1]:
        case "meet":
            print("first:", multihost.broadcast_from_zero("name", lambda: {"who": index}))
            print("again:", multihost.broadcast_from_zero("name", lambda: [index, "twice"]))
            figures = {"worst": float(index), "mean": float(index), "sum": 1.0}
            print("all:", multihost.reduce_figures(figures, {"worst": np.max, "sum": np.sum}))
            for _ in range(2):
                multihost.barrier("crossing")
            print("crossed", flush=True)
            if index != 1:
                multihost.barrier("supper")
            time.sleep(60)  # ended by the others
        case "bad input" | "storage" | "bug":
            who, error = {
                "bad input": (1, UserError("the cheese is missing; bring some")),
                "storage": (0, StorageError("the shelf fell down")),
                "bug": (1, ZeroDivisionError("by none")),
            }[sys.argv[1]]
            if index == who:
                raise error
            time.sleep(60)
        case "computing":
            while True:
                sum(i * i for i in range(1_000_000))
        case "at a barrier":
            if index != int(sys.argv[2]):
                multihost.barrier("supper")
            time.sleep(60)
        case "in collectives":
            while True:
                summed()
        case "at the end":
            time.sleep(60 * (index == int(sys.argv[2])))
        case "slow compiler":  # than gloo's patience, in all but process 0
            from jax._src import compiler

            if index:
                compiler.backend_compile_and_load = late(compiler.backend_compile_and_load)
            print("all:", summed(), flush=True)
        case "cache":
            hits: list[str] = []
            jax.monitoring.register_event_listener(
                lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
            )
            summed()
            print("hits:", len(hits), flush=True)
        case "slow":
            end = time.monotonic() + 20
            while time.monotonic() < end:
                np.linalg.svd(np.ones((700, 700)))  # without the interpreter's lock
                summed()
            multihost.barrier("enough")
    return 0


def summed():
    """A collective on the devices, from a program that is compiled for it."""
    from jax.experimental import multihost_utils

    return float(multihost_utils.process_allgather(np.ones(1, np.float32)).sum())


def late(function):
    """The function, a while later."""

    def call(*args, **kwargs):
        time.sleep(float(sys.argv[2]))
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    sys.exit(cli.exit_code(lambda: multihost.run_distributed(main)))
