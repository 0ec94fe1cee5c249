"""Lists a checkpoint's files with their checksums, its step and its run. This list is the
checkpoint's seal: it is written last, and with it the checkpoint is complete.

    checksums.json    {"format": 3, "run": ..., "step": ..., "files": {NAME: [bytes, crc32c, tail]}, "crc32c": ...}

A chunk ends in its own crc32c, a tail of four bytes. The CRC of data followed by its own CRC is a
constant, so the seal has the CRC of the data alone, and the tail must match it. A chunk swapped in
from another array, step or run is therefore detected.
"""

import contextlib
import dataclasses
import json
import os
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from zaya_jax.config import UserError, shown

FORMAT = 3  # 2 had the experts' gate_up as [L, E, D, 2 F]
TAIL = 4  # bytes
RUN = ".run"  # the file next to the steps with the name of their run
BLOCK = 1 << 20  # read and summed at a time: a sum holds the interpreter's lock meanwhile

# a file's [bytes, crc32c of its content, bytes of the tail that repeats it]
Sums = dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Seal:
    """The files of one checkpoint; run is None for one that a library wrote without a run."""

    files: Sums
    step: int
    run: str | None = None

    def to_bytes(self) -> bytes:
        """The content of checksums.json."""
        fields = {"format": FORMAT, "run": self.run, "step": self.step, "files": self.files}
        return with_checksum(fields)

    def mismatch(self, step: int | None, run: str | None) -> str | None:
        """How it differs from this step and run, if it does; None matches any."""
        if step is not None and step != self.step:
            return f"of step {self.step}, not of step {step}: whole steps were exchanged or renamed"
        if run and self.run and run != self.run:
            return f"of run {self.run}, not of run {run}, whose name is in {RUN}"
        return None


def parse(content: bytes) -> Seal:
    """A seal from its file's content; ValueError if a byte has changed, or it is no seal,
    UserError if it is one of another version, which is no damage."""
    fields = without_checksum(content)
    if fields.get("format") != FORMAT:
        raise UserError(
            f"is a checkpoint of format {shown(fields.get('format'))}, and this version reads format"
            f" {FORMAT} alone; go on with the version that wrote it, or export it there"
            " (`experiments.checkpoint to_hf`) and begin here with --config.run.init_from=DIR"
        )
    seal = Seal(fields["files"], fields["step"], fields["run"])
    for name in seal.files:  # it may come from anywhere, and files are written by its names
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"naming a file outside of the checkpoint: {name}")
    return seal


def with_checksum(fields: dict[str, Any]) -> bytes:
    """A small file with a checksum of itself."""
    return _canonical(fields | {"crc32c": crc32c(_canonical(fields))})


def without_checksum(content: bytes) -> dict[str, Any]:
    """The object given to `with_checksum`; ValueError if a byte has changed."""
    # text may be read deeper than it can be written
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(content)
        is_signed = isinstance(fields, dict) and fields.pop("crc32c", None) is not None
        if is_signed and with_checksum(fields) == content:
            return fields
    raise ValueError("changed: it does not have its own checksum")


def damage_in(file: BinaryIO, entry: list[int]) -> str | None:
    """The damage in a file, compared with its entry, in blocks; None if there is none."""
    listed_size, listed_crc, tail = entry
    size = file.seek(0, os.SEEK_END)
    if size != listed_size:
        kind = "truncated" if size < listed_size else "too long"
        return f"{kind}: {size} bytes instead of {listed_size}"
    file.seek(0)
    crc = 0
    for begin in range(0, size - tail, BLOCK):
        crc = crc32c(file.read(min(BLOCK, size - tail - begin)), crc)
    if crc != listed_crc:
        return f"changed: crc32c {crc:08x} instead of {listed_crc:08x}"
    if tail and file.read() != listed_crc.to_bytes(TAIL, "little"):
        return "changed in its tail"
    return None


def crc32c(buffer: Any, crc: int = 0) -> int:
    """The checksum of a buffer, going on from `crc`."""
    view = memoryview(buffer)
    for begin in range(0, len(view), BLOCK):
        crc = google_crc32c.extend(crc, np.frombuffer(view[begin : begin + BLOCK], np.uint8))
    return crc


def _canonical(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
