"""Times every kernel on this machine's chip, with XLA's implementation and the other choices of
users.

    python -m benchmarks.kernels --out DIR [--sizes 4K 32K 131K] [--operators NAME ...] [--seconds 1]

Forward and backward passes apart, in bfloat16, at ZAYA1's sizes (`benchmarks.cases`). Each is first
compared with XLA in float32, and a wrong one is not timed. Rates are compared with those of one
large product and one copy in the same run. Written are kernels.json and kernels.md. On
a CPU kernels are interpreted at a size of a few hundred numbers, which shows that the program runs
and says nothing of any chip.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases
from pallas_kernels import chip, timing
from pallas_kernels.chip import Chip
from pallas_kernels.timing import Timing
from zaya_jax.report.document import Table

CHECKED = cases.Size("1K", 1, 1024, cases.ZAYA)  # tokens at which values and gradients are compared
# Of a norm, by which all may differ; beyond that an error is held against XLA's in the same format.
NOISE = 1e-3
OTHERS = 0.1  # and the error of XLA and others, which is shown
HEAD = (
    "operator",
    "direction",
    "implementation",
    "ms",
    "10% to 90%",
    "rate",
    "share",
    "temporaries",
    "note",
)


@dataclasses.dataclass
class Row:
    """One implementation of one direction at one size."""

    operator: str
    label: str
    size: str
    direction: str
    implementation: str
    error: float  # relative to a norm of XLA's float32 results; the largest of all results
    seconds: Timing | None = None
    flops: float = 0.0  # of use; 0 where bytes count
    bytes: int = 0  # arguments and results, each once
    temporaries: int | None = None
    note: str = ""

    @property
    def rate(self) -> float | None:
        """FLOP/s, or bytes a second where no FLOPs are counted."""
        return (self.flops or self.bytes) / self.seconds.median if self.seconds else None

    @property
    def is_fault(self) -> bool:
        """Whether it is ours, or XLA's, and wrong or failed: other libraries' faults are theirs."""
        return self.implementation in ("ours", "XLA") and self.note.startswith(("wrong", "failed"))


def rivals(case: cases.Case, here: Chip) -> dict[str, Callable[[Any], Callable]]:
    """Other importable implementations, by name: `call(dtype)` as a case has it."""
    found: dict[str, Callable[[Any], Callable]] = {}
    if (case.operator, case.label) == ("attention", "causal"):
        how: Any = "cudnn" if here.maker == "cuda" and not here.is_host else "xla"
        found[f"jax.nn, {how}"] = lambda dtype: (
            lambda q, k, v: jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=how
            )
        )
        if tokamax := _installed("tokamax", here, "cuda"):
            found["tokamax"] = lambda dtype: (
                lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=True)
            )
        if aiter := _installed("jax_aiter.mha", here, "rocm"):
            # A tuple, of the output alone. Its assembly kernels for the gradients are not for
            # `deterministic`.
            found["AITER"] = lambda dtype: (
                lambda q, k, v: aiter.flash_attn_func(q, k, v, causal=True, deterministic=False)[0]
            )
    if case.label == "sorted rows":
        found["lax.ragged_dot"] = lambda dtype: _ragged(jax.lax.ragged_dot)
        if tokamax := _installed("tokamax", here, "cuda"):
            found["tokamax"] = lambda dtype: _ragged(tokamax.ragged_dot)
    return found


def _installed(module: str, here: Chip, maker: str) -> Any:
    """The module, if this chip is of its maker and a user has installed it."""
    there = (
        here.maker == maker and not here.is_host and importlib.util.find_spec(module.split(".")[0])
    )
    return importlib.import_module(module) if there else None


def _ragged(product: Callable) -> Callable:
    def mlp(rows, sizes, gate_up, down):
        gate, up = jnp.split(product(rows, gate_up.astype(rows.dtype), sizes), 2, axis=-1)
        return product(jax.nn.silu(gate) * up, down.astype(rows.dtype), sizes)

    return mlp


def measure(case: cases.Case, size: cases.Size, here: Chip, seconds: float) -> Iterator[Row]:
    """Every implementation of a case: compared, then timed, direction by direction."""
    none = here.taking(("none",))
    offered = {"ours": (case, here), "XLA": (case, none)}
    for name, call in rivals(case, here).items():
        offered[name] = (dataclasses.replace(case, call=call), none)
    errors = _errors(case, size if size is cases.SMALL else CHECKED, offered, none)
    for name, (own, target) in offered.items():
        (error, note), limit = errors[name], OTHERS
        if name in ("ours", "XLA"):
            limit = min(2 * max(errors["XLA"][0], NOISE), OTHERS)
        if not note and not error <= limit:  # NaN is wrong too
            note = f"wrong by {error:.2g} of the norm; not timed"
        for direction in ("forward", "backward"):
            row = Row(case.operator, case.label, size.label, direction, name, error, note=note)
            row.flops = case.flops(size)[direction]
            if not note:
                _time(row, own, size, target, seconds)
            yield row


def _errors(
    case: cases.Case, size: cases.Size, offered: dict, none: Chip
) -> dict[str, tuple[float, str]]:
    """The largest error of each implementation's results and gradients, over a norm; infinite, with
    the reason, where it fails."""
    with chip.making(none), jax.default_matmul_precision("highest"):
        exact = _results(
            cases.function(case, "gradients", jnp.float32), case.values(size, jnp.float32)
        )
    found: dict[str, tuple[float, str]] = {}
    for name, (own, target) in offered.items():
        try:
            with chip.making(target):
                got = _results(cases.function(own, "gradients"), case.values(size))
        except Exception as error:
            found[name] = np.inf, f"failed: {_line(error)}"
            continue
        norms = [
            (np.linalg.norm(a - b), np.linalg.norm(b)) for a, b in zip(got, exact, strict=True)
        ]
        found[name] = max(float(off / max(norm, 1e-30)) for off, norm in norms), ""
    return found


def _results(function: Callable, arguments: tuple) -> list[np.ndarray]:
    out = jax.jit(lambda *a: jax.tree.leaves(function(*a)))(*arguments)
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in out]


def _time(row: Row, case: cases.Case, size: cases.Size, target: Chip, seconds: float) -> None:
    try:
        with chip.making(target):
            arguments: tuple = case.values(size)
            if row.direction == "backward":
                out, pull = jax.jit(cases.linearized(case))(*arguments)
                arguments = (pull, jax.tree.map(lambda x: (x + 1).astype(x.dtype), out))
            program = jax.jit(cases.function(case, row.direction)).lower(*arguments).compile()
            row.bytes = cases.bytes_of(arguments, program.out_info)
            analysis = program.memory_analysis()
            row.temporaries = analysis.temp_size_in_bytes if analysis else None
            row.seconds = timing.time_call(
                lambda: program(*arguments), seconds, queue=not target.is_host
            )
    except jax.errors.JaxRuntimeError as error:
        out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
        row.note = "does not fit the chip's memory" if out_of_memory else f"failed: {_line(error)}"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def yardsticks(here: Chip, seconds: float) -> dict[str, float]:
    """FLOP/s of one large bfloat16 product, and bytes a second that a copy reads and writes."""
    side, numbers = (256, 1 << 16) if here.is_host else (8192, 1 << 28)
    # of random numbers: a product of ones draws less power, so its clock is higher
    x = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    wide = jax.random.normal(jax.random.key(1), (numbers,))
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    copy = jax.jit(jnp.negative).lower(wide).compile()
    queue = not here.is_host
    return {
        "product": 2 * side**3 / timing.time_call(lambda: product(x, x), seconds, queue).median,
        "copy": 2 * wide.nbytes / timing.time_call(lambda: copy(wide), seconds, queue).median,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures all, and writes two files; 1 where a kernel of ours, or XLA's, is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", choices=cases.SIZES, default=list(cases.SIZES))
    parser.add_argument(
        "--operators", nargs="+", choices=chip.OPERATORS, default=list(chip.OPERATORS)
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for which each is repeated")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    host = device.platform == "cpu"
    here = Chip("cpu", "gfx942") if host else chip.chip_of(device)
    sizes = [cases.SMALL] if host else [cases.SIZES[label] for label in options.sizes]
    about = {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        **yardsticks(here, options.seconds),
    }
    about["note"] = (
        f"One product of 8,192² reaches {about['product'] / 1e12:,.1f} TFLOP/s in bfloat16, a copy"
        f" {about['copy'] / 1e9:,.0f} GB/s; shares are of these."
    )
    if host:
        about["note"] = (
            "No GPU is here: kernels are interpreted at a tiny size, and figures are of this host."
        )
    print(about["note"], flush=True)
    rows: list[Row] = []
    for case in itertools.chain(*map(cases.of_operator, options.operators)):
        seen = []
        for size in sizes:
            if (like := case.like(size)) in seen:  # it has no tokens
                continue
            seen.append(like)
            for row in measure(case, size, here, options.seconds):
                rows.append(row)
                print(" | ".join(_cells(row, about)), flush=True)
                write(options.out, about, rows)  # earlier results are kept if a later case fails
    print(f"written: {options.out}/kernels.json, kernels.md")
    return int(any(row.is_fault for row in rows))


def _cells(row: Row, about: dict[str, Any]) -> list[str]:
    yardstick, scale, unit = "copy", 1e9, "GB/s"
    if row.flops:
        yardstick, scale, unit = "product", 1e12, "TFLOP/s"
    measured, temporaries = ["–"] * 4, "–"
    if row.seconds and row.rate:
        low, high = row.seconds.low * 1e3, row.seconds.high * 1e3
        measured = [
            f"{row.seconds.median * 1e3:,.3f}",
            f"{low:,.3f} to {high:,.3f}",
            f"{row.rate / scale:,.4g} {unit}",
            f"{row.rate / about[yardstick]:.0%}",
        ]
    if row.temporaries is not None:
        temporaries = f"{row.temporaries / 1e6:,.1f} MB"
    name, note = f"{row.operator}: {row.label}, {row.size}", row.note or f"error {row.error:.1e}"
    return [name, row.direction, row.implementation, *measured, temporaries, note]


def write(out: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """kernels.json, where an error that is not finite is null, and kernels.md."""
    out.mkdir(parents=True, exist_ok=True)
    flat = [dataclasses.asdict(row) for row in rows]
    for of_row in flat:
        if not np.isfinite(of_row["error"]):
            of_row["error"] = None
    (out / "kernels.json").write_text(json.dumps({**about, "rows": flat}, indent=1) + "\n")
    title = f"Kernels on {about['device']}, jax {about['jax']}, {about['date']}"
    table = Table("Median of repeated calls", HEAD, [_cells(row, about) for row in rows]).markdown()
    (out / "kernels.md").write_text(f"# {title}\n\n{about['note']}\n\n{table}")


if __name__ == "__main__":
    sys.exit(main())
