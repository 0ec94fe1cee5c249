"""What goes in comes out, bit for bit, streamed, whole or not at all: directories to workdirs and
back, and to a small hub on loopback, to which huggingface_hub talks as to the real one, but without
hf_xet."""

import dataclasses
import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from hub_server import TOKEN, serving
from huggingface_hub import HfApi, constants, metadata_load
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from saved_trees import save_tree

from experiments.checkpoint import __main__ as checkpoint
from zaya_jax import config
from zaya_jax.checkpoint.run import store
from zaya_jax.config import Model
from zaya_jax.model import zaya
from zaya_jax.pytorch import any_model, exchange, hf, tensor_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.pytorch.card import UNPUBLISHED, Publication
from zaya_jax.text import tokenizers
from zaya_jax.training.workdir import open_workdir

MODEL = Model(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=12,
    num_experts=2,
    router_hidden_size=6,
    max_position_embeddings=64,
)


def write_model(folder, model=MODEL, dtype_of=lambda name: "float32", tied=False, **further):
    """A directory as transformers writes it, with random weights; `tied`: the head too."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(exchange.DTYPES[dtype_of(name)])
        for name, shape in hf.expected_shapes(model).items()
    }
    if tied:
        tensors[names.HEAD] = tensors[names.EMBEDDING]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(names.model_to_json(model, "float32") | further))
    return folder, tensors


def read_all(folder):
    return {
        k: x for file in sorted(folder.glob("*.safetensors")) for k, x in load_file(file).items()
    }


def assert_same(ours, theirs):
    about = lambda tensors: {name: (x.dtype, x.shape) for name, x in tensors.items()}  # noqa: E731
    assert about(ours) == about(theirs)
    assert [name for name, x in theirs.items() if x.tobytes() != ours[name].tobytes()] == []


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_json(file):
    return json.loads(file.read_text())


def mixed_dtypes(name):
    if name.endswith((names.BALANCE, "temp", "norm.weight")):
        return "float32"
    return "float16" if "conv" in name else "bfloat16"


CASES = {
    "float32": {},
    "mixed": {"dtype_of": mixed_dtypes, "transformers_version": "5.0"},
    "a repeated tied head": {"tied": True, "chunk_size_feed_forward": 7},
}


@pytest.mark.parametrize("shard_gb", [5.0, 4e-6])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_same_bits_and_config(tmp_path, case, shard_gb):
    source, tensors = write_model(tmp_path / "in", **CASES[case])
    exchange.from_hf(source, tmp_path / "work")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out", shard_gb=shard_gb)
    assert_same(read_all(out), tensors)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_gb < 1) == (out / "model.safetensors.index.json").exists()
    with safe_open(files[0], framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers asks for
    assert read_json(out / "config.json") == read_json(source / "config.json")
    # And written shards are read again.
    exchange.from_hf(out, tmp_path / "again")
    assert_same(read_all(exchange.to_hf(tmp_path / "again", tmp_path / "out2")), tensors)


def test_golden_cases_come_back_bit_for_bit(golden_case, tmp_path):
    exchange.from_hf(golden_case, tmp_path / "work")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out")
    assert_same(load_file(out / "model.safetensors"), load_file(golden_case / "model.safetensors"))
    for name in ("config.json", "generation_config.json"):
        assert read_json(out / name) == read_json(golden_case / name)


def test_a_chosen_dtype_leaves_balancing_biases_float32(tmp_path):
    source, tensors = write_model(tmp_path / "in")
    exchange.from_hf(source, tmp_path / "work")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out", dtype="bfloat16")
    for name, x in read_all(out).items():
        kept = name.endswith(names.BALANCE)
        assert x.dtype == (np.float32 if kept else ml_dtypes.bfloat16), name
        np.testing.assert_array_equal(x, tensors[name].astype(x.dtype))
    assert read_json(out / "config.json")["dtype"] == "bfloat16"


def train(folder, settings, *steps, **meta):
    """A workdir such as pretrain leaves: checkpoints with an optimizer's state in them; its weights
    and biases."""
    model = settings.model
    params = zaya.init(model, jax.random.key(1))
    bias = jax.random.normal(jax.random.key(2), (model.num_hidden_layers, model.num_experts + 1))
    state = {"params": params, "optimizer": {"mean": params}, "balance": {"bias": bias}}
    checkpoints = store.Store(open_workdir(folder, settings))
    for step in steps:
        save_tree(checkpoints, step, state, meta | {"step": step})
    checkpoints.close()
    return params, bias


def test_a_trained_workdir_is_exported_in_float32_with_its_phase_s_rope(tmp_path):
    keys = config.default().to_dict()
    keys["model"] = config.to_dict(MODEL)
    keys["data"] |= {"seq_len": 16, "global_batch": 2}
    keys["schedule"]["phases"] = ({"tokens": 64}, {"tokens": 64, "rope_theta": 777.0})
    params, bias = train(tmp_path / "work", config.check(keys), 3)
    out = exchange.to_hf(f"{tmp_path / 'work'}@3", tmp_path / "out")
    assert all(x.dtype == np.float32 for x in read_all(out).values())
    assert hf.Directory(out).model.rope_parameters.hybrid.rope_theta == 777.0
    params["layers"]["router"]["eda"] = params["layers"]["router"]["eda"].at[0].set(1.0)
    for name in (out, f"{tmp_path / 'work'}@3"):
        ours = any_model.find(name).load_weights()
        jax.tree.map(np.testing.assert_array_equal, ours, (params, bias))


def test_the_tokenizer_goes_along(tmp_path):
    source, _ = write_model(tmp_path / "in", dataclasses.replace(MODEL, vocab_size=300))
    trained = tokenizers.train_bpe(["some words, some more words"] * 20, 270)
    trained.save(source)
    (source / tokenizers.META_FILE).unlink()
    (source / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    exchange.from_hf(source, tmp_path / "work")
    stored = tokenizers.load(tmp_path / "work" / "tokenizer")
    assert stored.encode("some words") == trained.encode("some words")
    made = contents(exchange.to_hf(tmp_path / "work", tmp_path / "out"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert made[name] == (source / name).read_bytes()
    assert tokenizers.META_FILE not in made


PEAK = """
import resource, sys
from zaya_jax.pytorch import exchange
import jax
jax.devices()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
if sys.argv[1] == "from_hf":
    exchange.from_hf(sys.argv[2], sys.argv[3])
else:
    exchange.to_hf(sys.argv[2], sys.argv[3], shard_gb=0.04)
print(peak() - before)
"""


@pytest.mark.slow
def test_host_memory_stays_near_one_shard(tmp_path):
    """290 MB with tensors of at most 17 MB: both ways need less than half of it."""
    model = Model(
        vocab_size=8000,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        head_dim=32,
        moe_intermediate_size=256,
        num_experts=14,
        router_hidden_size=32,
    )
    source, tensors = tmp_path / "in", hf.expected_shapes(model)
    source.mkdir()
    specs = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in tensors.items()}
    rng = np.random.default_rng(0)
    tensor_files.write_sharded(
        source, specs, lambda n: rng.standard_normal(tensors[n], np.float32), 40_000_000
    )
    (source / "config.json").write_text(json.dumps(names.model_to_json(model, "float32")))
    size = sum(map(tensor_files.num_bytes, specs.values()))
    assert size > 250e6
    for way in (
        ("from_hf", source, tmp_path / "work"),
        ("to_hf", tmp_path / "work", tmp_path / "out"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, way)], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) < size / 2, way[0]
    there, back = hf.Directory(source), hf.Directory(tmp_path / "out")
    for name in tensors:
        np.testing.assert_array_equal(there.tensor(name), back.tensor(name))


@pytest.fixture
def server(monkeypatch, tmp_path):
    with serving() as found:
        for name, value in {
            "ENDPOINT": found.address,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(tmp_path / "no token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def test_an_export_is_pushed_in_one_commit_and_stays(called, server, golden_dir, tmp_path):
    out = tmp_path / "out"
    options = (f"--model={golden_dir / 'base'}", f"--out={out}", "--license=mit")
    code, said, err = called(checkpoint, "to_hf", *options, "--push=lab/tiny", "--private")
    assert code == 0, err
    assert said == f"written: {out}\npushed: {server.address}/lab/tiny/commit/1\n"
    pushed = server.repositories["lab/tiny"]
    assert pushed["private"] and pushed["files"] == contents(out)
    assert server.calls.count("POST /api/models/lab/tiny/commit/main") == 1


def test_a_push_that_broke_off_changes_nothing_there_and_hf_upload_repeats_it(
    called, server, golden_dir, tmp_path
):
    out = tmp_path / "out"
    server.fails = "/commit/"
    options = (f"--model={golden_dir / 'base'}", f"--out={out}", "--license=mit")
    code, _, err = called(checkpoint, "to_hf", *options, "--push=ann/tiny", "--private")
    assert code == 4 and "the hub is in a bad mood" in err
    # which makes a public repository without its --private, where none was made yet
    assert err.endswith(f"stays: then `hf upload ann/tiny {out} . --private` sends it\n")
    assert not server.repositories["ann/tiny"]["files"]
    server.fails = ""
    HfApi().upload_folder(repo_id="ann/tiny", folder_path=out)  # as that command does
    assert server.repositories["ann/tiny"]["files"] == contents(out)


TO_HF = "to_hf --model=BASE --out=NEW"
REFUSED = {
    f"{TO_HF} --push=ann/tiny": (2, "--push=ann/tiny needs a license"),
    f"{TO_HF} --push=tiny --license=mit": (2, "tiny is not a repository that this token writes to"),
    f"{TO_HF} --push=bob/tiny --license=mit": (2, "it is ann's: give ann/NAME or lab/NAME, or"),
    f"{TO_HF} --private": (2, "add --push=OWNER/NAME"),
    f"{TO_HF} --push=ann/public --license=mit --private": (4, "is public already"),
    f"{TO_HF} --push=ann/sharded --license=mit": (4, "or templates, model-00001-of-00002"),
    f"{TO_HF} --push=ann/chat --license=mit": (4, "or templates, chat_template.jinja"),
    f"{TO_HF} --push=ann/new --license=secret": (4, "- no license"),
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_pushed_is_refused_in_a_line(called, server, golden_dir, tmp_path, command):
    for name, files in {
        "ann/public": {},
        "ann/sharded": {"model-00001-of-00002.safetensors": b""},
        "ann/chat": {"chat_template.jinja": b""},
    }.items():
        server.repositories[name] = {"id": name, "private": False, "files": files}
    expected, says = REFUSED[command]
    out = tmp_path / "new"
    command = command.replace("BASE", str(golden_dir / "base")).replace("NEW", str(out))
    code, _, err = called(checkpoint, *command.split())
    assert code == expected and says in err and err.count("\n") == 1
    assert out.exists() == (code == 4)  # then it is whole
    assert not [call for call in server.calls if "commit" in call]


@pytest.mark.parametrize(
    ("token", "address", "says"),
    [
        ("", None, "no token found. You must provide a token or be logged in"),
        ("hf_wrong", None, "Invalid user token"),
        (
            TOKEN,
            "http://127.0.0.1:9",
            "Connection refused; check the network, HF_ENDPOINT and the token",
        ),
    ],
)
def test_a_missing_token_or_network_is_told_before_the_export(
    called, server, golden_dir, tmp_path, monkeypatch, token, address, says
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "ENDPOINT", address or server.address)
    options = (f"--model={golden_dir / 'base'}", f"--out={tmp_path / 'out'}", "--license=mit")
    code, _, err = called(checkpoint, "to_hf", *options, "--push=ann/tiny")
    assert code == 2 and says in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


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
    """A run of two steps that began with a model of the hub, and evaluations of both."""
    folder = tmp_path_factory.mktemp("card") / "tiny"
    keys = config.default().to_dict()
    keys["model"] |= SMALL
    keys["data"] |= {"seq_len": 16, "mixture": ("/data/web=0.5", "/data/code.v2=0.5")}
    keys["run"]["init_from"] = CACHED
    settings = config.check(keys)
    meta = {"tokens": 64, "config": config.to_dict(settings), "metrics": {"eval/loss": 1.25}}
    train(folder, settings, 1, 2, **meta)
    tokenizers.load("bytes").save(folder / "tokenizer")
    losses = {"/data/python": {"loss": 1.5}, "all": {"loss": None}}
    for step, data in ((1, {}), (2, losses)):
        tasks = {"arc_easy": {"acc": [step / 8, 0.01]}}
        result = {"model": f"{folder}@{step}", "data": data, "tasks": tasks}
        (folder / f"evaluation of {step}").mkdir()
        (folder / f"evaluation of {step}" / "evaluation.json").write_text(json.dumps(result))
    return folder


def card_of(model, out, publication=UNPUBLISHED):
    made = exchange.to_hf(model, out, publication=publication)
    return (made / "README.md").read_text(encoding="utf-8")


def test_the_hub_reads_what_the_owner_and_the_run_say(workdir, tmp_path):
    said = Publication("lab/tiny", "apache-2.0", ("en", "no"), ("lab/web",))
    text = card_of(workdir, tmp_path / "out", said)
    assert metadata_load(tmp_path / "out" / "README.md") == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "base_model": "lab/big-base",
        "datasets": ["lab/web"],
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "tags": ["zaya", "mixture-of-experts"],
    }
    assert "\n# tiny\n" in text and text.count('from_pretrained("lab/tiny")') == 2


def test_a_person_reads_what_it_is_and_how_good(workdir, tmp_path):
    text = card_of(workdir, tmp_path / "out")
    for line in (
        "- from: `tiny@2`, by zaya_jax ",
        "- began with: `lab/big-base`\n",
        "- license: none is chosen\n",
        "- data: `web`, `code.v2`\n",
        "- trained: 2 steps, 64 tokens of this run\n",
        "- held-out loss: 1.2500 nats a token at this step\n",
        "- tokenizer: 264 ids\n",
        "- every text begins with: `<|bos|>`; the tokenizer puts it there, ",
        "context of 64 tokens\n",
        'AutoTokenizer.from_pretrained("PATH")\ninputs = tokenizer("Once upon a time", ',
        "| `python` | loss, nats a token | 1.5000 |\n| `all` | loss, nats a token | ? |\n",
        "| `arc_easy` | acc | 0.2500 ± 0.0100 |\n",
    ):
        assert line in text, line
    assert "license" not in metadata_load(tmp_path / "out" / "README.md")


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
