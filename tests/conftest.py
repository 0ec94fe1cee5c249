"""What every test runs under: the CPU as eight devices, and a compilation cache that outlives the
process.

The settings are environment variables, set before anything imports jax: programs a test starts have
them too.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPS = 16_000


def compiled() -> Path:
    """The folder of compiled programs: the user's, so that a fresh clone finds them, or else the
    clone's."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zaya_jax" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return ROOT / ".cache" / "jax"
    return folder


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no folder here may be one of the hub's
flags = os.environ.get("XLA_FLAGS", "")
# Most of the tests' time is compiling: of a training step 17.7 s with LLVM's first level, 11.9 s
# with none. Without its expensive passes tests/parallel/test_axes.py takes 72 s of a core, with
# them 84 s. Without fusion programs took twice as long: each operation goes through the pipeline
# that a fusion goes through.
for name, value in {
    "xla_force_host_platform_device_count": 8,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": "true",
}.items():
    if name not in flags:
        flags = f"{flags} --{name}={value}".strip()
os.environ["XLA_FLAGS"] = flags
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled()))
# Small programs too: tests/pallas_kernels/test_attention.py takes 13 s of a core the second time,
# without them 28 s.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# each operation's lines of Python: a tenth of the time
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# tracing makes many objects and few cycles: Python's 700 take a fifteenth of the time
gc.set_threshold(20_000)


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Lets go of compiled programs once they take a quarter of the memory maps that a process may
    have.

    Each takes three on a CPU, of 65,530: tests/pytorch/test_golden.py alone makes 22,000. With no
    map left, XLA crashes where it loads the next program (a segmentation fault in
    compilation_cache.get_executable_and_time).
    """
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        sys.modules["jax"].clear_caches()


@pytest.fixture
def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Calls a program of experiments/ in this process: its exit code, and its output."""
    from zaya_jax import cli

    def call(program, *options):
        monkeypatch.setattr("sys.argv", [program.__name__.rpartition(".")[2], *map(str, options)])
        capsys.readouterr()
        return cli.exit_code(program.main), *capsys.readouterr()

    return call


@pytest.fixture(params=["cpu", "xla"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The algorithms of each kind of chip that this machine can run: a CPU's own, and those that
    XLA gets for a GPU.

    Tests of operators with kernels of their own may ask for "triton" too, by indirect parameters:
    interpreted.
    """
    from pallas_kernels import chip

    named = {
        "cpu": chip.Chip("cpu", "cpu"),
        "xla": chip.Chip("gpu", "gfx942", kernels=()),
        "triton": chip.Chip("cpu", "gfx942"),
    }
    with chip.making(named[request.param]):
        yield request.param


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of golden cases, computed by the public PyTorch implementation: base, sliding,
    taps, mixed."""
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session", params=["base", "sliding", "taps", "mixed"])
def golden_case(request: pytest.FixtureRequest, golden_dir: Path) -> Path:
    """Each golden case in turn: a folder with config.json, model.safetensors and
    expected.safetensors."""
    return golden_dir / request.param


@pytest.fixture(scope="session")
def _s3() -> Iterator[dict[str, str]]:
    from tools import faults

    store = faults.Store()
    yield store.variables
    store.die()


@pytest.fixture
def s3_server(_s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a real S3 server on this machine; also for the programs that a test starts."""
    for name, value in _s3.items():
        monkeypatch.setenv(name, value)
    return _s3["AWS_ENDPOINT_URL"]
