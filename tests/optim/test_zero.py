"""ZeRO-1 gives the unsharded chain's parameters, with the collectives, bytes and memory that its
docstring promises; every number of a gradient arrives."""

import itertools
import math

import jax
import jax.numpy as jnp
import logical_state
import numpy as np
import optim_helpers
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from refusals import check_refused
from rows import fast_alone, slow

from zaya_jax.compiled import hlo
from zaya_jax.config import Optim, Precision
from zaya_jax.optim import chain, zero
from zaya_jax.optim.zero import matrices


@pytest.fixture(scope="module")
def like():
    return optim_helpers.shapes()


def compiled(optimizer, mesh, like) -> jax.stages.Compiled:
    """An update on a mesh whose devices have all weights; gradients have a first dim of one part
    for each device, whose sum is the gradient."""

    def step(params, state, parts):
        return optimizer.apply(jax.tree.map(lambda x: x[0], parts), state, params, lr=0.1)

    state = optimizer.specs()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), state, P(mesh.axis_names)),
        out_specs=(P(), state),
        check_vma=False,
    )
    parts = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype), like)
    return jax.jit(mapped).lower(like, jax.eval_shape(optimizer.init), parts).compile()


def check_collectives(program, layout, size) -> None:
    """One reduce-scatter and one all-gather, of numbers of so many bytes, for each large bucket,
    and sums of all that is small."""
    found, devices = hlo.collectives(program), layout.grid.num_devices
    travel = [b for b in layout.matrices.values() if not b.summed_whole]
    numbers = {name: math.prod(b.matrix) * b.count for name, b in layout.matrices.items()}
    # less than a row a device is padding
    assert all(0 <= 8 * b.padded_rows - numbers[b.name] < 8 * devices for b in travel)
    (vectors,) = layout.vectors
    cut, whole = 4 * devices * vectors.sizes["adamw cut"], 4 * vectors.sizes["adamw whole"]
    padded, groups = [8 * b.padded_rows for b in travel], len(layout.metric_groups)
    # One sum for all that is small, one for small matrices' directions, and the norms: first those
    # of gradients.
    small = 4 * sum(numbers[b.name] for b in layout.matrices.values() if b.summed_whole)
    sums = [4 * groups, 8 * groups, whole + small, *([small] if small else [])]
    rounds = 2 * sum(
        len(b.plan.joins) + sum(leg.pairs is not None for leg in b.plan.out) for b in travel
    )
    by_kind = {kind: sorted(c.bytes for c in found if c.kind == kind) for kind in hlo.KINDS}
    assert len(by_kind.pop("collective-permute")) == rounds > 0
    # XLA:CPU has a reduce-scatter of its own.
    assert {kind: sizes for kind, sizes in by_kind.items() if sizes} == {
        "reduce-scatter": sorted([cut, *(4 * n for n in padded)]),
        "all-gather": sorted([cut, *(size * n for n in padded)]),
        "all-reduce": sorted(sums),
    }
    for c in found:
        assert c.times == 1 and (c.kind == "collective-permute" or c.group_size == devices)
    for b in travel:
        traffic = b.traffic(b.name, size)
        assert traffic["reduce-scatter"] == 4 * 8 * b.padded_rows
        assert traffic["all-gather"] == size * 8 * b.padded_rows


def bytes_per_device(optimizer) -> int:
    """Bytes of optimizer state that each device holds."""
    grid = optimizer.layout.grid
    mesh = AbstractMesh(grid.shape, grid.names)

    def part(x, spec):
        return math.prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize

    parts = jax.tree.map(part, jax.eval_shape(optimizer.init), optimizer.specs())
    return sum(jax.tree.leaves(parts))


@pytest.mark.parametrize("precision", [slow("float32"), "bfloat16"])
def test_collectives_bytes_and_memory(like, precision, monkeypatch):
    # numbers: of the router's four matrices three are smaller
    monkeypatch.setattr(matrices, "SMALL", 1500)
    mesh = mesh_of(data=4, expert=2)
    optimizer = chain.build(Optim(), Precision(newton_schulz=precision), like, axes=mesh.shape)
    program, layout = compiled(optimizer, mesh, like), optimizer.layout
    travel = {"muon 16x32", "muon 32x16", "muon 32x2x16", "muon 32x8"}
    small = {"muon 32x4", "muon 8x8", "muon 8x5"}
    assert layout.sharded and set(layout.methods) == travel | small | {"adamw cut", "adamw whole"}
    assert {name for name, b in layout.matrices.items() if b.summed_whole} == small
    check_collectives(program, layout, 2 if precision == "bfloat16" else 4)
    kept = [4 * math.prod(b.matrix) * b.slots for b in layout.matrices.values()]
    kept += [8 * n for n in layout.vectors[0].sizes.values()]
    # the rest are counters and figures
    assert 0 <= bytes_per_device(optimizer) - sum(kept) < 256
    # The program's own arguments: the state, the parameters, and one part of the gradients.
    weights = sum(4 * x.size for x in jax.tree.leaves(like))
    state = program.memory_analysis().argument_size_in_bytes - 2 * weights
    assert abs(state - bytes_per_device(optimizer)) < 4096


def test_stacks_that_do_not_divide_travel_as_they_are(monkeypatch):
    """Five matrices on seven devices: less than a row of padding a device, and small exchanges."""
    monkeypatch.setattr(matrices, "SMALL", 0)
    like = {"embed": {"embedding": jax.ShapeDtypeStruct((40, 32), np.float32)}}
    like["layers"] = {"experts": {"down": jax.ShapeDtypeStruct((1, 5, 32, 24), np.float32)}}
    optimizer = chain.build(Optim(), Precision(), like, axes=dict(data=7))
    program, layout = compiled(optimizer, mesh_of(data=7), like), optimizer.layout
    check_collectives(program, layout, 2)
    (vectors,) = layout.vectors
    # five rows of the table on each device; all devices have the other five
    assert [*vectors.sizes.values()] == [5 * 32, 5 * 32]
    sent = [c.bytes for c in hlo.collectives(program) if c.kind == "collective-permute"]
    assert max(sent) <= 4 * -(-5 * 32 * 24 // 7) and len(sent) <= 2 * 4


def test_memory_is_an_eighth_where_stacks_divide():
    """At the sizes of ZAYA1, where every device keeps only little whole."""
    like = optim_helpers.shapes(L=40, D=2048, H=8, K=2, C=128, E=16, F=2048, R=256, V=262_272)
    whole = bytes_per_device(chain.build(Optim(), Precision(), like))
    share = chain.build(Optim(), Precision(weights="float32"), like, axes=dict(data=8))
    assert whole / 8 <= bytes_per_device(share) < 1.03 * whole / 8
    experts = 4 * 40 * 16 * 3 * 2048**2  # of which other devices have copies
    copied = chain.build(Optim(), Precision(), like, axes=dict(data=8))
    assert bytes_per_device(copied) == bytes_per_device(share) + experts / 8


def test_one_device_needs_no_bucket(like):
    assert not chain.build(Optim(), Precision(), like, axes=dict(data=1, expert=1)).layout.sharded


def test_sizes_that_do_not_divide_are_named(like):
    specs = optim_helpers.expert_specs(like)
    check_refused(
        r"layers/experts/down \[5, 4, 16, 32\] is sharded over 3 devices",
        lambda: chain.build(Optim(), Precision(), like, specs=specs, axes=dict(data=1, expert=3)),
    )


WEIGHTS = {  # path: (shape, method, spec on a mesh that has these axes)
    # a matrix of three dims, whose columns are cut in pairs
    "pairs": ((3, 6, 12, 2, 4), "muon", (None, "expert", "data", None, "tensor")),
    "down": ((3, 6, 8, 12), "muon", (None, "expert", "tensor")),
    "square": ((5, 24, 24), "muon", (None, "data", "tensor")),
    "odd": ((7, 3, 5), "muon", ()),
    "alone": ((24, 7), "muon", ()),
    "table": ((131, 16), "adamw", ("tensor",)),
    "taps": ((4, 2, 6), "adamw", (None, None, "expert")),
    "bias": ((24,), "adamw", ()),
}


def layout_on(axes: dict[str, int], sharded: tuple[str, ...]) -> zero.Layout:
    """A layout of the weights above, those of them sharded over these axes that they name and that
    divide them."""
    weights = []
    for path, (shape, method, spec) in sorted(WEIGHTS.items()):
        dims = [
            (axis,) if axis in sharded and axis in axes and size % axes[axis] == 0 else ()
            for axis, size in zip((*spec, *[None] * (len(shape) - len(spec))), shape, strict=True)
        ]
        matrix_dims = 3 if path == "pairs" else 2
        weights.append(
            zero.Weight(path, shape, method, path[:1], tuple(dims), matrix_dims=matrix_dims)
        )
    return zero.Layout(weights, jax.tree.structure(dict.fromkeys(WEIGHTS, 0)), axes)


def there_and_back(layout: zero.Layout, axes: dict[str, int], dtype=jnp.float32):
    """The sum of whole-numbered gradients, the shares that `reduce` made of it, and what `gather`
    made of these."""
    mesh = mesh_of(**axes)
    random = np.random.default_rng(0)
    specs = {w.path: P(*(dim or None for dim in w.dims)) for w in layout.weights}
    free = {w.path: tuple(a for a in axes if a not in w.axes) for w in layout.weights}
    parts, total = {}, {}
    for w in layout.weights:
        copies = math.prod(axes[a] for a in free[w.path])
        parts[w.path] = random.integers(-3, 4, (copies, *w.shape)).astype(np.float32)
        total[w.path] = parts[w.path].sum(0)

    def step(parts):
        shares = layout.reduce_gradients({path: x[0] for path, x in parts.items()})
        back = {n: x.astype(dtype) if layout.methods[n] == "muon" else x for n, x in shares.items()}
        return shares, layout.gather_directions(back), layout.sum_squares(shares)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=({path: P(free[path] or None, *specs[path]) for path in WEIGHTS},),
        out_specs=({name: layout.spec(name) for name in layout.methods}, specs, P()),
        check_vma=False,
    )
    return total, *jax.device_get(jax.jit(mapped)(parts))


CASES = {
    "7 devices": (dict(data=7), ()),
    "data 3 x expert 2": (dict(data=3, expert=2), ("expert",)),
    "data 2 x expert 3": (dict(data=2, expert=3), ("expert",)),
    "expert 3 x tensor 2": (dict(data=1, expert=3, tensor=2), ("expert", "tensor")),
    "data 2 x tensor 4": (dict(data=2, tensor=4), ("tensor",)),
    "fsdp on 3": (dict(data=3), ("data",)),
    "fsdp on 8": (dict(data=8), ("data",)),
    "everything": (dict(data=2, expert=2, context=1, tensor=2), ("data", "expert", "tensor")),
}
FAST = (("7 devices", False), ("everything", False), ("everything", True))


@pytest.mark.parametrize(
    ("name", "together"), fast_alone(FAST, itertools.product(CASES, (False, True)))
)
def test_every_number_arrives(name, together, monkeypatch):
    """Sums of whole numbers, which are exact: they come back unchanged, and are meanwhile where
    `held` says."""
    monkeypatch.setattr(matrices, "SMALL", 2**16 if together else 0)
    monkeypatch.setattr(matrices, "WASTE", 1.0)
    axes, sharded = CASES[name]
    layout = layout_on(axes, sharded)
    assert {b.summed_whole for b in layout.matrices.values()} == {together}
    total, shares, back, squares = there_and_back(layout, axes, jnp.bfloat16)
    for path, x in total.items():
        np.testing.assert_array_equal(back[path], x, err_msg=path)
        assert squares[path[:1]] == sum(
            np.square(total[w.path]).sum() for w in layout.weights if w.group == path[:1]
        )
    check_held(layout, axes, shares, total)


def check_held(layout: zero.Layout, axes: dict[str, int], shares: dict, total: dict) -> None:
    """Every box is where it is said to be, and every number of every weight is in as many boxes as
    it has holders."""
    seen = {path: np.zeros(x.shape) for path, x in total.items()}
    for name, x in shares.items():
        copies = math.prod(axes.values()) // layout.num_shards(name)
        for held, there in logical_state.boxes(layout, name, x):
            box = total[held.weight][held.box]
            assert np.array_equal(there.reshape(-1), box.reshape(-1)), held
            seen[held.weight][held.box] += 1 / copies
    for path, times in seen.items():
        np.testing.assert_allclose(times, 1, rtol=1e-6, err_msg=path)
