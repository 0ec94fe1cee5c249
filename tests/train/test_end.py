"""What a run does beside its steps: evaluation just large enough, a sample that fits, an MFU or why there is none."""

import dataclasses
import json
import types

import jax
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import cli, config, schedule
from zaya_jax.data import pipeline
from zaya_jax.model import decode
from zaya_jax.parallel.spread import Spread
from zaya_jax.train import recipe, sample

PHASES = (
    config.Phase(name="a", tokens=2 * 1024, rope_theta=111.0),
    config.Phase(name="b", tokens=3 * 1024, seq_len=64, global_batch=16, rope_theta=777.0, eval_seq_len=16),
    config.Phase(name="c", tokens=2 * 1024, rope_theta=999.0),
)


def settings(**keys):
    """A small run of three phases on this project's own source; a dense model, whose programs compile fastest."""
    given = tiny.get_config()
    small = {
        "model.hidden_size": 32, "model.num_hidden_layers": 1, "model.head_dim": 8, "model.intermediate_size": 32,
        "model.model_type": "dense", "model.num_experts": 1, "data.seq_len": 32, "data.global_batch": 32,
        "eval.windows": 5, "eval.every": 2, "log.sample_tokens": 4, "optim.name": "adamw", "run.num_steps": 4,
    }  # fmt: skip
    given.update_from_flattened_dict(small | {name.replace("__", "."): value for name, value in keys.items()})
    given.data.path = f"{pretrain.Path(cli.__file__).parent}/optim"
    given.schedule.phases = PHASES
    return config.check(given)


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)


def test_evaluation_and_sample_are_the_phases_own(tmp_path, monkeypatch, capsys):
    asked, sampled = [], []
    eval_batches, generate = pipeline.eval_batches, decode.generate

    def batches(given, tokenizer, process, rows):
        found = eval_batches(given, tokenizer, process, rows)
        asked.append((given.data.seq_len, rows, [batch["tokens"].shape for batch in found]))
        return found

    def continued(model, *args, **keys):
        sampled.append(model.rope_parameters.hybrid.rope_theta)
        return generate(model, *args, **keys)

    monkeypatch.setattr(pipeline, "eval_batches", batches)
    monkeypatch.setattr(decode, "generate", continued)
    assert pretrain.train(settings(), tmp_path / "run") == cli.DONE
    # Five windows on four devices are one batch of eight rows, of which three are empty.
    assert asked == [(32, 8, [(8, 32)]), (16, 8, [(8, 16)])]
    assert sampled == [777.0]  # the phase that was reached, not the first nor the last
    text = (tmp_path / "run" / "sample.txt").read_text()
    assert text.startswith("def ")
    kept = json.loads((tmp_path / "run" / "samples.jsonl").read_text())
    assert kept == {"step": kept["step"], "prompt": "def ", "text": text}
    monkeypatch.setattr(sample, "free_bytes", lambda device: 1000)
    capsys.readouterr()
    assert pretrain.train(settings(run__num_steps=5), tmp_path / "run") == cli.DONE
    assert (
        f"free; python -m experiments.generate --workdir={tmp_path / 'run'} makes one"
        in capsys.readouterr().out
    )
    assert sampled == [777.0]
    assert not (tmp_path / "run" / "sample.txt").exists()  # that one was of other weights


def test_samples_are_kept_by_step_and_those_after_it_are_another_run_s(tmp_path):
    path = tmp_path / "samples.jsonl"
    for step, text in ((10, "ten"), (20, "twenty \ud800"), (30, "thirty"), (20, "again")):
        sample.keep_sample(tmp_path, step, "", text)
        path.write_text(path.read_text() + "no line\n")
    kept = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    assert [(one["step"], one["text"]) for one in kept] == [(10, "ten"), (20, "again")]


@pytest.mark.parametrize(
    ("windows", "micro_batch", "spread", "rows"),
    [
        (64, 1024, Spread(data=1024), 1024),
        (64, 128, Spread(data=128, context=8), 128),
        (64, 512, Spread(data=8), 64),
        (64, 16, Spread(data=8), 16),
        (5, 512, Spread(data=2, expert=2), 8),
        (1, 512, Spread(), 1),
        (0, 512, Spread(data=4), 4),
    ],
)
def test_rows_of_a_held_out_batch(windows, micro_batch, spread, rows):
    given = dataclasses.replace(settings(), eval=config.Eval(windows=windows))
    phase = schedule.make_plan(settings()).segments[0].phase
    phase = dataclasses.replace(phase, global_batch=4096, micro_batch=micro_batch)
    assert recipe.eval_rows(given, phase, spread) == rows


@pytest.mark.parametrize(
    ("platform", "kind", "said"),
    [("cpu", "cpu", ""), ("gpu", "NVIDIA H200", ""), ("gpu", "Future X1", "peak rate of Future X1 unknown")],
)
def test_why_no_mfu_is_shown_is_said(monkeypatch, platform, kind, said):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert said in pretrain.unknown_peak() and bool(pretrain.unknown_peak()) == bool(said)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert pretrain.environment().get("mfu", "") == pretrain.unknown_peak()
