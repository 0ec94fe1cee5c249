"""A small step of the run's own form is compared with a CPU's numbers, and gradients are computed
again on the same devices and on others: sound ones pass on every mesh, planted faults are found and
named."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

from pallas_kernels import chip
from pallas_kernels.attention import triton
from zaya_jax import cli, config, schedule
from zaya_jax.config import files
from zaya_jax.guard import first_step, replay
from zaya_jax.guard.replay import Replay
from zaya_jax.hardware import host, sizing
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.training import state as states
from zaya_jax.training import step as steps


def checked(devices, injected=None, **keys):
    """What the check of a first step finds."""
    settings = tiny_runs.settings(**tiny_runs.GUARDED | {"mesh.data": -1} | keys)
    settings = schedule.phase_config(settings, schedule.make_plan(settings).step(1).phase)
    setup = states.set_up(settings, make_mesh(settings.mesh, jax.devices()[:devices]))
    state = states.init(settings, setup)
    ids = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    rows = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": np.ones((8, 16), np.int32),
        "positions": np.tile(np.arange(16, dtype=np.int32), (8, 1)),
        "loss_mask": np.ones((8, 16), np.float32),
    }
    batch = steps.put_batch(setup.mesh, rows, 1, setup.spread)
    inject = injected and injected.gradients(setup.mesh)
    return Replay(settings, setup, inject)(state["params"], state["balance"].bias, batch)


SOUND = [(4, {}, None, None)]  # devices, keys, what is wrong, and what is found
SLOW = [
    (1, {}, None, None),
    (2, {}, None, None),
    (4, {"mesh__expert": 2}, None, None),
    (4, {"mesh__context": 2}, None, None),
    (4, {"mesh__tensor": 2}, None, None),
    (4, {"mesh__context": 2, "mesh__ring": True}, None, None),
    (4, {"mesh__fsdp": True}, None, None),
    (4, {"mesh__tensor": 2, "mesh__tsp": True}, None, None),
    (4, {"remat": "layer"}, None, None),
    (4, {"precision__compute": "bfloat16"}, None, None),
    # one that is wrong once differs from itself
    (4, {}, {"kind": "flip", "device": 1, "times": 1}, ("unstable", (1,))),
    (1, {}, {"kind": "flip", "device": 0, "times": 1}, ("unstable", (0,))),
    # one alone that is always wrong is not found
    (1, {}, {"kind": "flip", "device": 0}, None),
    (4, {}, {"kind": "nonfinite", "device": 3}, ("disagrees", (3,))),
    (2, {}, {"kind": "flip", "device": 1}, ("disagrees", (0, 1))),
    # of devices that compute together the group is named
    (8, {"mesh__tensor": 2}, {"kind": "flip", "device": 6}, ("disagrees", (6, 7))),
]


@pytest.mark.parametrize(
    ("devices", "keys", "fault", "expected"),
    [*SOUND, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_wrong_device_is_named_and_sound_ones_agree_wherever_the_batch_lies(
    devices, keys, fault, expected, faulty
):
    found = checked(devices, fault and faulty(fault), **keys)
    assert (found and (found.kind, found.devices)) == expected
    undecided = found is not None and "there is no third to decide" in found.why
    assert undecided == (expected is not None and devices == 2)


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
        assert found.devices == tuple(range(guilty * group, guilty * group + group))
        assert found.weights == ("d",)
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

    width = 8 * x.dtype.itemsize
    opposite = bits.copy()  # -x in the place after x
    opposite[5] = opposite[4] ^ bits.dtype.type(1 << (width - 1))
    others = [bits, opposite]
    for place, bit in itertools.product((0, 1, 52, 104), range(width)):
        others.append(bits.copy())
        others[-1][place] ^= bits.dtype.type(1 << bit)
    swaps = (bits, 0, 1), (bits, 3, 80), (bits, 7, 8), (bits, 0, 104), (opposite, 4, 5)
    for base, a, b in swaps:
        others.append(base.copy())
        others[-1][[a, b]] = base[[b, a]]
    found = np.asarray(of(jnp.array(others)))
    assert len({x.tobytes() for x in found}) == len(others)
    assert (found == found.astype(np.int64)).all() and found.max() < 1 << 16
    np.testing.assert_array_equal(found, np.asarray(of(jnp.array(others))))


INTERPRETED = chip.Chip("cpu", "gfx942")
PLAIN = {"compute": "float32", "newton_schulz": "float32", "matmul": "highest"}


def given(mesh=None, precision=None, **keys) -> config.Config:
    kinds = keys.pop("kinds", ("hybrid",))
    model = {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": 9}
    wanted = {"model": model, "mesh": mesh or {}, "precision": PLAIN | (precision or {})}
    return config.check(wanted | {"guard": {"try_step": "always"}} | keys)


def tried(of: config.Config, devices: int, micro_batches: int = 1) -> tuple[str, list[str]]:
    """The line of a fault, and what was said."""
    said: list[str] = []
    mesh = make_mesh(of.mesh, jax.devices()[:devices])
    return first_step.try_step(of, mesh, micro_batches, said.append), said


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def expected(monkeypatch):
    """In the place of the step its expected numbers; gives a list of what was asked."""
    asked = []

    def numbers(of, mesh, micro_batches, options=None):
        case = files.read_json(first_step.EXPECTED)["numbers"][
            first_step.small_model_name(of.model)
        ]
        asked.append((of, mesh.size, options))
        found = case["step"] | case[of.optim.name]
        return {name: np.array(x) for name, x in found.items()}

    monkeypatch.setattr(first_step, "run_small_model", numbers)
    return asked


KINDS = ("hybrid", "hybrid_sliding", "hybrid_linear")
BFLOAT16 = {"compute": "bfloat16", "newton_schulz": "compute"}
RIGHT = {"data, two micro-batches": (2, 2, {"optim": {"name": "adamw"}})}
SLOWLY_RIGHT = {
    "fsdp and experts": (4, 1, {"mesh": {"expert": 2, "fsdp": True}, "precision": BFLOAT16}),
    "one device": (1, 1, {"optim": {"name": "adamw"}}),
    "one device in bfloat16": (1, 1, {"precision": BFLOAT16}),
    "context and tensor": (4, 1, {"mesh": {"context": 2, "tensor": 2}, "kinds": KINDS[:2]}),
    "all kinds of layers": (2, 1, {"kinds": KINDS, "remat": "attention"}),
    "TSP": (4, 1, {"mesh": {"tensor": 2, "tsp": True}, "precision": BFLOAT16}),
}
CASES = [pytest.param(*case, id=name) for name, case in RIGHT.items()]
CASES += [
    pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOWLY_RIGHT.items()
]


@pytest.mark.parametrize(("devices", "micro_batches", "keys"), CASES)
def test_a_right_step_is_within_its_formats_limits(devices, micro_batches, keys):
    wrong, said = tried(given(**keys), devices, micro_batches)
    assert not wrong
    assert len(said) == 1 and said[0].startswith("the step was tried on this machine and is right")


@pytest.mark.slow
def test_a_wrong_kernel_is_named_with_the_line_that_goes_on_without_it(monkeypatch):
    forward = triton.forward

    def wrong(*args, **kwargs):
        out, lse = forward(*args, **kwargs)
        return out.at[:, -16:].multiply(1.5), lse

    monkeypatch.setattr(triton, "forward", wrong)
    with chip.making(INTERPRETED):
        line, _ = tried(given(kernels=("attention", "cca_mix"), precision=BFLOAT16), 1)
    assert line.startswith("error: the step is wrong on this machine")
    assert "right without our kernels of attention: repeat" in line
    assert line.endswith("--config.kernels=cca_mix")


def test_a_wrong_collective_is_told_from_a_wrong_device(monkeypatch):
    monkeypatch.setattr(sizing, "CAUTIOUS", ())
    scatter = jax.lax.psum_scatter
    monkeypatch.setattr(
        jax.lax, "psum_scatter", lambda x, *args, **kwargs: scatter(x[::-1], *args, **kwargs)[::-1]
    )
    line, _ = tried(given(optim={"name": "adamw"}), 2)
    assert "embed.embedding by " in line
    assert "It is right without an exchange between devices: check their links" in line


def test_a_swapped_format_is_no_kernels_fault(monkeypatch):
    made = steps.make_train_step

    def swapped(of, *args):
        rounded = dataclasses.replace(of.precision, router="bfloat16")
        return made(dataclasses.replace(of, precision=rounded), *args)

    monkeypatch.setattr(steps, "make_train_step", swapped)
    line, said = tried(given(optim={"name": "adamw"}), 1)
    assert "error: the step is wrong" in line
    assert "There is nothing else to leave out. XLA or the driver is at fault" in line
    assert not said


def test_a_swapped_flag_is_named(monkeypatch):
    """The real compiler, told to take sums in any order, and gradients that pass through one."""
    options, made, scatter = host.compiler_options, steps.make_train_step, jax.lax.psum_scatter

    def swapped(*args):
        with monkeypatch.context() as patch:
            fast = {"xla_cpu_enable_fast_math": True}
            patch.setattr(host, "compiler_options", lambda target: options(target) | fast)
            return made(*args)

    monkeypatch.setattr(steps, "make_train_step", swapped)
    monkeypatch.setattr(
        jax.lax,
        "psum_scatter",
        lambda x, *args, **kwargs: scatter(x + ((x + 1e30) - 1e30), *args, **kwargs),
    )
    unknown = ("other schedule", "xla_no_such_option", False)
    order = ("order of sums", "xla_cpu_enable_fast_math", False)
    monkeypatch.setattr(sizing, "CAUTIOUS", (unknown, order))
    # With a remat of its own: programs of one config are made once in all these tests.
    line, _ = tried(given(optim={"name": "adamw"}, remat="layer"), 2)
    assert " by 1 of it, at most " in line
    assert "What could not be tried: without the compiler's other schedule (" in line
    assert "No such compile option: 'xla_no_such_option')" in line
    assert "It is right without the compiler's order of sums: repeat" in line
    assert line.endswith('XLA_FLAGS="$XLA_FLAGS --xla_cpu_enable_fast_math=false"')


def test_all_that_was_left_out_in_vain_is_said(monkeypatch, expected):
    monkeypatch.setattr(first_step, "differences", lambda *args: ["loss by 1 of it"])
    line, _ = tried(given(), 4)
    for without, option, value in sizing.CAUTIOUS:
        assert f"without the compiler's {without}, and without " in line
        assert any(options == {option: value} for _, _, options in expected)
    assert "without an exchange between devices. XLA or the driver is at fault" in line


def test_a_right_step_is_remembered_until_the_machine_changes(monkeypatch, expected):
    auto = given(guard={"try_step": "auto"})
    assert tried(auto, 1) == ("", []) and not expected  # a CPU's own step is not tried
    monkeypatch.setattr(chip.Chip, "is_host", False)
    assert len(tried(auto, 1)[1]) == 1 and tried(auto, 1) == ("", []) and len(expected) == 1
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    tried(auto, 1)
    tried(dataclasses.replace(auto, remat="layer"), 1)
    tried(auto, 2)
    monkeypatch.setattr(sizing, "two_levels_under", lambda of: 0)  # sums over nodes go otherwise
    tried(auto, 2)
    assert len(expected) == 5
    assert tried(given(guard={"try_step": "never"}), 1) == ("", []) and len(expected) == 5


def test_a_mesh_that_does_not_divide_the_small_model_is_said_and_not_tried():
    line, said = tried(given(mesh={"expert": 3}), 3)
    assert not line and said[0].startswith("note: the step was not tried on this machine: ")
    assert first_step.EXPECTED.stat().st_size < 200_000


def test_a_wrong_step_ends_the_run_before_it_trains(monkeypatch, expected, tmp_path, capsys):
    monkeypatch.setattr(first_step, "differences", lambda *args: ["loss by 1 (at most 0.1)"])
    keys = {"data__path": tiny_runs.write_corpus(tmp_path / "corpus"), "run__num_steps": 1}
    code = tiny_runs.train(tmp_path / "run", guard__try_step="always", **keys)
    assert code == cli.HARDWARE and "error: the step is wrong" in capsys.readouterr().out
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
