"""Traffic of decoding over a cache in parts: tree attention and two rings, read from compiled
programs.

    python benchmarks/bench_tree.py [--lengths 8192 1048576] [--batch 1]

One layer and one new token per row, on 2 to 8 devices of one CPU, for shapes: nothing is allocated
or run. What counts of messages that follow each other: a ring's are N - 1 hops; an all-reduce is
counted once, though it takes about 2 log2 N hops. A cache is compiled as float32, because a CPU's
collectives widen bfloat16; printed bytes are bfloat16's.
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools

import jax
import jax.numpy as jnp
import rivals
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.attention import softmax_scale
from zaya_jax.compiled import hlo

HEADS, KV, CHANNELS = 8, 2, 128  # ZAYA1-base's
LAYERS = 40
SCHEMES = {
    "tree attention": rivals.tree_attention,
    "ring of outputs": rivals.ring_of_parts,
    "ring of keys and values": rivals.ring_of_keys,
}


def sent(function: Callable, devices: int, batch: int, length: int) -> tuple[float, str]:
    """KiB that a device sends for one layer and token, and the messages."""
    mesh = jax.make_mesh(
        (devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    everywhere, parts = PartitionSpec(), PartitionSpec(None, "context")

    def shape(spec, *dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((batch, *dims), dtype, sharding=NamedSharding(mesh, spec))

    mapped = jax.shard_map(
        functools.partial(function, scale=softmax_scale(CHANNELS), axis="context"),
        mesh=mesh,
        in_specs=(everywhere, parts, parts, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )
    kv = shape(parts, length, KV, CHANNELS)
    args = shape(everywhere, 1, HEADS, CHANNELS), kv, kv, shape(everywhere, length, dtype=bool)
    found = hlo.collectives(jax.jit(mapped).lower(*args).compile())
    in_bfloat16 = 2 if function is rivals.ring_of_keys else 1
    kinds = sorted({c.kind for c in found})
    arrays = sum(len(c.operands) for c in found)
    what = f"{len(found)} {', '.join(kinds)}" + (
        f" of {arrays} arrays" if arrays > len(found) else ""
    )
    return sum(c.wire_bytes for c in found) / in_bfloat16 / 1024, what


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 1_048_576])
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    print(f"jax {jax.__version__}, H {HEADS}, K {KV}, C {CHANNELS}, batch {options.batch}\n")
    print(
        "| devices | tokens in the cache | scheme | messages, one by one | KiB per layer | MiB per"
        " token |"
    )
    print("|---|---|---|---|---|---|")
    for devices in (2, 4, 8):
        for length in options.lengths:
            for name, function in SCHEMES.items():
                kib, what = sent(function, devices, options.batch, length)
                mib = kib * LAYERS / 1024
                print(f"| {devices} | {length:,} | {name} | {what} | {kib:,.1f} | {mib:,.2f} |")


if __name__ == "__main__":
    main()
