"""Reads the memory that a compiled program takes over its course from XLA's record of its buffers.

    compiled, memory = buffers.compile_watched(lowered)
    memory.peak, memory.at_peak()

XLA places each value at an offset of one large allocation for temporaries, for the instructions
between its first and its last use. Values that share a place, as a loop's carried arrays do with
their initial values, count once. Arguments and results have allocations of their own; donated ones
are both.
"""

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from zaya_jax.compiled import hlo

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$")
_VALUE = re.compile(r"^ value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
# By a word in an allocation's line; the first that is there counts.
_KINDS = {
    "preallocated-temp": "temporaries",
    "parameter": "arguments",
    "constant": "constants",
    "live-out": "results",
}
_RANGE = re.compile(r"^    (\S+):(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value at its place among the temporaries, from the instruction that makes it to the last
    that needs it."""

    name: str  # of the instruction that makes it, without the index into a tuple
    shape: str
    offset: int
    size: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """The memory of a program on one device, in bytes."""

    arguments: int  # and donated results, which lie in their place
    results: int  # that are no arguments
    constants: int
    temporaries: int  # the one allocation in which all of them lie
    buffers: tuple[Buffer, ...]

    @property
    def peak(self) -> int:
        """The sum of all: XLA places temporaries in one allocation of a fixed size."""
        return self.arguments + self.results + self.constants + self.temporaries

    def live(self, time: int) -> list[Buffer]:
        """The temporaries that are in use while an instruction runs, one for each place, largest
        first."""
        buffers: list[Buffer] = []
        alive = (b for b in self.buffers if b.first <= time <= b.last and b.size)
        end = -1
        for b in sorted(alive, key=lambda b: (b.offset, -b.size)):
            # otherwise a part of the one before, or the same one under another name
            if b.offset >= end:
                buffers.append(b)
                end = b.offset + b.size
        return sorted(buffers, key=lambda b: -b.size)

    def at_peak(self) -> list[Buffer]:
        """The temporaries that are in use where most are."""
        times = sorted({b.first for b in self.buffers})
        return max(map(self.live, times), key=lambda live: sum(b.size for b in live), default=[])


def compile_watched(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, ProgramMemory]:
    """Compiles a program, never from JAX's cache, and reads XLA's record of its buffers."""
    with uncached(), tempfile.TemporaryDirectory(prefix="zaya_jax-compile-") as folder:
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        )
        return compiled, _read_memory(Path(folder))


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compiles anew inside: JAX cannot load a program for an absent chip from its cache."""
    cached = jax.config.jax_enable_compilation_cache
    _cache(False)
    try:
        yield
    finally:
        _cache(cached)


def _cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # otherwise JAX does not look at the setting again


def _read_memory(folder: Path) -> ProgramMemory:
    """The memory of the program with a record in this folder; of several, the largest one's."""
    files = sorted(
        folder.glob("*after_optimizations-buffer-assignment.txt"), key=lambda f: f.stat().st_size
    )
    assert files, f"XLA wrote no buffer assignment into {folder}"
    ranges = _ranges(Path(str(files[-1]).replace("-buffer-assignment.txt", "-live-range.txt")))
    sizes = dict.fromkeys(_KINDS.values(), 0)
    buffers, kind = [], ""
    for line in files[-1].read_text().splitlines():
        if allocation := _ALLOCATION.match(line):
            kind = next((kind for mark, kind in _KINDS.items() if mark in allocation.group(2)), "")
            if kind:  # otherwise it is a thread's own
                sizes[kind] += int(allocation.group(1))
        elif kind == "temporaries" and (value := _VALUE.match(line)):
            name, size, offset, shape = value.groups()
            name = name if name.endswith("}") else name + "{}"
            if name in ranges and hlo.arrays(shape):
                buffers.append(
                    Buffer(name.split("{")[0], shape, int(offset), int(size), *ranges[name])
                )
    return ProgramMemory(**sizes, buffers=tuple(buffers))


def _ranges(path: Path) -> dict[str, tuple[int, int]]:
    """The first and the last instruction that need each value."""
    matches = map(_RANGE.match, path.read_text().splitlines())
    return {match[1]: (int(match[2]), int(match[3])) for match in matches if match}
