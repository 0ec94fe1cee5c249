"""Reads a compiled program: its collectives, how many bytes they move, and whether they sit in a
loop.

    found = hlo.collectives(jax.jit(f).lower(*args).compile())
    [c.kind for c in found if c.in_loop]

How a program communicates is proved by its compiled text only; tests and plans read it here. It
is XLA's own and the same on every backend; asynchronous pairs (`all-gather-start`,
`all-gather-done`) count once.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
SCOPES = (
    "embed",
    "cca",
    "router",
    "experts",
    "attention",
    "mlp",
    "head",
    "accumulation",
    "optimizer",
    "balance",
    "exchange",
)
BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_SCOPE = re.compile(rf"(?<![\w.])({'|'.join(SCOPES)})(?![\w.])")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
# name, shape, op, all after its opening parenthesis, and of that what is before the closing one
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((((?:[^()]|\([^()]*\))*).*)$"
)

_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=\{?([^,}\s]+(?:, ?%[^,}\s]+)*)"
)


@dataclasses.dataclass(frozen=True)
class HloArray:
    """An array in the program: its number format as XLA writes it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all its numbers."""
        bits = BITS.get(self.dtype)
        if bits is None:  # the first number in the format's name: bf16, f8e4m3
            bits = _integers(self.dtype)[0]
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, as one device sees it."""

    kind: str
    name: str
    operands: tuple[HloArray, ...]  # that the device puts in
    results: tuple[HloArray, ...]  # that it gets out
    group_size: int  # devices that take part together
    in_loop: bool  # inside the body of a while loop
    # how often it runs: the product of the loops' known lengths; None if one is unknown
    times: int | None
    op_name: str  # where in the Python program it comes from
    groups: tuple[tuple[int, ...], ...] = ()  # of devices; of a permutation its pairs

    @property
    def bytes(self) -> int:
        """Its payload: the larger of a device's operands and results."""
        return max(sum(a.bytes for a in self.operands), sum(a.bytes for a in self.results))

    @property
    def wire_bytes(self) -> float:
        """The least that a device must send: (g - 1) / g of the payload, twice that for an
        all-reduce."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        cut = self.bytes * (self.group_size - 1) / self.group_size
        return 2 * cut if self.kind == "all-reduce" else cut

    @property
    def scalar(self) -> bool:
        """Whether it moves only a handful of numbers: norms, counts, flags."""
        return self.bytes <= 1024


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the program."""

    name: str
    shape: str
    op: str
    rest: str  # all that follows the op's opening parenthesis
    operands: tuple[str, ...]  # their names
    operand_shapes: tuple[str, ...]  # "" for one that is not in the same computation

    @property
    def op_name(self) -> str:
        """Where in the Python program it comes from; "" if the compiler added it."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match.group(1) if match else ""

    @property
    def trip_count(self) -> int | None:
        """How often a while loop turns, if the compiler knows."""
        match = re.search(r"known_trip_count[^\d]*(\d+)", self.rest)
        return int(match.group(1)) if match else None


def text_of(compiled: Any) -> str:
    """A compiled program's text, which may be given in its place."""
    return compiled if isinstance(compiled, str) else compiled.as_text()


def collectives(compiled: Any) -> list[Collective]:
    """All collectives of a compiled program (or of its text), in the order of the text."""
    text = text_of(compiled)
    computations = parse(text)
    loops = _loops(computations)
    devices = re.search(r"num_partitions=(\d+)", text) or re.search(r"replica_count=(\d+)", text)
    num_devices = int(devices[1]) if devices else 1
    all_collectives = []
    for computation, instructions in computations.items():
        lengths = loops[computation]
        for i in instructions:
            kind = i.op.removesuffix("-start")
            if kind not in KINDS:
                continue
            inputs = arrays(" ".join(i.operand_shapes))
            results = arrays(i.shape)
            # An asynchronous start gives a tuple of operands, results and contexts.
            if i.op.endswith("-start") and len(results) > len(inputs):
                results = results[len(inputs) : 2 * len(inputs)]
            groups = _groups(i.rest, num_devices)
            # A permutation's text names pairs, no groups.
            size = num_devices if "source_target_pairs" in i.rest else len(groups[0])
            times = None if None in lengths else math.prod(length or 0 for length in lengths)
            all_collectives.append(
                Collective(
                    kind, i.name, inputs, results, size, bool(lengths), times, i.op_name, groups
                )
            )
    return all_collectives


def scope_of(op_name: str) -> str:
    """The named scopes of an instruction, outermost first, each once: "optimizer/exchange", or ""."""
    return "/".join(dict.fromkeys(_SCOPE.findall(op_name)))


def parse(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation, in the order in which they run."""
    computations: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    shapes: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            instructions, shapes = [], {}
            if start := _COMPUTATION.match(line):
                computations[start.group(2)] = instructions
        elif match := _INSTRUCTION.match(line):
            name, shape, op, rest, inputs = match.groups()
            shapes[name] = shape
            operands = tuple(re.findall(r"%([\w.\-]+)", inputs))
            operand_shapes = tuple(shapes.get(operand, "") for operand in operands)
            instructions.append(Instruction(name, shape, op, rest, operands, operand_shapes))
    return computations


def _loops(computations: dict[str, list[Instruction]]) -> dict[str, tuple[int | None, ...]]:
    """For every computation the lengths of the loops that it runs inside, outermost first."""
    lengths_of: dict[str, tuple[int | None, ...]] = {}

    def visit(name: str, lengths: tuple[int | None, ...]) -> None:
        # A computation that is called in several places has the longest of their nests.
        if name in lengths_of and len(lengths_of[name]) >= len(lengths):
            return
        lengths_of[name] = lengths
        for i in computations.get(name, []):
            inside = (*lengths, i.trip_count) if i.op == "while" else lengths
            for callee in callees(i):
                visit(callee, inside)

    for name in computations:
        visit(name, ())
    return lengths_of


def callees(i: Instruction) -> list[str]:
    """The computations that an instruction runs; of a loop the condition, then the body."""
    return re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(i.rest)))


def arrays(shape: str) -> tuple[HloArray, ...]:
    """The arrays of a shape, which may be a tuple."""
    return tuple(HloArray(dtype, _integers(dims)) for dtype, dims in _SHAPE.findall(shape))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _groups(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups, or pairs, that an instruction lists, or cuts from a mesh's devices after
    transposing it; or all."""
    if listed := re.search(
        r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d, ]+\},?)+)\}", rest
    ):
        return tuple(map(_integers, re.findall(r"\{[\d, ]+\}", listed[1])))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, sizes = _integers(iota[1]), _integers(iota[2])
        order: Sequence[int] = _integers(iota[3] or "") or range(len(sizes))
        group = shape[-1]
    elif mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        axes = re.findall(r"'([^']*)'=(\d+)", mesh[1])
        chosen = re.findall(r"'([^']*)'", mesh[2])
        sizes = tuple(int(size) for _, size in axes)
        # The axes of a group go last.
        order = sorted(range(len(axes)), key=lambda dim: axes[dim][0] in chosen)
        group = math.prod(int(size) for axis, size in axes if axis in chosen)
    else:
        return (tuple(range(devices)),)
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
    return tuple(map(tuple, numbers.reshape(-1, group).tolist()))
