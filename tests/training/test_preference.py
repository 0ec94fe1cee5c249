"""DPO: the loss and its gradients are TRL's, pairs stay together, and runs on pairs resume and
refuse as others do."""

import re

import jax
import numpy as np
import pytest
import tiny_runs
from data_helpers import jsonl
from refusals import refusal
from rows import slow
from safetensors.numpy import load_file
from tiny_runs import start as train

import zaya_jax as zj
from experiments.configs import finetune
from zaya_jax import cli, config
from zaya_jax.data import pack, pipeline, windows
from zaya_jax.evaluate import texts
from zaya_jax.parallel.spread import NO_SPREAD
from zaya_jax.pytorch import named
from zaya_jax.text import tokenizers
from zaya_jax.text.token_block import Document, concatenate
from zaya_jax.training.preference import loss_of_pairs

TUNED = {
    "data__global_batch": 4,
    "run__num_steps": 8,
    "run__beta": 0.5,
    "eval__every": 8,
    "eval__windows": 8,
    "log__sample_tokens": 0,
    "optim__lr": 0.02,
    "checkpoint__every_steps": 4,
    "mesh__data": 1,
}


def test_loss_figures_and_gradients_are_trls(golden_dir):
    """Two pairs in one row, and one in another."""
    theirs = load_file(golden_dir / "dpo.safetensors")
    model = zj.load(golden_dir / "base")
    tokenizer, batch = tokenizers.Bytes(), pack.BatchBuilder(2, 64, 0)
    for i, row in enumerate([0, 0, 1]):
        prompt, *answers = (theirs[f"{name}_ids.{i}"] for name in ("prompt", "chosen", "rejected"))
        tokens = [np.concatenate([prompt, answer]) for answer in answers]
        documents = [Document(x, np.arange(len(x)) >= len(prompt)) for x in tokens]
        block = concatenate(documents, tokenizer)
        batch.append_span(row, block)
    settings = config.Config(
        model=model.config.model,
        precision=model.config.precision,
        run=config.Run(preference="dpo", beta=0.5),
    )
    loss, rows = loss_of_pairs(settings, NO_SPREAD), batch.build()
    first = {"params": jax.tree.map(lambda x: 0.95 * x, model.params), "scales": {}}

    def value(params):
        return loss.value(params, model.balance, rows, loss.count(rows), frozen=first)

    (found, (parts, _)), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(model.params)
    assert loss.count(rows) == 3
    np.testing.assert_allclose(found, theirs["loss"], atol=2e-5)
    for name, x in parts.items():
        np.testing.assert_allclose(x, theirs[name], rtol=2e-5, atol=2e-5, err_msg=name)
    for name, g in named(grads, settings.model).items():
        wanted = theirs[f"grad.{name}"]
        assert np.linalg.norm(g - wanted) <= 1e-4 * np.linalg.norm(wanted) + 1e-7, name


def pair(i, better="yes", worse="no"):
    return {"prompt": f"Is {i} a number?", "chosen": better, "rejected": worse}


def settings(folder, options=",preference=dpo", **keys):
    keys = TUNED | {"data__path": str(folder / "pairs.jsonl")} | keys
    return tiny_runs.changed(finetune.get_config(f"{folder / 'base'}{options}"), **keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base that was never trained, 44 pairs, and a run on these."""
    root = tmp_path_factory.mktemp("preference")
    small = dict(model__max_position_embeddings=128, data__seq_len=128)
    zj.create(tiny_runs.settings(**small)).save(root / "base")
    bad = [pair(90, "a", "a"), pair(91, "a", "b" * 90), pair(92, "a", "")]
    (root / "pairs.jsonl").write_bytes(jsonl([*map(pair, range(41)), *bad]))
    assert train(settings(root), root / "run") == cli.DONE
    return root


def test_a_run_learns_to_prefer_and_counts_what_it_leaves_out(folder):
    log = (folder / "run" / "logs" / "process-00000.log").read_text()
    assert f"answers are compared with those of step 0 of {folder / 'base'}\n" in log
    assert re.search("38 pairs .* 4 held out, .*, 1 dropped, 1 identical, 42 kept, ", log)
    before, first, *_, last = tiny_runs.lines(folder / "run")
    assert before["step"] == 0 and before["eval/rewards/accuracies"] == 0
    for figures in (before["eval/loss"], first["loss"]):
        assert figures == pytest.approx(np.log(2), abs=1e-6)  # it begins as its own reference
    assert (first["pairs"], first["rewards/margins"]) == (4, 0)
    assert last["eval/loss"] < 0.5 and last["eval/rewards/accuracies"] == 1
    assert last["rewards/margins"] == pytest.approx(
        last["rewards/chosen"] - last["rewards/rejected"], abs=1e-5
    )
    assert "nats per pair" in (folder / "run" / "report.html").read_text()


def test_a_run_on_pairs_is_a_model_as_any(folder, tmp_path):
    """Saved, to begin another run; a second run on pairs has the first one's rate."""
    model = zj.load(folder / "run")
    assert model.config.run.preference == "dpo"
    saved = zj.load(model.save(tmp_path / "saved"))
    tables = [x.params["embed"]["embedding"] for x in (saved, model)]
    np.testing.assert_array_equal(*tables)
    first = settings(folder).optim.lr
    assert finetune.get_config(f"{folder / 'run'},preference=dpo").optim.lr == first


@pytest.mark.parametrize("options", [",preference=dpo", slow(",preference=dpo,lora=4")])
def test_a_killed_run_ends_in_the_same_bits(folder, tmp_path, options):
    whole = folder / "run"
    if "lora" in options:
        whole = tmp_path / "whole"
        assert train(settings(folder, options), whole) == cli.DONE
        assert tiny_runs.lines(whole)[1]["loss"] == pytest.approx(np.log(2), abs=1e-6)
        assert zj.load(whole).config.run.lora is None  # merged with its base
    cut = tiny_runs.without_last(whole, tmp_path / "cut")
    assert train(settings(folder, options), cut) == cli.DONE
    tiny_runs.same_run(whole, cut, "rewards/margins", "eval/loss")


def test_both_answers_of_a_pair_are_neighbours_in_a_row(folder):
    c, tok = settings(folder), tokenizers.Bytes()
    stream = pipeline.Batches(c, tok)
    for batch in [*(stream[t] for t in range(3)), *windows.eval_batches(c, tok, damaged=set())]:
        for tokens, ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
            texts = [tok.decode(tokens[ids == n].tolist()) for n in range(1, ids.max() + 1)]
            assert len(texts) % 2 == 0
            for better, worse in zip(texts[::2], texts[1::2], strict=True):
                assert "yes" in better or "a\n" in better[-3:], (better, worse)
                assert better.split("?")[0] == worse.split("?")[0]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"run__init_from": ""}, "needs run.init_from, whose"),
        ({"data__chats": False}, "needs data.chats=True"),
        ({"balance__enabled": True}, "needs balance.enabled=False"),
        ({"optim__z_loss": 0.1}, "needs optim.z_loss=0"),
    ],
)
def test_keys_that_contradict_pairs_are_said(folder, keys, says):
    assert says in refusal(settings, folder, **keys)


def test_a_preference_of_none_is_as_if_it_were_not_given(folder):
    given = [finetune.get_config(f"{folder / 'base'}{x}") for x in ("", ",preference=none")]
    assert config.check(given[0]) == config.check(given[1])


def test_data_without_pairs_are_said(folder, tmp_path):
    chats = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for content, says in (
        (chats, "line 1: a pair has chosen and rejected"),
        (pair(1, "a", "b" * 300), "its pairs are all longer than the context of 128"),
    ):
        path = tmp_path / "a.jsonl"
        path.write_bytes(jsonl([content]))
        assert says in refusal(train, settings(folder, data__path=str(path)), tmp_path / "new")
    given = settings(folder), str(folder / "pairs.jsonl"), tokenizers.Bytes()
    assert "give chats or text with --data" in refusal(texts.held_out, *given)
    for option, says in (
        ("preferenc=dpo", "preferenc is not one of lora, base, preference, beta"),
        ("preference=kto", "config.run.preference='kto' is not one of"),
    ):
        assert says in refusal(settings, folder, f",{option}")
