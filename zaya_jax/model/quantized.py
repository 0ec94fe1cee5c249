"""Experts' weights in few bits: codes and scales, of which the numbers are products.

The forms are those of compressed-tensors (`float-quantized` and `mxfp4-pack-quantized`), with our
order of dims; the numbers of a group share a scale:

    fp8      a code is a float of 8 bits (E4M3); the group is all inputs of an output, its scale float32
    mxfp4    a code is a float of 4 bits (E2M1), two lie in a byte, the first in the lower half; the
             group is 32 inputs of an output, its scale a power of 2, kept as its exponent + 127

    codes, scale = quantized.encode(x, "mxfp4", axis)     NumPy; inputs lie along `axis`
    x = quantized.decode(codes, scale, axis)              float32; by NumPy, or traced with jax.numpy
"""

from typing import Any

import jax
import ml_dtypes
import numpy as np

from zaya_jax.config import UserError

FORMATS = ("fp8", "mxfp4")
# The weights of a layer that are kept so, and the dim of their inputs.
INPUT_AXES = {"experts/gate_up": -3, "experts/down": -2}
GROUP = 32  # of mxfp4
E4M3, E2M1 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)
E4M3_LARGEST, E2M1_LARGEST = np.float32(448), np.float32(6)
_E2M1_NUMBERS = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float32)
_POWERS = np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)  # 255 would be no number


def input_axes(form: str) -> dict[str, int]:
    """The weights of a layer that this form of a base quantizes, and the dim of their inputs."""
    return INPUT_AXES if form in FORMATS else {}


def scale_axes(name: str, axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """The logical axes of a weight's scale: its groups of inputs are on every device."""
    dim = INPUT_AXES[name] % len(axes)
    return (*axes[:dim], None, *axes[dim + 1 :])


def abstract(
    shape: tuple[int, ...], form: str, axis: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Codes and scale of an array of this shape; UserError if its inputs are no whole groups."""
    inputs = shape[axis]

    def with_inputs(length: int) -> tuple[int, ...]:
        return (*shape[:axis], length, *shape[axis + 1 :])

    if form == "fp8":
        scale = jax.ShapeDtypeStruct(with_inputs(1), np.float32)
        return jax.ShapeDtypeStruct(shape, E4M3), scale
    if inputs % GROUP:
        raise UserError(
            f"mxfp4 has a scale for every {GROUP} inputs of an expert, but here an expert has"
            f" {inputs}; model.hidden_size and moe_intermediate_size must be multiples of {GROUP}:"
            " take fp8"
        )
    scale = jax.ShapeDtypeStruct(with_inputs(inputs // GROUP), np.uint8)
    return jax.ShapeDtypeStruct(with_inputs(inputs // 2), np.uint8), scale


def encode(x: np.ndarray, form: str, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale of an array, as compressed-tensors makes them of float32 numbers."""
    x = np.moveaxis(x.astype(np.float32, copy=False), axis, -1)
    codes, scale = {"fp8": _encode_fp8, "mxfp4": _encode_mxfp4}[form](x)
    return np.moveaxis(codes, -1, axis), np.moveaxis(scale, -1, axis)


def _encode_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(x).max(-1, keepdims=True) / E4M3_LARGEST
    scale = np.where(scale == 0, np.finfo(np.float32).eps, scale)
    return np.clip(x / scale, -E4M3_LARGEST, E4M3_LARGEST).astype(E4M3), scale


def _encode_mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    greatest = np.abs(groups).max(-1)
    mantissa, exponent = np.frexp(greatest)  # the mantissa lies in [0.5, 1)
    # The greatest number becomes one from 3.5 to 7; those above 6 are cut.
    scale = np.clip(exponent + 124 + (mantissa >= 0.875), 0, 254)
    scale = np.where(greatest > 0, scale, 0).astype(np.uint8)
    units = groups / _POWERS[scale][..., None]
    units = np.clip(units, -E2M1_LARGEST, E2M1_LARGEST)
    halves = units.astype(E2M1).view(np.uint8).reshape(x.shape)
    return halves[..., ::2] | halves[..., 1::2] << 4, scale


def decode(codes: Any, scale: Any, axis: int, numpy: Any = np) -> Any:
    """The numbers, float32, by NumPy or with jax.numpy in its place."""
    if codes.dtype == E4M3:
        return codes.astype(np.float32) * scale
    axis += codes.ndim
    # Behind the dim of groups one of the group's inputs.
    halves = numpy.stack([codes & 15, codes >> 4], axis + 1)
    halves = halves.reshape(*scale.shape[: axis + 1], GROUP, *scale.shape[axis + 1 :])
    numbers = numpy.asarray(_E2M1_NUMBERS)[halves]
    numbers = numbers * numpy.expand_dims(numpy.asarray(_POWERS)[scale], axis + 1)
    return numbers.reshape(*scale.shape[:axis], -1, *scale.shape[axis + 1 :])
