"""Measured figures, shared by tests."""

import dataclasses

from zaya_jax.hardware.measured import Measured


def figures_of(**changes):
    of_cpu = Measured("cpu", "cpu", 8, 1, 1, "0.12.0", "2026-11-22T18:00:00+00:00")
    return dataclasses.replace(of_cpu, **changes)
