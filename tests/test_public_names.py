"""The library's public names, its import, and the commands of the package; every program describes its
purpose and options, and the page of the config's keys agrees with them."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zaya_jax as zj
from tools import config_page, reference
from zaya_jax import config
from zaya_jax.config import page

ROOT = Path(__file__).resolve().parent.parent
NAMES = [
    "Config",
    "EndRun",
    "LanguageModel",
    "Layer",
    "Linear",
    "Observer",
    "Router",
    "StorageError",
    "TokenSum",
    "Trace",
    "TrainingStopped",
    "UserError",
    "__version__",
    "apply",
    "balance",
    "checkpoint",
    "config",
    "create",
    "data",
    "init",
    "load",
    "loss",
    "metrics",
    "optimizer",
    "schedule",
    "scores",
    "train",
    "training_loss",
    "weight",
]
OF_A_MODEL = [
    "continued",
    "generate",
    "layer",
    "lens",
    "logits",
    "loss",
    "loss_and_grads",
    "on_one_device",
    "save",
    "scores",
    "stream",
    "to_hf",
    "trace",
]
OF_A_TRACE = [
    "logits",
    "hidden_states",
    "router_probs",
    "choices",
    "expert_outputs",
    "attention",
    "queries",
    "keys",
    "values",
]


def test_the_public_names_are_frozen():
    assert zj.__all__ == NAMES
    assert set(NAMES) <= set(dir(zj))
    for name in NAMES:
        assert getattr(zj, name) is not None
    methods = [
        n for n, x in vars(zj.LanguageModel).items() if callable(x) and not n.startswith("_")
    ]
    assert sorted(methods) == OF_A_MODEL
    fields = [field.name for field in dataclasses.fields(zj.LanguageModel)]
    assert [name for name in fields if not name.startswith("_")] == [
        "config",
        "params",
        "balance",
        "tokenizer",
        "mesh",
        "source",
    ]
    assert [field.name for field in dataclasses.fields(zj.Trace)] == OF_A_TRACE
    with pytest.raises(AttributeError, match="'nothing'"):
        zj.nothing  # noqa: B018


def test_the_import_is_cheap_and_lazy():
    code = """
import sys
import zaya_jax as zj
import zaya_jax.aegis.node
heavy = {"jax", "flax", "numpy", "experiments"} & set(sys.modules)
assert not heavy, heavy
assert "create" in dir(zj) and "jax" not in sys.modules
zj.UserError
zj.data.dataset
import zaya_jax.report
assert not {"jax", "grain", "orbax"} & set(sys.modules)
zj.apply
assert "jax" in sys.modules
assert zj.train is zj.library.train
assert "experiments.pretrain" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_page_names_every_command():
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(re.findall(r"`(zaya-[a-z-]+)`", page)) == sorted(project["scripts"])


def test_the_page_of_keys_is_as_it_is_made():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_page.page(), "python -m tools.config_page > docs/config.md"


def test_page_and_help_have_every_key():
    for key in config.all_keys():
        assert f"| `{key}` |" in config_page.page()
        assert f"  {key}=" in page.listing()
    assert "schedule.phases[i].tokens" in config_page.page()


def test_no_program_imports_jax_to_print_its_help():
    code = (
        "import sys; from tools import reference as r; [r.parser_of(name).format_help() for name in"
        " r.names()]; "
    )
    subprocess.run(
        [sys.executable, "-c", code + "assert 'jax' not in sys.modules"],
        cwd=ROOT,
        check=True,
        timeout=60,
    )


def test_options_are_whole_words_with_underscores():
    names = {
        name for own in reference.options().values() for options in own.values() for name in options
    }
    assert not [name for name in names if "-" in name]


@pytest.mark.parametrize("name", ["pretrain", "compile", "plan"])
def test_the_help_of_a_program_with_a_config_has_its_keys(name):
    assert "optim.lr=0.001" in reference.parser_of(name).format_help()
