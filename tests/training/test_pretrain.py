"""A run that is stopped and goes on, what its report reads of it, and a dense model's."""

import json
import re
from pathlib import Path

import pytest
import tiny_runs
from refusals import check_refused

from zaya_jax import cli
from zaya_jax.pytorch import exchange
from zaya_jax.report import curves, read
from zaya_jax.report.run_page import run_document
from zaya_jax.training import figures


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small folder of text, so that a run starts at once."""
    return tiny_runs.write_corpus(tmp_path_factory.mktemp("corpus"), 60)


@pytest.fixture
def run(corpus):
    """Runs the program in this process, on as many devices as mesh.data says."""

    def call(workdir, **keys):
        keys = {
            "data__path": corpus,
            "eval__every": 2,
            "eval__windows": 4,
            "checkpoint__every_steps": 2,
        } | keys
        return tiny_runs.train(workdir, keys.get("mesh__data", 1), **keys)

    return call


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run(whole, run__num_steps=5, schedule__decay_fraction=0.0) == cli.DONE
    assert run(halves, run__num_steps=3, schedule__decay_fraction=0.0) == cli.DONE
    # as a run killed after step 4, before its checkpoint, leaves it
    with (halves / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"step": 4, "loss": 0.0}) + "\n" + '{"step": 5, "lo')
    assert run(halves, run__num_steps=5, schedule__decay_fraction=0.0) == cli.DONE
    tiny_runs.same_state(whole, halves)
    a, b = tiny_runs.lines(whole), tiny_runs.lines(halves)
    assert [x["step"] for x in b] == [1, 2, 3, 4, 5]
    assert [x["loss"] for x in a] == [x["loss"] for x in b]
    assert a[-1]["eval/loss"] == b[-1]["eval/loss"]
    of_metrics = (
        Path(__file__).parents[2].joinpath("docs", "metrics.md").read_text(encoding="utf-8")
    )
    listed = set(re.findall(r"^\| `([^`]+)` \|", of_metrics, re.M))
    written = {
        name.partition("/")[0] if "_norm/" in name else name for line in a + b for name in line
    }
    assert written <= listed, f"not in docs/metrics.md: {written - listed}"
    assert {"eval/loss", "load", "data/wait_fraction"} <= written
    capsys.readouterr()
    assert run(halves, run__num_steps=5, schedule__decay_fraction=0.0) == cli.DONE
    assert "is complete" in capsys.readouterr().out
    assert len(tiny_runs.lines(halves)) == 5
    assert (halves / "report.html").stat().st_size > 1000
    assert list(halves.glob("events.out.*"))


class Asked(dict):
    """A dict that remembers the missing keys that it was asked for."""

    def __init__(self, content, missed):
        super().__init__(content)
        self.missed = missed

    def __contains__(self, key):
        if not super().__contains__(key):
            self.missed.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        return super().get(key, default) if key in self else default


def test_every_key_that_the_report_reads_is_one_that_a_run_wrote(run, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "peak_flops", lambda *_: 1e12)  # a CPU's is not known, so no MFU
    assert run(tmp_path / "run", run__num_steps=12, log__every=1) == cli.DONE
    found, missed = read.read_workdir(tmp_path / "run"), set()
    found.series, found.vectors = Asked(found.series, missed), Asked(found.vectors, missed)
    found.config, found.environment = Asked(found.config, missed), Asked(found.environment, missed)
    asked = set()
    setting = found.setting
    monkeypatch.setattr(read.Workdir, "setting", lambda _, key: (asked.add(key), setting(key))[1])
    source = run_document(found).html()
    assert not missed
    assert asked and all(setting(key) is not None for key in asked), asked
    assert all(
        f"<figcaption>{title}<" in source
        for title in ("Loss", "Copy", "Whole save", "Gradient norm by group")
    )
    written = [*found.series, *found.vectors]
    assert [
        key
        for key in curves.TITLES
        if not any(f"{name}/".startswith(f"{key}/") for name in written)
    ] == []


@pytest.mark.slow
def test_a_dense_model_trains_and_samples_but_has_no_form_in_the_port(run, tmp_path):
    """tests/parallel has its numbers on meshes."""
    dense = {"model__model_type": "dense", "model__num_experts": 1, "model__intermediate_size": 32}
    dense["log__sample_tokens"] = 2
    assert run(tmp_path / "run", run__num_steps=2, **dense) == cli.DONE
    record = tiny_runs.lines(tmp_path / "run")[0]
    assert "load_entropy" not in record and record["grad_norm/mlp"] > 0
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")
    assert "Expert load" not in (tmp_path / "run" / "report.html").read_text()
    check_refused(
        r"model_type='dense'; only 'zaya' has a form",
        exchange.to_hf,
        tmp_path / "run",
        tmp_path / "out",
    )
