"""What pre-training refuses leaves nothing behind, and a run that ended without a loss does not end well."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import cli, config, schedule
from zaya_jax.checkpoint import store
from zaya_jax.config import UserError
from zaya_jax.train import memory
from zaya_jax.train import state as states
from zaya_jax.train.workdir import open_workdir

SMALL = {
    "model.hidden_size": 32, "model.num_hidden_layers": 1, "model.head_dim": 8, "model.moe_intermediate_size": 32,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 32, "data.global_batch": 8,
    "eval.windows": 4, "log.sample_tokens": 4, "optim.name": "adamw", "run.num_steps": 2,
    "data.path": str(Path(cli.__file__).parent / "optim"),
}  # fmt: skip


def settings(**keys):
    given = tiny.get_config()
    given.update_from_flattened_dict(SMALL | {name.replace("__", "."): value for name, value in keys.items()})
    return config.check(given)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    monkeypatch.setattr("signal.signal", lambda *args: None)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


REFUSED = {
    "config.schedule.warmup_fraction=0.6 and decay_fraction=0.5 overlap": {
        "schedule__warmup_fraction": 0.6, "schedule__decay_fraction": 0.5,
    },
    "warmup_fraction=0.6 and decay_steps=1 of 2 steps overlap": {
        "schedule__warmup_fraction": 0.6, "schedule__decay_steps": 1,
    },
    "config.name='../x' is a path": {"name": "../x"},
    "config.name='..' is a path": {"name": ".."},
    "takes 320.0 GiB in this process": {"data__global_batch": 2**24, "data__micro_batch": 2**20, "data__seq_len": 1024},
    "parameters needs": {"model__num_hidden_layers": 10_000, "model__hidden_size": 2**14},
    "data.path": {"data__path": "nowhere"},
    "tokenizer": {"data__tokenizer": "nowhere.json"},
    "config.model.eos_token_id=3": {"model__eos_token_id": 3},
    "config.run.init_from=nowhere holds no checkpoint": {"run__init_from": "nowhere"},
    "nothing://host/x is no folder and no URL": {"checkpoint__durable": "nothing://host/x"},
    "config.checkpoint.local=/dev/null/x cannot be written": {"checkpoint__local": "/dev/null/x"},
    "config.mesh": {"mesh__data": 3},
    "a mixture's source='nowhere' holds no text": {"data__mixture": ("nowhere=1",)},
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
def test_a_refused_run_leaves_nothing(here, says):
    with pytest.raises(UserError) as caught:
        pretrain.train(settings(**REFUSED[says]))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert tree(here) == []


def test_64_bit_numbers_are_refused(here):
    """As a config file may have told JAX; tests/experiments/test_compile.py sets the variable."""
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(
            UserError, match="unset JAX_ENABLE_X64, or take jax_enable_x64 out of the config file"
        ):
            pretrain.train(settings())
    finally:
        jax.config.update("jax_enable_x64", False)
    assert tree(here) == []


@pytest.mark.parametrize("place", ["nowhere", "other@9", "other"])
def test_weights_to_begin_with_are_refused_before_anything_is_compiled(here, monkeypatch, place):
    uncompiled = states.init
    if place.startswith("other"):
        params = {"embed": {"embedding": np.zeros((3, 2), np.float32)}}
        other = store.Store(open_workdir(here / "other", config.Config()))
        other.save(1, {"params": params}, {"step": 1})
        other.close()
    before = tree(here)

    def compiled(config, optimizer, mesh):
        assert isinstance(jax.numpy.zeros(()), jax.core.Tracer), "the fresh state is being made"
        return uncompiled(config, optimizer, mesh)

    monkeypatch.setattr(states, "init", compiled)
    with pytest.raises(UserError, match=rf"config\.run\.init_from={place} (holds no|does not fit)"):
        pretrain.train(settings(run__init_from=place))
    assert tree(here) == before


def test_what_was_there_before_a_refused_run_stays(here):
    (here / "runs" / "tiny").mkdir(parents=True)
    before = tree(here)
    for _ in range(2):
        with pytest.raises(UserError, match="init_from"):
            pretrain.train(settings(run__init_from="nowhere"))
        assert tree(here) == before
    (here / "runs" / "tiny" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds mine\.txt"):
        pretrain.train(settings())
    assert tree(here) == [*before, "runs/tiny/mine.txt"]


def test_a_run_s_folder_stays_when_its_next_start_is_refused(here):
    assert pretrain.train(settings()) == cli.DONE
    before = tree(here)
    for keys in ({"run__num_steps": 1}, {"model__hidden_size": 16}):
        with pytest.raises(UserError):
            pretrain.train(settings(**keys))
        assert tree(here) == before


def test_a_workdir_without_a_name(here):
    with pytest.raises(UserError, match="--workdir='' is empty"):
        pretrain.train(settings(), "")


@pytest.mark.parametrize("kind", ["file", "below a file", "link to itself", "link to nothing"])
def test_a_workdir_that_is_no_folder(here, kind):
    (here / "file").write_text("mine")
    (here / "link").symlink_to("link" if kind == "link to itself" else "nothing/at/all")
    before = tree(here)
    place = {"file": "file", "below a file": "file/a/b"}.get(kind, "link")
    with pytest.raises(UserError, match=f"--workdir={place} cannot be written"):
        pretrain.train(settings(), place)
    assert tree(here) == before


def test_fractions_that_add_up_to_one_pass(here, monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 10)  # the next check refuses
    for up in (0.07, 0.1, 0.3, 0.35, 1.0):
        with pytest.raises(UserError, match="the machine has"):
            pretrain.train(settings(schedule__warmup_fraction=up, schedule__decay_fraction=1 - up))


def test_phases_to_come_are_measured_too(monkeypatch):
    """One that does not fit these devices is a note: it begins with a start of its own, which may be on others."""
    phases = (
        config.Phase("now", 512),
        config.Phase("then", 512, mesh=config.Mesh(fsdp=True)),
        config.Phase("last", 512),
    )
    given = settings(schedule__phases=phases, run__num_steps=6)
    plan = schedule.make_plan(given)

    def check(here, mesh, key):
        if here.mesh.fsdp == too_much:
            raise UserError(f"too much; see {key}")

    monkeypatch.setattr(memory, "check_state", check)
    too_much = True
    (note,) = memory.check_phases(given, plan, 0, jax.devices())
    assert note.startswith(
        "note: phase 'then', from step 3, cannot be trained on these devices: too much; see "
    )
    assert note.endswith("see config.schedule.phases[1].mesh")
    with pytest.raises(UserError, match="too much"):
        memory.check_phases(given, plan, 2, jax.devices())
    assert memory.check_phases(given, plan, 4, jax.devices()) == []
    too_much = False
    with pytest.raises(UserError, match=r"too much; see config\.mesh"):
        memory.check_phases(given, plan, 0, jax.devices())


def test_a_loss_that_is_no_number_is_not_done(capsys):
    assert pretrain.ended_well({"loss": 2.0, "eval/loss": 1.0}) == pretrain.ended_well(None) == cli.DONE
    for figures in ({"loss": math.nan}, {"loss": 1.0, "eval/loss": math.inf}):
        assert pretrain.ended_well(figures) == cli.UNHEALTHY
        assert "is not finite" in capsys.readouterr().out


def test_a_run_that_ends_without_a_loss_says_so_each_time(tmp_path, capsys):
    wild = settings(optim__lr=1000.0, run__skip_update="never", optim__clip_norm=0.0, run__num_steps=12)
    for _ in range(2):
        assert pretrain.train(wild, tmp_path / "run") == cli.UNHEALTHY
        assert "error: the loss of the last step is not finite" in capsys.readouterr().out
