"""The installed package: a wheel's content, its commands and public names; every program describes
its purpose and options, and the page of the config's keys agrees with them."""

import ast
import dataclasses
import fnmatch
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from test_architecture import imports, modules

import zaya_jax
import zaya_jax as zj
from tools import config_page, reference

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LEFT = {"__pycache__", ".ipynb_checkpoints"}  # by Python and Jupyter
PACKAGES = ("experiments", "pallas_kernels", "zaya_jax")
COMMANDS = {f"zaya-{name.replace('_', '-')}": name for name in reference.names()}


def tree() -> set[str]:
    """Every file of the packages and of launch/, by its path."""
    found = [
        path
        for room in (*PACKAGES, "launch")
        for path in (ROOT / room).rglob("*")
        if path.is_file()
    ]
    return {str(path.relative_to(ROOT)) for path in found if not LEFT & {*path.parts}}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in requirements}


# ################################################################################################
# What pyproject.toml says
# ##################################################################################################


def test_each_program_is_a_command():
    assert PROJECT["project"]["scripts"] == dict.fromkeys(sorted(COMMANDS), "experiments:main")


def test_every_file_of_the_packages_is_declared():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for name in tree():
        path = Path(name)
        if path.parts[0] == "launch":
            assert len(path.parts) == 2
            continue
        package = ".".join(path.parent.parts)
        assert (ROOT / path.parent / "__init__.py").exists(), (
            f"{package} is no package: its files would be left out"
        )
        patterns = ["*.py", *data.get(package, [])]
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), name
    assert PROJECT["tool"]["setuptools"]["data-files"] == {"share/zaya_jax/launch": ["launch/*"]}


def test_the_version_is_one():
    assert PROJECT["project"]["version"] == zaya_jax.__version__


def test_what_training_needs_is_pinned_in_the_small_set_and_nothing_of_development():
    def pinned(name):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        return names_of([line for line in lines if "==" in line])

    base, dev = pinned("base"), pinned("dev")
    extras = PROJECT["project"]["optional-dependencies"]
    assert names_of(PROJECT["project"]["dependencies"]) <= base
    assert names_of(extras["dev"]) - base <= dev and not base & dev
    assert not base & {"pytest", "mypy", "ruff", "hypothesis", "matplotlib", "moto", "flask"}


def test_what_the_packages_import_is_declared_and_no_more():
    """At a module's top: nothing of the development set is needed to import what training
    imports."""
    known = importlib.metadata.packages_distributions()
    declared = names_of(PROJECT["project"]["dependencies"])
    below = {"ml-dtypes": "jax", "jaxlib": "jax", "psutil": "grain"}
    there = {*PACKAGES, *sys.stdlib_module_names}
    foreign, used = set(), set()
    for module, path in modules():
        at_top = {node.lineno for node in ast.parse(path.read_text(encoding="utf-8")).body}
        for line, name in imports(module, path):
            package = name.split(".")[0]
            given_by = {below.get(x, x) for x in names_of(known.get(package, []))}
            used |= given_by
            if line in at_top and package not in there and not given_by & declared:
                foreign.add((module, name))
    assert not foreign
    assert declared <= used


# ################################################################################################
# Its environment
# ##################################################################################################

INTERPRETER = """#!/bin/bash
case "$*" in
  "-I --version") echo Python 3.13.0 ;;
  "-I -c"*) echo "$HERE/python" ;;
  "-I -m venv "*) mkdir -p "$4/bin"; cp "$HERE/python" "$4/bin/python" ;;
  "-m pip install"*) echo "$*" >>"$HERE/installed"; [ ! -e "$HERE/broken" ] ;;
esac
"""


@pytest.fixture
def set_up(tmp_path):
    """tools/setup.sh in a folder of its own, with an interpreter that only notes what it is to
    install: a function from EXTRAS to (exit code, the extras that are installed)."""
    for name in ("tools", "requirements"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    finds = tmp_path / "tools" / "find_python.sh"
    finds.write_text(f"#!/bin/bash\necho {tmp_path}/python\n")
    (tmp_path / "python").write_text(INTERPRETER)
    for path in (finds, tmp_path / "python"):
        path.chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "requirements" / "dev.txt").touch()

    def call(extras=None):
        (tmp_path / "installed").write_text("")
        given = {"HERE": str(tmp_path)} | ({} if extras is None else {"EXTRAS": extras})
        setup = ["bash", "tools/setup.sh", ".venv", "requirements/dev.txt"]
        code, _, _ = started(setup, tmp_path, **given)
        return code, re.findall(r"-e \.\[?([\w,]*)", (tmp_path / "installed").read_text())

    return call


def test_extras_add_up_in_the_environment_that_is_there(set_up, tmp_path):
    assert set_up("cuda") == (0, ["cuda"])
    by_hand = tmp_path / ".venv" / "by_hand"
    by_hand.touch()
    assert set_up("eval, notebook") == (0, ["cuda,eval,notebook"])
    assert set_up() == set_up("eval") == set_up("") == (0, [])  # nothing to do
    (tmp_path / "broken").touch()  # a network that ends in the middle
    assert set_up("s3")[0] == 1
    (tmp_path / "broken").unlink()
    assert set_up() == (0, ["cuda,eval,notebook,s3"]) and by_hand.exists()
    shutil.move(tmp_path / ".venv", tmp_path / "elsewhere")
    (tmp_path / "broken").touch()
    assert set_up("rocm")[0] == 1
    (tmp_path / "broken").unlink()
    assert set_up() == (0, ["rocm"])


# ################################################################################################
# The wheel
# ##################################################################################################


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the tree, since building leaves files in it."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "launch", "pyproject.toml", "README.md", "LICENSE"):
        there = ROOT / name
        if there.is_dir():
            shutil.copytree(there, source / name, ignore=shutil.ignore_patterns(*LEFT))
        else:
            shutil.copyfile(there, source / name)
    pip = "-m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps --no-index -w"
    subprocess.run([sys.executable, *pip.split(), source / "dist", source], check=True)
    return next((source / "dist").glob("*.whl"))


@pytest.mark.slow
def test_a_wheel_holds_the_tree(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    data = f"zaya_jax-{zaya_jax.__version__}.data/data/share/zaya_jax/"
    assert {name.removeprefix(data) for name in names if ".dist-info/" not in name} == tree()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of commands of an environment that has the wheel, and the rest from this one."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (
        subprocess.run([x, "-c", ask], check=True, capture_output=True, text=True).stdout
        for x in (python, sys.executable)
    )
    Path(theirs.strip(), "rest.pth").write_text(ours)
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", "--ignore-installed", wheel], check=True
    )
    return venv / "bin"


def started(command, folder, **variables):
    """(exit code, output, errors) of a command in another folder."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_an_installed_package_is_used_from_any_folder(installed, tmp_path):
    code = "import zaya_jax, experiments as e, pallas_kernels; print(zaya_jax.__file__, e.__file__)"
    _, out, err = started([installed / "python", "-c", code], tmp_path)
    assert not err and all(Path(name).is_relative_to(installed.parent) for name in out.split())
    code = (
        "import zaya_jax as zj; from zaya_jax.aegis.log_rules import load; print(load('kernel'),"
        " zj.create('tiny'))"
    )
    assert "5,182,616 parameters" in started([installed / "python", "-c", code], tmp_path)[1]
    templates = (installed.parent / "share" / "zaya_jax" / "launch", ROOT / "launch")
    theirs, ours = ({path.name: path.read_bytes() for path in x.iterdir()} for x in templates)
    assert theirs == ours


@pytest.mark.slow
def test_an_installed_program_trains(installed, tmp_path):
    keys = {
        "model.hidden_size": 16,
        "model.num_hidden_layers": 2,
        "model.head_dim": 8,
        "model.moe_intermediate_size": 8,
        "model.num_experts": 2,
        "model.router_hidden_size": 8,
        "data.seq_len": 16,
        "data.global_batch": 8,
        "run.num_steps": 2,
    }
    options = [f"--config.{key}={value}" for key, value in keys.items()]
    config = "--config=experiments/configs/zaya1_base.py"  # as the pages name it
    for program, *words, says in (
        ("zaya-pretrain", "--workdir=run", *options, "done: 2 steps"),
        ("zaya-pretrain", config, "--describe", "838,044 steps"),
        ("zaya-checkpoint", "verify", "--workdir=run", "step 2.*whole"),
    ):
        code, out, err = started([installed / program, *words], tmp_path)
        assert (code, err) == (0, "") and re.search(says, out, re.DOTALL)


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
    public = {n: x for n, x in vars(zj.LanguageModel).items() if not n.startswith("_")}
    assert sorted(n for n, x in public.items() if callable(x)) == OF_A_MODEL
    fields = [field.name for field in dataclasses.fields(zj.LanguageModel)]
    assert fields == ["config", "params", "balance", "tokenizer", "mesh", "source", "_origin"]
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
    assert sorted(re.findall(r"`(zaya-[a-z-]+)`", page)) == sorted(COMMANDS)


def test_the_page_of_keys_is_as_it_is_made():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_page.page(), "python -m tools.config_page > docs/config.md"


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
