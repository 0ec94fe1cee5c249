"""What a GPU that is there for a while is asked: what is right, how fast it is, where the time goes,
and what the plan and the compiler had said.

    python -m benchmarks.gpu --out=DIR [--parts NAME ...]       the first hour of somebody who has one
    tools/gpu_hour.sh HOUR --out=DIR [--tiny] [--warm=DIR/cache.tar.gz] [--torch-python=PYTHON]

Each part is a process with its own time, the cheapest begin, and the next begins whatever became of
it. After each, DIR/gpu.json and DIR/gpu.md hold all that is known; DIR/PART.log has its errors.

The second command is for a GPU that is lent for ten minutes, on that machine, in the root of a clone
with the packages of requirements/:

    PYTHONUNBUFFERED=1 tools/gpu_hour.sh 1 --out=$OUT

Hour 1 (an H100, say) asks what is true: golden cases, the router's products, eight layers of
ZAYA1-base and where their time goes. Hour 2 tunes the tiles, and compares with before and with
PyTorch. Hour 3 (an H200) has the whole model. Hour 4 trains beside PyTorch, three minutes each side.
DIR then gets four files: of logs one, logs.tar.gz, and cache.tar.gz with compiled programs and tiles,
which the next hour takes by --warm. Without PyTorch and transformers its parts are left out.

--tiny, or a machine without a GPU, runs every part at tiny size: that shows that they run, and
measures no chip.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.hardware import sizing
from zaya_jax.report.document import Table

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (sys.executable, "-m")
RESUME = (
    "run.num_steps=4",
    "checkpoint.every_steps=2",
    "data.global_batch=8",
    "data.seq_len=64",
    "eval.every=1000",
    "eval.windows=1",
    "log.sample_tokens=2",
)


def golden(out: Path) -> dict[str, Any]:
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


def resume(out: Path) -> dict[str, Any]:
    """Whether four steps are those of a run that goes on from the second of them, bit for bit."""
    import jax
    import numpy as np

    from zaya_jax.checkpoint import partial

    whole, again = out / "resume" / "whole", out / "resume" / "again"
    for folder in (whole, again):
        if folder == again:
            shutil.copytree(whole, again)
            shutil.rmtree(again / "checkpoints" / "4")
        keys = [f"--config.{key}" for key in RESUME]
        command = [*PYTHON, "experiments.pretrain", f"--workdir={folder}", *keys]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    same = jax.tree.map(
        lambda a, b: bool(np.array_equal(a, b)), *(partial.read(one, "*") for one in (whole, again))
    )
    return {
        "equal bit for bit": f"{sum(jax.tree.leaves(same))} of {len(jax.tree.leaves(same))} arrays"
    }


OWN = {"golden": golden, "resume": resume}
STEP = "benchmarks.gpu_step"
# seconds, program with {out}, environment
Parts = Mapping[str, tuple[float, str, Mapping[str, str]]]
# JAX's share of the memory, for a model that just fits; a cache without tiles of this card; and
# none taken beforehand, since PyTorch has the GPU while JAX waits.
SHARE, SHIPPED = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}, {"XDG_CACHE_HOME": "/nonexistent"}
LITTLE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
WHOLE = f"{STEP} --config=experiments/configs/zaya1_h200.py --layers=0 --micro-batches=4"
BESIDE = "--device=gpu --torch-python={torch}"
ATTENTION = "benchmarks.kernels --out={out} --operators attention --sizes 4K 32K --seconds=0.3"
HOURS: dict[int, Parts] = {
    0: {
        "golden": (150, "benchmarks.gpu --out={out} --child=golden", {}),
        "resume": (300, "benchmarks.gpu --out={out} --child=resume", {}),
        "tiles": (300, "pallas_kernels.tune", {}),
        "slice": (300, STEP, {}),
        "profile": (300, f"{STEP} --profile={{out}}/profile", {}),
        "kernels": (600, "benchmarks.kernels --out={out}/kernels --sizes 4K", {}),
        "decoding": (300, "benchmarks.generation --device=gpu --sizes=slice", {}),
        "checkpoint": (300, "benchmarks.bench_checkpoint --gb=4", {}),
        "characterize": (600, "experiments.characterize all --out={out} --seconds=0.1", {}),
    },
    1: {
        "golden": (90, "benchmarks.gpu --out={out} --child=golden", {}),
        "router": (60, "benchmarks.router", {}),
        "slice": (200, STEP, {}),
        "profile": (180, f"{STEP} --profile={{out}}/slice", {}),
        "float32 experts": (150, f"{STEP} --config.precision.weights=float32", {}),
        "attention": (90, ATTENTION, {}),
    },
    2: {
        "tune": (200, "pallas_kernels.tune --seconds=90", {}),
        "slice, tuned": (180, STEP, {}),
        "beside PyTorch": (240, f"benchmarks.bench_step {BESIDE} --shape=slice --rounds=3", {}),
        "decoding": (150, f"benchmarks.generation {BESIDE} --sizes=slice --rounds=1", {}),
        "jax-triton": (60, "benchmarks.jax_triton_down", {}),
        "slice, tiles that ship": (150, STEP, SHIPPED),
    },
    3: {
        "golden": (90, "benchmarks.gpu --out={out} --child=golden", {}),
        "whole": (250, WHOLE, SHARE),
        "profile": (200, f"{WHOLE} --micro-batches=2 --profile={{out}}/whole", SHARE),
        "products repeated": (200, f"{WHOLE} --config.remat=attention", SHARE),
    },
    4: {
        "beside PyTorch": (
            560,
            f"benchmarks.torch_parity {BESIDE} --curve={{out}}/curve --seconds=180",
            LITTLE,
        )
    },
}
HAS_TORCH = "import torch, transformers; transformers.ZayaForCausalLM"
SMALL = "--config=experiments/configs/tiny.py"
# of each program: what makes it tiny; None: it needs a GPU
TINY = {
    "benchmarks.gpu": "",
    "benchmarks.router": "--tokens=256 --width=64",
    "benchmarks.jax_triton_down": None,
    STEP: f"{SMALL} --layers=0 --sequences=2 --micro-batches=2 --seconds=0.1",
    "benchmarks.kernels": "--operators residual_norm --seconds=1e-3",
    "benchmarks.bench_step": "--shape=tiny --rounds=2",
    "benchmarks.generation": "--sizes=tiny",
    "benchmarks.torch_parity": "--seconds=5",
    "benchmarks.bench_checkpoint": "--gb=0.2 --saves=2",
    "experiments.characterize": f"--seconds=1e-3 {SMALL} --devices=1",
    "pallas_kernels.tune": None,
}


HERE = """import importlib.metadata as m, jax; of = jax.devices()[0]
there = {d.name: d.version for d in m.distributions() if "cudnn" in d.name}
print(f"{jax.device_count()} x {of.device_kind}, jax {jax.__version__}, python packages {there},",
  *of.client.platform_version.split(), of.platform)"""


def here() -> tuple[str, bool]:
    """The devices in words, and whether they are a CPU's; asked by a process that ends, since one
    takes the memory."""
    done = subprocess.run([sys.executable, "-c", HERE], capture_output=True, text=True)
    words = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no device "
    return words.rpartition(" ")[0], words.endswith(" cpu")


def in_a_process(
    command: Sequence[str], seconds: float, environment: Mapping[str, str], log: Path
) -> dict[str, Any]:
    """A program's result, the JSON of its last line or else all that it printed; or what became of
    it, and what it had printed until then. `log` gets its errors."""
    begun, printed = time.monotonic(), log.with_suffix(".out")
    with printed.open("w") as out, log.open("w") as errors:
        process = subprocess.Popen(
            [*PYTHON, *command],
            cwd=ROOT,
            stdout=out,
            stderr=errors,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
            fault = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            fault = f"did not end within {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
    text = printed.read_text().strip()
    if fault.startswith("ended"):
        fault = (log.read_text().strip() or text or fault).splitlines()[-1][:300]
    last = text.rpartition("\n")[2]
    found = json.loads(last) if last.startswith('{"found"') else {"text": text} if text else {}
    took = {"seconds": round(time.monotonic() - begun, 1)}
    return found | ({"fault": fault} if fault else {}) | took


def run_all(
    parts: Parts, out: Path, logs: Path, seconds: float = math.inf, tiny: bool = False, **names: str
) -> int:
    """Runs programs in their order, within so many seconds, and writes all results into `out` after
    each; 1 if one of them failed. `names` are filled in; an empty one leaves out who needs it."""
    about, cpu = here()
    until, results = time.monotonic() + seconds, dict[str, dict[str, Any]]()
    for name, (limit, words, environment) in parts.items():
        missing = [key for key, value in names.items() if f"{{{key}}}" in words and not value]
        small: str | None = ""
        skipped = ""
        if tiny or cpu:
            small = TINY[words.split()[0]]
        left = min(limit, until - time.monotonic())
        if missing:
            skipped = f"no {missing[0]} here"
        elif small is None:
            skipped = "it needs a GPU"
        elif left <= 0:
            skipped = "no time was left"
        # a path may have a space
        command = [word.format(out=logs, **names) for word in f"{words} {small}".split()]
        results[name] = {"skipped": skipped, "seconds": 0.0}
        if not skipped:
            results[name] = in_a_process(command, left, environment, logs / f"{name}.log")
        record = json.dumps({"device": about, **results}, indent=1)
        (out / "gpu.json").write_text(record + "\n")
        (out / "gpu.md").write_text(page(results, about))
        said = skipped or results[name].get("fault", "done")
        print(f"{name}: {said} ({results[name]['seconds']:g} s)", flush=True)
    print(f"written: {out}/gpu.md, gpu.json")
    return 1 if any("fault" in result for result in results.values()) else 0


def page(results: Mapping[str, dict[str, Any]], about: str) -> str:
    """All parts as Markdown."""
    words = f"# On {about}, {time.strftime('%Y-%m-%d')}\n\n"
    for name, result in results.items():
        above = {key: result[key] for key in ("fault", "skipped") if key in result}
        rows = [[key, str(value)] for key, value in (above | result.get("found", {})).items()]
        table = Table(f"{name}, {result['seconds']:g} s", ("what", "found"), rows).markdown()
        words += f"{table}\n{result.get('text', '')}\n"
    return words


def main(arguments: list[str] | None = None) -> int:
    """Runs an hour's parts, in their order; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hour", type=int, choices=HOURS, default=0)
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--minutes", type=float, help="of all parts; 45, or 9.5 of a lent GPU")
    parser.add_argument("--parts", nargs="+", help="these alone")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm", type=Path, help="cache.tar.gz of an earlier hour")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--child", choices=OWN, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    out, hour, minutes = options.out, HOURS[options.hour], 9.5 if options.hour else 45
    out.mkdir(parents=True, exist_ok=True)
    if options.child:  # its result is the last line
        sizing.set_for_platform()  # as a run has them
        print(json.dumps({"found": OWN[options.child](out)}))
        return 0
    parts = {name: hour[name] for name in options.parts or hour}
    asked = subprocess.run([options.torch_python, "-c", HAS_TORCH], capture_output=True)
    torch = "" if asked.returncode else options.torch_python
    how = 60 * (options.minutes or minutes), options.tiny
    if not options.hour:
        return run_all(parts, out, out, *how, torch=torch)
    with tempfile.TemporaryDirectory() as folder:
        logs, cache = Path(folder, "logs"), Path(folder, "cache")
        for made in (logs, cache):
            made.mkdir()
        if options.warm:
            shutil.unpack_archive(options.warm, folder)
        os.environ |= {"XDG_CACHE_HOME": str(cache), "JAX_COMPILATION_CACHE_DIR": f"{cache}/jax"}
        code = run_all(parts, out, logs, *how, torch=torch)
        for made in (logs, cache):
            shutil.make_archive(str(out / made.name), "gztar", folder, made.name)
    return code


if __name__ == "__main__":
    sys.exit(main())
