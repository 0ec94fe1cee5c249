"""Traffic of linear attention between devices, compared with softmax attention's: read from
compiled programs.

    python benchmarks/bench_lasp.py [--lengths 8192 65536 524288]

One layer's attention alone (queries, keys and values given) on 8 devices of one CPU, forward and
backward, for shapes: nothing is allocated or run. Linear attention by LASP-2 and by LASP-1's ring;
softmax attention with gathered keys and values and in a ring. Of each, per device: the collectives
(no two overlap: each waits for the one before), their bytes, the memory for temporaries, the
multiplications. Float32, because a CPU's collectives have no bfloat16.
"""

import argparse
import collections
import functools
import os
from collections.abc import Callable

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import rivals
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.attention import softmax_scale
from pallas_kernels.linear_attention import CHUNK
from zaya_jax.compiled import hlo
from zaya_jax.parallel import context, linear
from zaya_jax.parallel.spread import Spread

DEVICES = 8
MIB = 2**20
HEADS, KV, CHANNELS = 8, 2, 128  # ZAYA1-base's
SPEC = PartitionSpec(None, "context")


def softmax(ring: bool) -> Callable:
    """Softmax attention over the context axis."""

    def run(q, k, v):
        spread = Spread(context=lax.axis_size("context"), ring=ring)
        at = context.chunks_of(spread, q.shape[1], None)
        rows = (at.split(x) for x in (q, k, v))
        return at.join(
            context.attention_over_chunks(*rows, None, at, scale=softmax_scale(CHANNELS))
        )

    return run


SCHEMES = {
    "LASP-2": functools.partial(linear.lasp2, axis="context"),
    "LASP-1 ring": functools.partial(rivals.lasp1, axis="context"),
    "softmax, gathered K and V": softmax(ring=False),
    "softmax, ring": softmax(ring=True),
}


def program_of(run: Callable, length: int) -> tuple[Callable, tuple]:
    """Forward and backward of one call on all devices, and its arguments as shapes."""
    mesh = jax.make_mesh((jax.device_count(),), ("context",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False)

    def both(q, k, v, d_out):
        out, backward = jax.vjp(mapped, q, k, v)
        return out, backward(d_out)

    def shape(heads):
        return jax.ShapeDtypeStruct(
            (1, length, heads, CHANNELS), jnp.float32, sharding=NamedSharding(mesh, SPEC)
        )

    q, k = shape(HEADS), shape(KV)
    return both, (q, k, k, q)


def row(name: str, length: int) -> str:
    """A line of the table."""
    both, args = program_of(SCHEMES[name], length)
    compiled = jax.jit(both).lower(*args).compile()
    kinds: collections.Counter[str] = collections.Counter()
    sent = 0.0
    for c in hlo.collectives(compiled):
        kinds[c.kind] += c.times or 1
        sent += c.wire_bytes * (c.times or 1)
    names = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    memory = compiled.memory_analysis().temp_size_in_bytes
    work = multiplications(length, "softmax" in name)
    return (
        f"| {length:,} | {name} | {names} | {sent / MIB:,.1f} | {memory / MIB:,.0f} |"
        f" {work / 1e9:,.1f} |"
    )


def multiplications(length: int, of_softmax: bool) -> float:
    """The multiplications of a device forward: half of the scores twice, or half a chunk's scores
    twice and a state's use."""
    tokens = length / DEVICES
    if of_softmax:
        return tokens * HEADS * length * CHANNELS
    per_token = HEADS * CHUNK * CHANNELS + (HEADS + 2 * KV) * CHANNELS * (CHANNELS + 1)
    return tokens * per_token


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 65536, 524288])
    options = parser.parse_args()
    print(
        f"jax {jax.__version__}, {DEVICES} devices, H {HEADS}, K {KV}, C {CHANNELS}, batch 1,"
        " float32\n"
    )
    print("| tokens | scheme | collectives | MiB sent | MiB needed | GMul forward |")
    print("|---|---|---|---|---|---|")
    for length in options.lengths:
        for name in SCHEMES:
            print(row(name, length), flush=True)


if __name__ == "__main__":
    main()
