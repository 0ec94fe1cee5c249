"""Shared by tests of whole runs: a comparison of their ends, and a kill."""

import json

import jax
import numpy as np

from zaya_jax.aegis import decisions
from zaya_jax.checkpoint import partial


class Killed(Exception):
    """In place of a process that is no more."""


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def same_end(a, b):
    for x, y in zip(jax.tree.leaves(partial.read(a, "*")), jax.tree.leaves(partial.read(b, "*")), strict=True):
        np.testing.assert_array_equal(x, y)
    figures = [[(line["step"], line["loss"], line.get("data/left_out")) for line in lines(w)] for w in (a, b)]
    assert figures[0] == figures[1]
    assert decisions.read(a) == decisions.read(b)
