"""Evaluations while a run trains: named ones, and lm-eval's tasks; their figures are those of the
program, the same after a stop, and change nothing else.

The loop of tasks is tested with a stand-in for the harness, which asks the model as a task does;
with lm-eval installed one test runs a task of its own."""

import json
import shutil
import signal
import types

import jax
import multiprocess_runs
import pytest
import tiny_runs
from refusals import check_refused
from test_ends import run, signalled

import zaya_jax as zj
from experiments.evaluate import __main__ as evaluate
from zaya_jax import cli
from zaya_jax.cluster import multihost
from zaya_jax.evaluate import harness
from zaya_jax.evaluate.during_training import StateModel, TaskScores
from zaya_jax.evaluate.scorer import Scorer, TokenRow
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.run import train
from zaya_jax.training import state as states
from zaya_jax.training.pace import Pace

__all__ = ["run"]
TASKS = str(multiprocess_runs.ROOT / "tests" / "evaluate" / "tasks")
ROWS = [TokenRow([256, *b"def f(x):"]), TokenRow([256, *b"import json, os"], 8)]
KEYS = dict(
    eval__tasks=("mine",), eval__tasks_every=4, run__num_steps=6, model__max_position_embeddings=64
)


def answered(model):
    """The likelihoods of the rows' ends, as a sum."""
    return float(sum(log_probs.sum() for log_probs, _ in Scorer(model)(ROWS)))


@pytest.fixture
def asked(monkeypatch):
    """What the stand-in was asked, and what it does then."""
    calls = types.SimpleNamespace(sources=[], then=lambda: None)

    def score(model, loaded, **options):
        assert loaded.tasks == ("mine",)
        calls.sources.append(model.source)
        calls.then()
        return {"results": {"mine": {"sum,none": answered(model), "em,strict": 0.5}}}

    monkeypatch.setattr(harness, "run", score)
    monkeypatch.setattr(
        harness, "load_tasks", lambda tasks, *_: harness.LoadedTasks(None, tasks, [])
    )
    return calls


def scores(workdir):
    return tiny_runs.by_step(workdir, "eval/mine/sum")


def test_scores_are_of_the_state_and_change_no_bit(run, asked, tmp_path, caplog):
    assert run(**KEYS) == cli.DONE
    found = scores(tmp_path / "run")
    assert list(found) == [4, 6] and asked.sources == ["step 4", "step 6"]
    for step, score in found.items():
        model = zj.load(f"{tmp_path / 'run'}@{step}")
        assert answered(model) == pytest.approx(score, abs=1e-4), step
    assert f"step 6 | tasks: mine/sum {found[6]:.4f}, mine/em/strict 0.5000" in caplog.text
    assert "Task mine, sum" in (tmp_path / "run" / "report.html").read_text()

    shutil.move(tmp_path / "run", tmp_path / "with")
    assert run(**KEYS | {"eval__tasks": ()}) == cli.DONE
    assert scores(tmp_path / "run") == {} and len(asked.sources) == 2
    tiny_runs.same_run(tmp_path / "run", tmp_path / "with")


def test_a_signal_while_tasks_are_scored_stops_after_the_next_step(run, asked, tmp_path):
    asked.then = signalled(signal.SIGTERM)
    assert run(**KEYS) == cli.PREEMPTED
    assert tiny_runs.lines(tmp_path / "run")[-1]["step"] == 5
    asked.then = lambda: None
    assert run(**KEYS) == cli.DONE
    assert asked.sources == ["step 4", "step 6"] and list(scores(tmp_path / "run")) == [4, 6]


def test_a_mesh_gives_the_scores_of_one_device():
    """The mesh has bfloat16 copies of the experts, in parts."""
    mesh = dict(mesh__expert=2, mesh__context=2, mesh__fsdp=True)
    settings = tiny_runs.settings(**mesh, precision__compute="bfloat16")
    setup = states.set_up(settings, make_mesh(settings.mesh, tiny_runs.ALL_DEVICES, "mesh"))
    state, now = states.init(settings, setup), types.SimpleNamespace(number=0, phase_index=0)
    layers = state["params"]["layers"]
    layers["experts"] = jax.tree.map(lambda x: x.astype("bfloat16"), layers["experts"])
    planned = types.SimpleNamespace(setup=setup, tokenizer=None)
    over = StateModel(planned, settings, state, now, Pace(tiny_runs.ALL_DEVICES[0]))
    one = zj.create(settings, settings.run.seed)
    assert answered(over) == pytest.approx(answered(one), abs=0.05)
    options = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=[1], ends=[0])
    text = [list(x.continued([[256, 97]], 3, **options).more()) for x in (over, one)]
    assert text[0] == text[1]
    assert not layers["cca"]["q"]["kernel"].sharding.is_fully_replicated


def test_low_rank_updates_are_added_to_the_weights_and_step_0_is_scored(run, asked, tmp_path):
    assert run(**KEYS | {"run__num_steps": 2}) == cli.DONE
    base = shutil.move(tmp_path / "run", tmp_path / "base")
    keys = KEYS | dict(run__init_from=str(base), run__lora=4, optim__lr=0.1)
    assert run(**keys) == cli.DONE
    found = scores(tmp_path / "run")
    assert list(found) == [0, 4, 6] and asked.sources[1:] == ["step 0", "step 4", "step 6"]
    for place, step in ((base, 0), (tmp_path / "run", 6)):
        assert answered(zj.load(place)) == pytest.approx(found[step], abs=1e-3)
    assert abs(found[6] - found[0]) > 0.1


@pytest.mark.parametrize(
    ("installed", "message"),
    [(False, "needs lm-eval-harness: pip"), (True, "did you mean zaya_choice")],
)
def test_tasks_that_cannot_be_run_are_refused_before_anything_is_written(
    installed, message, tmp_path, monkeypatch
):
    if installed:
        pytest.importorskip("lm_eval")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = tiny_runs.settings(eval__tasks=("zaya_choise",), eval__tasks_path=TASKS)
    check_refused(rf"config\.eval\.tasks.*{message}", train, settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("base", "processes"), [("fp8", 1), ("compute", 2)])
def test_what_the_loop_cannot_score_is_refused(asked, monkeypatch, base, processes):
    settings = tiny_runs.settings(
        eval__tasks=("mine",), run__base=base, run__init_from="x", run__lora=1
    )
    planned = types.SimpleNamespace(recipe=types.SimpleNamespace(config=settings))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    loaded = harness.LoadedTasks(None, ["mine"], ["asks"])
    monkeypatch.setattr(harness, "load_tasks", lambda *_: loaded)
    check_refused("which a run cannot do while it trains", TaskScores, planned, None)


def test_lm_eval_s_scores_are_those_of_the_program(run, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(multiprocess_runs.ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = ("zaya_choice", "zaya_go_on")
    keys = KEYS | dict(eval__tasks=tasks, eval__tasks_path=TASKS, eval__tasks_limit=3)
    assert run(**keys) == cli.DONE
    lines = {line["step"]: line for line in tiny_runs.lines(tmp_path / "run")}
    for step in (4, 6):
        found = {name: x for name, x in lines[step].items() if name.count("/") > 1}
        model = zj.load(f"{tmp_path / 'run'}@{step}")
        again = harness.figures(harness.run(model, tasks, include_path=TASKS, limit=3))
        assert found == {
            f"eval/{task}/{name}": pytest.approx(value)
            for task, table in again.items()
            for name, (value, _) in table.items()
        }
        assert len(found) == 3


# ################################################################################################
# Named evaluations
# ##################################################################################################


CONTENT = 14  # bytes: with begin and end a row of 16 tokens, so that windows are documents


@pytest.fixture
def keys(tmp_path):
    """A run on documents of one row each, and two named evaluations of such."""
    for name, count in (("trained", 60), ("one", 5), ("two", 2)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i * i}".ljust(CONTENT, "."))
    places = tuple(f"{name}={tmp_path / name}" for name in ("one", "two"))
    return dict(
        data__path=str(tmp_path / "trained"),
        eval__named=places,
        eval__every=4,
        eval__windows=8,
        run__num_steps=6,
        model__max_position_embeddings=64,
    )


def named_losses(workdir):
    """{step: {name: loss}} of steps that have some."""
    lines = tiny_runs.lines(workdir)
    found = {
        line["step"]: {k: v for k, v in line.items() if k.startswith("eval/")} for line in lines
    }
    return {step: names for step, names in found.items() if names}


def test_named_losses_are_evaluate_s_and_the_same_after_a_stop(
    run, called, keys, tmp_path, monkeypatch, capsys
):
    assert run(4, signalled(signal.SIGTERM), **keys) == cli.PREEMPTED
    assert named_losses(tmp_path / "run") == {}
    assert run(**keys) == cli.DONE
    found = named_losses(tmp_path / "run")
    assert list(found) == [6]  # the stop left the evaluation of step 4 out
    assert all(list(names) == ["eval/loss", "eval/one", "eval/two"] for names in found.values())
    printed = capsys.readouterr().out
    assert "eval/" not in printed and "held-out" in printed
    report = (tmp_path / "run" / "report.html").read_text()
    assert "eval/one" in report and "eval/two" in report

    # Documents are windows here, so the program that evaluates gives the same, of the held-out part
    # too.
    monkeypatch.setattr(multihost, "run_distributed", lambda program: program())
    for name, options in [("loss", []), ("one", [f"--data={tmp_path / 'one'}"])]:
        options = [f"--model={tmp_path / 'run'}", f"--out={tmp_path / 'out' / name}", *options]
        assert called(evaluate, *options)[0] == cli.DONE
        (row,) = json.loads((tmp_path / "out" / name / "evaluation.json").read_text())[
            "data"
        ].values()
        assert row["loss"] == pytest.approx(found[6][f"eval/{name}"], rel=1e-5), name

    run_that_stopped = shutil.move(tmp_path / "run", tmp_path / "stopped")
    assert run(**keys) == cli.DONE
    never_stopped = named_losses(tmp_path / "run")
    assert list(never_stopped) == [4, 6] and never_stopped[6] == found[6]

    (tmp_path / "trained" / "7.txt").write_text("other text than the run has seen")
    code, _, err = called(evaluate, f"--model={run_that_stopped}", f"--out={tmp_path / 'out'}")
    assert code == cli.BAD_INPUT and "was trained on other data than its sources now have" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("one", "is not of the form name=path, such as"),
        ("loss={}/one", "is not loss, which is that of"),
        ("x={}/nowhere", r"eval\.named x=.*nowhere: .*nowhere. holds no text file"),
        (
            "x={}/trained/3.txt",
            r"1 of its 1 files are trained on as part of .*trained, such as .*/3\.txt",
        ),
        (
            "x={}/links",
            r"2 of its 2 files are trained on as part of .*trained, such as .*links/hard\.txt",
        ),
    ],
)
def test_what_cannot_be_evaluated_on_is_refused_before_anything_is_written(
    keys, tmp_path, given, message
):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "hard.txt").hardlink_to(tmp_path / "trained" / "4.txt")
    (tmp_path / "links" / "soft.txt").symlink_to(tmp_path / "trained" / "5.txt")
    named = (f"first={tmp_path}/two", given.format(tmp_path))
    settings = tiny_runs.settings(**keys | {"eval__named": named})
    check_refused(message, train, settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
