"""Meshes of the virtual devices."""

import math

import jax
from jax.sharding import AxisType


def mesh_of(**sizes):
    """The first devices, along axes of these sizes."""
    devices = jax.devices()[: math.prod(sizes.values())]
    axis_types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=devices
    )
