"""The installed package: what a wheel holds, its commands, and that it runs where Linux's own calls are missing."""

import ast
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
from test_architecture import OPTIONS, modules

import zaya_jax

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LEFT = {"__pycache__", ".ipynb_checkpoints"}  # by Python and Jupyter
PACKAGES = ("experiments", "pallas_kernels", "zaya_jax")
COMMANDS = {f"zaya-{name.replace('_', '-')}": name for name in OPTIONS}


def tree() -> set[str]:
    """Every file of the packages and of launch/, by its path."""
    found = [path for room in (*PACKAGES, "launch") for path in (ROOT / room).rglob("*") if path.is_file()]
    return {str(path.relative_to(ROOT)) for path in found if not LEFT & {*path.parts}}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


########################################################################################################################
# What pyproject.toml says
########################################################################################################################


def test_each_program_is_a_command():
    assert PROJECT["project"]["scripts"] == dict.fromkeys(sorted(COMMANDS), "experiments._commands:main")


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
        return {normal(line.split("==")[0]) for line in lines if "==" in line}

    def declared(lines):
        return {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}

    base, dev = pinned("base"), pinned("dev")
    extras = PROJECT["project"]["optional-dependencies"]
    assert declared(PROJECT["project"]["dependencies"]) <= base
    assert declared(extras["dev"]) - base <= dev and not base & dev
    assert not base & {"pytest", "mypy", "ruff", "hypothesis", "matplotlib", "moto", "flask"}


@pytest.mark.slow
@pytest.mark.parametrize("pins", ["base", "dev"])
@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_pins_have_wheels_for_other_machines(machine, pins, tmp_path):
    """aarch64 Linux (glibc 2.28) and Apple silicon (macOS 14). Needs the package index."""
    old = (5, 12, 17, 24, 26, 27, 28)
    platforms = {
        "aarch64": ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in old)],
        "arm64": [f"macosx_{v}" for v in ("11_0_arm64", "12_0_arm64", "13_0_arm64", "14_0_arm64")]
        + [f"macosx_10_{minor}_universal2" for minor in (9, 12, 13)],
    }[machine]
    wanted = tmp_path / "pins.txt"
    lines = (ROOT / "requirements" / f"{pins}.txt").read_text().splitlines()
    # pip reads markers for the machine that it runs on.
    wanted.write_text("\n".join(x for x in lines if "==" in x and not (machine == "aarch64" and "; " in x)))
    asked = [f"--platform={name}" for name in platforms] + [
        f"--abi={abi}" for abi in ("cp312", "abi3", "none")
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
    ]
    command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12", *asked]
    done = subprocess.run(
        [*command, f"--target={tmp_path / 'there'}", "-r", wanted], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_the_packages_import_is_declared():
    """At a module's top: nothing of the development set is needed to import what training imports."""
    known = importlib.metadata.packages_distributions()
    declared = {normal(re.match(r"[\w.-]+", line)[0]) for line in PROJECT["project"]["dependencies"]}
    below = {"tensorstore": "orbax-checkpoint", "ml-dtypes": "jax", "jaxlib": "jax", "psutil": "grain"}
    foreign = set()
    for module, path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.split(".")[0] for name in names} - {*PACKAGES, *sys.stdlib_module_names}:
                given_by = {normal(name) for name in known[top]}
                if not given_by & declared and not {below.get(name) for name in given_by} & declared:
                    foreign.add((module, top))
    assert not foreign


########################################################################################################################
# The wheel
########################################################################################################################


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
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [
            *pip,
            "wheel",
            "-q",
            "--no-build-isolation",
            "--no-deps",
            "--no-index",
            "-w",
            source / "dist",
            source,
        ],
        check=True,
    )
    return next((source / "dist").glob("*.whl"))


@pytest.mark.slow
def test_a_wheel_holds_the_tree(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    data = f"zaya_jax-{zaya_jax.__version__}.data/data/share/zaya_jax/"
    held = {name.removeprefix(data) for name in names if ".dist-info/" not in name}
    assert held == tree()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of commands of an environment that has the wheel, and the rest from this one."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    )
    ours = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True).stdout
    (site / "rest.pth").write_text(ours)
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", "--ignore-installed", wheel], check=True
    )
    return venv / "bin"


def started(command, folder, **variables):
    """(exit code, output, errors) of a command in another folder."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_an_installed_package_is_used_from_any_folder(installed, tmp_path):
    code = "import zaya_jax, experiments, pallas_kernels; print(zaya_jax.__file__, experiments.__file__)"
    _, out, err = started([installed / "python", "-c", code], tmp_path)
    assert not err and all(Path(name).is_relative_to(installed.parent) for name in out.split())
    code = "from zaya_jax.aegis import rules; import zaya_jax as zj; print(zj.create('tiny'))"
    assert "5,182,616 parameters" in started([installed / "python", "-c", code], tmp_path)[1]
    templates = installed.parent / "share" / "zaya_jax" / "launch"
    assert {path.name for path in templates.iterdir()} == {path.name for path in (ROOT / "launch").iterdir()}
    assert templates.joinpath("node.sh").read_bytes() == (ROOT / "launch" / "node.sh").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_is_its_program(installed, tmp_path, command):
    program = [sys.executable, "-m", f"experiments.{COMMANDS[command]}"]
    for options in (["--help"], ["--nonsense=1"]):
        theirs = started([*program, *options], tmp_path, PYTHONPATH=str(ROOT))
        code, out, err = started([installed / command, *options], tmp_path)
        ours = [text.replace(str(installed.parent), "") for text in (out, err)]
        where = Path("lib") / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        ours = [re.sub(rf"/?{where}", str(ROOT), text) for text in ours]
        assert (code, *ours) == theirs, options
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupt_of_a_command_that_starts_is_no_traceback(installed, tmp_path):
    """As of `python -m`: the default action, until the program takes over."""
    code = "import sys, signal; sys.argv = ['/bin/zaya-plan']; import experiments; "
    code += "print(signal.getsignal(2) is signal.SIG_DFL)"
    assert started([installed / "python", "-c", code], tmp_path)[1] == "True\n"
    assert started([installed / "python", "-c", code.replace("zaya-plan", "other")], tmp_path)[1] == "False\n"


@pytest.mark.slow
def test_the_configs_of_the_pages_are_found(installed, tmp_path):
    """As they are written there, from a folder that is no clone."""
    told = ["--config=experiments/configs/zaya1_base.py", "--describe"]
    code, out, err = started([installed / "zaya-pretrain", *told], tmp_path)
    assert (code, err) == (0, "") and "838,044 steps" in out
    told = ["--config=experiments/configs/finetune.py:nowhere"]
    code, out, err = started([installed / "zaya-pretrain", *told], tmp_path)
    assert (code, out) == (2, "") and "finetune.py:nowhere has no checkpoint" in err
    assert not list(tmp_path.iterdir())


def test_the_page_of_the_library_names_every_command():
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(zaya-[a-z-]+)`", page.partition("## Installed")[2])) == set(COMMANDS)


@pytest.mark.slow
def test_an_installed_program_trains(installed, tmp_path):
    keys = {
        "model.hidden_size": 16, "model.num_hidden_layers": 2, "model.head_dim": 8, "model.moe_intermediate_size": 8,
        "model.num_experts": 2, "model.router_hidden_size": 8, "data.seq_len": 16, "data.global_batch": 8,
        "run.num_steps": 2,
    }  # fmt: skip
    options = [f"--config.{key}={value}" for key, value in keys.items()]
    code, out, err = started([installed / "zaya-pretrain", "--workdir=run", *options], tmp_path)
    assert (code, err) == (0, "") and "done: 2 steps" in out
    code, out, err = started([installed / "zaya-checkpoint", "verify", "--workdir=run"], tmp_path)
    assert (code, err) == (0, "") and "step 2" in out and "whole" in out


########################################################################################################################
# Systems that are not Linux
########################################################################################################################

# A stand-in for macOS, where no such machine is: what its Python has not is taken out, and /proc, /dev/shm and
# /sys are not there. Dependencies are imported before; theirs is theirs to see to.
NOT_LINUX = """
import builtins, ctypes, errno, importlib, io, mmap, os, platform, pathlib, resource, select, signal, socket, sys
import asyncio, concurrent.futures.process, multiprocessing.context, shutil, subprocess, tempfile, uuid
import jax, jax.experimental.multihost_utils, jax.experimental.pallas.triton, flax.nnx, grain, optax
import ml_collections.config_flags, orbax.checkpoint, prometheus_client, psutil, pyarrow.parquet, safetensors.numpy
import sentencepiece, tensorboardX, tensorstore, tokenizers, tqdm, zstandard, fsspec.implementations.local
jax.devices()

LINUX = {
    os: "posix_fadvise posix_fallocate pidfd_open memfd_create eventfd copy_file_range splice O_TMPFILE O_DIRECT "
        "O_PATH POSIX_FADV_DONTNEED POSIX_FADV_SEQUENTIAL POSIX_FADV_WILLNEED sched_getaffinity sched_setaffinity "
        "fdatasync pipe2 setns unshare getrandom O_NOATIME sched_setscheduler process_cpu_count getxattr setxattr",
    signal: "SIGRTMIN SIGRTMAX SIGPOLL SIGPWR SIGSTKFLT sigtimedwait sigwaitinfo pidfd_send_signal",
    resource: "prlimit RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_OFILE",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MAP_POPULATE MAP_STACK",
    select: "epoll EPOLLIN EPOLL_CLOEXEC",
    socket: "AF_NETLINK AF_PACKET SO_PEERCRED TCP_USER_TIMEOUT SO_BINDTODEVICE SOCK_CLOEXEC SOCK_NONBLOCK AF_VSOCK",
}
for module, names in LINUX.items():
    for name in names.split():
        vars(module).pop(name, None)
tempfile._O_TMPFILE_WORKS = False
sys.platform, platform.system, platform.libc_ver = "darwin", lambda: "Darwin", lambda *_, **__: ("", "")

class NoLibc:
    def __getattr__(self, name):
        raise AttributeError(f"dlsym: symbol not found: {name}")
load = ctypes.CDLL
ctypes.CDLL = lambda name, *args, **kwargs: NoLibc() if name is None else load(name, *args, **kwargs)

def hidden(function):
    def call(path, *args, **kwargs):
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if str(text).startswith(("/proc", "/sys", "/dev/shm", "/etc/os-release")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", text)
        return function(path, *args, **kwargs)
    return call
files = {builtins: ["open"], io: ["open"], os: ["open", "stat", "lstat", "listdir", "scandir", "access"]}
for module, names in files.items():
    for name in names:
        setattr(module, name, hidden(getattr(module, name)))
limit, setlimit = resource.getrlimit, resource.setrlimit
resource.getrlimit = lambda which: (256, 2**63 - 1) if which == resource.RLIMIT_NOFILE else limit(which)
"""


def as_if_elsewhere(code, folder):
    done = subprocess.run(
        [sys.executable, "-c", NOT_LINUX + code], cwd=folder, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_module_is_imported_without_what_linux_alone_has(tmp_path):
    names = [module for module, _ in modules()]
    assert "zaya_jax.data.storage" in names and "experiments.pretrain" in names
    code = f"""
from absl import flags
before = set(flags.FLAGS)
for name in {names}:
    importlib.import_module(name)
    for flag in set(flags.FLAGS) - before:  # programs have some in common, and none is imported with another
        delattr(flags.FLAGS, flag)
print("all")
"""
    assert as_if_elsewhere(code, tmp_path) == "all\n"


@pytest.mark.slow
def test_a_run_needs_nothing_that_linux_alone_has(tmp_path):
    code = """
import zaya_jax as zj
from zaya_jax import cli
from zaya_jax.cluster import lifelines
from zaya_jax.hardware import host
c = zj.config.default()
for key, value in dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=2,
    moe_intermediate_size=8, router_hidden_size=8, vocab_size=264, max_position_embeddings=64,
).items():
    c.model[key] = value
c.data.path, c.data.tokenizer, c.data.seq_len, c.data.global_batch = "stdlib", "bytes", 16, 8
c.run.num_steps, c.eval.every, c.checkpoint.every_steps, c.log.sample_tokens = 2, 1, 1, 2
host.keep_memory()
lifelines.listen(0, "the test's", "").close()
print(zj.train(c, "run").source)
"""
    assert as_if_elsewhere(code, tmp_path).splitlines()[-1] == "run@2"
