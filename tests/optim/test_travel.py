"""Gradients travel to the devices that own them and back, on any number of devices, and every
number arrives."""

import itertools
import math

import jax
import jax.numpy as jnp
import logical_state
import numpy as np
import optim_helpers
import pytest
from jax.sharding import PartitionSpec as P
from rows import fast_alone

from zaya_jax.optim import zero
from zaya_jax.optim.zero import matrices

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
