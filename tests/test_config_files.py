"""A config file that gives no config ends in one line in any case; changed keys are read as their
types."""

from pathlib import Path

import pytest
from refusals import refusal

from zaya_jax import cli
from zaya_jax.config import read_config

ROOT = Path(__file__).resolve().parent.parent
START = "from zaya_jax import config\ndef get_config():\n    c = config.default()\n"


def parsed(file, *changes):
    parser = cli.Parser()
    parser.add_config("tiny.py")
    return parser.parse_args([f"--config={file}", *changes]).config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "def get_config():\n    raise RuntimeError('boom\\nmore')\n",
            "RuntimeError in line 2: boom)",
        ),
        ("def get_config():\n    return {'name': 'x'}\n", "returns dict, not a ConfigDict"),
        ("def get_config(:\n", "SyntaxError in line 1"),
        (START + "    c.optim.lrr = 1\n", "unknown config key 'lrr' in line 4; did you mean lr?"),
        (START + "    c.optim.lr = -1.0\n    return c\n", "config.optim.lr=-1.0 is out of range"),
        (None, "is not a file"),
    ],
)
def test_it_is_one_line(tmp_path, content, says):
    file = tmp_path / "config.py"
    file.mkdir() if content is None else file.write_text(content)
    assert says in refusal(parsed, file, "--config.data.path=x")


def test_keys_are_changed_by_their_types():
    changed = parsed(
        "experiments/configs/tiny.py",
        "--config.data.path=1",
        "--config.optim.lr=1e-2",
        "--config.run.num_steps=7",
        "--config.eval.every=3",
        "--config.mesh.fsdp=true",
        "--config.kernels=none",
        "--config.eval.every=4",
        "--config.data.mixture=('a=1', 'b=2')",
    )
    assert (changed.data.path, changed.optim.lr, changed.run.num_steps, changed.mesh.fsdp) == (
        "1",
        0.01,
        7,
        True,
    )
    assert (
        changed.kernels == ("none",)
        and changed.eval.every == 4
        and changed.data.mixture == ("a=1", "b=2")
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.pth=x", "unknown config key config.data.pth; did you mean data.path?"),
        ("checkpoint.every=4", "did you mean checkpoint.every_steps?"),
        ("data.seq_len=1e3", "--config.data.seq_len=1e3: expected a whole number"),
        ("optim.lr=much", "--config.optim.lr=much: expected a number"),
        ("mesh.fsdp", "--config.mesh.fsdp: expected true or false"),
    ],
)
def test_a_change_that_will_not_do_names_its_key(change, says):
    assert says in refusal(parsed, "experiments/configs/tiny.py", f"--config.{change}")


def test_what_is_shipped_is_found_from_any_folder(tmp_path, monkeypatch):
    """An installed package's pages say --config=experiments/configs/NAME.py too. A file that is
    there comes first."""
    monkeypatch.chdir(tmp_path)
    assert read_config("experiments/configs/tiny.py").name == "tiny"
    assert "needs the weights" in refusal(read_config, "experiments/configs/finetune.py")
    said = refusal(read_config, "experiments/configs/no.py")
    assert "is not a file; give" in said and str(ROOT / "experiments" / "configs") in said
    folder = tmp_path / "experiments" / "configs"
    folder.mkdir(parents=True)
    (folder / "tiny.py").write_text(START + "    c.name = 'mine'\n    return c\n")
    assert read_config("experiments/configs/tiny.py").name == "mine"
