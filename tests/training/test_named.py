"""Named evaluations: their losses next to the held-out one, the same after a stop, drawn, and
checked at the start."""

import json
import os
import shutil
import signal

import pytest
import tiny_runs
from test_ends import run

from experiments.configs import tiny
from experiments.evaluate import __main__ as evaluate
from zaya_jax import cli, config
from zaya_jax.cluster import multihost
from zaya_jax.config import UserError
from zaya_jax.run import train

__all__ = ["run"]
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


def losses(workdir):
    """{step: {name: loss}} of steps that have some."""
    lines = tiny_runs.lines(workdir)
    found = {
        line["step"]: {k: v for k, v in line.items() if k.startswith("eval/")} for line in lines
    }
    return {step: names for step, names in found.items() if names}


def test_named_losses_are_evaluate_s_and_the_same_after_a_stop(
    run, called, keys, tmp_path, monkeypatch, capsys
):
    asked = []
    stop = lambda: asked or asked.append(os.kill(os.getpid(), signal.SIGTERM))  # noqa: E731
    assert run(4, stop, **keys) == cli.PREEMPTED
    assert losses(tmp_path / "run") == {}
    assert run(99, None, reached=4, **keys) == cli.DONE
    found = losses(tmp_path / "run")
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
    changed = tmp_path / "trained" / "7.txt"
    before = changed.read_text()
    changed.write_text("other text than the run has seen")
    code, _, err = called(evaluate, f"--model={tmp_path / 'run'}", f"--out={tmp_path / 'out'}")
    assert code == cli.BAD_INPUT and "was trained on other data than its sources now have" in err
    changed.write_text(before)

    shutil.rmtree(tmp_path / "run")
    assert run(99, None, **keys) == cli.DONE
    never_stopped = losses(tmp_path / "run")
    assert list(never_stopped) == [4, 6] and never_stopped[6] == found[6]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("one", "is not of the form name=path, such as"),
        ("loss={}/one", "loss is the name of the loss on the run's held-out data"),
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
    settings = tiny.get_config()
    settings.update_from_flattened_dict(
        {"data.path": keys["data__path"], "data.tokenizer": "bytes"}
    )
    settings.eval.named = (f"first={tmp_path}/two", given.format(tmp_path))
    with pytest.raises(UserError, match=message):
        train(config.check(settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
