"""The exchange from the command line, and training on from what was imported."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments import checkpoint, pretrain
from zaya_jax import cli, config
from zaya_jax.pytorch import exchange
from zaya_jax.train.workdir import read_config


@pytest.fixture
def run(monkeypatch, capsys):
    """The program's exit code, and what it printed."""

    def call(*options):
        monkeypatch.setattr("sys.argv", ["checkpoint", *map(str, options)])
        code = cli.exit_code(checkpoint.main)
        return code, *capsys.readouterr()

    return call


def test_there_and_back(run, golden_dir, tmp_path):
    source = golden_dir / "mixed"
    assert run("from_hf", f"--model={source}", f"--workdir={tmp_path / 'run'}")[0] == 0
    code, out, err = run("to_hf", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}")
    note = "note: no chat template: the vocabulary has no marks of turns, or there is no tokenizer"
    assert (code, out, err) == (0, f"{note}\nwritten: {tmp_path / 'out'}\n", "")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", source))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == x.tobytes() for name, x in theirs.items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["from_hf", "--model=/nowhere", "--workdir={tmp}/new"], "/nowhere is not a directory"),
        (["from_hf", "--model={golden}/base", "--workdir={golden}"], "is not empty"),
        (["to_hf", "--workdir={tmp}", "--out={tmp}/out"], "has no config.json"),
        (["to_hf", "--workdir={tmp}", "--out={tmp}/out", "--dtype=int8"], "invalid choice: 'int8'"),
        (["to_hf", "--workdir={tmp}"], "required: --out"),
        (["look"], "invalid choice: 'look'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_input_is_one_line(run, golden_dir, tmp_path, options, says):
    code, out, err = run(*(o.format(golden=golden_dir, tmp=tmp_path) for o in options))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert not any(tmp_path.iterdir())


def test_an_imported_model_is_trained_further(run, golden_dir, tmp_path, monkeypatch):
    """With a learning rate of zero the weights stay what they were: the run did begin with them."""
    workdir = tmp_path / "run"
    run("from_hf", f"--model={golden_dir / 'base'}", f"--workdir={workdir}")
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"some words, file {i}\n" * 40)
    settings = config.editable(read_config(workdir))
    settings.update_from_flattened_dict({
        "data.path": str(tmp_path / "text"), "data.seq_len": 32, "data.global_batch": 4, "run.num_steps": 2,
        "optim.lr": 0.0, "eval.windows": 0, "log.sample_tokens": 0, "mesh.data": 1, "balance.enabled": False,
    })  # fmt: skip
    monkeypatch.setattr("signal.signal", lambda *args: None)
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    with pytest.raises(config.UserError, match=r"bos_token_id=2, but tokenizer bytes has 256"):
        pretrain.train(config.check(settings), workdir)
    for name in ("bos", "eos", "pad"):
        settings.model[f"{name}_token_id"] = None  # another tokenizer than it was trained with: its ids
    assert pretrain.train(config.check(settings), workdir) == 0
    assert [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
    ]
    code, _, _ = run("to_hf", f"--workdir={workdir}", "--step=2", f"--out={tmp_path / 'out'}")
    assert code == 0
    theirs = load_file(golden_dir / "base" / "model.safetensors")
    for name, x in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def imported(tmp_path_factory, golden_dir):
    folder = tmp_path_factory.mktemp("imported") / "run"
    exchange.from_hf(golden_dir / "base", folder)
    return folder


def tree(folder):
    return sorted(
        (str(path.relative_to(folder)), path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    )


@pytest.mark.parametrize(
    "options",
    [
        ["from_hf", "--model={golden}/base", "--workdir=/dev/null/x"],
        ["from_hf", "--model={golden}/base", "--workdir=/proc/nowhere/x"],
        ["from_hf", "--model={run}", "--workdir={tmp}/a/b"],
        ["to_hf", "--workdir={run}", "--out={tmp}/a/b", "--shard_gb=nan"],
        ["to_hf", "--workdir={run}", "--out={tmp}/a/b", "--shard_gb=inf"],
        ["to_hf", "--workdir={run}", "--out={tmp}/a/b", "--shard_gb=-1"],
        ["to_hf", "--workdir={run}", "--out={tmp}/a/b", "--step=7"],
        ["to_hf", "--workdir={run}", "--out={run}"],
        ["to_hf", "--workdir={run}", "--out={run}/config.json/x"],
        ["export_params", "--workdir={run}", "--out={run}/config.json"],
        ["export_params", "--workdir={run}", "--out=/dev/null/x/y"],
        ["export_params", "--workdir={run}", "--out={tmp}/a/b", "--step=-1"],
        ["export_params", "--workdir={tmp}", "--out={tmp}/a/b"],
        ["reshard", "--from={run}", "--to={run}"],
        ["reshard", "--from={run}", "--to={tmp}/a/b", "--chunk_mb=inf"],
        ["reshard", "--from={run}", "--to={tmp}/a/b", "--chunk_mb=nan"],
        ["reshard", "--from={run}", "--to={tmp}/a/b", "--step=3"],
        ["reshard", "--from={tmp}", "--to={tmp}/a/b"],
        ["reshard", "--from={run}", "--to=/proc/nowhere/x"],
        ["reshard", "--from={run}", "--to={golden}"],
        ["inspect", "--workdir={run}", "--html={tmp}/a/b.html"],
        ["inspect", "--workdir={run}", "--html={run}/config.json"],
        ["inspect", "--workdir={run}", "--html=/dev/null"],
        ["inspect", "--workdir={run}", "--html={tmp}"],
        ["inspect", "--workdir={run}", "--step=9"],
        ["verify", "--workdir={run}", "--step=9"],
        ["verify", "--workdir={tmp}"],
        ["verify", "--workdir=nothing://host/x"],
    ],
    ids=" ".join,
)
def test_what_is_refused_leaves_everything_as_it_was(run, imported, golden_dir, tmp_path, options):
    folders = [imported, tmp_path]
    before = [tree(folder) for folder in folders]
    code, _, err = run(*(o.format(golden=golden_dir, tmp=tmp_path, run=imported) for o in options))
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert [tree(folder) for folder in folders] == before


def test_a_damaged_source_leaves_no_folder_of_the_target(run, imported, tmp_path):
    shutil.copytree(imported, tmp_path / "run")
    files = [path for path in (tmp_path / "run" / "checkpoints" / "0").rglob("*") if path.is_file()]
    chunk = max(files, key=lambda path: path.stat().st_size)
    chunk.write_bytes(chunk.read_bytes()[:-1])
    before = tree(tmp_path)
    (tmp_path / "empty").mkdir()
    for target in ("a/b", "empty"):
        code, _, err = run("reshard", f"--from={tmp_path}/run", f"--to={tmp_path}/{target}")
        assert code == 4 and "is damaged" in err
    (tmp_path / "empty").rmdir()  # it is empty
    assert [entry[0] for entry in tree(tmp_path)] == [entry[0] for entry in before]
