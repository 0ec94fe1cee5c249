"""Lists a checkpoint's files with their checksums, its step and its run; with this list the
checkpoint is complete.

    checksums.json    {"format": 3, "run": ..., "step": ..., "files": {NAME: [bytes, crc32c, tail]}, "crc32c": ...}

A chunk ends in its own crc32c, a tail of four bytes. A checksum taken over both would be the same
for every chunk, so it is the raw numbers' that is listed, and the tail must be equal to it. So a
chunk of another array, step or run is found.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable
from typing import Any

import google_crc32c
import numpy as np

from zaya_jax.config import UserError, shown

FORMAT = 3  # 2 had the experts' gate_up as [L, E, D, 2 F]
TAIL = 4  # bytes
RUN = ".run"  # the file next to the steps with the name of their run
BLOCK = 4 << 20  # summed at a time: the checksum holds the interpreter's lock meanwhile

# a file's [bytes, crc32c of its content, bytes of the tail that repeats it]
Sums = dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Seal:
    """The files of one checkpoint; run is None for one that a library wrote without a run."""

    files: Sums
    step: int
    run: str | None = None

    def content(self) -> bytes:
        """The file's."""
        return signed({"format": FORMAT, "run": self.run, "step": self.step, "files": self.files})

    def differs(self, step: int | None, run: str | None) -> str | None:
        """How it differs from this step and run, if it does; None matches any."""
        if step is not None and step != self.step:
            return f"of step {self.step}, not of step {step}: whole steps were exchanged or renamed"
        if run and self.run and run != self.run:
            return f"of run {self.run}, not of run {run}, whose name is in {RUN}"
        return None


def parse(content: bytes) -> Seal:
    """A seal from its file's content; ValueError if a byte has changed, UserError if it is one of
    another version, which is no damage."""
    found = unsigned(content)
    if found.get("format") != FORMAT:
        raise UserError(
            f"is a checkpoint of format {shown(found.get('format'))}, and this version reads format"
            f" {FORMAT} alone; go on with the version that wrote it, or export it there"
            " (`experiments.checkpoint to_hf`) and begin here with --config.run.init_from=DIR"
        )
    seal = Seal(found["files"], found["step"], found["run"])
    for name in seal.files:  # it may come from anywhere, and files are written by these names
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"naming a file outside of the checkpoint: {name}")
    return seal


def signed(found: dict[str, Any]) -> bytes:
    """A small file with a checksum of itself."""
    return _canonical(found | {"crc32c": crc32c(_canonical(found))})


def unsigned(content: bytes) -> dict[str, Any]:
    """The object given to `signed`; ValueError if a byte has changed."""
    # text may be read deeper than it can be written
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(content)
        if (
            isinstance(found, dict)
            and found.pop("crc32c", None) is not None
            and signed(found) == content
        ):
            return found
    raise ValueError("changed: it does not have its own checksum")


def entry_of(content: Any) -> list[int]:
    """The entry of a file that is not a chunk."""
    return [len(content), crc32c(content), 0]


def wrong_with(content: bytes, entry: list[int]) -> str | None:
    """The damage in a file's content, compared with its entry; None if there is none."""
    return _wrong_with([memoryview(content)], len(content), entry)


def wrong_with_file(path: str, entry: list[int]) -> str | None:
    """The same of a file on the disk, without the memory of all of it."""
    with open(path, "rb", buffering=0) as file:
        blocks = (memoryview(block) for block in iter(lambda: file.read(1 << 20), b""))
        return _wrong_with(blocks, os.fstat(file.fileno()).st_size, entry)


def _wrong_with(blocks: Iterable[memoryview], size: int, entry: list[int]) -> str | None:
    wanted, expected, tail = entry
    if size != wanted:
        return f"{'truncated' if size < wanted else 'too long'}: {size} bytes instead of {wanted}"
    crc, rest, end = 0, size - tail, b""
    for block in blocks:
        crc, end = crc32c(block[: max(rest, 0)], crc), end + bytes(block[max(rest, 0) :])
        rest -= len(block)
    if crc != expected:
        return f"changed: crc32c {crc:08x} instead of {expected:08x}"
    return "changed in its tail" if tail and end != expected.to_bytes(TAIL, "little") else None


def crc32c(buffer: Any, crc: int = 0) -> int:
    """The checksum of a buffer, going on from `crc`."""
    view = memoryview(buffer)
    for begin in range(0, len(view), BLOCK):
        crc = google_crc32c.extend(crc, np.frombuffer(view[begin : begin + BLOCK], np.uint8))
    return crc


def _canonical(found: Any) -> bytes:
    return json.dumps(found, separators=(",", ":"), sort_keys=True).encode()
