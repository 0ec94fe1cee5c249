"""A kernel's inner loop as machine code: its matrix instructions, and a model of how fast it can
turn.

    loop = inner_loop.read_loop(code)           # `machine_code.Code`; None where the kernel has no loop with products
    loop.matrix, loop.share, loop.bound         # 16, 0.67, "shared memory"

Disassembled by the vendors' own tools: LLVM's for AMD (llvm-objdump and llvm-mca, 19 or later; 20
or later for gfx950), NVIDIA's nvdisasm. The inner loop is the innermost one with matrix
instructions, of several the one with most.

The model covers one scheduler and counts the clocks that a turn of one warp takes on each unit; the
longest is the bound, and the share is its products' time at the published peak over that. It is
calibrated on the data sheet: a loop of nothing but bfloat16 matrix instructions has a share of 1.
On AMD the units are llvm-mca's, which counts in passes of four clocks, like AMD's manuals; a lone
warp's time, with its waits, is divided by the warps that fit. Added by hand are the rates of shared
memory (128 bytes a clock for all schedulers of a core) and of exponentials and roots (a quarter of
the rest). For NVIDIA there is no such tool: an instruction takes one clock to issue, and waits are
not thought of. Memory beyond the core, caches too, is in no model here.
"""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine_code import Code
from zaya_jax.hardware import targets

PASS = 4  # clocks of a scheduler of AMD in which it issues one instruction of 64 threads
SHARED = 128  # bytes a clock that a core's shared memory gives, AMD and NVIDIA
_LEAST_LLVM = {"gfx942": 19, "gfx950": 20}
_AMD_LINE = re.compile(
    r"^\t(\S.*?)\s*// ([0-9A-F]+): [0-9A-F ]+(?:<\S+\+0x([0-9a-f]+)>)?$", re.MULTILINE
)
_AMD_START = re.compile(r"^([0-9a-f]+) <\w+>:$", re.MULTILINE)
_NVIDIA_LINE = re.compile(r"^(\.L_x_\d+):|^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_MFMA = re.compile(r"^v_s?mfmac?_\w+?_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")
_WGMMA = re.compile(r"\bHGMMA\.(\d+)x(\d+)x(\d+)\.\S*(.*)")
_MMA = re.compile(r"\bHMMA\.(16)(8)(8|16|32)\b")
_SLOW = re.compile(r"^v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_|\bMUFU\b")


class Instruction(NamedTuple):
    """One of them, at its place, and where it may go on."""

    address: int
    text: str
    target: int | None


class Loop(NamedTuple):
    """A turn of the inner loop, as one warp runs it."""

    instructions: int
    matrix: int  # matrix instructions
    kind: str  # of these: "mfma", "wgmma", "mma"
    clocks: dict[str, float]  # of a scheduler, that each unit is taken by
    least: float  # clocks that its products take at the data sheet's bfloat16 rate

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        return max(self.clocks, key=lambda unit: self.clocks[unit])

    @property
    def share(self) -> float:
        """The share of the data sheet's bfloat16 rate, by the model."""
        return self.least / self.clocks[self.bound]


def missing(arch: str) -> str:
    """The missing program that reads a chip's instructions, in words; "" where it is there."""
    if arch.startswith("sm_"):
        return "" if _nvdisasm() else "nvdisasm (make setup-targets installs it)"
    least = _LEAST_LLVM[arch]
    return (
        ""
        if _llvm("objdump", least) and _llvm("mca", least)
        else f"LLVM {least} or later (Debian: llvm-{least})"
    )


def read_loop(code: Code) -> Loop | None:
    """The inner loop of a kernel; None where it has none with matrix instructions. See
    `missing`."""
    body = body_of(instructions(code))
    if body is None:
        return None
    return _on_nvidia(code, body) if code.arch.startswith("sm_") else _on_amd(code, body)


def count(code: Code) -> int:
    """Matrix instructions in all of a kernel, in loops or not."""
    return sum(_flops(i.text) > 0 for i in instructions(code))


def body_of(program: list[Instruction]) -> list[Instruction] | None:
    """The innermost loop with matrix instructions, of several the one with most of them."""
    at = {i.address: number for number, i in enumerate(program)}
    loops = {
        (at[i.target], number)
        for number, i in enumerate(program)
        if i.target in at and at[i.target] <= number  # a jump back
    }
    matrix = [number for number, i in enumerate(program) if _flops(i.text)]
    held = {loop: sum(loop[0] <= n <= loop[1] for n in matrix) for loop in loops}
    held = {loop: n for loop, n in held.items() if n}
    inner = [
        loop
        for loop in held
        if not any(loop != other and loop[0] <= other[0] and other[1] <= loop[1] for other in held)
    ]
    if not inner:
        return None
    begin, end = max(inner, key=lambda loop: (held[loop], loop[0] - loop[1]))
    return program[begin : end + 1]


def instructions(code: Code) -> list[Instruction]:
    """A kernel, disassembled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.elf"
        file.write_bytes(code.elf)
        if code.arch.startswith("sm_"):
            return _read_nvidia(_run(_nvdisasm(), "-ndf", "-c", str(file)))
        tool = _llvm("objdump", _LEAST_LLVM[code.arch])
        return _read_amd(
            _run(tool, "-d", f"--mcpu={code.arch}", "--triple=amdgcn-amd-amdhsa", str(file))
        )


def _read_amd(text: str) -> list[Instruction]:
    start = _AMD_START.search(text)
    assert start, "no kernel in what llvm-objdump wrote"
    base = int(start[1], 16)
    found = []
    for words, address, offset in _AMD_LINE.findall(text):
        jumps = offset and words.startswith(("s_branch", "s_cbranch"))
        found.append(
            Instruction(int(address, 16), words, base + int(offset, 16) if jumps else None)
        )
    return found


def _read_nvidia(text: str) -> list[Instruction]:
    labels: dict[str, int] = {}
    pending: list[str] = []
    lines: list[tuple[int, str]] = []
    for label, address, words in _NVIDIA_LINE.findall(text):
        if label:
            pending.append(label)
            continue
        labels |= dict.fromkeys(pending, int(address, 16))
        pending = []
        lines.append((int(address, 16), words))
    found = []
    for address, words in lines:
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", words)
        found.append(Instruction(address, words, labels.get(jump[1]) if jump else None))
    return found


def _flops(text: str) -> float:
    """FLOPs of a warp in one matrix instruction; 0 for any other."""
    if found := _MFMA.search(text) or _MMA.search(text):
        m, n, k, *blocks = found.groups()
        return 2.0 * int(m) * int(n) * int(k) * int((blocks or [None])[0] or 1)
    if found := _WGMMA.search(text):  # of four warps together
        return 2.0 * int(found[1]) * int(found[2]) * int(found[3]) / 4
    return 0.0


def _on_amd(code: Code, body: list[Instruction]) -> Loop:
    core, turns = code.core, 50
    texts = [_for_mca(i.text) for i in body]
    tool = _llvm("mca", _LEAST_LLVM[code.arch])
    report = json.loads(
        _run(
            tool,
            "-mtriple=amdgcn-amd-amdhsa",
            f"-mcpu={code.arch}",
            f"-iterations={turns}",
            "-json",
            given="\n".join(texts) + "\n",
        )
    )
    (region,) = report["CodeRegions"]
    names = report["TargetInfo"]["Resources"]
    taken = {
        names[use["ResourceIndex"]]: use["ResourceUsage"]
        for use in region["ResourcePressureView"]["ResourcePressureInfo"]
        if use["InstructionIndex"] == len(texts)  # the sums come last
    }
    matrix = [t for t in texts if _flops(t)]
    # A matrix instruction takes the vector unit's turn to issue; an exponential takes four of them.
    vector = taken.get("HWVALU", 0) + len(matrix) + 3 * sum(bool(_SLOW.search(t)) for t in texts)
    alone = region["SummaryView"]["TotalCycles"] / turns
    passes = {
        "matrix cores": taken["HWXDL"],
        "vector unit": vector,
        "scalar unit": taken.get("HWSALU", 0),
        "loads and stores": taken.get("HWVMEM", 0),
        "waiting": alone / max(code.occupancy, 1),
    }
    clocks = {unit: PASS * float(n) for unit, n in passes.items()}
    clocks["shared memory"] = sum(map(_lds_bytes, texts)) * core.warp * core.schedulers / SHARED
    return Loop(
        len(body),
        len(matrix),
        "mfma",
        clocks,
        sum(map(_flops, texts)) / core.flops * core.schedulers,
    )


def _for_mca(text: str) -> str:
    """LLVM 19's llvm-mca crashes on loads and stores through a buffer's descriptor; those by
    address cost as much."""
    found = re.match(r"buffer_(load|store)_(\w+) (v\S+), (v\d+|off), s\[(\d+):\d+\]", text)
    if not found:
        return text
    how, width, data, offset, base = found.groups()
    offset = "v0" if offset == "off" else offset
    first, second = (data, offset) if how == "load" else (offset, data)
    return f"global_{how}_{width} {first}, {second}, s[{base}:{int(base) + 1}]"


def _lds_bytes(text: str) -> int:
    """That an instruction moves for one thread to or from LDS."""
    found = re.match(
        r"ds_(?:read|write|bpermute|permute|swizzle|add|max)\w*?(2(?:st64)?)?_\w*?b?(8|16|32|64|96|128)\b",
        text,
    )
    return max(int(found[2]) // 8, 4) * (2 if found[1] else 1) if found else 0


def _on_nvidia(code: Code, body: list[Instruction]) -> Loop:
    core = code.core
    texts = [i.text for i in body]
    matrix = [t for t in texts if _flops(t)]
    least = sum(map(_flops, matrix)) / core.flops * core.schedulers
    clocks = {
        "matrix cores": least,  # mma on sm_90 has a lower rate, which is not published
        "issue": float(len(texts)),
        "exponentials": 8.0 * sum(bool(_SLOW.search(t)) for t in texts),
        "shared memory": sum(_shared_bytes(t, core.warp) for t in texts) * core.schedulers / SHARED,
    }
    kind = "wgmma" if any(map(_WGMMA.search, matrix)) else "mma"
    return Loop(len(body), len(matrix), kind, clocks, least)


def _shared_bytes(text: str, warp: int) -> float:
    """That an instruction moves for one warp to or from shared memory, or its frame in L1; of a
    wgmma its quarter."""
    if found := _WGMMA.search(text):
        m, n, k = (int(found[i]) for i in (1, 2, 3))
        # its left operand may be in registers
        of_left = 0 if re.search(r"R\d+, R\d+, gdesc", found[4]) else m
        return 2 * (of_left + n) * k / 4
    found = re.search(r"\b(?:(LD|ST)SM|LDS|STS|LDL|STL|ATOMS)\b(\S*)", text)
    if not found:
        return 0.0
    if found[1]:  # so many matrices of 8 x 8 numbers of 16 bits
        return 128 * int(found[2].rsplit(".", 1)[-1])
    bits = re.search(r"\.(64|128)\b", found[2])
    return warp * int(bits[1] if bits else 32) / 8


def _llvm(tool: str, least: int) -> str:
    """One of LLVM's programs in a version that knows the chip; "" where none is installed."""
    for version in range(29, least - 1, -1):
        if found := shutil.which(f"llvm-{tool}-{version}"):
            return found
    found = shutil.which(f"llvm-{tool}") or ""
    match = re.search(r"version (\d+)", _run(found, "--version")) if found else None
    return found if match and int(match[1]) >= least else ""


def _nvdisasm() -> str:
    own = [*targets.FOLDER.glob("nvidia/*/bin/nvdisasm")]
    return str(own[0]) if own else shutil.which("nvdisasm") or ""


def _run(tool: str, *options: str, given: str | None = None) -> str:
    done: Any = subprocess.run(
        [tool, *options], input=given, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"{Path(tool).name} failed: {done.stderr.strip()[:300]}")
    return done.stdout
