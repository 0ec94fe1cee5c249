"""Which kernels a run takes: the trial's verdict at its start, the same in each process and at each
later start."""

import dataclasses
import json
import sys

import multiprocess_runs
import pytest
import tiny_runs

from benchmarks import gpu
from experiments.characterize import __main__ as characterize
from experiments.characterize import measure
from pallas_kernels import chip, trial
from zaya_jax import cli, config
from zaya_jax.checkpoint.source import read_meta
from zaya_jax.report import write_report
from zaya_jax.training import kernels

HERE = chip.Chip("cpu", "gfx942")


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """The program behaves as if this CPU were an MI300X whose kernels are interpreted; gives the
    planted faults."""
    faults = ["tests.pallas_kernels.planted"]
    find = {"program": faults, "pretend": HERE, "folder": tmp_path / "cache", "seconds": 120}
    monkeypatch.setattr(kernels, "FIND", find)
    monkeypatch.setattr(trial, "may_be_here", lambda: True)
    monkeypatch.setattr(chip, "_verdicts", [("all",)])
    monkeypatch.setattr(kernels, "_operators", lambda *_: ["newton_schulz"])
    return faults


@pytest.mark.slow
def test_a_run_tries_says_keeps_and_goes_on_with_its_verdict(on_a_gpu, tmp_path, capsys):
    keys = {"data__path": tiny_runs.write_corpus(tmp_path / "corpus"), "checkpoint__every_steps": 1}
    run = tmp_path / "run"
    assert tiny_runs.train(run, run__num_steps=1, **keys) == cli.DONE
    assert "kernels on gfx942: newton_schulz " in capsys.readouterr().out
    record = json.loads((run / "kernels.json").read_text())
    assert (
        record["tried"] and record["kernels"] == ["newton_schulz"] == read_meta(run, 1)["kernels"]
    )
    assert record["asked"]["length"] == 16 and record["asked"]["batch"] == 1  # of eight devices
    assert [*chip.Chip("gpu", "gfx942").taking(("auto",)).kernels] == ["newton_schulz"]
    page = write_report(run).read_text()
    assert "Implementations tried" in page and "newton_schulz" in page
    # It goes on without a trial, whatever the cache says; a trial that finds otherwise is said.
    (tmp_path / "cache").rename(tmp_path / "gone")
    on_a_gpu.append("newton_schulz=raises")
    assert tiny_runs.train(run, run__num_steps=2, **keys) == cli.DONE
    assert read_meta(run, 2)["kernels"] == ["newton_schulz"] and not (tmp_path / "cache").exists()
    assert "rounds differently" not in capsys.readouterr().out
    assert tiny_runs.train(run, run__num_steps=3, kernels=("try",), **keys) == cli.DONE
    said = capsys.readouterr().out
    assert (
        "note: kernels of ours were newton_schulz until step 2, now none: the run rounds"
        " differently" in said
    )
    assert (
        "newton_schulz: XLA's (ours failed: NotImplementedError" in said
        and read_meta(run, 3)["kernels"] == []
    )


def test_a_config_that_names_kernels_is_not_asked(on_a_gpu):
    for names in (("all",), ("none",), ("attention:2",)):
        assert kernels.settle(tiny_runs.settings(kernels=names)) is None
    assert not chip._verdicts[1:]


def test_kinds_of_devices_agree():
    a = {"kernels": ["attention", "cca_mix:2"], "kind": "gfx942", "rows": [1]}
    b = {"kernels": ["attention:2", "cca_mix:2"], "kind": "gfx950", "rows": [2]}
    both = kernels.agreed([a, b])
    assert both["kernels"] == ["cca_mix:2"] and both["taken_on"] == "gfx942, gfx950"
    assert kernels.agreed([a])["kernels"] == a["kernels"] and kernels.agreed([]) is None


def test_the_sizes_are_a_devices_share_of_the_phase_with_most_tokens():
    small = tiny_runs.settings()
    mesh = dataclasses.replace(small.mesh, data=2, expert=2, tensor=1)
    here = dataclasses.replace(small, mesh=mesh)
    asked = kernels.request(here, 4)
    assert asked["batch"] == 2 and asked["model"]["num_experts"] == small.model.num_experts // 2
    assert asked["operators"] == [
        "attention",
        "cca_mix",
        "cross_entropy",
        "grouped_mlp",
        "residual_norm",
    ]
    cut = dataclasses.replace(small, mesh=dataclasses.replace(small.mesh, data=1, context=2))
    asked = kernels.request(cut, 2)
    assert (asked["length"], asked["whole"]) == (8, 16) and "cca_mix" not in asked["operators"]
    assert kernels.request(small, 1, at_once=3)["batch"] == 3
    assert kernels.request(small, 1, at_once=5000)["batch"] == kernels.MOST // 16
    dense = config.editable(small)
    dense.model.update(model_type="dense", intermediate_size=24, num_experts=1)
    assert kernels.request(config.check(dense), 1)["model"]["moe_intermediate_size"] == 24
    assert "grouped_mlp" not in kernels.request(config.check(dense), 1)["operators"]


def test_characterize_writes_the_record_and_needs_a_gpu(on_a_gpu, called, monkeypatch, tmp_path):
    tiny = config.to_dict(tiny_runs.settings())
    monkeypatch.setattr(measure, "read_config", lambda path: config.check(tiny))
    code, out, _ = called(characterize, "kernels", f"--out={tmp_path / 'out'}")
    record = trial.read(tmp_path / "out" / "kernels.json")
    assert (
        code == cli.DONE and record["kernels"] == ["newton_schulz"] and trial.words(record) in out
    )
    assert "Seconds of one call" in (tmp_path / "out" / "kernels.html").read_text()
    monkeypatch.setattr(trial, "may_be_here", lambda: False)
    code, _, err = called(characterize, "kernels", f"--out={tmp_path / 'out'}")
    assert code == cli.BAD_INPUT and "error: no GPU is here" in err


@pytest.mark.slow
def test_a_first_hour_on_a_gpu_is_one_command_which_goes_on_past_a_part_that_fails(
    tmp_path, monkeypatch
):
    parts = [name for name in gpu.PARTS if "1B" not in name and "100M" not in name]
    assert gpu.main([f"--out={tmp_path}", "--minutes=8", "--parts", *parts]) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert list(results) == ["device", *parts] and not any(
        "fault" in results[name] for name in parts
    )
    assert all(words.startswith("right") for words in results["golden cases"]["found"].values())
    step = results["training step, 1M"]["found"]
    assert (
        step["tokens a second"] > 0
        and step["peak GB, planned"] > 0
        and step["peak GB, compiled"] > 0
    )
    whole, of = (
        results["resume"]["found"]["equal bit for bit"].removesuffix(" arrays").split(" of ")
    )
    assert whole == of
    monkeypatch.setattr(gpu, "LEAST", 0.1)
    assert gpu.main([f"--out={tmp_path}", "--minutes=0", "--parts", "resume", "decoding"]) == 1
    assert (tmp_path / "gpu.md").read_text().count("did not end within 0 s") == 2


PROGRAM = """
import os, sys
from pallas_kernels import chip, trial
from zaya_jax.cluster import multihost
from zaya_jax.training import kernels
from zaya_jax import config
from experiments.configs import tiny
from jax._src import xla_bridge

kernels.FIND = {"program": ["tests.pallas_kernels.planted"], "pretend": chip.Chip("cpu", "gfx942")}
trial.may_be_here = lambda: True
kernels._operators = lambda *_: ["newton_schulz"]
find = trial.find
trial.find = lambda *a, **k: print("tries", flush=True) or find(*a, **k)

def program():
    given = tiny.get_config()
    given.data.global_batch = 4
    given.model.hidden_size = given.model.moe_intermediate_size = 16
    record, begun = kernels.settle(config.check(given)), xla_bridge.backends_are_initialized()
    print("taken", record["kernels"], record["asked"]["batch"], chip._verdicts[-1], begun)
    return 0

sys.exit(multihost.together(program))
"""


@pytest.mark.slow
def test_one_of_two_processes_tries_and_both_take_its_verdict_before_jax_starts(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    more = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))}
    with multiprocess_runs.start([tmp_path / "program.py"], 2, tmp_path / "out", 1, more) as run:
        first, second = run.wait(120)
    taken = "taken ['newton_schulz'] 2 ('newton_schulz',) False\n"
    assert (first.code, first.out) == (0, f"tries\n{taken}"), first
    assert (second.code, second.out) == (0, taken), second
