"""Chips, and arrays made on the host (a program for each shape would take longer to compile)."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chip

CPU, XLA = chip.Chip("cpu", "cpu"), chip.Chip("gpu", "gfx942", ())
MI300X, H200 = chip.Chip("cpu", "gfx942"), chip.Chip("cpu", "NVIDIA H200")  # interpreted
CHIPS = {"cpu": CPU, "xla": XLA, "kernels": MI300X}
# Parametrizes a test that takes each kind of chip's implementation.
EACH = pytest.mark.parametrize("implementation", ["cpu", "xla", "triton"], indirect=True)


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def documents(rng, batch, length, share=0.1):
    """Segment ids: documents 1, 2, .. of uneven lengths, this share of tokens beginning one;
    padding (0) at the end."""
    ids = np.cumsum(rng.random((batch, length)) < share, axis=1) + 1
    ids[:, length - length // 8 :] = 0
    return jnp.asarray(ids, jnp.int32)
