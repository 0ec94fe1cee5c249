"""Reports the compilers' code of each kernel for chips that are not here:
pallas_kernels/TARGETS.md.

    make setup-targets                          # once
    python -m benchmarks.targets [--chips mi300x mi355x h200] [--operators NAME ...] [--out FILE]

Each case of `benchmarks.cases` is compiled twice, with the operator's own kernels and without any,
so that the page has side by side. Some ten minutes of one core, most of them XLA's. With
--operators it prints these alone and writes nothing unless --out is given.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks import absent, cases, inner_loop, machine_code
from benchmarks.inner_loop import Loop
from benchmarks.machine_code import Code
from pallas_kernels import chip
from zaya_jax.compiled import launches
from zaya_jax.config import UserError
from zaya_jax.hardware import targets
from zaya_jax.report.document import Table

PAGE = Path(__file__).parents[1] / "pallas_kernels" / "TARGETS.md"
CHIPS = {"mi300x": "gfx942", "mi355x": "gfx950", "h200": "sm_90"}
WITHOUT = ("none",)  # kernels of our own

HEAD = """\
<!-- Made by `python -m benchmarks.targets`; edit benchmarks/targets.py. -->

# The kernels as their compilers see them

{date}, jax {jax}, for {chips}. **No figure of this page was measured on a GPU**
([an H100's](../benchmarks/gpu.md)). Registers, spills, shared memory, matrix instructions, bytes
and launches are read from compiled programs; occupancy follows from these by the chips' rules; the modelled rate is a
model. Where a GPU can be had, `python -m benchmarks.kernels` measures, and its figures count.

Sizes are ZAYA1-base's on one device: 4K is four sequences of 4,096 tokens, 32K one of 32,768.

| column | |
|---|---|
| warps | of a block |
| registers | of a thread, out of {most} |
| spills | registers for which there was no room; NVIDIA's compiler tells bytes of the frame, here in words of four |
| shared | shared memory of a block, on AMD LDS |
| occupancy | warps at once for which a scheduler has registers and shared memory, of those that it can have |
| matrix | matrix instructions in a turn of the inner loop, and their kind |
| modelled | share of the data sheet's bfloat16 rate at which the inner loop would turn, and its bound |
| moves | bytes of HBM in one call, read and written, each operand and result once unless the kernel says otherwise |
| least | the operator's arguments and results, each once |

The model (`benchmarks/inner_loop.py`) takes the loop's instructions as they are in the machine code, for AMD
through LLVM's llvm-mca, and counts what each unit of a core needs for one turn. It knows nothing of HBM and caches, and
for NVIDIA nothing of waiting, whence "at most". It says which of two tiles is better where they differ much, and is no
forecast. A simulation of the caches found "moves" true on MI300X; on H200 experts_gate_up reads 1.73 times as much, d_x
1.29 and down 1.25 times.
"""


class Made(NamedTuple):
    """A direction of a case as compiled for a chip."""

    program: launches.Program
    codes: list[Code]
    least: int  # bytes of its arguments and results, each once

    def calls(self, name: str) -> list[launches.GpuKernel]:
        """Those of the program's kernels that are this one of ours."""
        return [k for k in self.program.kernels if f"/{name}/pallas_call" in k.op_name]

    def moves(self, name: str) -> float:
        """Bytes of one call of a kernel of ours, on average."""
        calls = self.calls(name)
        return sum(k.times * k.bytes for k in calls) / sum(k.times for k in calls)


def compiled(
    name: str, case: cases.Case, direction: str, size: cases.Size, own: tuple[str, ...] = ("all",)
) -> Made:
    """Compiles one for an absent chip, with these operators' own kernels."""
    target = chip.chip_of(targets.devices(name, 1)[0]).taking(own)
    with chip.making(target):
        function, like = cases.program(
            case, direction, size, placed=lambda f: absent.alone(name, f)
        )
        found = absent.compiled(name, function, *like)
    least = cases.bytes_of(
        like, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found.out_info)
    )
    return Made(launches.read_program(found), machine_code.read_kernels(found), least)


def loop_of(code: Code) -> Loop | None:
    """Its inner loop, where its chip's disassembler is installed."""
    return None if inner_loop.missing(code.arch) else inner_loop.read_loop(code)


def main() -> int:
    """Compiles all, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--operators", nargs="+", choices=chip.OPERATORS, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    chosen = [c for c in cases.CASES if c.operator in (options.operators or chip.OPERATORS)]
    try:
        for name in options.chips:
            targets.devices(name, 1)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    page = "\n".join([_head(options.chips), *(_of_chip(name, chosen) for name in options.chips)])
    out = options.out or (None if options.operators else PAGE)
    if out is None:
        print(page)
    else:
        out.write_text(page, encoding="utf-8")
        print(f"written: {os.path.relpath(out)}")
    return 0


def _head(names: list[str]) -> str:
    chips = ", ".join(f"{CHIPS[name]} ({name.upper()})" for name in names)
    most = ", ".join(
        f"{machine_code.CORES[CHIPS[name]].most_registers} ({CHIPS[name]})" for name in names
    )
    return HEAD.format(date=time.strftime("%-d %B %Y"), jax=jax.__version__, chips=chips, most=most)


def _of_chip(name: str, chosen: list[cases.Case]) -> str:
    """Both tables of one chip."""
    codes: list[list[str]] = []
    programs: list[list[str]] = []
    for title, case, direction, size in _rows(chosen):
        begun = time.perf_counter()
        own = compiled(name, case, direction, size)
        xla = compiled(name, case, direction, size, WITHOUT)
        print(f"{name}: {title} ({time.perf_counter() - begun:.0f} s)", file=sys.stderr, flush=True)
        codes += [[f"`{c.name}`", title, *_code(c), _bytes(own.moves(c.name))] for c in own.codes]
        programs.append([title, *_program(own, xla)])
    tables = [
        Table(
            f"{name.upper()}: each kernel",
            (
                "kernel",
                "in",
                "warps",
                "registers",
                "spills",
                "shared",
                "occupancy",
                "matrix",
                "modelled",
                "moves",
            ),
            codes,
        ).markdown(),
        Table(
            f"{name.upper()}: each operator, bytes and launches of all that it starts",
            ("operator", "least", "ours", "XLA's", "launches", "XLA's", "used"),
            programs,
        ).markdown(),
    ]
    note = inner_loop.missing(CHIPS[name])
    return "\n".join(
        [*tables, *([f"Its loops are not read: {note} is not installed.\n"] if note else [])]
    )


def _rows(chosen: list[cases.Case]) -> Iterator[tuple[str, cases.Case, str, cases.Size]]:
    for case in chosen:
        for label in case.sizes:
            for direction in case.directions:
                words = [case.operator, *([] if direction == "alone" else [direction])]
                yield (
                    f"{' '.join(words)}: {case.label}, {label}",
                    case,
                    direction,
                    cases.SIZES[label],
                )


def _code(code: Code) -> list[str]:
    loop = loop_of(code)
    spills = f"{code.spills}" + (f" ({code.private:,} B in memory)" if code.private else "")
    return [
        f"{code.warps}",
        f"{code.registers}",
        spills,
        f"{code.shared / 1024:g} KB",
        f"{code.occupancy:g} of {code.core.warps}",
        f"{loop.matrix} {loop.kind}" if loop else _without_loop(code),
        (
            f"{'at most ' if loop.kind != 'mfma' else ''}{loop.share:.0%}, {loop.bound}"
            if loop
            else "–"
        ),
    ]


def _without_loop(code: Code) -> str:
    count = 0 if inner_loop.missing(code.arch) else inner_loop.count(code)
    return f"{count} in no loop" if count else "–"


def _program(own: Made, xla: Made) -> list[str]:
    less, fewer = own.program.bytes / xla.program.bytes, own.program.launches / xla.program.launches
    if not own.codes:
        used = "XLA's: its `triton.py` leaves this shape to it"
    else:
        work = own.program.flops / xla.program.flops if xla.program.flops else 1.0
        words = [f"{less:.0%} of the bytes", f"{fewer:.0%} of the launches"]
        used = "ours: " + ", ".join(
            [*words, *([f"{work:.0%} of the FLOPs"] if abs(work - 1) > 0.02 else [])]
        )
    return [
        _bytes(own.least),
        _bytes(own.program.bytes),
        _bytes(xla.program.bytes),
        f"{own.program.launches:,.0f}",
        f"{xla.program.launches:,.0f}",
        used,
    ]


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.2f} GB" if number >= 1e7 else f"{number / 1e6:,.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
