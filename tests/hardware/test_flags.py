"""The compiler flags of GPU runs: known to the installed jaxlib, with reasons, and never over the
user's own."""

import os
import subprocess
import sys

import pytest

from tools import reference
from zaya_jax.hardware import sizing

COMMANDS = {"characterize": ["storage"]}  # what must come before a program's options
# Runs a program with a bad option, as a user would, where ROCm is asked for and is not there: one
# that touched a device before its options were read would say so. Then prints the compiler's flags.
START = """
import atexit, os, runpy, sys
from jax._src import xla_bridge
from zaya_jax.hardware import sizing

def checked(*args, before=sizing.set_for_platform):
    assert not xla_bridge.backends_are_initialized()
    before(*args)

sizing.set_for_platform = checked
atexit.register(lambda: print(os.environ.get("XLA_FLAGS")))
sys.argv = [*sys.argv[1:], "--no_such_option=1"]
runpy.run_module(f"experiments.{sys.argv[0]}", run_name="__main__")
"""


def start_jax(xla_flags):
    code = "import jax; print(len(jax.devices()))"
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )


def test_the_installed_jaxlib_knows_every_flag():
    done = start_jax(
        sizing.merged("", {**sizing.compiler_flags("cuda"), **sizing.compiler_flags("rocm")})
    )
    assert done.returncode == 0, done.stderr[-2000:]
    unknown = start_jax("--xla_gpu_no_such_flag=1")  # else the above would show nothing
    assert unknown.returncode != 0 and "xla_gpu_no_such_flag" in unknown.stderr


def test_what_the_user_set_stays():
    mine = "--xla_gpu_all_reduce_combine_threshold_bytes=1 --xla_dump_to=d"
    environ = {"JAX_PLATFORMS": "rocm", "XLA_FLAGS": mine}
    sizing.set_for_platform(environ=environ)
    words = environ["XLA_FLAGS"].split()
    assert words[:2] == mine.split()
    assert sum(word.startswith("--xla_gpu_all_reduce_combine") for word in words) == 1
    assert "--xla_gpu_enable_command_buffer=" in words
    before = dict(environ)
    sizing.set_for_platform(environ=environ)
    assert environ == before


def test_the_platform_is_what_jax_will_choose(monkeypatch):
    class Plugin:
        name = "xla_rocm7"

    monkeypatch.setattr(sizing, "entry_points", lambda group: [Plugin])
    assert sizing.platform({}) == "rocm"
    assert sizing.platform({"JAX_PLATFORMS": "gpu"}) == "rocm"
    assert sizing.platform({"JAX_PLATFORMS": "cuda,cpu"}) == "cuda"
    assert sizing.platform({"JAX_PLATFORMS": "cpu"}) is None
    monkeypatch.setattr(sizing, "entry_points", lambda group: [])
    environ: dict[str, str] = {}
    sizing.set_for_platform(environ=environ)
    assert sizing.platform({}) is None and environ == {}


@pytest.mark.parametrize(
    "programs",
    [("generate", "pretrain"), pytest.param(reference.names(), marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_every_program_sets_them_before_it_can_touch_a_device(programs):
    environ = os.environ | {"JAX_PLATFORMS": "rocm", "XLA_FLAGS": ""}
    children = {
        name: subprocess.Popen(
            [sys.executable, "-c", START, name, *COMMANDS.get(name, ())],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in programs
    }
    for name, child in children.items():
        out, errors = child.communicate(timeout=120)
        assert child.returncode == 2 and errors.startswith("error: "), (name, errors)
        assert (
            out.splitlines()[-1].split() == sizing.merged("", sizing.compiler_flags("rocm")).split()
        ), name
