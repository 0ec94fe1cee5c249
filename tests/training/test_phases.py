"""A run through phases that change everything at each border: ended by itself where the mesh does,
stopped anywhere."""

import subprocess
import sys
from pathlib import Path

import jax
import multiprocess_runs
import pytest
import tiny_runs
from refusals import check_refused, raising

from zaya_jax import cli, config, schedule
from zaya_jax.checkpoint import folders
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.parallel.spread import spread_of
from zaya_jax.run import train
from zaya_jax.training import notes, recipe

SMALL = Path(__file__).with_name("small_phases.py")
FULL_SIZE = config.SHIPPED / "zaya1_base.py"
BORDERS = [3, 6, 9]
LAST = 12
# Compiles in half the time of Muon, which the slow tests have; several processes are compared with
# it.
QUICK = {"optim__name": "adamw", "precision__compute": "float32"}


def settings(path=SMALL, **keys):
    """The config of a file, with other keys."""
    return tiny_runs.changed(config.read_config_dict(str(path)), **keys)


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
    assert list(tiny_runs.by_step(a, "loss")) == list(range(1, LAST + 1))
    ours, theirs = (tiny_runs.by_step(workdir, "eval/loss") for workdir in (a, b))
    both = ours.keys() & theirs.keys()
    assert {step: ours[step] for step in both} == {step: theirs[step] for step in both}


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
    plan, every_step = schedule.make_plan(settings()), range(1, LAST + 1)
    tokens = tiny_runs.by_step(tmp_path / "run", "tokens")
    assert tokens == {number: plan.tokens_of_step(number) for number in every_step}
    for figure, steps in (("loss", every_step), ("eval/loss", range(2, LAST + 1, 2))):
        ours, theirs = (tiny_runs.by_step(tmp_path / name, figure) for name in ("run", "one"))
        assert list(ours) == list(steps) and ours == pytest.approx(theirs, rel=1e-4)
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")


def test_phases_that_need_other_devices_are_a_note_until_they_begin():
    devices = jax.devices()
    two, eight = (recipe.make_recipe(settings(), devices[:count]) for count in (2, 8))
    misfit, _ = recipe.check(two)
    assert "phase 'pretrain 2', from step 4," in misfit
    mesh = "config.schedule.phases[1].mesh has data x expert x context x tensor = -1 x 4 x 1 x 1"
    assert mesh in misfit
    assert recipe.check(eight) == []
    table = notes.phase_table(eight)
    jump = "the learning rate jumps from 0.001 to 0.002 where phase 'midtrain' begins, at step 7"
    assert f"note: {jump}" in table and "no jump" not in table
    assert recipe.check(recipe.make_recipe(settings(run__num_steps=3), devices[:2])) == []
    check_refused(r"phases\[1\]\.mesh .* there are 2 devices", recipe.check, two, 3)
    recipe.check(two, 6)  # the phase on four is over
    assert [eight.last_step_here(n) for n in (1, 3, 4, 9, 10)] == [3, 3, 6, 9, LAST]


def test_a_phase_whose_rows_the_processes_cannot_share_does_not_fit_and_has_no_mesh(monkeypatch):
    (first, *_), devices = recipe.make_recipe(settings()).phases.values(), jax.devices()
    refuse = raising(config.UserError("no process has whole rows"))
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
    program = [sys.executable, "-m", "experiments.pretrain", f"--config={FULL_SIZE}"]
    command = [*program, "--describe", "--config.data.seq_len=8192"]
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
    plan = schedule.make_plan(settings(FULL_SIZE))
    for words in (
        f"{plan.last_step:,} steps, {plan.tokens_at_end:,} tokens in all",
        *(segment.phase.name for segment in plan.segments),
        "0.0006 to 0.0002, cosine",
        "it has no jump at a border between phases",
        "note: config.data.seq_len=8192 has no effect: each of schedule",
    ):
        assert words in done.stdout


def test_each_phase_of_the_full_size_recipe_fits_1024_devices_at_once():
    given = settings(FULL_SIZE, data__path="/srv/data")
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
