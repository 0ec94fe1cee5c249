"""A dense model from the training program to its sample, on one device and with TSP, and what refuses it."""

import json
import signal

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import config
from zaya_jax.pytorch import exchange

KEYS = {
    "model.model_type": "dense", "model.num_experts": 1, "model.intermediate_size": 32, "model.hidden_size": 32,
    "model.num_hidden_layers": 2, "model.head_dim": 8, "data.seq_len": 32, "data.global_batch": 4, "eval.every": 2,
    "eval.windows": 4, "log.sample_tokens": 4, "run.num_steps": 2, "precision.compute": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (folder / f"{i}.txt").write_text("".join(f"line {j} of file {i}\n" for j in range(40)))
    return folder


@pytest.mark.slow
def test_it_trains_and_samples_but_has_no_form_in_the_port(corpus, tmp_path, monkeypatch):
    losses, every = {}, jax.devices()
    for devices, tsp in ((1, False), (2, True)):
        monkeypatch.setattr(jax, "devices", lambda *args, n=devices: every[:n])
        settings = tiny.get_config()
        mesh = {"mesh.data": 1, "mesh.tensor": devices, "mesh.tsp": tsp}
        settings.update_from_flattened_dict(KEYS | mesh | {"data.path": str(corpus)})
        workdir = tmp_path / str(devices)
        assert pretrain.train(config.check(settings), workdir) == 0
        records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses[devices] = [record["loss"] for record in records] + [records[-1]["eval/loss"]]
        assert "load_entropy" not in records[0] and records[0]["grad_norm/mlp"] > 0
        assert (workdir / "sample.txt").read_text().startswith("def ")
        assert "Expert load" not in (workdir / "report.html").read_text()
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-5)
    with pytest.raises(config.UserError, match=r"model_type='dense'; only 'zaya' has a form"):
        exchange.to_hf(workdir, tmp_path / "out")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
