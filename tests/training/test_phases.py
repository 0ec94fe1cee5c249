"""A run through phases that change everything at each border: ended by itself where the mesh does,
stopped anywhere."""

import subprocess
import sys
from pathlib import Path

import jax
import multiprocess_runs
import numpy as np
import pytest
import tiny_runs
from refusals import check_refused

from zaya_jax import cli, config, schedule
from zaya_jax.checkpoint import folders
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.parallel.spread import spread_of
from zaya_jax.run import train
from zaya_jax.training import notes, recipe

SMALL = Path(__file__).with_name("small_phases.py")
BORDERS = [3, 6, 9]
LAST = 12
# Compiles in half the time of Muon, which the slow tests have; several processes are compared with
# it.
QUICK = {"optim__name": "adamw", "precision__compute": "float32"}


def settings(path=SMALL, **keys):
    """The config of a file, with other keys."""
    found: dict = {}
    exec(compile(path.read_text(), path, "exec"), found)
    given = found["get_config"]()
    given.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in keys.items()}
    )
    return config.check(given)


def newest(workdir):
    """The step of the newest checkpoint."""
    return max(folders.numbered(workdir / "checkpoints"), default=0)


def start(workdir, **keys):
    """One start of the program in this process."""
    return train(settings(**keys), workdir)


def through(workdir, **keys):
    """The starts of a run until it is done, each but the last at a border; the steps after which
    they ended."""
    codes, ends = [], []
    while not codes or codes[-1] == cli.PREEMPTED:
        codes.append(start(workdir, **keys))
        ends.append(newest(workdir))
    assert codes[-1] == cli.DONE
    return ends


def same(a, b):
    """The same run, where both evaluated too; a stop leaves that out."""
    tiny_runs.same_run(a, b, "grad_norm", "lr", "tokens", "target_tokens")
    assert [line["step"] for line in tiny_runs.lines(a)] == list(range(1, LAST + 1))
    for mine, other in zip(tiny_runs.lines(a), tiny_runs.lines(b), strict=True):
        if "eval/loss" in mine and "eval/loss" in other:
            assert mine["eval/loss"] == other["eval/loss"]


PHASES = [
    "phase 'pretrain 2' begins with mesh data rest x expert 4, fsdp",
    "phase 'midtrain' begins with mesh data rest x context 2",
    "phase 'sft' begins with mesh data rest x context 4, ring",
]


@pytest.mark.slow
def test_stopped_anywhere_it_is_the_same_run(tmp_path):
    assert through(tmp_path / "whole") == [*BORDERS, LAST]
    for step in range(1, LAST):
        while newest(tmp_path / "stopped") < step:
            start(tmp_path / "stopped", run__num_steps=step)
        assert newest(tmp_path / "stopped") == step
    through(tmp_path / "stopped")
    same(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_ends_at_each_border_to_another_mesh_and_the_same_command_goes_on(tmp_path):
    """Two processes start again at each border, on meshes that lie on them in four ways, and have
    the figures of one."""
    assert through(tmp_path / "one", **QUICK) == [*BORDERS, LAST]
    options = [f"--config.{key.replace('__', '.')}={value}" for key, value in QUICK.items()]
    program = ["-m", "experiments.pretrain", f"--config={SMALL}", f"--workdir={tmp_path / 'run'}"]
    for step, phase in zip([*BORDERS, LAST], [*PHASES, ""], strict=True):
        with multiprocess_runs.start([*program, *options], 2, tmp_path / "out", devices=4) as run:
            results = run.wait()
        code, out = cli.PREEMPTED if phase else cli.DONE, results[0].out
        assert [result.code for result in results] == [code] * 2, results
        assert newest(tmp_path / "run") == step and "micro-batches" in out and "best_fit" in out
        said = f"saved after step {step}; {phase}: the same command continues."
        assert (said in out) == bool(phase)
    plan = schedule.make_plan(settings())
    ours, theirs = tiny_runs.lines(tmp_path / "run"), tiny_runs.lines(tmp_path / "one")
    assert [line["step"] for line in ours] == list(range(1, LAST + 1))
    assert [line["tokens"] for line in ours] == [plan.tokens_of_step(n + 1) for n in range(LAST)]
    assert [line["step"] for line in ours if "eval/loss" in line] == list(range(2, LAST + 1, 2))
    np.testing.assert_allclose([x["loss"] for x in ours], [x["loss"] for x in theirs], rtol=1e-4)
    held_out = [[x["eval/loss"] for x in run if "eval/loss" in x] for run in (ours, theirs)]
    np.testing.assert_allclose(*held_out, rtol=1e-4)
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")


def test_phases_that_need_other_devices_are_a_note_until_they_begin(monkeypatch):
    devices = jax.devices()
    two, eight = (
        recipe.make_recipe(settings(), devices[:2]),
        recipe.make_recipe(settings(), devices),
    )
    misfits = recipe.check(two)
    assert len(misfits) == 2 and "phase 'pretrain 2', from step 4," in misfits[0]
    assert (
        "config.schedule.phases[1].mesh has data x expert x context x tensor = -1 x 4 x 1 x 1"
        in misfits[0]
    )
    assert recipe.check(eight) == []
    table = notes.phase_table(eight)
    jump = (
        "note: the learning rate jumps from 0.001 to 0.002 where phase 'midtrain' begins, at step 7"
    )
    assert jump in table and "no jump" not in table
    assert recipe.check(recipe.make_recipe(settings(run__num_steps=3), devices[:2])) == []
    check_refused(r"phases\[1\]\.mesh .* there are 2 devices", recipe.check, two, 3)
    recipe.check(two, 6)  # the phase on four is over
    assert [eight.last_step_here(n) for n in (1, 3, 4, 9, 10)] == [3, 3, 6, 9, LAST]


def test_a_phase_whose_rows_the_processes_cannot_share_does_not_fit_and_has_no_mesh(monkeypatch):
    def refuse(mesh):
        raise config.UserError("no process has whole rows")

    (first, *_), devices = recipe.make_recipe(settings()).phases.values(), jax.devices()
    monkeypatch.setattr(recipe, "rows_of_process", refuse)
    placed = recipe.make_recipe(settings(), devices).phases[first.index]
    assert placed.misfit and placed.mesh is None and placed.spread == first.spread


@pytest.mark.parametrize(
    ("index", "keys", "words"),
    [
        (2, {"mesh": {"context": 3}}, r"phases\[2\]\.seq_len=64 .*phases\[2\]\.mesh\.context=3"),
        (
            2,
            {"eval_seq_len": 66},
            r"phases\[2\]\.eval_seq_len=66 does not divide into 2 x 2 pieces",
        ),
        (3, {"eval_seq_len": 2048}, r"phases\[3\]\.eval_seq_len=2048 is above"),
        (
            3,
            {"micro_batch": 1},
            r"\(config\.schedule\.phases\[3\]\.micro_batch\) .* over 2 devices",
        ),
        (1, {"mixture": ("a",)}, r"phases\[1\]\.mixture has 'a'"),
    ],
)
def test_every_phase_is_checked_before_anything_begins(tmp_path, index, keys, words):
    given = config.to_dict(settings())
    given["schedule"]["phases"][index] |= keys
    check_refused(words, train, config.check(given), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_is_described_without_devices_data_or_files(tmp_path):
    path = Path(__file__).parents[2] / "experiments" / "configs" / "zaya1_base.py"
    command = [sys.executable, "-m", "experiments.pretrain", f"--config={path}", "--describe"]
    command.append("--config.data.seq_len=8192")
    environ = {
        "PYTHONPATH": str(multiprocess_runs.ROOT),
        "JAX_PLATFORMS": "none",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == cli.DONE, done.stderr
    assert not list(tmp_path.iterdir())
    plan = schedule.make_plan(settings(path))
    assert f"{plan.last_step:,} steps, {plan.tokens_at_end:,} tokens in all" in done.stdout
    assert all(segment.phase.name in done.stdout for segment in plan.segments)
    assert "0.0006 to 0.0002, cosine" in done.stdout
    assert "it has no jump at a border between phases" in done.stdout
    assert "note: config.data.seq_len=8192 has no effect: each of schedule" in done.stdout


def test_each_phase_of_the_full_size_recipe_fits_1024_devices_at_once():
    path = Path(__file__).parents[2] / "experiments" / "configs" / "zaya1_base.py"
    given = settings(path, data__path="/srv/data")
    assert recipe.check(recipe.make_recipe(given)) == []
    plan = schedule.make_plan(given)
    phases = [segments[0].phase for _, segments, *_ in schedule.phases_of(given, plan)]
    assert all(path.startswith("/srv/data/") for phase in phases for path in phase.mixture)
    for phase in phases:
        spread = spread_of(phase.mesh, shape_of(phase.mesh, 1024))
        rows = phase.global_batch // (spread.data * spread.expert)
        # all of a step at once
        assert rows * phase.seq_len // spread.context == 16_384
        assert phase.micro_batch == phase.global_batch
