"""Measures one device: matrix products over their rows, and how fast it copies its memory, over the
size of an array.

Products have a model's own shapes, the experts' grouped one among them. They are the project's:
`pallas_kernels.products.dot`, and of the operator `grouped_mlp` the implementation that the chip
uses, whose values `benchmarks.kernels` checks. On accelerators operands are bfloat16, on a CPU
float32.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import chip, grouped_mlp, products, timing
from pallas_kernels.timing import Timing
from zaya_jax.config import Model
from zaya_jax.hardware.measured import MemoryCopy, Product, ProductShape

# tokens at once, on a host and on an accelerator
ROWS = {True: (64, 256, 1024), False: (256, 1024, 4096, 16384)}
# of each
ROWS_OF_EXPERTS = {
    True: tuple(1 << i for i in range(4, 10)),
    False: tuple(1 << i for i in range(4, 13)),
}
MODEST = 1e9  # FLOP/s that a chip reaches in any case, until something has been measured


def weights(model: Model) -> dict[str, tuple[int, int]]:
    """The products of a token with weights, by name: (inputs k, outputs n)."""
    d, c = model.hidden_size, model.head_dim
    h, kv = model.num_attention_heads * c, model.num_key_value_heads * c
    products = {"q, k": (d, h + kv), "v": (d, kv), "o": (h, d), "head": (d, model.vocab_size)}
    if model.model_type == "dense":
        f = model.intermediate_size
        return products | {"gate, up": (d, 2 * f), "down": (f, d)}
    return products | {"router": (d, model.router_hidden_size)}


def shapes(model: Model, host: bool) -> list[ProductShape]:
    """All measured products, small ones first, so that the rate is known before the large ones."""
    products = [
        ProductShape("dense", name, m, n, k, 1)
        for m in ROWS[host]
        for name, (k, n) in weights(model).items()
    ]
    if model.model_type != "dense":
        d, f, e = model.hidden_size, model.moe_intermediate_size, model.num_experts
        names = ("grouped forward", "grouped backward")
        products += [
            ProductShape(name, "experts", m, f, d, e)
            for m in ROWS_OF_EXPERTS[host]
            for name in names
        ]
    return sorted(products, key=lambda shape: (shape.flops, shape))


def measure_products(
    device: Any, model: Model, seconds: float, say: Callable[[str], None]
) -> tuple[tuple[Product, ...], int]:
    """The products on one device, and how many were left out, since a call would take three times
    `seconds`."""
    host = device.platform == "cpu"
    dtype = jnp.float32 if host else jnp.bfloat16
    best, timed, left_out = MODEST, [], 0
    for shape in shapes(model, host):
        if shape.flops > 3 * seconds * best:
            left_out += 1
            continue
        with jax.default_device(device), chip.making(chip.chip_of(device)):
            taken = _time(shape, dtype, seconds, not host)
        timed.append(
            Product(**dataclasses.asdict(shape), dtype=jnp.dtype(dtype).name, seconds=taken)
        )
        best = max(best, timed[-1].rate)
        of = f"{shape.groups} x " if shape.groups > 1 else ""
        what = f"{shape.label} {of}[{shape.m}, {shape.k}] x [{shape.k}, {shape.n}]"
        say(f"{shape.name}, {what}: {timed[-1].rate / 1e12:,.3f} TFLOP/s")
    return tuple(timed), left_out


def _time(shape: ProductShape, dtype: Any, seconds: float, queue: bool) -> Timing:
    """Compiles and times one, on random numbers: the power that a chip draws depends on them."""

    def numbers(*shape: int) -> jax.Array:
        return jax.random.uniform(jax.random.key(0), shape, dtype, -1, 1)

    operands: tuple = (numbers(shape.m, shape.k), numbers(shape.k, shape.n))
    call: Any = lambda x, w: products.dot(x, w, dtype)  # noqa: E731
    if shape.groups > 1:
        operator = chip.choose("grouped_mlp", grouped_mlp.IMPLEMENTATIONS)
        rows, sizes = (
            numbers(shape.m * shape.groups, shape.k),
            jnp.full(shape.groups, shape.m, jnp.int32),
        )
        gate_up = numbers(shape.groups, shape.k, 2 * shape.n)
        operands, call = (
            (rows, sizes, gate_up, numbers(shape.groups, shape.n, shape.k)),
            operator.forward,
        )
        if shape.name == "grouped backward":
            out, hidden = jax.jit(operator.forward)(*operands)
            operands, call = (*operands, hidden, out), operator.backward
    compiled = jax.jit(call).lower(*operands).compile()
    return timing.time_call(lambda: compiled(*operands), seconds, queue)


def room(device: Any, sharing: int = 1) -> int:
    """Bytes of a device's memory that are free, or of the machine's for a CPU, which so many
    devices share."""
    if device.platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharing
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 1 << 30) - stats.get("bytes_in_use", 0)


def measure_copies(
    device: Any, seconds: float, say: Callable[[str], None]
) -> tuple[MemoryCopy, ...]:
    """Copies of 1 MiB to 4 GiB on one device, up to the first whose call takes longer than
    `seconds`.

    Two arrays take a quarter of the free memory at most.
    """
    copies: list[MemoryCopy] = []
    free = room(device)
    for size in (1 << bits for bits in range(20, 33) if 8 << bits <= free):
        with jax.default_device(device):
            x = jax.jit(lambda: (jnp.arange(size // 4) % 7).astype(jnp.float32))()  # noqa: B023
        compiled = jax.jit(lambda x: -x).lower(x).compile()  # a pass that no compiler leaves out
        taken = timing.time_call(lambda: compiled(x), seconds, device.platform != "cpu")  # noqa: B023
        copies.append(MemoryCopy(size, taken))
        if taken.median > seconds:
            break
    said = (f"{s.bandwidth / 1e9:,.1f} GB/s at {s.bytes / 2**20:,.0f} MiB" for s in copies[::3])
    say(f"memory copied: {', '.join(said)}")
    return tuple(copies)
