"""Shared by tests of whole runs: their config, a comparison of their ends, and a kill."""

import tiny_runs
from tiny_runs import lines

from zaya_jax.guard import decisions

SMALL = tiny_runs.SMALL | {
    "mesh.data": 1,
    "eval.windows": 0,
    "log.sample_tokens": 0,
    "log.every": 50,
    "checkpoint.every_steps": 10,
    "checkpoint.keep": 3,
    "guard.spike_steps": 5,
    "schedule.warmup_fraction": 0.1,
}


class Killed(Exception):
    """In place of a process that is no more."""


def same_end(a, b):
    tiny_runs.same_state(a, b)
    figures = [
        [(line["step"], line["loss"], line.get("data/left_out")) for line in lines(w)]
        for w in (a, b)
    ]
    assert figures[0] == figures[1]
    assert decisions.read(a) == decisions.read(b)
