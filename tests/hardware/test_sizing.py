"""Sizes off a chip's fast path are found, each with a better value; settings and compiler flags
follow from figures, with reasons, and never over the user's own."""

import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax._src.lib import xla_client
from measured_figures import FAST, SLOW, figures_of
from refusals import check_refused

from pallas_kernels.timing import Timing
from tools import reference
from zaya_jax import cli, config
from zaya_jax.config.keys import Config, Mesh, Phase, Schedule
from zaya_jax.hardware import measured, sizing
from zaya_jax.hardware.measured import Product, ProductShape

CONFIGS = Path(__file__).resolve().parents[2] / "experiments" / "configs"


def read(name):
    return config.check(runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]())


def changed(**keys):
    """ZAYA1's model in one phase of 4096 tokens, 16,384 at once on each of eight devices."""
    raw = config.default()
    raw.update_from_flattened_dict(
        {"model.max_position_embeddings": 1 << 20, "data.global_batch": 512, "data.micro_batch": 32}
        | {name.replace("__", "."): value for name, value in keys.items()}
    )
    return config.check(raw)


@pytest.mark.parametrize("chip", ["mi300x", "h200"])
@pytest.mark.parametrize(
    ("key", "value", "better", "rule"),
    [
        ("vocab_size", 50_257, 50_304, "multiple of 64"),
        ("hidden_size", 2000, 2048, "multiple of 64"),
        ("moe_intermediate_size", 1424, 1408, "multiple of 64"),
        ("head_dim", 96, 128, "head_dim"),
    ],
)
def test_a_width_off_the_path_is_found_with_a_better_one(chip, key, value, better, rule):
    for size, expected in ((value, [(f"model.{key}", value, better)]), (better, [])):
        found = sizing.advise(changed(**{f"model__{key}": size}), chip, 8)
        assert [(f.key, f.value, f.better) for f in found if f.rule == rule] == expected


def grouped(m, rate):
    """The experts' product with m rows each, at this rate."""
    shape = ProductShape("grouped forward", "", m, 2048, 2048, 16)
    seconds = Timing(shape.flops / rate, 1e-9, 1e3, 5)
    return Product(**dataclasses.asdict(shape), dtype="bfloat16", seconds=seconds)


PRODUCTS = (grouped(512, 1e14), grouped(2048, 4e14), grouped(4096, 5e14))
KNEE = figures_of(device="AMD Instinct MI300X", platform="rocm", products=PRODUCTS)
ZAYA1 = read("zaya1_base")
ZAYA1_ONE_AT_ONCE = dataclasses.replace(
    ZAYA1, data=dataclasses.replace(ZAYA1.data, micro_batch=1024)
)
# its two devices a sequence reach each other over one of seven links
FABRIC = (
    "sizing: schedule.phases[2].mesh.context=2: a part of a node: 14% of the rate that all 8 devices"
    " reach [{}]"
)
LINKS = FABRIC.format("ZAYA1 on MI300X, arXiv:2511.17127: n devices have n - 1 links")
# 4,096 tokens on 16 experts; 1,307 TFLOP/s over the 4.33 TB/s that the paper measured
ROWS = (
    "sizing: data.micro_batch={}: {} tokens per expert and device, of {} that hide the reading of"
    " its weights{} [{}]"
)
PRODUCT = (
    "sizing: data.micro_batch={}: a product of {} GFLOP for gate and up, of 200 that come near the"
    " chip's rate{} [ZAYA1 on MI300X, arXiv:2511.17127: some 200 GFLOP reach the peak]"
)
PEAK = "peak over memory bandwidth"


@pytest.mark.parametrize(
    ("given", "chip", "devices", "figures", "expected"),
    [
        (ZAYA1, "mi300x", 1024, None, [LINKS]),
        (ZAYA1, "h200", 1024, None, []),
        (
            ZAYA1,
            "h200",
            1024,
            dataclasses.replace(SLOW, device="NVIDIA H200"),
            [FABRIC.format("measured, 2026-11-22")],
        ),
        (
            ZAYA1_ONE_AT_ONCE,
            "mi300x",
            1024,
            None,
            [
                PRODUCT.format("1,024", "69", "; 4,096 would do"),
                ROWS.format("1,024", "256", "302", "; 2,048 would do", PEAK),
                LINKS,
            ],
        ),
        (
            changed(mesh__context=2, mesh__across=True),
            "mi300x",
            1024,
            None,
            [
                PRODUCT.format("32", "2.1", ", or fewer devices"),
                ROWS.format("32", "8", "302", ", or fewer devices", PEAK),
            ],
        ),
        (
            changed(data__micro_batch=8),
            "mi300x",
            8,
            None,
            [
                PRODUCT.format("8", "69", "; 32 would do"),
                ROWS.format("8", "256", "302", "; 16 would do", PEAK),
            ],
        ),
        (changed(data__micro_batch=64), "mi300x", 8, None, []),
        (changed(), "h200", 8, None, []),
        (
            changed(),
            "mi300x",
            8,
            KNEE,
            [ROWS.format("32", "1,024", "2,048", "; 64 would do", "measured, 2026-11-22")],
        ),
        # of another chip
        (changed(), "mi300x", 8, dataclasses.replace(KNEE, device="cpu"), []),
        (changed(), "mi300x", 8, dataclasses.replace(KNEE, device="NVIDIA H200"), []),
    ],
)
def test_advice_by_published_and_by_measured_figures(given, chip, devices, figures, expected):
    assert [str(advice) for advice in sizing.advise(given, chip, devices, figures)] == expected


def test_a_run_gets_advice_where_its_chip_is_known():
    given = read("tiny")
    gpu = [SimpleNamespace(device_kind="AMD Instinct MI300X", platform="rocm")] * 8
    settings, *advice = sizing.notes(given, gpu)
    assert settings == (
        "settings by published figures (config.hardware.figures is not given): tokens per expert"
        " 302, product 200 GFLOP, fusion buffers 268,435,456 bytes, two levels under 164,000 numbers"
        " a device"
    )
    assert advice == [str(f) for f in sizing.advise(given, "mi300x", 8)] and len(advice) == 5
    for kind in ("cpu", "NVIDIA A100-SXM4-80GB"):
        assert sizing.notes(given, [SimpleNamespace(device_kind=kind, platform="gpu")]) == []


def test_a_mesh_that_fits_no_phase_is_refused():
    check_refused("there are 3 devices", lambda: sizing.advise(read("dense_7b"), "mi300x", 3))


def with_figures(figures, folder, **keys):
    """A config that names a file of these figures."""
    (folder / "all.json").write_text(measured.to_json(figures))
    return changed(hardware__figures=str(folder), **keys)


@pytest.mark.parametrize(
    ("figures", "buffers", "levels", "switches"),
    [(FAST, 1 << 24, 700_000, set()), (SLOW, 1 << 26, 35_000, {"across", "ring"})],
    ids=["fast", "slow"],
)
def test_settings_follow_from_figures(figures, buffers, levels, switches, tmp_path):
    given = with_figures(figures, tmp_path, mesh__context=2)
    here = sizing.settled(given, 32)
    assert {key for key in ("across", "ring") if getattr(here.mesh, key)} == switches
    assert sizing.two_levels_under(given) == pytest.approx(levels, rel=0.02)
    assert sizing.settled(given, 8).mesh.across is False  # one node of the measured ones
    assert sizing.describe(here, "cpu") == (
        f"settings by {tmp_path}: fusion buffers {buffers:,} bytes, two levels under"
        f" {sizing.two_levels_under(given):,} numbers a device, mesh.across={here.mesh.across},"
        f" mesh.ring={here.mesh.ring}; by published figures: nothing"
    )


def test_what_a_config_turns_on_stays_on(tmp_path):
    given = with_figures(FAST, tmp_path, mesh__context=2, mesh__ring=True)
    assert sizing.settled(given, 32).mesh.ring
    assert sizing.settled(changed(mesh__context=2), 32) == changed(mesh__context=2)


def test_figures_of_another_chip_are_refused(tmp_path):
    given = with_figures(dataclasses.replace(FAST, device="NVIDIA H200"), tmp_path)
    check_refused(
        "figures of 32 x NVIDIA H200, none of AMD Instinct MI300X",
        sizing.describe,
        given,
        "AMD Instinct MI300X",
    )


def test_a_program_has_the_flags_that_follow(tmp_path, monkeypatch):
    """Over published ones that a supervisor has set, and never over the user's."""
    with_figures(SLOW, tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_gather_combine_threshold_bytes=5")
    sizing.set_for_platform()  # the supervisor
    parser = cli.Parser()
    parser.add_config("tiny.py")
    option = f"--config.hardware.figures={tmp_path}"
    assert cli.exit_code(lambda: parser.parse_args([option]) and 0) == 0
    words = [word.removeprefix("--xla_gpu_") for word in os.environ["XLA_FLAGS"].split()]
    flags = dict(word.split("=") for word in words)
    assert {name: value for name, value in flags.items() if "_combine_threshold_bytes" in name} == {
        "all_gather_combine_threshold_bytes": "5",
        "all_reduce_combine_threshold_bytes": f"{1 << 26}",
        "reduce_scatter_combine_threshold_bytes": f"{1 << 26}",
        "collective_permute_combine_threshold_bytes": f"{4 << 20}",
    }
    assert len(flags) == len(words) and flags["enable_command_buffer"] == ""


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


def test_a_step_with_tsp_goes_without_the_pass_that_ends_it():
    """XLA pipelines reduce-scatters for fsdp; in a large step with tsp that is a failed check."""
    name, tsp = "xla_gpu_enable_pipelined_reduce_scatter", Mesh(tensor=2, tsp=True)
    environ = {"JAX_PLATFORMS": "cuda"}
    sizing.set_for_platform(environ=environ)  # as at a program's start, before it has a config
    assert f"--{name}=true" in environ["XLA_FLAGS"].split()
    phases = Schedule(phases=(Phase(), Phase(mesh=tsp)))
    for asked in (Config(mesh=tsp), Config(schedule=phases)):
        assert sizing.compiler_flags("rocm", asked)[name] == "false"
    sizing.set_for_platform(Config(mesh=tsp), environ)
    words = environ["XLA_FLAGS"].split()
    assert [word for word in words if name in word] == [f"--{name}=false"]


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_the_memory_s_share_is_the_user_s_under_either_name(name, monkeypatch):
    """JAX refuses a start with both."""
    given = {"JAX_PLATFORMS": "cuda", name: "0.95"}
    sizing.set_for_platform(environ=given)
    names = [key for key in given if "MEM_FRACTION" in key]
    assert names == [name] and sizing.memory_share(given) == 0.95
    empty = {"JAX_PLATFORMS": "cuda", name: ""}  # as none, for JAX too
    sizing.set_for_platform(environ=empty)
    for key, value in empty.items():
        monkeypatch.setenv(key, value)
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert sizing.memory_share(empty) == options["memory_fraction"] == sizing.MEMORY_SHARE


@pytest.mark.parametrize(
    ("plugins", "environ", "expected"),
    [
        (["xla_rocm7"], {}, "rocm"),
        (["xla_rocm7"], {"JAX_PLATFORMS": "gpu"}, "rocm"),
        (["xla_rocm7"], {"JAX_PLATFORMS": "cuda,cpu"}, "cuda"),
        (["xla_rocm7"], {"JAX_PLATFORMS": "cpu"}, None),
        ([], {}, None),
    ],
)
def test_the_platform_is_what_jax_will_choose(plugins, environ, expected, monkeypatch):
    found = [SimpleNamespace(name=name) for name in plugins]
    monkeypatch.setattr(sizing, "entry_points", lambda group: found)
    assert sizing.platform(environ) == expected
    sizing.set_for_platform(environ=environ)
    assert ("XLA_FLAGS" in environ) == (expected is not None)


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
