"""The reader of compiled programs, on programs whose collectives are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from zaya_jax.compiled import hlo


@pytest.fixture(scope="module")
def mesh():
    return Mesh(
        np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )


def read(f, mesh, *shapes):
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo.collectives(jax.jit(mapped).lower(*args).compile())


def test_kinds_bytes_and_groups(mesh):
    found = read(lambda x: lax.psum(x, "a"), mesh, (16, 4))
    assert [(c.kind, c.bytes, c.group_size, c.times) for c in found] == [("all-reduce", 256, 4, 1)]
    assert found[0].wire_bytes == 2 * 256 * 3 / 4 and found[0].scalar and "psum" in found[0].op_name
    (found,) = read(lambda x: lax.psum_scatter(x, ("a", "b"), tiled=True), mesh, (16, 400))
    assert (found.kind, found.bytes, found.group_size) == ("reduce-scatter", 16 * 400 * 4, 8)
    assert found.results == (hlo.HloArray("f32", (2, 400)),) and not found.scalar
    (found,) = read(lambda x: lax.all_gather(x, "b", tiled=True), mesh, (16, 4))
    assert (found.kind, found.bytes, found.group_size, found.wire_bytes) == (
        "all-gather",
        512,
        2,
        256,
    )
    (found,) = read(
        lambda x: lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)]), mesh, (16, 4)
    )
    assert (found.kind, found.bytes, found.wire_bytes) == ("collective-permute", 256, 256)
    (found,) = read(lambda x: lax.all_to_all(x, "a", 0, 1, tiled=True), mesh, (16, 4))
    assert (found.kind, found.bytes, found.group_size) == ("all-to-all", 256, 4)


def test_loops(mesh):
    def f(x):
        def outer(_, x):
            return lax.fori_loop(
                0, 3, lambda _, x: jnp.sin(lax.psum(x, "b")), jnp.cos(lax.psum(x, "a"))
            )

        x = lax.fori_loop(0, 5, outer, x)
        return lax.psum(x, ("a", "b"))

    found = sorted((c.group_size, c.in_loop, c.times) for c in read(f, mesh, (16, 4)))
    assert found == [(2, True, 15), (4, True, 5), (8, False, 1)]

    def unknown(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + lax.psum(x, "a"), x)

    assert [(c.in_loop, c.times) for c in read(unknown, mesh, (16, 4))] == [(True, None)]


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
    found = {c.kind: c for c in hlo.collectives(ASYNC)}
    assert len(found) == 3
    assert found["reduce-scatter"].bytes == 1024 and found["reduce-scatter"].group_size == 8
    assert found["all-gather"].bytes == 128 and found["all-gather"].operands == (
        hlo.HloArray("bf16", (2, 4)),
    )
    assert found["all-reduce"].bytes == 128 + 128 and found["all-reduce"].group_size == 8
    assert not any(c.in_loop for c in found.values())
