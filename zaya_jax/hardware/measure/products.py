"""Measures matrix products on a device: a grid, a model's own shapes, odd widths, and the experts' grouped product.

Products are the project's: `pallas_kernels.products.dot`, and of the operator `grouped_mlp` the implementation that the
chip uses. On accelerators operands are bfloat16, on a CPU float32.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chip, grouped_mlp, products
from zaya_jax.config import Model
from zaya_jax.hardware.measure import streams, timing
from zaya_jax.hardware.measure.figures import Product
from zaya_jax.hardware.measure.timing import Timing

WIDTHS = (512, 2048, 8192)  # n and k of the grid
ODD = (-64, -32, -8, -1, 0, 1, 8, 32, 64)  # beside a width of 2048: which multiples are fast
MODEST = 1e9  # FLOP/s that a chip reaches in any case, until something has been measured


class Sizes(NamedTuple):
    """Rows that fit the kind of device."""

    grid: tuple[int, ...]
    model: tuple[int, ...]  # tokens at once
    odd: int
    experts: tuple[int, ...]  # tokens an expert


ACCELERATOR = Sizes((256, 1024, 4096, 16384), (4096, 16384), 16384, tuple(1 << i for i in range(4, 13)))
HOST = Sizes((64, 256, 1024), (256, 1024), 512, tuple(1 << i for i in range(4, 10)))


class Shape(NamedTuple):
    """A product that is measured."""

    name: str
    label: str
    m: int
    n: int
    k: int
    groups: int = 1


def of_model(model: Model) -> dict[str, tuple[int, int]]:
    """The products of a token with weights, by name: (inputs k, outputs n)."""
    d, c = model.hidden_size, model.head_dim
    h, kv = model.num_attention_heads * c, model.num_key_value_heads * c
    found = {"q, k": (d, h + kv), "v": (d, kv), "o": (h, d), "head": (d, model.vocab_size)}
    if model.model_type == "dense":
        f = model.intermediate_size
        return found | {"gate, up": (d, 2 * f), "down": (f, d)}
    return found | {"router": (d, model.router_hidden_size)}


def shapes(model: Model, sizes: Sizes) -> list[Shape]:
    """All measured products, small ones first, so that the rate is known before the large ones."""
    grid = [Shape("dense", "", m, n, k) for m in sizes.grid for n, k in itertools.product(WIDTHS, WIDTHS)]
    odd = [Shape("dense", f"width {2048 + o}", sizes.odd, 2048 + o, 2048) for o in ODD]
    own = [Shape("dense", name, m, n, k) for m in sizes.model for name, (k, n) in of_model(model).items()]
    found = grid + odd + own
    if model.model_type != "dense":
        d, f, e = model.hidden_size, model.moe_intermediate_size, model.num_experts
        names = ("grouped forward", "grouped backward")
        found += [Shape(name, "experts", m, f, d, e) for m in sizes.experts for name in names]
    return sorted(found, key=lambda s: (_flops(s), s))


def measure_products(
    device: Any, model: Model, seconds: float, say: Callable[[str], None]
) -> tuple[tuple[Product, ...], int]:
    """The products on one device, and how many were left out: too large, or three times `seconds` a call."""
    host = device.platform == "cpu"
    dtype = jnp.float32 if host else jnp.bfloat16
    free, best, found, left_out = streams.room(device) // 4, MODEST, [], 0
    for shape in shapes(model, HOST if host else ACCELERATOR):
        if _bytes(shape, jnp.dtype(dtype).itemsize) > free or _flops(shape) > 3 * seconds * best:
            left_out += 1
            continue
        with jax.default_device(device), chip.making(chip.chip_of(device)):
            taken = _time(shape, dtype, seconds, not host)
        found.append(Product(*shape, jnp.dtype(dtype).name, taken))
        best = max(best, found[-1].rate)
        if shape.label:
            of = f"{shape.groups} x " if shape.groups > 1 else ""
            what = f"{shape.label} {of}[{shape.m}, {shape.k}] x [{shape.k}, {shape.n}]"
            say(f"{shape.name}, {what}: {found[-1].rate / 1e12:,.3f} TFLOP/s")
    return tuple(found), left_out


def _flops(shape: Shape) -> float:
    return Product(*shape, "", Timing(1, 1, 1, 1)).flops


def _bytes(shape: Shape, size: int) -> float:
    """Of operands and results; a weight's gradient is float32."""
    rows, weights = shape.m * shape.groups, shape.n * shape.k * shape.groups
    if shape.groups == 1:
        return size * (rows * (shape.k + shape.n) + weights)
    backward = 3 * weights * (4 + size) if shape.name == "grouped backward" else 0
    return size * (rows * (2 * shape.k + 3 * shape.n) + 3 * weights) + backward


def _time(shape: Shape, dtype: Any, seconds: float, queue: bool) -> Timing:
    """Compiles, checks and times one."""
    if shape.groups == 1:
        x, w = _small((shape.m, shape.k), dtype), _small((shape.k, shape.n), dtype)
        compiled = jax.jit(lambda x, w: products.dot(x, w, dtype)).lower(x, w).compile()
        got, left, right = (np.asarray(a, np.float64) for a in (compiled(x, w)[-2:, -8:], x[-2:], w[:, -8:]))
        _near(got, left @ right, "a product")
        return timing.time_call(lambda: compiled(x, w), seconds, queue)
    operator = chip.choose(grouped_mlp.IMPLEMENTATIONS)
    rows = _small((shape.m * shape.groups, shape.k), dtype)
    sizes = jnp.full(shape.groups, shape.m, jnp.int32)
    gate_up = _small((shape.groups, shape.k, 2 * shape.n), dtype)
    down = _small((shape.groups, shape.n, shape.k), dtype)
    forward = jax.jit(operator.forward).lower(rows, sizes, gate_up, down).compile()
    out, hidden = forward(rows, sizes, gate_up, down)
    # The last row must have met the last expert's matrices.
    row, w_in, w_out = (np.asarray(x[-1], np.float64) for x in (rows, gate_up, down))
    _near(np.asarray(out[-1], np.float64), _activate(row @ w_in) @ w_out, "the grouped product")
    if shape.name == "grouped forward":
        return timing.time_call(lambda: forward(rows, sizes, gate_up, down), seconds, queue)
    arguments = rows, sizes, gate_up, down, hidden, out
    backward = jax.jit(operator.backward).lower(*arguments).compile()
    # A few rows of the last expert's gradient of `down`.
    d_down = np.asarray(backward(*arguments)[2][-1, :4], np.float64)
    last_hidden, d_out = (np.asarray(x[-shape.m :], np.float64) for x in (hidden, out))
    _near(d_down, _activate(last_hidden)[:, :4].T @ d_out, "the grouped product's gradient")
    return timing.time_call(lambda: backward(*arguments), seconds, queue)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _small(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Quarters between -1/2 and 1/2, exact in every format, without a pattern that a product could be rid of."""
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32) * jnp.uint32(2654435761)
    return ((index >> 15) % 5).astype(dtype).reshape(shape) / 4 - jnp.asarray(0.5, dtype)


def _activate(hidden: np.ndarray) -> np.ndarray:
    gate, up = np.split(hidden, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def _near(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Within 2% of the norm: bfloat16 rounds what lies between two products."""
    error = np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-9)
    if not error < 0.02:
        raise RuntimeError(f"{what} is wrong by {error:.1%} of its norm")
