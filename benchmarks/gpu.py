"""A first hour on a GPU: what is right there, how fast it is, and what the plan and the compiler
had said.

    python -m benchmarks.gpu --out=DIR [--minutes=20] [--parts NAME ...]

Each part is a process with its own time, and the next begins whatever became of it. After each,
DIR/gpu.json and DIR/gpu.md hold all that is known, and DIR/PART.log all that the part printed as
errors. On a CPU all parts run at tiny sizes: that shows that they run, and measures no chip.
"""

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.hardware import flags
from zaya_jax.report.document import Table

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (sys.executable, "-m")
# seconds of a part, however late it is: tiles are tried for a minute, and it compiles (H100)
LEAST = 150.0
# of bench_checkpoint.MODELS: sequences, tokens
SIZES = {"1M": (8, 256), "100M": (4, 2048), "1B": (2, 4096)}
RESUME = (
    "run.num_steps=4",
    "checkpoint.every_steps=2",
    "data.global_batch=8",
    "data.seq_len=64",
    "eval.every=1000",
    "eval.windows=1",
    "log.sample_tokens=2",
)

Part = Callable[[Path, bool], dict[str, Any]]


def run(*command: str | Path) -> str:
    """A program's output; an error with its last line if it fails."""
    done = subprocess.run([*PYTHON, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no word"]
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1][:300]}")
    return done.stdout


def golden(out: Path, tiny: bool) -> dict[str, Any]:
    """The greatest difference of logits, and of the loss, from the public implementation's, in
    float32."""
    import numpy as np
    from safetensors.numpy import load_file

    from zaya_jax import library

    found = {}
    for folder in sorted((ROOT / "tests" / "golden").iterdir()):
        if (folder / "expected.safetensors").exists():
            expected, model = load_file(folder / "expected.safetensors"), library.load(folder)
            off = np.abs(model.logits(expected["input_ids"]) - expected["logits"]).max()
            bound = 2e-5 * max(1, np.abs(expected["logits"]).max())
            loss = abs(model.loss(expected["input_ids"], expected["labels"]) - expected["loss"])
            right = "right" if off <= bound and loss <= 2e-5 else "WRONG"
            found[folder.name] = (
                f"{right}: logits by {off:.1e} of {bound:.1e}, the loss by {float(loss):.1e}"
            )
    return found


def tune(out: Path, tiny: bool) -> dict[str, Any]:
    """The tiles that a run of ZAYA1 would take here, and each kernel's time against all others."""
    found = {} if tiny else {"tiles": run("pallas_kernels.tune")}
    chosen = ("--operators", "residual_norm", "--seconds", "1e-3") if tiny else ("--sizes", "4K")
    run("benchmarks.kernels", "--out", out / "operators", *chosen)
    return {**found, "by operator": f"{out}/operators/kernels.md"}


def settings_of(name: str, tiny: bool) -> Any:
    """The config of a size; all are the smallest where `tiny`."""
    from benchmarks.bench_checkpoint import MODELS
    from zaya_jax import config

    sequences, length = (2, 64) if tiny else SIZES[name]
    model = MODELS["1M" if tiny else name]
    return config.check({"model": model, "data": {"seq_len": length, "global_batch": sequences}})


def training_step(name: str, out: Path, tiny: bool) -> dict[str, Any]:
    """Tokens a second, MFU of useful FLOPs, peak memory: measured, compiled, planned; the profile
    by scope."""
    import jax
    import numpy as np

    from pallas_kernels import timing
    from zaya_jax.compiled import buffers, launches, measure
    from zaya_jax.hardware import chips
    from zaya_jax.parallel.mesh import make_mesh
    from zaya_jax.parallel.spread import spread_of
    from zaya_jax.plan import footprint
    from zaya_jax.plan.case import Case
    from zaya_jax.training import kernels as chosen
    from zaya_jax.training import state as states

    settings = settings_of(name, tiny)
    chosen.look_up(settings, jax.devices()[0])
    mesh, sequences = make_mesh(settings.mesh, jax.devices()[:1]), settings.data.global_batch
    device, tokens = mesh.devices.flat[0], sequences * settings.data.seq_len
    program, memory = buffers.compile_watched(measure.lower(settings, mesh, sequences, 1))
    state = states.init(settings, states.build_optimizer(settings, mesh), mesh)
    like = measure.batch_like(settings, mesh, sequences, 1)
    batch = {key: jax.device_put(np.ones(x.shape, x.dtype), x.sharding) for key, x in like.items()}
    at = [state]

    def call():
        at[0], figures = program(at[0], batch, np.float32(1e-4))
        return figures

    seconds = timing.time_call(call, 1.0 if tiny else 10.0, queue=False).median
    peak = chips.peak_flops(device.device_kind, settings.precision)
    case = Case(
        settings,
        spread_of(settings.mesh, mesh.shape),
        chips.named(device.device_kind) or "mi300x",
        sequences,
        1,
    )
    statistics = device.memory_stats() or {}
    useful = chips.model_flops(settings.model, settings.data.seq_len) * tokens / seconds
    scopes = {
        kernel.name: kernel.scope for kernel in launches.read_program(program.as_text()).kernels
    }
    return {
        "tokens a second": round(tokens / seconds),
        "ms a step": round(1e3 * seconds, 2),
        "useful TFLOP/s": round(useful / 1e12, 3),
        "MFU": peak and round(useful / peak, 4),
        "peak GB, measured": round(statistics.get("peak_bytes_in_use", 0) / 1e9, 3) or None,
        "peak GB, compiled": round(memory.peak / 1e9, 3),
        "peak GB, planned": round(footprint.estimate(case).peak / 1e9, 3),
        **profiled(call, out / f"profile-{name}", scopes),
    }


def profiled(call: Callable[[], Any], folder: Path, scopes: dict[str, str]) -> dict[str, Any]:
    """Shares of the time of the device's operations by the scope that made them, of three calls.

    "unknown" are those that the program's text does not have by name: a GPU may launch many as one
    graph.
    """
    import jax

    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            jax.block_until_ready(call())
    found: collections.Counter[str] = collections.Counter()
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for event in (event for line in plane.lines for event in line.events):
                statistics = dict(event.stats)
                name = statistics.get("hlo_op", event.name)
                if name in scopes or ("hlo_op" in statistics and plane.name.startswith("/device:")):
                    found[scopes.get(name, "unknown") or "other"] += event.duration_ns
    total = sum(found.values())
    return {f"time in {scope}": f"{share / total:.1%}" for scope, share in found.most_common(8)}


def decoding(out: Path, tiny: bool) -> dict[str, Any]:
    """New tokens a second of one row and of 16, of the middle size; greedy."""
    import numpy as np

    from zaya_jax import library

    model, count, found = library.create(settings_of("100M", tiny)), 8 if tiny else 128, {}
    for rows in (1, 16):
        ids = np.ones((rows, 16), np.int32)
        model.generate(ids, count)
        begun = time.perf_counter()
        model.generate(ids, count)
        found[f"tokens a second, {rows} rows"] = round(
            rows * count / (time.perf_counter() - begun), 1
        )
    return found


def checkpoint(out: Path, tiny: bool) -> dict[str, Any]:
    """The step's wait for a save, against a plain copy and Orbax's."""
    text = run(
        "benchmarks.bench_checkpoint",
        "stall",
        "--gb=0.2" if tiny else "--gb=4",
        f"--saves={2 if tiny else 6}",
    )
    rows = [
        line.strip("| ").split("|")
        for line in text.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    return {row[0].strip(): " | ".join(cell.strip() for cell in row[1:]) for row in rows}


def resume(out: Path, tiny: bool) -> dict[str, Any]:
    """Whether four steps are those of a run that goes on from the second of them, bit for bit."""
    import jax
    import numpy as np

    from zaya_jax.checkpoint import partial

    whole, again = out / "resume" / "whole", out / "resume" / "again"
    keys = [f"--config.{key}" for key in RESUME]
    run("experiments.pretrain", f"--workdir={whole}", *keys)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "4")
    run("experiments.pretrain", f"--workdir={again}", *keys)
    same = jax.tree.map(
        lambda a, b: bool(np.array_equal(a, b)), *(partial.read(one, "*") for one in (whole, again))
    )
    return {
        "equal bit for bit": f"{sum(jax.tree.leaves(same))} of {len(jax.tree.leaves(same))} arrays"
    }


def characterize(out: Path, tiny: bool) -> dict[str, Any]:
    """Products, memory and collectives of this machine."""
    options = ("--config=experiments/configs/tiny.py", "--devices=1") if tiny else ()
    part = "memory" if tiny else "all"
    run(
        "experiments.characterize",
        part,
        f"--out={out}",
        f"--seconds={0.001 if tiny else 0.1}",
        *options,
    )
    return {"page": f"{out}/{part}.html"}


PARTS: dict[str, Part] = {
    "golden cases": golden,
    "kernels": tune,
    "training step, 1M": lambda *a: training_step("1M", *a),
    "training step, 100M": lambda *a: training_step("100M", *a),
    "training step, 1B": lambda *a: training_step("1B", *a),
    "decoding": decoding,
    "checkpoint": checkpoint,
    "resume": resume,
    "characterize": characterize,
}


HERE = """import jax; of = jax.devices()[0]
print(f"{jax.device_count()} x {of.device_kind}, jax {jax.__version__}", of.platform)"""


def here() -> tuple[str, bool]:
    """The devices in words, and whether they are a CPU's; asked by a process that ends, since one
    takes the memory."""
    done = subprocess.run([sys.executable, "-c", HERE], capture_output=True, text=True)
    words = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no device "
    return words.rpartition(" ")[0], words.endswith(" cpu")


def in_a_process(name: str, out: Path, tiny: bool, seconds: float) -> dict[str, Any]:
    """A part's result, or what became of it."""
    begun = time.monotonic()
    command = [*PYTHON, "benchmarks.gpu", f"--out={out}", f"--child={name}", *["--tiny"] * tiny]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            text, errors = "", f"{process.communicate()[1]}\ndid not end within {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    (out / f"{name}.log").write_text(errors)
    took = {"seconds": round(time.monotonic() - begun, 1)}
    try:
        return json.loads(text.strip().splitlines()[-1]) | took
    except (IndexError, ValueError):
        lines = errors.strip().splitlines() or [f"ended with {process.returncode}"]
        return {"fault": lines[-1][:300]} | took


def page(results: dict[str, dict[str, Any]], about: str) -> str:
    """All parts as Markdown."""
    words = f"# First hour on {about}, {time.strftime('%Y-%m-%d')}\n\n"
    for name, result in results.items():
        rows = [
            [key, str(value)]
            for key, value in result.get("found", {"failed": result.get("fault")}).items()
        ]
        words += (
            Table(f"{name}, {result['seconds']:g} s", ("what", "found"), rows).markdown() + "\n"
        )
    return words


def main(arguments: list[str] | None = None) -> int:
    """Runs all parts, in their order; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:  # a part; its result is the last line
        flags.set_for_platform()  # as a run has them
        print(json.dumps({"found": PARTS[options.child](options.out, options.tiny)}))
        return 0
    about, tiny = here()
    until, results = time.monotonic() + 60 * options.minutes, dict[str, dict[str, Any]]()
    for number, name in enumerate(options.parts):
        left = max((until - time.monotonic()) / (len(options.parts) - number) * 2, LEAST)
        results[name] = in_a_process(name, options.out, tiny, left)
        (options.out / "gpu.json").write_text(
            json.dumps({"device": about, **results}, indent=1) + "\n"
        )
        (options.out / "gpu.md").write_text(page(results, about))
        print(
            f"{name}: {results[name].get('fault', 'done')} ({results[name]['seconds']:g} s)",
            flush=True,
        )
    print(f"written: {options.out}/gpu.md, gpu.json")
    return 1 if any("fault" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
