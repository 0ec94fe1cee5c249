"""Devices' bfloat16 copies of weights whose owners have them in float32: the same run, bit for bit,
in less memory."""

import functools
import math
import shutil

import jax
import numpy as np
import pytest
import tiny_runs
from saved_trees import save_tree
from tiny_runs import lines, same_run, settings, train, without_last

from pallas_kernels import chip
from zaya_jax import cli, trees
from zaya_jax.checkpoint import partial
from zaya_jax.checkpoint.run import store
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.checkpoint.writing import parts_by_device
from zaya_jax.compiled.measure import batch_like
from zaya_jax.optim.zero import by_layer, matrices
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.plan import footprint
from zaya_jax.plan.case import StepCase
from zaya_jax.training import snapshot
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

EXPERTS = {"layers/experts/gate_up", "layers/experts/down"}
KEYS = {
    "optim__name": "muon",
    "optim__newton_schulz_steps": 1,  # five compile longer
    "precision__compute": "bfloat16",
    "model__moe_intermediate_size": 24,
    "model__num_hidden_layers": 3,
    "run__num_steps": 6,
}


@pytest.fixture(scope="module", autouse=True)
def of_any_size():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_layer, "MIN_LAYER_SIZE", 0)
        patch.setattr(matrices, "SMALL", 0)
        for module in (by_layer, matrices):
            patch.setattr(module, "WASTE", 1.0)
        yield


@functools.cache
def on(devices, **keys):
    """(config, setup, state's shapes, its snapshots) on so many devices."""
    config = settings(**KEYS | keys)
    setup = states.set_up(config, make_mesh(config.mesh, tiny_runs.ALL_DEVICES[:devices]))
    state = states.abstract(config, setup)
    return config, setup, state, snapshot.Snapshots(setup.optimizer, state)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with a checkpoint of random numbers, as four devices write it."""
    folder = tmp_path_factory.mktemp("copies")
    *_, snapshots = on(4)
    rng = np.random.default_rng(0)
    numbers = {
        name: (9 * rng.standard_normal(x.shape)).astype(x.dtype)
        for name, x in snapshots.locations.arrays.items()
    }
    meta = {"step": 6, "tokens": 6}
    save_tree(store.Store(folder / "given"), 6, trees.nested(numbers), meta, last=True)
    copy = snapshots.take(restored(snapshots, folder / "given"))
    store.Store(folder / "run").save_now(6, copy, meta, snapshots.locations)
    for name, x in trees.flat(partial.read(folder / "run", "*")).items():
        np.testing.assert_array_equal(x, numbers[name], name)
    return folder / "run"


def restored(snapshots, folder):
    source = SealedSource(folder)
    return snapshots.to_state(source.restore(snapshots.abstract, snapshots.locations, exact=True))


def check_copies(optimizer, state, weights):
    """Params are these weights: copies rounded once, all others in full."""
    for path, x in trees.flat(state["params"], "/").items():
        assert x.dtype == ("bfloat16" if path in optimizer.layout.copied else "float32")
        np.testing.assert_array_equal(x, weights[path].astype(x.dtype), path)


def saved(folder):
    return trees.flat(partial.read(folder)["params"], "/")


def check_same(ours, theirs):
    """The same run, but for the order in which norms of weights are summed."""
    same_run(ours, theirs, "grad_norm", "eval/loss")
    for a, b in zip(lines(ours), lines(theirs), strict=True):
        norms = [name for name in a if "_norm" in name]
        assert {"param_norm/experts", "update_norm/experts"} <= set(norms)
        np.testing.assert_allclose(
            [a[name] for name in norms], [b[name] for name in norms], rtol=1e-5
        )
    assert {x.dtype for x in saved(ours).values()} == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"data__micro_batch": 4, "guard__replay_every": 2}])
def test_a_run_with_copies_is_the_run_without(tmp_path, more):
    """From its beginning, and from the other's checkpoint; of two micro-batches and gradients made
    again, too."""
    ours, theirs, keys = tmp_path / "ours", tmp_path / "theirs", KEYS | more
    assert train(ours, 4, **keys) == cli.DONE
    assert train(theirs, 4, precision__weights="float32", **keys) == cli.DONE
    check_same(ours, theirs)
    for folder in (ours, theirs):
        again = without_last(folder, tmp_path / "again")
        assert train(again, 4, **keys) == cli.DONE
        check_same(again, ours)
        shutil.rmtree(again)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_any_mesh_reads_the_owners_weights(run, devices):
    _, setup, _, snapshots = on(devices)
    optimizer = setup.optimizer
    assert set(optimizer.layout.copied) >= EXPERTS if devices > 1 else not optimizer.layout.copied
    state = restored(snapshots, run)
    check_copies(optimizer, state, saved(run))
    theirs = trees.flat(partial.read(run, "*"))
    for copy in (parts_by_device(snapshots.on_devices(state)), snapshots.on_host(state)):
        ours = logical(snapshots, copy)  # and would save the same again
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            np.testing.assert_array_equal(ours[name], x, name)


def logical(snapshots, copy):
    """A checkpoint's arrays, put together from a copy by its list of boxes."""
    found = {name: np.zeros(x.shape, x.dtype) for name, x in snapshots.locations.arrays.items()}
    for part in snapshots.locations.parts:
        found[part.name][part.box] = part.view(np.asarray(copy[part.leaf][part.device]))
    return found


def test_a_run_begins_with_given_weights(run):
    config, setup, _, snapshots = on(4)
    fresh = states.init(config, setup)
    whole = trees.nested(logical(snapshots, parts_by_device(snapshots.on_devices(fresh))))
    check_copies(setup.optimizer, fresh, trees.flat(whole["params"], "/"))
    given = snapshots.with_weights_of(fresh, SealedSource(run).restore)
    check_copies(setup.optimizer, given, saved(run))


def test_a_step_leaves_copies_where_they_were():
    config, setup, state, _ = on(4)
    batch = batch_like(config, setup, 8, 1)
    after, _ = steps.make_train_step(config, setup).eval_shape(state, batch, np.float32(1e-3))
    after, before = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (after, state))
    assert after == before


def test_memory_is_planned():
    for devices, copied in ((4, True), (1, False)):
        config, setup, state, _ = on(devices)
        case = StepCase(config, setup.spread, "mi300x", 8, 1)
        assert bool(case.copied_numel) == copied
        planned = footprint.estimate(case).state
        for part, name in (("params", "weights"), ("optimizer", "optimizer")):
            taken = sum(map(states.bytes_per_device, jax.tree.leaves(state[part])))
            assert planned[name] == pytest.approx(taken, abs=600)  # figures and counters


def test_one_device_rounds_its_experts_once_a_step_and_changes_no_bit():
    """In the kernels, or before the first of two micro-batches; as planned, in 2 bytes a number
    more."""
    keys = {"model__num_hidden_layers": 1, "model__hidden_size": 32}
    tokens = np.random.default_rng(0).integers(0, 64, (2, 2, 16), np.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), tokens)
    batch |= {"segment_ids": 1 + 0 * tokens, "loss_mask": np.ones(tokens.shape, np.float32)}
    found = {}
    with chip.making(chip.Chip("cpu", "NVIDIA H200", ("grouped_mlp",))):
        for weights in ("compute", "float32"):
            config, setup, *_ = on(1, precision__weights=weights, **keys)
            step = steps.make_train_step(config, setup)
            state = step(states.init(config, setup), batch, np.float32(1e-3))
            planned = footprint.estimate(StepCase(config, setup.spread, "h200", 4, 2))
            found[weights] = jax.device_get(state), planned.bytes_by_moment["backward"]
    (ours, more), (theirs, less) = found.values()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    weights = [w for w in setup.optimizer.layout.weights if w.path in EXPERTS]
    assert more - less == 2 * sum(math.prod(w.shape) for w in weights)


def test_what_has_no_copies():
    """Products that may be float32, and weights that are in parts already."""
    for more in (
        {"precision__compute": "float32"},
        {"run__lora": 2, "run__init_from": "x"},
        {"mesh__fsdp": True},
        {"precision__weights": "float32"},
        {"mesh__tensor": 2},
    ):
        assert not EXPERTS & on(4, **more)[1].optimizer.layout.copied.keys()
    assert not any("router" in path for path in on(4)[1].optimizer.layout.copied)
