"""Reads the kernels that a GPU launches to run a compiled program, with the bytes, FLOPs and scope
of each.

    found = launches.read_program(compiled)
    sum(k.times for k in found.kernels)                     # launches
    sum(k.times * (k.reads + k.writes) for k in ...)        # HBM traffic

A kernel is an instruction of the entry computation, or of a loop's body or condition, that
computes: no tuple, parameter or bitcast. It runs as often as the loops around it turn. Where the
compiler does not know how often that is, the scope says so (`expected_turns` and `expected_share` in
`pallas_kernels.loops`). `unknown` counts the loops without any such number; each counts as one
turn.

A fusion reads its operands and writes its results once each: only the slices or rows that it takes
of an operand, and only the update of an operand that it updates in place. Caches do not count: a
kernel's results are read again by the next. FLOPs are those of matrix products. A Pallas kernel
states its own (`pallas_kernels.tiles`).
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from zaya_jax.compiled import hlo
from zaya_jax.compiled.hlo import Instruction

FREE = frozenset(
    {
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "opt-barrier",
        "partition-id",
        "replica-id",
        "add-dependency",
    }
)
# A part of the result needs that part of the operands alone.
ELEMENTWISE = frozenset(
    {
        "convert",
        "copy",
        "negate",
        "abs",
        "exponential",
        "log",
        "sqrt",
        "rsqrt",
        "tanh",
        "logistic",
        "sign",
        "not",
        "add",
        "subtract",
        "multiply",
        "divide",
        "maximum",
        "minimum",
        "power",
        "and",
        "or",
        "compare",
        "select",
        "clamp",
    }
)
UPDATES = ("dynamic-update-slice", "scatter")  # write a part of their first operand
SLICES = ("dynamic-slice", "slice", "gather")  # take a part of their first operand
# Parts of names by which JAX puts a layer's arrays into stacks, and takes them out.
STACKING = (
    "dynamic_update_index_in_dim",
    "dynamic_index_in_dim",
    "transpose(jvp())/broadcast_in_dim",
)
# The counts that our own kernels state in their names (`pallas_kernels.tiles`).
_SAID = re.compile(r"flops=([\d.e+]+)(?:of([\d.e+]+))?(?:,reads=([\d.e+]+),writes=([\d.e+]+))?")
_TURNS = re.compile(r"turns=([\d.e+]+)(?:of(\d+))?\)*/(?:\w+/)?while$")
_VISITS = re.compile(r"visits=([\d.e+-]+)")


@dataclasses.dataclass(frozen=True)
class GpuKernel:
    """One kernel, as one device sees it."""

    name: str
    op: str
    op_name: str  # where in the Python program it comes from; "" if the compiler added it
    times: float  # how often it runs in a run of the program
    reads: int  # bytes, each time
    writes: int
    flops: float
    wide: bool  # whether its products multiply float32
    collective: str | None  # its kind

    @property
    def bytes(self) -> int:
        """HBM traffic, each time."""
        return self.reads + self.writes

    @property
    def scope(self) -> str:
        """The named scopes around it; "stacks" without one, where it moves parts of arrays stacked
        over layers."""
        scope = hlo.scope_of(self.op_name)
        if not scope and any(mark in self.op_name for mark in STACKING):
            return "stacks"
        return scope or "other"

    @property
    def stage(self) -> str:
        """ "forward", "again" (recomputed), "backward", or "" for work after these."""
        if self.scope.startswith(("optimizer", "balance", "accumulation")):
            return ""
        if "rematted_computation" in self.op_name:
            return "again"
        return "backward" if "transpose(" in self.op_name else "forward"


@dataclasses.dataclass(frozen=True)
class Program:
    """All kernels in the order of the text, and the loops of unknown length by `op_name`, or by
    name where the compiler left none."""

    kernels: tuple[GpuKernel, ...]
    unknown: Mapping[str, int]
    # by the name of what is started and awaited later: the kernels [from, to) between
    under: Mapping[str, tuple[int, int]]

    @property
    def launches(self) -> float:
        """Kernels started in one run."""
        return sum(k.times for k in self.kernels)

    @property
    def bytes(self) -> float:
        """HBM traffic of one run."""
        return sum(k.times * k.bytes for k in self.kernels)

    @property
    def flops(self) -> float:
        """FLOPs of matrix products of one run."""
        return sum(k.times * k.flops for k in self.kernels)


def read_program(compiled: Any) -> Program:
    """The kernels of a compiled program, or of its text."""
    reader = _Reader(hlo.text_of(compiled))
    reader.run(reader.entry, 1.0)
    return Program(tuple(reader.kernels), dict(reader.unknown), reader.under)


def _fused(fusion: Instruction) -> str:
    """The computation that a fusion runs."""
    return hlo.callees(fusion)[0]


def _stated(op_name: str, whole: str, each: str | None) -> float:
    """A number that a name states: for each visit, where the name also says how many there are, or
    for the whole."""
    visits = _VISITS.findall(op_name)
    if each and visits:
        return float(visits[-1]) * float(each)
    return float(whole)


def _numbers(shape: str) -> int:
    return sum(math.prod(array.shape) for array in hlo.arrays(shape))


def size(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    return sum(array.bytes for array in hlo.arrays(shape))


class _Reader:
    """Walks through a program from its entry, loops multiplied out."""

    def __init__(self, text: str):
        self.computations = hlo.parse(text)
        entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
        assert entry, "no ENTRY in the program's text"
        self.entry = entry.group(1)
        self.kernels: list[GpuKernel] = []
        self.under: dict[str, tuple[int, int]] = {}
        self.unknown: collections.Counter[str] = collections.Counter()
        self._users = functools.cache(self._find_users)
        self._share = functools.cache(self._find_share)  # else paths are walked, not instructions

    def run(self, name: str, times: float) -> None:
        """Adds the kernels of a computation that runs so often."""
        for i in self.computations[name]:
            if i.op.endswith("-done"):
                for start in i.operands:
                    if start in self.under:
                        self.under[start] = self.under[start][0], len(self.kernels)
            elif i.op == "while":
                turns = self._turns(i)
                condition, body = hlo.callees(i)
                if i.trip_count is None:  # otherwise the condition is not evaluated
                    self.run(condition, times * (turns + 1))
                self.run(body, times * turns)
            elif i.op == "conditional":
                branches = hlo.callees(i)
                for branch in branches:  # they count equally
                    self.run(branch, times / len(branches))
            elif i.op in ("call", "async-start"):
                for callee in hlo.callees(i):
                    self.run(callee, times)
            elif i.op not in FREE:
                kernel = self._kernel(i, times)
                self.kernels.append(kernel)
                if i.op.endswith("-start"):
                    self.under[i.name] = len(self.kernels), len(self.kernels)

    def _turns(self, loop: Instruction) -> float:
        if loop.trip_count is not None:
            return loop.trip_count
        stated = _TURNS.search(loop.op_name)
        if not stated:
            self.unknown[loop.op_name or loop.name] += 1  # a pipelined loop has no op_name
            return 1
        return _stated(loop.op_name, stated[1], stated[2])

    def _kernel(self, i: Instruction, times: float) -> GpuKernel:
        kind = i.op.removesuffix("-start")
        collective = kind if kind in hlo.KINDS else None
        products = self._products(i)
        flops, wide = sum((n for n, _ in products), 0.0), any(wide for _, wide in products)
        if kind == "fusion":  # a slice may travel beside other kernels: `fusion-start`
            fused = _fused(i)
            reads = sum(self._reads(fused, number) for number in range(len(i.operands)))
            writes = self._writes(fused)
        else:
            reads, writes = sum(map(size, i.operand_shapes)), size(i.shape)
            if collective and i.op.endswith("-start"):  # its tuple holds the operands too
                writes = max(writes - reads, 0)
            elif i.op == "dynamic-update-slice":
                reads = writes = size(i.operand_shapes[1])
            elif i.op in SLICES:
                reads = writes
        if i.op == "custom-call" and (stated := _SAID.search(i.op_name)):
            flops = _stated(i.op_name, stated[1], stated[2])
            if stated[3]:
                reads, writes = int(float(stated[3])), int(float(stated[4]))
            wide = flops > 0 and hlo.arrays(i.operand_shapes[0])[0].dtype == "f32"
        return GpuKernel(i.name, i.op, i.op_name, times, reads, writes, flops, wide, collective)

    def _find_users(self, fused: str) -> dict[str, list[tuple[Instruction, int]]]:
        """The instructions that take each value of a computation, and as which operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for i in self.computations[fused]:
            for place, name in enumerate(i.operands):
                users.setdefault(name, []).append((i, place))
        return users

    def _reads(self, fused: str, number: int) -> int:
        """Bytes that a fusion takes of its operand of this number."""
        parameters = (i for i in self.computations[fused] if i.op == "parameter")
        value = next(i for i in parameters if i.rest.startswith(f"{number})"))
        return math.ceil(size(value.shape) * self._share(fused, value))

    def _find_share(self, fused: str, value: Instruction, made: bool = False) -> float:
        """Which share of a value's numbers the rest of a fusion takes; of one that is `made` there,
        all to give it."""
        total, numbers = 0.0, max(_numbers(value.shape), 1)
        users = self._users(fused).get(value.name, [])
        if made and not users:
            return 1.0
        for user, place in users:
            if user.op in SLICES and place == 0:
                total += _numbers(user.shape) / numbers
            elif user.op in UPDATES and place == 0 and not made and self._ends(fused, user):
                pass  # in place
            elif user.op == "tuple":
                if made:  # otherwise it is handed through
                    total += 1
            elif user.op == "fusion":
                total += self._reads(_fused(user), place) / max(size(value.shape), 1)
            elif user.op == "bitcast":
                total += self._share(fused, user, made)
            elif user.op in ELEMENTWISE and _numbers(user.shape) == numbers:
                total += self._share(fused, user, True)
            else:
                return 1.0
        return min(total, 1.0)

    def _ends(self, fused: str, value: Instruction) -> bool:
        """Whether a fusion gives a value as it is, and does nothing else with it."""
        users = self._users(fused).get(value.name, [])
        return all(user.op in ("bitcast", "tuple") and self._ends(fused, user) for user, _ in users)

    def _writes(self, fused: str) -> int:
        """Bytes that a fusion writes."""
        by_name = {i.name: i for i in self.computations[fused]}

        def written(i: Instruction) -> int:
            inputs = [by_name[name] for name in i.operands if name in by_name]
            if i.op == "tuple":
                return sum(map(written, inputs))
            if i.op == "bitcast":
                return written(inputs[0])
            if i.op == "dynamic-update-slice":
                base = inputs[0]
                while base.op == "bitcast":
                    base = by_name[base.operands[0]]
                return size(inputs[1].shape if base.op == "parameter" else i.shape)
            if i.op == "scatter":
                return size(inputs[-1].shape)
            if i.op == "fusion":
                return self._writes(_fused(i))
            if i.op == "parameter":
                return 0
            return size(i.shape)

        return written(self.computations[fused][-1])

    def _products(self, i: Instruction) -> list[tuple[float, bool]]:
        """The matrix products of an instruction, and of what it fuses: FLOPs, and whether float32
        is multiplied."""
        if i.op in ("fusion", "fusion-start"):
            return [*itertools.chain(*map(self._products, self.computations[_fused(i)]))]
        library = ""
        if i.op == "custom-call" and (target := re.search(r'custom_call_target="([^"]*)"', i.rest)):
            library = target[1]
        if i.op != "dot" and not re.search("gemm|matmul", library, re.IGNORECASE):
            return []
        left, out = hlo.arrays(i.operand_shapes[0])[0], hlo.arrays(i.shape)[0]
        dims = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', i.rest)
        summed = re.findall(r"\d+", dims[1]) if dims else []
        flops = 2.0 * math.prod(left.shape[int(dim)] for dim in summed) * math.prod(out.shape)
        if "grouped" in library:  # each row meets one matrix, or each pair of rows one group
            flops = 2.0 * math.prod(left.shape) * out.shape[-1]
        return [(flops, left.dtype == "f32")]
