"""Gradients computed again on the same devices and on others: sound ones agree bit for bit, a wrong
one is named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

from tools import faults
from zaya_jax import schedule
from zaya_jax.guard import replay
from zaya_jax.guard.replay import Replay
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.training import state as states
from zaya_jax.training import step as steps


def small(**keys):
    return tiny_runs.settings(**tiny_runs.GUARDED | {"mesh.data": -1} | keys)


def made(settings, devices):
    """(config, setup, state, batch) of a first step."""
    settings = schedule.phase_config(settings, schedule.make_plan(settings).step(1).phase)
    setup = states.set_up(settings, make_mesh(settings.mesh, jax.devices()[:devices]))
    state = states.init(settings, setup)
    ids = np.random.default_rng(0).integers(0, 256, (8, 17))
    rows = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": np.ones((8, 16)),
        "positions": np.tile(np.arange(16), (8, 1)),
    }
    rows = {name: x.astype(np.int32) for name, x in rows.items()} | {
        "loss_mask": np.ones((8, 16), np.float32)
    }
    return settings, setup, state, steps.put_batch(setup.mesh, rows, 1, setup.spread)


def checked(settings, devices, injected=None):
    settings, setup, state, batch = made(settings, devices)
    hook = injected and injected.gradients(setup.mesh)
    return Replay(settings, setup, hook)(state["params"], state["balance"].bias, batch)


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Asks for faults, and gives their hooks."""

    def ask(*wanted):
        path = tmp_path / "faults.json"
        path.write_text(json.dumps(wanted))
        monkeypatch.setenv(faults.VARIABLE, str(path))
        return faults.requested()

    return ask


OTHERS = (
    (1, {}),
    (2, {}),
    (4, {"mesh__expert": 2}),
    (4, {"mesh__context": 2}),
    (4, {"mesh__tensor": 2}),
    (4, {"mesh__context": 2, "mesh__ring": True}),
    (4, {"mesh__fsdp": True}),
    (4, {"mesh__tensor": 2, "mesh__tsp": True}),
    (4, {"remat": "layer"}),
    (4, {"precision__compute": "bfloat16"}),
)
MESHES = [(4, {}), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in OTHERS)]


@pytest.mark.parametrize(("devices", "keys"), MESHES)
def test_sound_devices_agree_wherever_the_batch_lies(devices, keys):
    assert checked(small(**keys), devices) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "keys", "fault", "kind", "named"),
    [
        # one that is wrong once differs from itself
        (4, {}, {"kind": "flip", "device": 1, "times": 1}, "unstable", (1,)),
        (1, {}, {"kind": "flip", "device": 0, "times": 1}, "unstable", (0,)),
        (4, {}, {"kind": "nonfinite", "device": 3}, "disagrees", (3,)),
        (2, {}, {"kind": "flip", "device": 1}, "disagrees", (0, 1)),
        # of devices that compute together the group is named
        (8, {"mesh__tensor": 2}, {"kind": "flip", "device": 6}, "disagrees", (6, 7)),
    ],
)
def test_a_wrong_device_is_named(devices, keys, fault, kind, named, faulty):
    found = checked(small(**keys), devices, faulty(fault))
    assert (found.kind, found.devices) == (kind, named)
    assert ("a third to decide is not there" in found.why) == (devices == 2)


@pytest.mark.slow
def test_one_alone_that_is_always_wrong_is_not_found(faulty):
    assert checked(small(), 1, faulty({"kind": "flip", "device": 0})) is None


def hashes(parts, words=5, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 16, (parts, words)).astype(np.float32)


@pytest.mark.parametrize("parts", [3, 4, 7])
@pytest.mark.parametrize("group", [1, 2])
def test_votes(parts, group):
    """Each device in turn is wrong."""
    names, everything = list("abcde"), np.ones(5, bool)
    for guilty in range(parts):
        seen = [np.roll(hashes(parts).repeat(group, 0), by * group, axis=0) for by in range(3)]
        assert replay.differs_from_others(seen, everything, parts, names) is None
        for by, x in enumerate(seen):
            x[guilty * group, 3] += 1 + by
        assert replay.differs_from_others(seen[:2], everything, parts, names)
        found = replay.differs_from_others(seen, everything, parts, names)
        assert found.devices == tuple(
            range(guilty * group, guilty * group + group)
        ) and found.weights == ("d",)
    first, again = hashes(parts), hashes(parts)
    assert replay.differs_from_itself(first, again, parts, names) is None
    again[:, 0] += 1
    assert replay.differs_from_itself(first, again, parts, names).kind == "irreproducible"


def test_a_device_differs_once_and_a_program_often():
    right, wrong = hashes(1), hashes(1) + 1
    repeats = [right] * replay.REPEATS
    assert replay.all_but_one_agree([*repeats[1:], wrong])
    assert not replay.all_but_one_agree([*repeats[2:], wrong, wrong])
    assert not replay.all_but_one_agree([right + n for n in range(replay.REPEATS)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_hash_sees_every_bit_and_every_place(dtype):
    x = jax.random.normal(jax.random.key(0), (3, 5, 7), dtype)
    bits = np.asarray(
        jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
    ).ravel()

    @jax.jit
    @jax.vmap
    def of(bits):
        return replay.hashed(jax.lax.bitcast_convert_type(bits, dtype).reshape(x.shape))

    others = [bits]
    for place in (0, 1, 52, 104):
        for bit in range(8 * x.dtype.itemsize):
            others.append(bits.copy())
            others[-1][place] ^= bits.dtype.type(1 << bit)
    for a, b in ((0, 1), (3, 80), (7, 8), (0, 104)):
        others.append(bits.copy())
        others[-1][[a, b]] = bits[[b, a]]
    opposite = bits.copy()
    # x and -x in each other's places
    opposite[5] = opposite[4] ^ bits.dtype.type(1 << (8 * x.dtype.itemsize - 1))
    others += [opposite.copy(), opposite.copy()]
    others[-1][[4, 5]] = opposite[[5, 4]]
    found = np.asarray(of(jnp.array(others)))
    assert len({x.tobytes() for x in found}) == len(others)
    assert (found == found.astype(np.int64)).all() and found.max() < 1 << 16
    np.testing.assert_array_equal(found, np.asarray(of(jnp.array(others))))
