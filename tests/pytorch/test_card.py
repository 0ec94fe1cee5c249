"""A model card says what the hub and a person need, and nothing by a path of this machine."""

import jax
import jax.numpy as jnp
import pytest
from huggingface_hub import metadata_load
from saved_trees import save_tree

from zaya_jax import config
from zaya_jax.checkpoint.run import store
from zaya_jax.model import zaya
from zaya_jax.pytorch import any_model, exchange
from zaya_jax.text import tokenizers
from zaya_jax.training.workdir import open_workdir

SMALL = {
    "vocab_size": 264,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 2,
    "router_hidden_size": 6,
    "max_position_embeddings": 64,
}
CACHED = "/cache/hub/models--lab--big-base/snapshots/0123abc"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of two steps that began with a model of the hub."""
    folder = tmp_path_factory.mktemp("card") / "tiny"
    keys = config.default().to_dict()
    keys["model"] |= SMALL
    keys["data"] |= {"seq_len": 16, "mixture": ("/data/web=0.5", "/data/code.v2=0.5")}
    keys["run"]["init_from"] = CACHED
    settings = config.check(keys)
    open_workdir(folder, settings)
    tokenizers.load("bytes").save(folder / "tokenizer")
    params = zaya.init(settings.model, jax.random.key(1))
    meta = {"tokens": 64, "config": config.to_dict(settings), "metrics": {"eval/loss": 1.25}}
    steps = store.Store(folder)
    for step in (1, 2):
        state = {"params": params, "balance": {"bias": jnp.zeros((2, 3))}}
        save_tree(steps, step, state, meta | {"step": step})
    steps.close()
    return folder


def card_of(model, out):
    return (exchange.to_hf(model, out) / "README.md").read_text(encoding="utf-8")


def test_the_hub_reads_what_the_run_says(workdir, tmp_path):
    text = card_of(workdir, tmp_path / "out")
    assert metadata_load(tmp_path / "out" / "README.md") == {
        "library_name": "transformers",
        "base_model": "lab/big-base",
        "pipeline_tag": "text-generation",
        "tags": ["zaya", "mixture-of-experts"],
    }
    assert text.count('from_pretrained("PATH")') == 2


def test_a_person_reads_what_it_is(workdir, tmp_path):
    text = card_of(workdir, tmp_path / "out")
    for line in (
        "- from: `tiny@2`, by zaya_jax ",
        "- began with: `lab/big-base`\n",
        "- data: `web`, `code.v2`\n",
        "- trained: 2 steps, 64 tokens of this run\n",
        "- held-out loss: 1.2500 nats a token at this step\n",
        "- tokenizer: 264 ids\n",
        "- every text begins with: `<|bos|>`; the tokenizer puts it there, ",
        "context of 64 tokens\n",
        'AutoTokenizer.from_pretrained("PATH")\ninputs = tokenizer("Once upon a time", ',
    ):
        assert line in text, line


def test_no_path_of_this_machine_is_in_it(workdir, tmp_path):
    for number, model in enumerate((workdir, f"{workdir}@1", any_model.find(workdir))):
        text = card_of(model, tmp_path / str(number))
        assert not [path for path in ("/data", "/cache", str(workdir.parent)) if path in text]


def test_a_chat_model_is_asked_by_its_template(workdir, tmp_path):
    (workdir / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    text = card_of(f"{workdir}@1", tmp_path / "out")
    (workdir / "tokenizer" / "chat_template.jinja").unlink()
    assert "inputs = tokenizer.apply_chat_template(\n" in text


def test_the_hub_s_name_of_an_imported_model_stays_with_it(tmp_path, golden_dir):
    """In the hub's cache its folder bears it."""
    cached = tmp_path / "models--lab--base" / "snapshots" / "0123"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(golden_dir / "base")
    exchange.from_hf(cached, tmp_path / "run")
    exchange.to_hf(tmp_path / "run", tmp_path / "out")
    assert metadata_load(tmp_path / "out" / "README.md")["base_model"] == "lab/base"
