"""Bytes that spread experts send and keep, by the compiler: bounded slots, the ragged exchange, and
gathered tokens.

    .venv/bin/python benchmarks/dispatch.py [--tokens=8192] [--devices=2,4,8,16] [--target=h200]

Compiles values and gradients of one of ZAYA1's expert layers; nothing is allocated or run. Bytes
are those of the collectives in the program, times the rounds that a load takes; temporaries are the
compiler's own analysis. On virtual CPU devices it is the float32 program: XLA's CPU backend has no
bfloat16 collectives, and no ragged one. With --target it is the bfloat16 program for such GPUs,
eight a host, which need not be there: make setup-targets. Experts are multiplied block by block
there too, as on a CPU, so that temporaries are the exchange's and not those of a dense
`ragged_dot`.
"""

import argparse
import functools
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import formulas
from zaya_jax.compiled import hlo
from zaya_jax.config import Model
from zaya_jax.hardware import targets
from zaya_jax.model.experts import gated, of_own_expert
from zaya_jax.parallel import dispatch
from zaya_jax.parallel.spread import Spread

MODEL = Model()
D, F, E = MODEL.hidden_size, MODEL.moe_intermediate_size, MODEL.num_experts
MIB = 1 << 20
PARTS = PartitionSpec("expert")


def gathered(x, choice, gate, gate_up, down, *, dtype, spread) -> jax.Array:
    """Every device gets all tokens and computes those of its experts; the results are summed and
    scattered."""
    own = gate_up.shape[0]
    rows, of_all = (lax.all_gather(a, "expert", tiled=True) for a in (x.astype(dtype), choice))
    here = of_all - lax.axis_index("expert") * own
    classes = jnp.where((here >= 0) & (here < own), here, own)
    y = of_own_expert(rows, classes, gate_up, down)
    y = lax.psum_scatter(y, "expert", tiled=True)
    return gated(y, choice, gate, own * spread.expert)


def compiled(form: str, num: int, size: int, devices: list, dtype) -> jax.stages.Compiled:
    """Values and gradients of one layer, `num` tokens on each of `size` devices."""
    mesh = jax.make_mesh((size,), ("expert",), axis_types=(AxisType.Auto,), devices=devices[:size])

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PARTS))

    spread = Spread(expert=size)
    function = gathered if form == "gathered" else functools.partial(dispatch.expert_mlp, form=form)
    mlp = functools.partial(function, dtype=dtype, spread=spread)

    def run(x, choice, gate, gate_up, down, d_out):
        y, pull = jax.vjp(lambda *a: mlp(a[0], choice, *a[1:]), x, gate, gate_up, down)
        return y, pull(d_out)

    tokens = num * size
    args = (
        shape(tokens, D, dtype=dtype),
        shape(tokens, dtype=jnp.int32),
        shape(tokens),
        shape(E, D, 2 * F),
        shape(E, F, D),
        shape(tokens, D),
    )
    out = (PARTS, (PARTS,) * 4)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(PARTS,) * 6, out_specs=out, check_vma=False)
    return jax.jit(mapped).lower(*args).compile()


def moved(program: jax.stages.Compiled, rounds: int) -> float:
    """Bytes that each device sends, and gets, where the program's loop over further rounds runs
    rounds - 1 times."""
    return sum(
        c.wire_bytes * (rounds - 1 if c.times is None else c.times)
        for c in hlo.collectives(program)
    )


def moved_ragged(num: int, size: int, worst: bool, itemsize: int) -> float:
    """The same of the ragged form, whose program does not tell: rows that exist, four times where
    the load is even.

    At the worst load, bytes that reach the device that computes all: tokens of the others forward,
    their cotangents backward, and once more the tokens that did not come in the first round, which
    has room for those of two devices.
    """
    rows = 2 * (size - 1) + max(size - 3, 0) if worst else 4 * (size - 1) / size
    return rows * num * D * itemsize


def table(num: int, sizes: list[int], devices: list, forms: tuple[str, ...], dtype) -> None:
    """One line for each number of devices and form."""
    print(
        "| devices | form | moved, even load (MiB) | rounds, worst load | moved, worst load (MiB) "
        "| temporaries (MiB) | bound (MiB) |"
    )
    print("|---|---|---|---|---|---|---|")
    itemsize = jnp.dtype(dtype).itemsize
    for size in sizes:
        for form in forms:
            program = compiled(form, num, size, devices, dtype)
            rounds = 1 if form == "gathered" else dispatch.most_rounds(num, size, form)
            even, worst = moved(program, 1), moved(program, rounds)
            if form == "ragged":
                even, worst = (moved_ragged(num, size, load, itemsize) for load in (False, True))
            bound = formulas.most_temporaries(num, size, D, F, E // size, itemsize, True) / MIB
            used = program.memory_analysis().temp_size_in_bytes / MIB
            last = "" if form == "gathered" else f"{bound:,.0f}"
            print(
                f"| {size} | {form} | {even / MIB:,.0f} | {rounds} | {worst / MIB:,.0f} |"
                f" {used:,.0f} | {last} |",
                flush=True,
            )


def devices_of(target: str | None) -> list:
    """Virtual CPU devices, or those of GPUs that need not be there."""
    return jax.devices() if target is None else targets.devices(target, 16)


def numbers(text: str) -> list[int]:
    """The integers of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--devices", type=numbers, default=[2, 4, 8, 16])
    parser.add_argument("--target", choices=[*targets.TARGETS, "cpu"])
    options = parser.parse_args()
    forms = ("slots", "ragged", "gathered") if options.target else ("slots", "gathered")
    dtype = jnp.bfloat16 if options.target else jnp.float32
    table(options.tokens, options.devices, devices_of(options.target), forms, dtype)


if __name__ == "__main__":
    main()
