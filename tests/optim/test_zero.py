"""ZeRO-1 gives the unsharded chain's parameters, with the collectives, bytes and memory that its
docstring promises."""

import math

import jax
import logical_state
import numpy as np
import optim_helpers
import pytest
from jax.sharding import PartitionSpec
from rows import slow

from zaya_jax.compiled import hlo
from zaya_jax.config import Optim, Precision, UserError
from zaya_jax.optim import chain
from zaya_jax.optim.zero import matrices


@pytest.fixture(scope="module")
def like():
    return optim_helpers.shapes()


def tensor_specs(like):
    """Weights sharded over matrix dims too: expert width over tensor, q over both its dims, the
    embedding by rows."""
    specs = optim_helpers.expert_specs(like)
    specs["layers"]["experts"] = {
        "gate_up": PartitionSpec(None, "expert", None, None, "tensor"),
        "down": PartitionSpec(None, "expert", "tensor"),
    }
    specs["layers"]["cca"]["q"]["kernel"] = PartitionSpec(None, "data", "tensor")
    specs["embed"]["embedding"] = PartitionSpec("tensor")
    specs["head"]["bias"] = PartitionSpec(("data", "tensor"))
    return specs


MESHES = {
    "data and expert": (dict(data=4, expert=2), optim_helpers.replicated),
    "sharded experts": (dict(data=2, expert=4), optim_helpers.expert_specs),
    "sharded matrices": (dict(data=2, expert=2, tensor=2), tensor_specs),
    "odd": (dict(data=3, expert=2), optim_helpers.expert_specs),
    "prime": (dict(data=7), optim_helpers.replicated),
}


@pytest.mark.slow  # tests/parallel/test_train.py has the whole step on a mesh
@pytest.mark.parametrize(
    ("name", "together"),
    [*((name, False) for name in MESHES), ("sharded matrices", True), ("sharded experts", True)],
)
def test_fifty_steps_give_the_unsharded_parameters(name, together, monkeypatch):
    if not together:
        monkeypatch.setattr(matrices, "SMALL", 0)
        monkeypatch.setattr(matrices, "WASTE", 1.0)
    axes, make_specs = MESHES[name]
    like = optim_helpers.shapes(V=52)
    error, (whole, state), (sharded, mesh_state) = optim_helpers.compare(
        optim_helpers.mesh_of(**axes), like, make_specs(like), steps=50
    )
    assert error < 1e-5
    assert {bucket.summed_whole for bucket in sharded.layout.matrices.values()} == {together}
    for figure, value in state.figures.items():
        np.testing.assert_allclose(mesh_state.figures[figure], value, rtol=1e-4, err_msg=figure)
    # The logical state is the unsharded one's; tests/parallel/test_checkpoints.py carries it to
    # other meshes.
    logical, expected = logical_state.of(sharded, mesh_state), logical_state.of(whole, state)
    assert jax.tree.structure(logical) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(logical), jax.tree.leaves(expected), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


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
        traffic = layout.traffic(name, size)
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
    step, _ = optim_helpers.mesh_step(optimizer, mesh, specs)
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
    optimizer = chain.build(Optim(), Precision(), like, axes=dict(data=1, expert=1))
    assert not optimizer.layout.sharded


def test_buckets_join_stacks_of_one_shape():
    like = optim_helpers.shapes(L=3, D=16, H=2, K=2, C=8, E=4, F=8, R=16, V=20)
    layout = chain.build(Optim(), Precision(), like, axes=dict(data=8)).layout
    # q, k and o are 16x16, so are the router's down, fc1 and fc2: 3 layers of them.
    bucket = layout.matrices["muon 16x16"]
    assert bucket.count == 3 * 6 and bucket.slots == 3
    assert layout.matrices["muon 8x16"].count == layout.matrices["muon 16x2x8"].count == 12


def test_sizes_that_do_not_divide_are_named(like):
    specs = optim_helpers.expert_specs(like)
    with pytest.raises(
        UserError, match=r"layers/experts/down \[5, 4, 16, 32\] is sharded over 3 devices"
    ):
        chain.build(Optim(), Precision(), like, specs=specs, axes=dict(data=1, expert=3))
