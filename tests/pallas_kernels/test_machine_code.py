"""Readings of kernels' machine code: registers, spills, shared memory, occupancy; the inner loop, modelled."""

import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks import absent, inner_loop, machine_code
from benchmarks.inner_loop import Instruction
from benchmarks.machine_code import CORES, Code
from pallas_kernels import tiles
from zaya_jax.hardware import chips, targets

ARCH = {"mi300x": "gfx942", "h200": "sm_90"}


def code(arch="gfx942", registers=64, shared=0, threads=256, **more) -> Code:
    fixed = dict(name="k", grid=(1, 1, 1), spills=0, private=0, scalar_spills=0, times=1, elf=b"")
    return Code(arch=arch, registers=registers, shared=shared, threads=threads, **{**fixed, **more})


@pytest.mark.parametrize(
    ("of", "occupancy"),
    [
        (code(registers=64), 8),
        (code(registers=65), 7),  # 72 are given
        (code(registers=128), 4),
        (code(registers=129), 3),
        (code(registers=512), 1),
        (code(registers=64, shared=16 << 10), 4),
        (code(registers=64, shared=(32 << 10) + 1), 1),
        (code(registers=64, shared=(64 << 10) + 1), 0),
        (code(registers=512, threads=512), 0),
        (code("gfx950", registers=64, shared=(64 << 10) + 1), 2),
        (code("sm_90", registers=128, threads=128), 4),
        (code("sm_90", registers=168, threads=128), 3),
        (code("sm_90", registers=64, threads=256, shared=100 << 10), 4),
        (code("sm_90", registers=64, threads=128, shared=227 << 10), 1),
        (code("sm_90", registers=64, threads=128, shared=(227 << 10) + 1), 0),
    ],
)
def test_how_many_warps_fit(of, occupancy):
    assert of.occupancy == occupancy


@pytest.mark.parametrize(
    ("arch", "cores", "clock"), [("gfx942", 304, 2.1e9), ("gfx950", 256, 2.4e9), ("sm_90", 132, 1.83e9)]
)
def test_a_core_of_the_model_has_the_rate_of_the_data_sheet(arch, cores, clock):
    sheet = chips.CHIPS[{"gfx942": "mi300x", "gfx950": "mi355x", "sm_90": "h200"}[arch]].peaks["bfloat16"]
    assert CORES[arch].flops * cores * clock == pytest.approx(sheet, rel=0.002)


AMD = """
k.elf:	file format elf64-amdgpu

0000000000001600 <k>:
	s_load_dwordx2 s[0:1], s[4:5], 0x0                         // 000000001600: C0060002 00000000
	v_mov_b32_e32 v1, 0                                        // 000000001608: 7E020280
	v_mfma_f32_32x32x8_bf16 v[0:15], v[98:99], v[82:83], v[0:15]// 00000000160C: D3E00000 0402A562
	s_cbranch_scc1 65533                                       // 000000001614: BF85FFFD <k+0xc>
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]    // 000000001618: D3E10000 04020D04
	s_cbranch_vccz 2                                           // 000000001620: BF860002 <k+0x2c>
	s_cbranch_scc1 65529                                       // 000000001624: BF85FFF9 <k+0x8>
	s_nop 0                                                    // 000000001628: BF800000
	s_endpgm                                                   // 00000000162C: BF810000
"""
NVIDIA = """
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   MUFU.EX2 R3, R3 ;
.L_x_0:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR16].tnspB, R88 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8], R88, gsb0 ;
        /*0040*/                   LDSM.16.M88.4 R32, [R76+UR20] ;
        /*0050*/                   LDS.U.128 R4, [R2] ;
        /*0060*/              @P0 BRA `(.L_x_0) ;
        /*0070*/              @P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   BRA `(.L_x_2);
"""


def test_the_inner_loop_is_the_innermost_with_products():
    amd = inner_loop._read_amd(AMD)
    assert len(amd) == 9 and [i.target for i in amd if i.target] == [0x160C, 0x162C, 0x1608]
    assert inner_loop.body_of(amd) == amd[2:4]
    nvidia = inner_loop._read_nvidia(NVIDIA)
    assert [i.address for i in nvidia] == list(range(0, 0xA0, 16))[: len(nvidia)]
    body = inner_loop.body_of(nvidia)
    assert body == nvidia[2:7]
    assert inner_loop.body_of([i for i in nvidia if "HGMMA" not in i.text]) is None


def test_what_a_turn_takes_of_a_scheduler_of_nvidia():
    body = inner_loop.body_of(inner_loop._read_nvidia(NVIDIA))
    found = inner_loop._on_nvidia(code("sm_90"), body)
    assert (found.matrix, found.kind, found.instructions) == (2, "wgmma", 5)
    assert found.least == found.clocks["matrix cores"] == 2 * 64  # 64 x 128 x 16 in 64 clocks
    # Both operands from shared memory (6 KB), then the right one alone (4 KB); four warps load 2 KB each, twice.
    assert found.clocks["shared memory"] == (6 + 4 + 2 * 2) * 1024 / 128
    assert found.bound == "matrix cores" and found.share == 1


def test_what_shared_memory_gives_a_thread():
    said = {
        "ds_read_b128 v[0:3], v4": 16, "ds_read2st64_b64 v[0:3], v4 offset1:8": 16, "ds_write_b32 v1, v2": 4,
        "ds_read_u16 v1, v2": 4, "ds_write_b8 v1, v2": 4, "ds_bpermute_b32 v1, v2, v3": 4, "v_add_u32 v1, v2, v3": 0,
    }  # fmt: skip
    assert {text: inner_loop._lds_bytes(text) for text in said} == said


@pytest.mark.skipif(bool(inner_loop.missing("gfx942")), reason="LLVM 19 is not installed")
def test_a_loop_of_matrix_instructions_alone_runs_at_the_peak():
    def body(*texts):
        return [Instruction(4 * n, text, None) for n, text in enumerate(texts)]

    products = [f"v_mfma_f32_32x32x8_bf16 a[{n}:{n + 15}], v[0:1], v[2:3], a[{n}:{n + 15}]" for n in range(0, 128, 16)]
    found = inner_loop._on_amd(code(registers=128), body(*products))
    assert found.matrix == 8 and found.bound == "matrix cores" and found.share == 1
    # 8,192 FLOPs a thread of 64 on one of four schedulers that share 2,048 a clock.
    assert found.least == 8 * 2 * 32 * 32 * 8 / 512
    more = ["v_exp_f32_e32 v9, v10"] * 40 + ["buffer_load_dwordx4 v[12:15], v9, s[4:7], 0 offen"]
    slower = inner_loop._on_amd(code(registers=128), body(*products, *more))
    assert slower.bound == "vector unit" and slower.clocks["vector unit"] == 4 * (8 + 160)
    assert slower.share == pytest.approx(64 / 168)


def product(x, y, *, tile, warps=4):
    """x y, in tiles of so many rows and columns."""

    def body(x, y, out):
        def add(i, total):
            part = tiles.slice_of(i * 64, 64)
            return total + tiles.dot(x[:, part], y[part, :])

        zero = jnp.zeros(out.shape, jnp.float32)
        out[...] = jax.lax.fori_loop(0, x.shape[1] // 64, add, zero).astype(out.dtype)

    rows, inner, columns = len(x), len(y), y.shape[1]
    return tiles.call(
        body, x, y, name=f"product_{tile}", grid=(rows // tile, columns // tile),
        blocks=(
            (tiles.block((tile, inner), lambda i, j: (i, 0)), tiles.block((inner, tile), lambda i, j: (0, j))),
            tiles.block((tile, tile), lambda i, j: (i, j)),
        ),
        out_shapes=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        work=tiles.Work(2 * rows * inner * columns), warps=warps,
    )  # fmt: skip


@pytest.fixture(scope="module", params=ARCH)
def compiled(request):
    """(chip, a program with a kernel twice, another of its name's kind, and one whose tile is too large)."""
    if not targets.FOLDER.exists():
        pytest.skip("make setup-targets installs the compilers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # changes of it end with these tests

        def f(x):
            y = product(jnp.sin(product(x, x, tile=64)), x, tile=64)

            def again(y, _):
                return product(y, x, tile=256), None

            return jax.lax.scan(again, product(y, x, tile=128), length=3)[0] @ x

        like = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
        yield ARCH[request.param], absent.compiled(request.param, f, like)


def test_registers_spills_and_shared_memory_of_a_compiled_program(compiled):
    arch, program = compiled
    found = machine_code.read_kernels(program)
    assert [(c.name, c.arch, c.times) for c in found] == [
        ("product_64", arch, 2), ("product_128", arch, 1), ("product_256", arch, 1)
    ]  # fmt: skip
    small, middle, large = found
    assert (small.grid, middle.grid, large.grid) == ((8, 8, 1), (4, 4, 1), (2, 2, 1))
    for kernel in (small, middle):
        assert kernel.warps == 4 and kernel.spills == kernel.private == 0
        assert 64 < kernel.registers <= 256 and kernel.occupancy >= 2
        assert 0 < kernel.shared <= kernel.core.a_block
    # A tile of 256 x 256 in float32 takes 256 or 512 registers of each thread, for its sum alone.
    assert large.spills > 0 and large.private > 0 and large.registers == large.core.most_registers


def test_inner_loops_of_a_compiled_program(compiled):
    arch, program = compiled
    if missing := inner_loop.missing(arch):
        pytest.skip(f"{missing} is not installed")
    small, middle, large = (inner_loop.read_loop(c) for c in machine_code.read_kernels(program))
    assert small and middle and large
    assert {loop.kind for loop in (small, middle, large)} == {"mfma" if arch == "gfx942" else "wgmma"}
    # A turn of a block's four warps multiplies its whole tile with 64 columns.
    for loop, tile in ((small, 64), (middle, 128), (large, 256)):
        assert 4 * loop.least * CORES[arch].flops / 4 == 2 * tile * tile * 64
    assert small.share < middle.share and 0 < large.share <= 1
