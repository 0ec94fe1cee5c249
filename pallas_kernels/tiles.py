"""Kernels for GPUs, of Pallas's Triton backend: the one file that knows it.

    tiles.call(body, {"x": x, "y": y}, name="add", grid=(n,), out_shapes=like, work=tiles.Work(flops))

One source serves CUDA (sm_90) and ROCm (gfx942, gfx950). JAX calls this backend deprecated and has
no other one for AMD, so bodies use only the operations of any tiled language: loads and stores of
tiles, products, reductions, loops. A program made for a CPU interprets them (`chip.Chip("cpu",
"gfx942")`): as right, some 20 times slower than XLA.

Who reads a compiled program (`zaya_jax.compiled.launches`) cannot look into a kernel. So each call
says its FLOPs, and the bytes that it moves where these are not its operands and results, each once.
"""

import functools
import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

from pallas_kernels import chip, table

program_id = pl.program_id
slice_of = pl.ds
when = pl.when
# with `mask` and `other`, for tiles that reach over an array's end
load, store = (backend.load, backend.store)
# of a matrix' rows and columns; None: all are there
Masks = tuple[jax.Array | None, jax.Array | None]
WHOLE = pl.BlockSpec()  # of an operand or a result: the body indexes it by itself


class Work(NamedTuple):
    """A kernel's FLOPs and bytes, for readers of the compiled program."""

    flops: float = 0.0
    # FLOPs at most, where a caller may know better than `flops` (`loops.expected_share`)
    most: float | None = None
    # bytes read and written; None: operands and results, each once
    moved: tuple[float, float] | None = None

    @property
    def scope(self) -> str:
        words = f"flops={self.flops:g}"
        if self.most:
            words += f"of{self.most:g}"
        if self.moved is not None:
            words += f",reads={self.moved[0]:g},writes={self.moved[1]:g}"
        return words


NOTHING_SAID = Work()


def tile_of[Tile: tuple](make: Callable[..., Tile], kernel: str, variant: str = "") -> Tile:
    """A kernel's tile on the chip: one that the chip was given, otherwise the table's; of the
    variant if that has a row."""
    target = chip.current()
    known = {name: row["tile"] for name, row in table.rows(target.architecture).items()}
    known |= {name: dict(tile) for name, tile in target.tiles}
    name = f"{kernel} {variant}"
    return make(**known[name if name in known else kernel])


class ProductTile(NamedTuple):
    """The tile of a product: its sides, the depth of a step, and how it runs."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def call(
    body: Callable,
    operands: Mapping[str, Any],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shapes: Any,
    work: Work = NOTHING_SAID,
    warps: int = 4,
    stages: int = 1,
    in_place: bool = False,
) -> Any:
    """Runs body(operands by name, *results) for each point of the grid, of at most three dims; see
    `jax.experimental.pallas.pallas_call`.

    A body is given operands and results whole, and indexes them itself. An operand may be None, or
    a tuple of arrays. `in_place`: the first result takes the place of the last array.
    """
    arrays, structure = jax.tree.flatten([*operands.values()])

    def run(*refs):
        given = jax.tree.unflatten(structure, refs[: len(arrays)])
        body(dict(zip(operands, given, strict=True)), *refs[len(arrays) :])

    with jax.named_scope(work.scope):
        return pl.pallas_call(
            run,
            out_shape=out_shapes,
            grid=grid,
            in_specs=[WHOLE] * len(arrays),
            out_specs=jax.tree.map(lambda x: WHOLE, out_shapes),
            input_output_aliases={len(arrays) - 1: 0} if in_place else {},
            compiler_params=backend.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=chip.current().is_host,
            name=name,
        )(*arrays)


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array whose numbers nobody has set yet: anything, or NaN where kernels are interpreted."""
    like = jax.ShapeDtypeStruct(shape, dtype)
    work = Work(moved=(0, 0))
    return call(lambda refs, out: None, {}, name="empty", grid=(1,), out_shapes=like, work=work)


def power(number: int) -> int:
    """The next power of two: the only sides that tiles have."""
    return 1 << max(number - 1, 0).bit_length()


def steps(number: int) -> jax.Array:
    """0, 1, 2 .., `number` of them."""
    return jax.lax.iota(jnp.int32, number)


def within(start: jax.Array, size: int, length: int) -> tuple[jax.Array, jax.Array | None]:
    """The places of a stretch that begins within a dim of this length, and which of them exist.

    None: all of them, since stretches of this size divide the dim. One that begins behind the end
    would go unmasked: grids and loops stop there, at `-(-length // size)`.
    """
    places = start + jnp.arange(size, dtype=jnp.int32)
    return places, None if length % size == 0 else places < length


def take(
    ref: Any,
    *lead: Any,
    rows: jax.Array,
    columns: jax.Array,
    real: Masks = (None, None),
    dtype: Any = None,
) -> jax.Array:
    """A matrix of any rows and columns of what `lead` leaves of an array; zeros where a row or
    column is not `real`."""
    place, mask = _matrix(ref, lead, rows, columns, real)
    x = load_masked(place, mask)
    return x if dtype is None else narrow(x, dtype)


def load_masked(place: Any, mask: jax.Array | None, other: float = 0) -> jax.Array:
    """The numbers there, or `other` where the mask leaves them out."""
    return load(place) if mask is None else load(place, mask=mask, other=other)


def put(
    ref: Any,
    x: jax.Array,
    *lead: Any,
    rows: jax.Array,
    columns: jax.Array,
    real: Masks = (None, None),
) -> None:
    """Writes a matrix in the same way; of rows and columns that are not `real`, nothing.

    When interpreted, unselected rows must be past the array's end: their old numbers would
    overwrite new ones.
    """
    place, mask = _matrix(ref, lead, rows, columns, real)
    store(place, x.astype(ref.dtype), mask=mask)


def _matrix(
    ref: Any, lead: tuple, rows: jax.Array, columns: jax.Array, real: Masks
) -> tuple[Any, jax.Array | None]:
    shape = rows.size, columns.size
    place = ref.at[
        (*lead, jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape))
    ]
    masks = []
    for side, m in enumerate(real):
        if m is not None:
            m = jnp.expand_dims(m, 1 - side)
            masks.append(jnp.broadcast_to(m, shape))
    return place, functools.reduce(operator.and_, masks) if masks else None


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """x in the format of a product, rounded to the nearest, of ties to the even one. A NaN has to
    be one that arithmetic makes: one whose upper fraction is all ones, as in memory full of 0xFF,
    becomes a zero.

    CDNA3 has no instruction for float32 to bfloat16. LLVM's own takes twice as long as this, since
    it looks for NaNs: in a product of 128 x 128 tiles longer than the matrix instructions do.
    """
    if (
        x.dtype != jnp.float32
        or dtype != jnp.bfloat16
        or not chip.current().kind.startswith("gfx94")
    ):
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    odd = (bits >> 16) & 1
    return jax.lax.bitcast_convert_type(
        ((bits + (odd + 0x7FFF)) >> 16).astype(jnp.uint16), jnp.bfloat16
    )


def exp2(x: jax.Array, factor: float, less: jax.Array) -> jax.Array:
    """2 ** (factor x - less) of a float32 tile, `less` a row or a column of it; below 2 ** -126 zero.

    The compilers' exponential also takes numbers under that apart, and XLA's Triton makes no
    multiply-add: six instructions of NVIDIA's for these two, five of AMD's for three. LLVM does not
    see what is inside: on CDNA the wait that the next instruction may need comes with it, and
    what matrix instructions gave is read outside.
    """
    target = chip.current()
    if target.maker == "cuda" and not target.is_host:
        less = jnp.broadcast_to(less, x.shape)
        scale = struct.pack(">f", factor).hex()
        asm = "{.reg .f32 t; neg.f32 t, $2; fma.rn.f32 t, $1, 0f%s, t; ex2.approx.ftz.f32 $0, t;}"
        return _assembled(asm % scale, "=f,f,f", x, less)
    power = x * factor - less
    if target.architecture.startswith("gfx9") and not target.is_host:
        return _assembled("v_exp_f32 $0, $1\ns_nop 0", "=v,v", power)
    return jnp.exp2(power)


def _assembled(asm: str, constraints: str, *args: jax.Array) -> jax.Array:
    like = jax.ShapeDtypeStruct(args[0].shape, jnp.float32)
    (found,) = backend.elementwise_inline_asm(
        asm, args=args, constraints=constraints, pack=1, result_shape_dtypes=[like]
    )
    return found


def dot(
    x: jax.Array, y: jax.Array, *, transpose_x: bool = False, transpose_y: bool = False
) -> jax.Array:
    """The product of two tiles in float32; float32 tiles keep all their bits."""
    wide = x.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if wide else None
    sides = (0 if transpose_x else 1,), (1 if transpose_y else 0,)
    return jax.lax.dot_general(
        x, y, (sides, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
