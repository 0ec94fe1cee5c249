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
from jax.sharding import PartitionSpec as P
from refusals import check_refused
from rows import fast_alone, slow

from zaya_jax.compiled import hlo
from zaya_jax.config import Optim, Precision
from zaya_jax.optim import chain, zero
from zaya_jax.optim.zero import matrices


@pytest.fixture(scope="module")
def like():
    return optim_helpers.shapes()


@pytest.mark.parametrize("precision", [slow("float32"), "bfloat16"])
def test_collectives_bytes_and_memory(like, precision, monkeypatch):
    # numbers: of the router's four matrices three are smaller
    monkeypatch.setattr(matrices, "SMALL", 1500)
    mesh, specs = optim_helpers.mesh_of(data=4, expert=2), optim_helpers.replicated(like)
    optimizer = chain.build(
        Optim(), Precision(newton_schulz=precision), like, specs=specs, axes=mesh.shape
    )
    program = compiled(optimizer, mesh, specs, like)
    found, layout = hlo.collectives(program), optimizer.layout
    assert layout.sharded
    names = {
        "muon 16x32",
        "muon 32x16",
        "muon 32x2x16",
        "muon 32x8",
        "muon 32x4",
        "muon 8x8",
        "muon 8x5",
    }
    assert set(layout.methods) == names | {"adamw cut", "adamw whole"}
    travel = {name: b for name, b in layout.matrices.items() if not b.summed_whole}
    small = {name: b for name, b in layout.matrices.items() if b.summed_whole}
    assert travel.keys() == {"muon 16x32", "muon 32x16", "muon 32x2x16", "muon 32x8"}

    size = 2 if precision == "bfloat16" else 4
    (vectors,) = layout.vectors
    cut, whole = 4 * 8 * vectors.sizes["adamw cut"], 4 * vectors.sizes["adamw whole"]
    numbers = {name: math.prod(b.matrix) * b.count for name, b in layout.matrices.items()}
    # a row a device
    assert all(b.padded_rows * 8 - numbers[name] < 8 * 8 for name, b in travel.items())
    by_kind = {kind: sorted(c.bytes for c in found if c.kind == kind) for kind in hlo.KINDS}
    # XLA:CPU has a reduce-scatter of its own; one and one all-gather a bucket, as the formula says,
    # once each.
    padded = [b.padded_rows * 8 for b in travel.values()]
    assert by_kind.pop("reduce-scatter") == sorted([cut, *(4 * n for n in padded)])
    assert by_kind.pop("all-gather") == sorted([cut, *(size * n for n in padded)])
    # One sum for all that is small, one for small matrices' directions, and the norms: first those
    # of gradients.
    summed = 4 * sum(numbers[name] for name in small)
    assert by_kind.pop("all-reduce") == sorted(
        [4 * len(layout.metric_groups), 8 * len(layout.metric_groups), summed, summed + whole]
    )
    rounds = [c for c in found if c.kind == "collective-permute"]
    assert len(by_kind.pop("collective-permute")) == 2 * sum(
        len(b.plan.joins) + sum(leg.pairs is not None for leg in b.plan.out)
        for b in travel.values()
    )
    assert rounds and not any(by_kind.values())
    assert all(c.times == 1 for c in found) and all(
        c.group_size == 8 for c in found if c not in rounds
    )
    for name, b in travel.items():
        traffic = b.traffic(name, size)
        assert traffic["reduce-scatter"] == 4 * 8 * b.padded_rows
        assert traffic["all-gather"] == size * 8 * b.padded_rows
    kept = [4 * math.prod(b.matrix) * b.slots for b in layout.matrices.values()]
    kept += [8 * n for n in vectors.sizes.values()]
    # the rest are counters and figures
    assert 0 <= optim_helpers.bytes_per_device(optimizer) - sum(kept) < 256
    # The program's own arguments: the state, the parameters, and one part of the gradients.
    weights = sum(4 * x.size for x in jax.tree.leaves(like))
    state = program.memory_analysis().argument_size_in_bytes - 2 * weights
    assert abs(state - optim_helpers.bytes_per_device(optimizer)) < 4096


def compiled(optimizer, mesh, specs, like) -> jax.stages.Compiled:
    step = optim_helpers.mesh_step(optimizer, mesh, specs)
    devices = math.prod(mesh.shape.values())
    parts = jax.tree.map(lambda x: jax.ShapeDtypeStruct((devices, *x.shape), x.dtype), like)
    return step.lower(like, jax.eval_shape(optimizer.init), parts, 0.1).compile()


def test_stacks_that_do_not_divide_travel_as_they_are(monkeypatch):
    """Five matrices on seven devices: less than a row of padding a device, and small exchanges."""
    monkeypatch.setattr(matrices, "SMALL", 0)
    like = {"embed": {"embedding": jax.ShapeDtypeStruct((40, 32), np.float32)}}
    like["layers"] = {"experts": {"down": jax.ShapeDtypeStruct((1, 5, 32, 24), np.float32)}}
    mesh, specs = optim_helpers.mesh_of(data=7), optim_helpers.replicated(like)
    optimizer = chain.build(Optim(), Precision(), like, specs=specs, axes=mesh.shape)
    found = hlo.collectives(compiled(optimizer, mesh, specs, like))
    share = -(-5 * 32 * 24 // (8 * 7)) * 8
    table = 35 * 32  # five rows on each device; all devices have the other five
    assert sorted(c.bytes for c in found if c.kind == "reduce-scatter") == sorted(
        [4 * 7 * share, 4 * table]
    )
    assert sorted(c.bytes for c in found if c.kind == "all-gather") == sorted(
        [2 * 7 * share, 4 * table]
    )
    sent = [c.bytes for c in found if c.kind == "collective-permute"]
    assert max(sent) <= 4 * share and len(sent) <= 2 * 4
    assert sorted(c.bytes for c in found if c.kind == "all-reduce") == [4 * 2, 8 * 2, 4 * 5 * 32]
    assert {c.kind for c in found} == {
        "reduce-scatter",
        "all-gather",
        "collective-permute",
        "all-reduce",
    }


def test_memory_is_an_eighth_where_stacks_divide():
    """At the sizes of ZAYA1, where every device keeps only little whole."""
    like = optim_helpers.shapes(L=40, D=2048, H=8, K=2, C=128, E=16, F=2048, R=256, V=262_272)
    whole = optim_helpers.bytes_per_device(chain.build(Optim(), Precision(), like))
    share = chain.build(Optim(), Precision(weights="float32"), like, axes=dict(data=8))
    assert whole / 8 <= optim_helpers.bytes_per_device(share) < 1.03 * whole / 8
    experts = 4 * 40 * 16 * 3 * 2048**2  # of which other devices have copies
    copied = chain.build(Optim(), Precision(), like, axes=dict(data=8))
    assert (
        optim_helpers.bytes_per_device(copied)
        == optim_helpers.bytes_per_device(share) + experts / 8
    )


def test_one_device_needs_no_bucket(like):
    assert not chain.build(Optim(), Precision(), like, axes=dict(data=1, expert=1)).layout.sharded


def test_buckets_join_stacks_of_one_shape():
    like = optim_helpers.shapes(L=3, D=16, H=2, K=2, C=8, E=4, F=8, R=16, V=20)
    layout = chain.build(Optim(), Precision(), like, axes=dict(data=8)).layout
    # q, k and o are 16x16, so are the router's down, fc1 and fc2: 3 layers of them.
    bucket = layout.matrices["muon 16x16"]
    assert bucket.count == 3 * 6 and bucket.slots == 3
    assert layout.matrices["muon 8x16"].count == layout.matrices["muon 16x2x8"].count == 12


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
    mesh = optim_helpers.mesh_of(**axes)
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
