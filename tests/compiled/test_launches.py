"""Reading a compiled program: collectives, kernels, bytes, FLOPs, loops; and the memory that it
takes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from pallas_kernels.loops import expected_turns
from zaya_jax import config as config_lib
from zaya_jax.compiled import buffers, hlo, launches, measure
from zaya_jax.hardware import chips
from zaya_jax.hardware.clusters import CLUSTERS

# As XLA 0.12.0 writes a GPU's program: a loop with a known length and one without, slices, an
# update in place.
PROGRAM = (Path(__file__).parent / "program.txt").read_text()
MATRIX, CLUSTER = 64 * 64 * 4, CLUSTERS["mi300x_pollara"]


def test_kernels_bytes_and_flops_with_loops_multiplied_out():
    program = launches.read_program(PROGRAM)
    turns = 8 + 4.5
    # Three kernels a turn; three more; and the condition of the loop of unknown length, once more
    # than it turns.
    assert program.launches == 3 * turns + 5.5 + 3 and not program.unknown
    assert [k.times for k in program.kernels if k.name == "slice_fusion"] == [8, 4.5]
    assert program.flops == 2 * 64**3 * (turns + 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "slice_fusion",  # reads a slice of the stack, and its place
            {"reads": MATRIX + 4, "writes": MATRIX, "collective": None}
            | {"scope": "cca", "stage": "backward"},
        ),
        (
            "update_fusion",
            {"reads": MATRIX + 4, "writes": MATRIX, "collective": None, "scope": "stacks"},
        ),
        (
            "all-gather-start.1",
            {"reads": MATRIX, "writes": 16 * MATRIX, "collective": "all-gather"}
            | {"scope": "optimizer/exchange", "stage": ""},
        ),
        ("gemm_fusion", {"stage": "again", "wide": True}),
        ("copy.1", {"scope": "other"}),
    ],
)
def test_a_kernel_s_bytes_scope_and_stage(name, expected):
    kernels = launches.read_program(PROGRAM).kernels
    found = next(kernel for kernel in kernels if kernel.name == name)
    assert {key: getattr(found, key) for key in expected} == expected


def test_what_a_scope_needs_is_needed_once_whatever_lies_in_it():
    """A kernel's own name may be a scope's too; its FLOPs are of use only up to those of the
    model's formula."""
    config = config_lib.Config()
    needed = chips.flops_by_scope(config.model, config.data.seq_len)["cca"] * 1000
    flops = {"jit(step)/cca/dot": 0.6 * needed, "jit(step)/cca/attention/pallas_call": 0.9 * needed}
    kernels = tuple(
        launches.GpuKernel("k", "fusion", path, 1.0, 0, 0, n, False, None)
        for path, n in flops.items()
    )
    rows = measure._by_scope(launches.Program(kernels, {}, {}), config, 1000)
    of_use = {row["scope"]: row["flops_of_use"] for row in rows}
    assert of_use == pytest.approx({"cca": 0.6 * needed, "cca/attention": 0.4 * needed}, rel=1e-7)


def test_a_loop_says_its_length_or_is_reported():
    unnamed = launches.read_program(PROGRAM.replace("turns=4.5", "anything"))
    assert unnamed.unknown == {"jit(f)/transpose(jvp(anything))/while": 1}
    assert unnamed.launches == 3 * 9 + 2 + 3
    named = re.search(r'%(\S+) = .* while\(.*(metadata=\{op_name="[^"]*turns=4.5[^"]*"\})', PROGRAM)
    bare = launches.read_program(PROGRAM.replace(named[2], "metadata={}"))
    assert bare.unknown == {named[1]: 1}

    def f(x, n):
        with expected_turns(2.5):
            return jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x) @ x, x)

    program = launches.read_program(jax.jit(f).lower(jnp.ones((4, 4)), 3).compile())
    assert not program.unknown and program.flops == pytest.approx(2.5 * 2 * 4**3)


def program_of(text: str) -> launches.Program:
    return launches.read_program(f"HloModule m\n\n{text}")


FUSION = """\
%fused (a: f32[100,64], b: f32[4,64], i: s32[]) -> f32[100,64] {{
  %a = f32[100,64]{{1,0}} parameter(0)
  %b = f32[4,64]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
{body}
}}

ENTRY %main (a: f32[100,64], b: f32[4,64], i: s32[]) -> f32[100,64] {{
  %a = f32[100,64]{{1,0}} parameter(0)
  %b = f32[4,64]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = {shape} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}}
"""
ALL, PART = 100 * 64 * 4, 4 * 64 * 4


@pytest.mark.parametrize(
    ("body", "shape", "reads", "writes"),
    [
        (  # in place: the update alone
            "  ROOT %u = f32[100,64]{1,0} dynamic-update-slice(%a, %b, %i, %zero)",
            "f32[100,64]{1,0}",
            PART + 4,
            PART,
        ),
        (  # what goes on with the updated array reads all of it
            (
                "  %u = f32[100,64]{1,0} dynamic-update-slice(%a, %b, %i, %zero)\n"
                "  ROOT %e = f32[100,64]{1,0} exponential(%u)"
            ),
            "f32[100,64]{1,0}",
            ALL + PART + 4,
            ALL,
        ),
        (  # forty products of a value with itself: 2^40 ways from the operand to the result
            "\n".join(
                f"  {'ROOT ' * (n == 39)}%m{n} = f32[100,64]{{1,0}} multiply(%{of}, %{of})"
                for n, of in enumerate(["a", *(f"m{n}" for n in range(39))])
            ),
            "f32[100,64]{1,0}",
            ALL,
            ALL,
        ),
        (  # a slice of an array made of it element by element takes that slice
            (
                "  %e = bf16[100,64]{1,0} convert(%a)\n  ROOT %s = bf16[4,64]{1,0}"
                " dynamic-slice(%e, %i, %zero), dynamic_slice_sizes={4,64}"
            ),
            "bf16[4,64]{1,0}",
            PART + 4,
            PART // 2,
        ),
        (  # and where that array is also a result, all
            (
                "  %e = f32[100,64]{1,0} negate(%a)\n"
                "  %s = f32[4,64]{1,0} dynamic-slice(%e, %i, %zero), dynamic_slice_sizes={4,64}\n"
                "  ROOT %t = (f32[100,64]{1,0}, f32[4,64]{1,0}) tuple(%e, %s)"
            ),
            "(f32[100,64]{1,0}, f32[4,64]{1,0})",
            ALL + 4,
            ALL + PART,
        ),
    ],
)
def test_what_a_fusion_takes_of_its_operands(body, shape, reads, writes):
    text = FUSION.format(body=body, shape=shape)
    started = text.replace(
        f"ROOT %f = {shape} fusion(",
        f"%f-start = ((f32[100,64], f32[4,64], s32[]), {shape}, u32[]) fusion-start(",
    )
    beside_others = started.replace(
        "calls=%fused\n", f"calls=%fused\n  ROOT %f = {shape} fusion-done(%f-start)\n"
    )
    for program in (program_of(text), program_of(beside_others)):
        (found,) = program.kernels
        assert (found.reads, found.writes) == (reads, writes)


@pytest.mark.parametrize(
    "branches",
    ["true_computation=%one, false_computation=%none", "branch_computations={%one, %none}"],
)
def test_of_a_choice_each_branch_counts_as_often(branches):
    program = program_of(f"""\
%one (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %d = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%none (x.1: f32[8,8]) -> f32[8,8] {{
  ROOT %x.1 = f32[8,8]{{1,0}} parameter(0)
}}

ENTRY %main (p: pred[], y: f32[8,8]) -> f32[8,8] {{
  %p = pred[] parameter(0)
  %y = f32[8,8]{{1,0}} parameter(1)
  ROOT %c = f32[8,8]{{1,0}} conditional(%p, %y, %y), {branches}
}}
""")
    assert program.launches == 0.5 and program.flops == 8**3


def test_the_slowest_group_bounds_a_collective():
    """Threes over nodes of eight: the group 6, 7, 8 crosses from one to the other."""
    text = PROGRAM.replace("num_partitions=16", "num_partitions=24").replace(
        "[1,16]<=[16]", "[8,3]<=[24]"
    )
    (found,) = hlo.collectives(text)
    assert found.groups[2] == (6, 7, 8) and found.group_size == 3
    bound = measure.bound_of(launches.read_program(text), [found], "AMD Instinct MI300X", CLUSTER)
    travel = found.wire_bytes / CLUSTER.card + CLUSTER.latency
    assert bound["links"] + bound["hidden"] == pytest.approx(travel)


def test_a_bound_takes_each_kernel_for_what_it_is_bound_by():
    program, collectives = launches.read_program(PROGRAM), hlo.collectives(PROGRAM)
    assert measure.bound_of(program, collectives, "no such chip", CLUSTER) is None
    found = measure.bound_of(program, collectives, "AMD Instinct MI300X", CLUSTER)
    # All of these are tiny: a launch each, but for the collective, which has one copy under it.
    travel, launching = 15 * MATRIX / (8 * CLUSTER.card) + CLUSTER.latency, program.launches - 1
    assert found.pop("binds") == "launches"
    assert found == pytest.approx(
        {
            "compute": 0,
            "HBM": 0,
            "launches": launching * measure.LAUNCH,
            "links": travel - measure.LAUNCH,
            "hidden": measure.LAUNCH,
            "seconds": (launching - 1) * measure.LAUNCH + travel,
        }
    )


def bound_of_copy(rows: int, beside: bool) -> float:
    """Seconds of a copy of so many rows, begun before a product and awaited before or behind it."""
    copied, product = f"f32[{rows},4096]", "bf16[4096,4096]"
    order = [
        f"%w = {copied} fusion-done(%s)",
        f"%d = {product} dot(%x, %x), lhs_contracting_dims={{1}}",
    ]
    if beside:
        order.reverse()
    program = program_of(f"""\
%fused (a: {copied}) -> {copied} {{
  %a = {copied} parameter(0)
  ROOT %n = {copied} negate(%a)
}}

ENTRY %main (a: {copied}, x: {product}) -> {copied} {{
  %a = {copied} parameter(0)
  %x = {product} parameter(1)
  %s = (({copied}), {copied}, u32[]) fusion-start(%a), kind=kLoop, calls=%fused
  {order[0]}
  {order[1]}
}}
""")
    return measure.bound_of(program, [], "AMD Instinct MI300X", CLUSTER)["seconds"]


@pytest.mark.parametrize("rows", [1024, 32768])  # the copy fits beside the product, and does not
def test_a_copy_beside_products_takes_only_what_they_do_not_cover(rows):
    chip = chips.CHIPS["mi300x"]
    product = 2 * 4096**3 / chip.peaks["bfloat16"]
    idle = product - 3 * 2 * 4096**2 / chip.bandwidth
    copy = 2 * 4 * rows * 4096 / chip.bandwidth
    assert bound_of_copy(rows, beside=False) == pytest.approx(product + copy)
    assert bound_of_copy(rows, beside=True) == pytest.approx(product + max(copy - idle, 0))


def test_memory_over_a_program_is_the_compilers():
    """It adds up to the compiler's own sum, and no byte counts twice."""

    def f(w, x):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)

    like = (
        jax.ShapeDtypeStruct((4, 128, 128), jnp.float32),
        jax.ShapeDtypeStruct((64, 128), jnp.float32),
    )
    compiled, memory = buffers.compile_watched(jax.jit(f).lower(*like))
    stats = compiled.memory_analysis()
    sizes = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
    assert (memory.arguments, memory.results, memory.temporaries) == sizes
    assert memory.peak == pytest.approx(sum(sizes), rel=0.01)
    assert 0 < sum(b.size for b in memory.at_peak()) <= memory.temporaries
    # each layer's input, or output
    kept = [b for b in memory.buffers if b.shape.startswith("f32[4,64,128]")]
    assert kept and all(b.size == 4 * 64 * 128 * 4 for b in kept)


def test_frozen_weights_are_weights():
    """Of low-rank updates and of pairs; they were part of the batch."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def like(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here)

    state = {"params": {"layers": {"a": like(2, 4)}}, "optimizer": like(2, 4), "frozen": like(8, 8)}
    memory = buffers.ProgramMemory(400, 0, 0, 0, ())
    found = measure._memory(memory, state, launches.Program((), {}, {}))
    assert (found["weights"], found["optimizer"], found["batch and figures"]) == (288, 32, 80)


def test_a_collective_in_a_loop_that_does_not_turn_takes_no_time():
    array = (hlo.HloArray("f32", (1 << 20,)),)
    sent = hlo.Collective("all-to-all", "a", array, array, 8, True, None, "", (tuple(range(8)),))
    kernels = tuple(
        launches.GpuKernel(name, op, "", 0.0, 1 << 22, 1 << 22, 0.0, False, collective)
        for name, op, collective in (("a", "all-to-all-start", "all-to-all"), ("k", "fusion", None))
    )
    found = measure.bound_of(
        launches.Program(kernels, {}, {"a": (1, 2)}), [sent], "MI300X", CLUSTER
    )
    assert found is not None and found["seconds"] == found["hidden"] == 0


@pytest.fixture(scope="module")
def mesh():
    return Mesh(
        np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )


def read(f, mesh, width=4):
    whole = PartitionSpec()
    mapped = jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    x = jax.ShapeDtypeStruct((16, width), jnp.float32)
    return hlo.collectives(jax.jit(mapped).lower(x).compile())


@pytest.mark.parametrize(
    ("f", "width", "expected"),
    [
        (
            lambda x: lax.psum(x, "a"),
            4,
            {"kind": "all-reduce", "bytes": 256, "group_size": 4, "times": 1, "scalar": True}
            | {"wire_bytes": 2 * 256 * 3 / 4, "op_name": "jit(<lambda>)/shard_map/psum"},
        ),
        (
            lambda x: lax.psum_scatter(x, ("a", "b"), tiled=True),
            400,
            {"kind": "reduce-scatter", "bytes": 16 * 400 * 4, "group_size": 8, "scalar": False}
            | {"results": (hlo.HloArray("f32", (2, 400)),)},
        ),
        (
            lambda x: lax.all_gather(x, "b", tiled=True),
            4,
            {"kind": "all-gather", "bytes": 512, "group_size": 2, "wire_bytes": 256},
        ),
        (
            lambda x: lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)]),
            4,
            {"kind": "collective-permute", "bytes": 256, "wire_bytes": 256},
        ),
        (
            lambda x: lax.all_to_all(x, "a", 0, 1, tiled=True),
            4,
            {"kind": "all-to-all", "bytes": 256, "group_size": 4},
        ),
    ],
)
def test_kinds_bytes_and_groups(mesh, f, width, expected):
    (found,) = read(f, mesh, width)
    assert {key: getattr(found, key) for key in expected} == expected


def test_loops(mesh):
    def f(x):
        def outer(_, x):
            return lax.fori_loop(
                0, 3, lambda _, x: jnp.sin(lax.psum(x, "b")), jnp.cos(lax.psum(x, "a"))
            )

        x = lax.fori_loop(0, 5, outer, x)
        return lax.psum(x, ("a", "b"))

    found = sorted((c.group_size, c.in_loop, c.times) for c in read(f, mesh))
    assert found == [(2, True, 15), (4, True, 5), (8, False, 1)]

    def unknown(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + lax.psum(x, "a"), x)

    assert [(c.in_loop, c.times) for c in read(unknown, mesh)] == [(True, None)]


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{0,4},{1,5}}", (0, 4)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['data'=2,'tensor'=4] {'data'}", (0, 4)),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", (0, 1, 2, 3)),
    ],
)
def test_groups_in_each_of_their_forms(groups, first):
    entry = (
        "ENTRY %main (p: f32[4]) -> f32[4] {\n  ROOT %a = f32[4]{0} all-reduce(%p),"
        f" replica_groups={groups}\n}}"
    )
    (found,) = hlo.collectives(f"HloModule m, num_partitions=8\n\n{entry}\n")
    assert found.groups[0] == first and found.group_size == len(first)


ASYNC = """HloModule m, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%wrapped (p: f32[64,4]) -> f32[8,4] {
  %p = f32[64,4]{1,0} parameter(0)
  ROOT %rs = f32[8,4]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[64,4], y: bf16[2,4]) -> (f32[8,4], bf16[16,4]) {
  %x = f32[64,4]{1,0} parameter(0)
  %y = bf16[2,4]{1,0:T(8,128)} parameter(1)
  %s = ((f32[64,4]{1,0}), f32[8,4]{1,0}) async-start(%x), calls=%wrapped
  %d = f32[8,4]{1,0} async-done(%s), calls=%wrapped
  %g = (bf16[2,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%y), replica_groups=[1,8]<=[8], dimensions={0}
  %h = bf16[16,4]{1,0} all-gather-done(%g)
  %r = (f32[8,4]{1,0}, bf16[16,4]{1,0}) all-reduce(%d, %h), replica_groups={}, to_apply=%add
  ROOT %t = (f32[8,4]{1,0}, bf16[16,4]{1,0}) tuple(%d, %h)
}
"""


def test_asynchronous_and_combined_forms():
    found = hlo.collectives(ASYNC)
    assert {(c.kind, c.bytes, c.group_size, c.in_loop) for c in found} == {
        ("reduce-scatter", 1024, 8, False),
        ("all-gather", 128, 8, False),
        ("all-reduce", 128 + 128, 8, False),
    }
    (gather,) = [c for c in found if c.kind == "all-gather"]
    assert len(found) == 3 and gather.operands == (hlo.HloArray("bf16", (2, 4)),)
