"""The experts' `down` product in Triton's own language, called by jax-triton, beside ours of Pallas.

    python -m benchmarks.jax_triton_down [--tokens=16384] [--width=2048] [--experts=16] [--layers=4]

JAX says that Pallas's Triton backend will be removed and names jax-triton (docs/decisions.md, "Where
Pallas goes"). Both kernels take rows of groups and a layer of a stack of bfloat16 weights, sorted or
with an `order`; both are compared with the definition, then timed with the same tiles. It needs a GPU
and `pip install jax-triton`, which is no dependency of ours; without, it says so.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import candidates, chip, timing
from pallas_kernels.grouped_mlp import reference, triton
from pallas_kernels.tiles import ProductTile, power
from zaya_jax.report.document import Table

try:
    import jax_triton
    import triton as compiler
    import triton.language as tl
    from jax._src.interpreters import partial_eval
    from jax_triton.triton_lib import triton_kernel_call_p

    # jax-triton 0.4.1 has JAX 0.11's form of this rule, with which JAX 0.12 lowers no kernel of it
    if jax.__version_info__ >= (0, 12):
        partial_eval.dce_rules.pop(triton_kernel_call_p, None)
except ImportError:
    jax_triton = None

MOST = 4e-3  # of the error: bfloat16's rounding of the result alone is 1.7e-3


def body(
    sizes_at,
    x_at,
    w_at,
    layer_at,
    order_at,
    out_at,
    num: "tl.constexpr",
    depth: "tl.constexpr",
    dim: "tl.constexpr",
    experts: "tl.constexpr",
    lanes: "tl.constexpr",
    side: "tl.constexpr",
    across: "tl.constexpr",
    step: "tl.constexpr",
) -> None:
    """A tile of `side` rows of one expert and `across` columns, as `grouped_mlp.triton._by_rows` has
    it; depth and dim are whole tiles."""
    lane = tl.arange(0, lanes)
    sizes = tl.load(sizes_at + lane, mask=lane < experts, other=0)
    sizes = tl.where(lane == experts, num - tl.sum(sizes), sizes)
    blocks = tl.cdiv(sizes, side)
    group = tl.sum((tl.cumsum(blocks) <= tl.program_id(1)).to(tl.int32))
    before = lane < group
    first = (tl.program_id(1) - tl.sum(tl.where(before, blocks, 0))) * side
    lines = first + tl.arange(0, side)
    inside = lines < tl.sum(tl.where(lane == group, sizes, 0))
    lines = tl.minimum(tl.sum(tl.where(before, sizes, 0)) + lines, num - 1)
    columns = tl.program_id(0) * across + tl.arange(0, across)
    matrix = group.to(tl.int64)
    if layer_at is not None:
        matrix += tl.load(layer_at) * experts
    ahead = tl.arange(0, step)
    x_tile = x_at + lines[:, None] * depth + ahead[None, :]
    w_tile = w_at + matrix * depth * dim + ahead[:, None] * dim + columns[None, :]
    total = tl.zeros((side, across), tl.float32)
    turns = tl.where(group < experts, depth // step, 0)
    for i in range(turns):
        total = tl.dot(tl.load(x_tile + i * step), tl.load(w_tile + i * step * dim), total)
    places = lines
    if order_at is not None:
        places = tl.load(order_at + lines)
    out_tile = out_at + places[:, None] * dim + columns[None, :]
    tl.store(out_tile, total.to(out_at.dtype.element_ty), mask=inside[:, None])


def by_jax_triton(
    tile: ProductTile, sizes, x, w, layer, order, compute_capability: int | None = None
) -> jax.Array:
    """x[i] @ w[layer, its expert], in the place order[i]; the capability is that of an absent card."""
    (num, depth), (experts, _, dim) = x.shape, w.shape[-3:]
    assert depth % tile.depth == dim % tile.columns == 0, (depth, dim, tile)
    return jax_triton.triton_call(
        sizes,
        x,
        w,
        None if layer is None else layer.reshape(1),
        order,
        kernel=kernel(),
        out_type=jax.ShapeDtypeStruct((num, dim), x.dtype),
        grid=(dim // tile.columns, -(-num // tile.rows) + experts + 1),
        name="experts_down",
        num_warps=tile.warps,
        num_stages=tile.stages,
        num=num,
        depth=depth,
        dim=dim,
        experts=experts,
        lanes=power(experts + 1),
        side=tile.rows,
        across=tile.columns,
        step=tile.depth,
        compute_capability=compute_capability,
        # Triton 3.9 writes PTX 9.4 by itself, which the ptxas of CUDA 13.0 does not read
        backend_options={"ptx_version": 90} if chip.current().maker == "cuda" else {},
    )


@functools.cache
def kernel() -> Any:
    """The body as a Triton function."""
    return compiler.jit(body)


def by_pallas(tile: ProductTile, sizes, x, w, layer, order) -> jax.Array:
    """The same by the kernel of the step."""
    like, route = jax.ShapeDtypeStruct((x.shape[0], w.shape[-1]), x.dtype), (order, sizes, layer)
    own = chip.current()._replace(tiles=(("experts_down", tuple(tile._asdict().items())),))
    with chip.making(own):
        of_rows = functools.partial(triton._to_tokens, transposed=False)
        (out,) = triton._by_rows(of_rows, "down", route, (x, w), [like], *w.shape[:-3:-1])
    return out


def arguments(tokens: int, width: int, experts: int, layers: int, ordered: bool) -> tuple:
    """Sizes of groups of all kinds, with an empty one and rows of no expert, and random numbers."""
    keys = jax.random.split(jax.random.key(0), 4)
    choice = jax.random.randint(keys[0], (tokens,), 1, experts + 1)  # `experts`: of none
    x = jax.random.normal(keys[1], (tokens, width), jnp.bfloat16)
    w = jax.random.normal(keys[2], (layers, experts, width, width), jnp.bfloat16)
    order = jax.random.permutation(keys[3], tokens).astype(jnp.int32) if ordered else None
    return jnp.bincount(choice, length=experts), x, w, jnp.int32(layers - 1), order


@jax.jit
def error(out, sizes, x, w, layer, order) -> jax.Array:
    """The norm of the difference from the definition in float32, relative to its own."""
    with jax.default_matmul_precision("highest"):
        exact = reference.grouped_dot(x.astype(jnp.float32), w[layer], sizes)
    if order is not None:
        exact = jnp.zeros_like(exact).at[order].set(exact)
    return jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, number in (("tokens", 16_384), ("width", 2048), ("experts", 16), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = vars(parser.parse_args())
    if jax_triton is None:
        print("jax-triton and triton are not installed here: pip install jax-triton")
        return
    shipped = triton._tile("down", options["tokens"], *2 * [options["width"]], dtype=jnp.bfloat16)
    found, flops = [], 2 * options["tokens"] * options["width"] ** 2
    for ordered in (False, True):
        given = arguments(**options, ordered=ordered)
        for tile in dict.fromkeys((shipped, *map(ProductTile._make, candidates.PRODUCTS))):
            for by in (by_pallas, by_jax_triton):
                row = [f"{'with order' if ordered else 'sorted'}, {by.__name__}", str([*tile])]
                program = jax.jit(functools.partial(by, tile)).lower(*given).compile()
                run = functools.partial(program, *given)
                off, seconds = float(error(run(), *given)), timing.time_call(run, 0.1, True).median
                speed = f"{1e3 * seconds:.3f}", f"{flops / seconds / 1e12:.0f}"
                found.append([*row, f"{off:.1e}", *(speed if off < MOST else ("WRONG", ""))])
    head = ("kernel", "rows, columns, depth, warps, stages", "error", "ms", "TFLOP/s")
    print(Table("The experts' down product", head, found).markdown())


if __name__ == "__main__":
    main()
