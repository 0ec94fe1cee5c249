"""The hybrid of linear and softmax attention trains, from the command's own program."""

import json
import signal

import jax
import pytest

from experiments import pretrain
from experiments.configs import tiny_linear
from zaya_jax import config


@pytest.mark.slow
def test_the_loss_of_the_hybrid_falls(tmp_path, monkeypatch):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text("".join(f"line {j} of file {i}\n" for j in range(40)))
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    settings = tiny_linear.get_config()
    settings.update_from_flattened_dict(
        {
            "data.path": str(tmp_path), "data.seq_len": 64, "data.global_batch": 8, "model.hidden_size": 32,
            "model.head_dim": 8, "model.moe_intermediate_size": 32, "model.num_experts": 4, "run.num_steps": 40,
            "model.router_hidden_size": 8, "eval.every": 40, "eval.windows": 4, "log.sample_tokens": 4, "mesh.data": 1,
        }
    )  # fmt: skip
    assert config.check(settings).model.kinds.count("hybrid_linear") == 3
    try:
        pretrain.train(config.check(settings), tmp_path / "run")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[0] > 5
    assert losses[-1] < 3
