"""The compiler's cost of a sequence cut over devices: gathered keys and values or a ring, and the
balance.

    .venv/bin/python benchmarks/context.py [--lengths=32768,131072] [--parts=2,8] [--drawing=docs/context_balance.svg]
        [--target=h200]

Compiles the gradient of one of ZAYA1's attention blocks (one sequence, remat "attention"); nothing
is allocated or run. Bytes are those of the collectives in the program, next to the formula of
`context.traffic`; temporaries are the compiler's own analysis. On virtual CPU devices it is the
float32 program: XLA's CPU backend has no bfloat16 collectives. With --target it is the bfloat16
program for eight such GPUs, which need not be there: make setup-targets.
"""

import argparse
import itertools
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from benchmarks import formulas
from pallas_kernels.attention import SAVED
from pallas_kernels.rotary import rope_table
from zaya_jax.compiled import hlo
from zaya_jax.config import Model, Precision
from zaya_jax.hardware import targets
from zaya_jax.model.cca import CCA
from zaya_jax.model.placement import Weights
from zaya_jax.parallel import context
from zaya_jax.parallel.spread import Spread

MODEL = Model()
REACH = MODEL.cca_time0 + MODEL.cca_time1 - 2
MIB = 1 << 20
SIDE = 16  # of a chunk's square in the drawing


def compiled_block(
    length: int, parts: int, ring: bool, compute: str, devices: list
) -> jax.stages.Compiled:
    """The gradient of a sum over one attention block's output, for x and the weights."""
    spread = Spread(context=parts, ring=ring)
    mesh = jax.make_mesh(
        (parts,), ("context",), axis_types=(AxisType.Auto,), devices=devices[:parts]
    )
    graph, state = nnx.split(
        nnx.eval_shape(lambda: CCA(nnx.Rngs(0), MODEL, Precision(compute=compute))), nnx.Param
    )

    def body(state, x, segments):
        here = context.cut(spread, x.shape[1], segments, None, Weights())
        rope = [(None, rope_table(here.positions(2, x.shape[1] // 2), 1e6, MODEL.head_dim // 2))]

        def block(state, x):
            return here.joined(nnx.merge(graph, state)(here.rows(x), rope, here)[0])

        block = jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(SAVED))
        return jax.grad(lambda *args: jnp.sum(block(*args).astype(jnp.float32)), argnums=(0, 1))(
            state, x
        )

    cut = PartitionSpec(None, "context")
    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), cut, cut),
        out_specs=(PartitionSpec(), cut),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((1, length, MODEL.hidden_size), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return jax.jit(run).lower(state, x, segments).compile()


def traffic_table(lengths: list[int], all_parts: list[int], compute: str, devices: list) -> None:
    """Prints a row for each length, number of devices and method."""
    print(
        "| tokens | devices | keys and values | sent, compiled (MiB) | formula (MiB) | temporaries"
        " (MiB) |"
    )
    print("|---|---|---|---|---|---|")
    size = jnp.dtype(compute).itemsize
    for length, parts, ring in itertools.product(lengths, all_parts, (False, True)):
        compiled = compiled_block(length, parts, ring, compute, devices)
        found = [
            c for c in hlo.collectives(compiled) if not any(a.dtype == "s32" for a in c.operands)
        ]
        sent = sum(c.wire_bytes * (c.times or 1) for c in found)
        kv = (MODEL.num_key_value_heads, MODEL.head_dim)
        formula = sum(
            formulas.of_context(
                1, length, parts, *kv, MODEL.hidden_size, REACH, size, ring
            ).values()
        )
        peak = compiled.memory_analysis().temp_size_in_bytes
        print(
            f"| {length:,} | {parts} | {'ring' if ring else 'gathered'} | {sent / MIB:,.2f} | "
            f"{formula / MIB:,.2f} | {peak / MIB:,.0f} |",
            flush=True,
        )


def balance_table(lengths: list[int], all_parts: list[int]) -> None:
    """Prints the busiest and the least busy device's work over the mean, counted in blocks of 512 x
    512 scores."""
    print("| tokens | devices | window | plain cut: most, least | zig-zag: most, least |")
    print("|---|---|---|---|---|")
    for length, parts, window in itertools.product(lengths, all_parts, (None, 4096)):
        cells = []
        for zigzagged in (False, True):
            blocks = np.array(formulas.blocks_visited(length, parts, 512, window, zigzagged))
            cells.append(f"{blocks.max() / blocks.mean():.2f}, {blocks.min() / blocks.mean():.2f}")
        print(f"| {length:,} | {parts} | {window or 'none'} | {' | '.join(cells)} |")
    print()


def drawing(parts: int = 8, length: int = 131_072) -> str:
    """Who computes which scores under both cuts, and how much that is, as SVG."""
    shapes: list[str] = []
    left, panel = 80, 2 * parts * SIDE + 60
    bars = left + 2 * parts * SIDE + 90

    def text(x, y, words, anchor="start"):
        shapes.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>')

    def box(x, y, width, height, device):
        color = f"hsl({device * 360 // parts} 60% 55%)"
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}"/>'
        )

    for zigzagged in (False, True):
        top = 40 + panel * zigzagged
        order = context.zigzag(2 * parts, parts) if zigzagged else np.arange(2 * parts)
        owners = np.argsort(order) // 2
        text(
            left, top - 12, f"{'zig-zag' if zigzagged else 'plain'} cut: who computes which scores"
        )
        text(bars, top - 12, "work over the mean")
        for i, owner in enumerate(owners):
            text(left - 8, top + i * SIDE + 12, f"device {owner}", "end")
            for j in range(i + 1):
                box(left + j * SIDE, top + i * SIDE, SIDE - 1, SIDE - 1, int(owner))
        blocks = np.array(formulas.blocks_visited(length, parts, 512, zigzagged=zigzagged))
        for device, share in enumerate(blocks / blocks.mean()):
            at = top + 2 * device * SIDE
            text(bars - 8, at + 20, f"device {device}", "end")
            box(bars, at + 4, share * 90, 2 * SIDE - 8, device)
            text(bars + share * 90 + 6, at + 20, f"{share:.2f}")
    width, height = bars + 240, 2 * panel + 20
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
                ' font-family="sans-serif" font-size="12">'
            ),
            (
                f"<title>Causal work of {parts} devices under a plain and a zig-zag cut of the"
                " sequence</title>"
            ),
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def devices_of(target: str | None) -> list:
    """Virtual CPU devices, or those of GPUs that need not be there."""
    return jax.devices() if target is None else targets.devices(target, 8)


def numbers(text: str) -> list[int]:
    """The integers of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Prints the tables, and draws the balance where a file is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=numbers, default=[32_768, 131_072])
    parser.add_argument("--parts", type=numbers, default=[2, 8])
    parser.add_argument("--drawing")
    parser.add_argument("--target", choices=[*targets.TARGETS, "cpu"])
    options = parser.parse_args()
    if options.drawing:
        Path(options.drawing).write_text(drawing())
    balance_table(options.lengths, options.parts)
    compute = "bfloat16" if options.target else "float32"
    traffic_table(options.lengths, options.parts, compute, devices_of(options.target))


if __name__ == "__main__":
    main()
