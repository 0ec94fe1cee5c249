"""The machine code of a compiled program's Pallas kernels: registers, spills, shared memory.

    for code in machine_code.read_kernels(compiled):    # one for each that differs from the others
        code.name, code.registers, code.spills, code.shared

A program that is compiled for a GPU, here or not, serializes to a file that holds each kernel as
the ELF file which the GPU's driver would load. What that says of itself is read here.

The serialized program is XLA's own: a Riegeli file whose records are protocol buffers. Neither is
promised to stay, so whatever is not found where JAX 0.11 and 0.12 have it is an error, never a
guess.
"""

import hashlib
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow
from flax import serialization
from google.protobuf import empty_pb2, unknown_fields

ELF = b"\x7fELF"
_CALL = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?\bname = \\?"([^"\\]+)')
_FILE = bytes.fromhex("83af70d10d884a3f")  # a Riegeli file's first bytes
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_CODECS = {ord("s"): "snappy", ord("z"): "zstd", ord("b"): "brotli"}
_AMD, _NVIDIA = 224, 190  # of an ELF file, its machine
_NO_BITS = 8  # of a section, that the file has no bytes for it
_SIZED = 4  # of an attribute, that a length stands before it
# attributes of a kernel in a cubin's .nv.info: registers, bytes of its local frame
_REGISTERS, _FRAME = (0x2F, 0x11)


class Code(NamedTuple):
    """A kernel's machine code."""

    name: str  # the `name` that `tiles.call` was given
    registers: int  # of a thread; AMD's vector registers, those for matrices counted
    # registers for which there was no room; of NVIDIA, which does not say, the 4-byte words of the
    # frame
    spills: int
    shared: int  # bytes of LDS, or shared memory, of a block
    digest: str  # of its instructions, by which equal code is known


def read_kernels(compiled: Any) -> list[Code]:
    """The Pallas kernels of a program that was compiled for a GPU, each code once."""
    called = set(_CALL.findall(compiled.as_text()))
    found: dict[Code, None] = {}
    for record in _records(compiled.runtime_executable().serialize()):
        if ELF not in record or record.startswith(ELF):
            continue
        for parents, elf in _elves(record):
            code = _code(parents[-3], elf)
            if code.name in called:  # the others are XLA's own
                found[code] = None
    if missing := called - {code.name for code in found}:
        raise ValueError(
            f"no machine code of {', '.join(sorted(missing))} was found in the serialized program"
        )
    return list(found)


def _code(call: bytes, elf: bytes) -> Code:
    said = dict(_fields(call))  # 1: name, 6: bytes of shared memory
    symbol, shared = said[1].decode(), said.get(6, 0)  # a second kernel of a name has a number
    sections, name = _sections(elf), re.sub(r"__\d+$", "", symbol)
    digest = hashlib.sha256(sections.get(".text", sections.get(f".text.{symbol}", elf))).hexdigest()
    machine = struct.unpack_from("<H", elf, 18)[0]
    if machine == _AMD:
        kernels = _amd_metadata(sections[".note"])["amdhsa.kernels"]
        (kernel,) = [k for k in kernels if k[".name"] == symbol]
        registers, spills = kernel[".vgpr_count"], kernel[".vgpr_spill_count"]
        return Code(name, registers, spills, shared + kernel[".group_segment_fixed_size"], digest)
    if machine != _NVIDIA:
        raise ValueError(f"kernel {name} is an ELF file for machine {machine}, which is no GPU's")
    attributes = _nvidia_attributes(sections[".nv.info"])
    return Code(name, attributes[_REGISTERS], attributes[_FRAME] // 4, shared, digest)


def _sections(elf: bytes) -> dict[str, bytes]:
    """The contents of an ELF file's sections, by name; 64 bits."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, of_names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, start + i * size) for i in range(count)]
    names = headers[of_names][4]
    return {
        elf[names + name : elf.index(b"\0", names + name)].decode(): elf[offset : offset + length]
        for name, kind, _, _, offset, length in headers
        if kind != _NO_BITS
    }


def _amd_metadata(note: bytes) -> dict[str, Any]:
    name, length, _ = struct.unpack_from("<3I", note)
    start = 12 + -(-name // 4) * 4
    return serialization.msgpack_restore(note[start : start + length])


def _nvidia_attributes(info: bytes) -> dict[int, int]:
    """The greatest number of each attribute of a kernel: a file holds one kernel."""
    found: dict[int, int] = {}
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<2BH", info, at)
        at += 4
        if form == _SIZED:
            if length == 8:
                (value,) = struct.unpack_from("<I", info, at + 4)
                found[attribute] = max(found.get(attribute, 0), value)
            at += length
    return found


# ################################################################################################
# The file: Riegeli (github.com/google/riegeli, doc/riegeli_records_file_format.md) and protocol
# buffers
# ##################################################################################################


def _records(data: bytes) -> Iterator[bytes]:
    """The records of the Riegeli file in these bytes, which another file may be one of."""
    begin = data.find(_FILE)
    if begin < 0:
        raise ValueError(
            "XLA's serialized program is no Riegeli file any more; machine_code.py reads no other"
        )
    data = data[begin:]
    data = b"".join(data[i + _BLOCK_HEADER : i + _BLOCK] for i in range(0, len(data), _BLOCK))
    at = 0
    while at + _CHUNK_HEADER <= len(data):
        size, kind, count = struct.unpack_from("<8xQ8xB7s", data, at)
        chunk = data[at + _CHUNK_HEADER : at + _CHUNK_HEADER + size]
        at += _CHUNK_HEADER + size
        if kind != ord("r"):  # "s" begins the file
            continue
        length, start = _number(chunk, 1)
        sizes = _unpacked(chunk[0], chunk[start : start + length])
        values = _unpacked(chunk[0], chunk[start + length :])
        place = begin = 0
        for _ in range(int.from_bytes(count, "little")):
            length, place = _number(sizes, place)
            record = values[begin : begin + length]
            begin += length
            if record.startswith(_FILE):
                yield from _records(record)
            else:
                yield record


def _unpacked(codec: int, data: bytes) -> bytes:
    if codec == 0:
        return data
    size, start = _number(data, 0)
    return pyarrow.Codec(_CODECS[codec]).decompress(
        data[start:], decompressed_size=size, asbytes=True
    )


def _elves(message: bytes, parents: tuple[bytes, ...] = ()) -> Iterator[tuple[list[bytes], bytes]]:
    """The ELF files in a protocol buffer, each with the messages around it, outermost first."""
    around = (*parents, message)
    for _, value in _fields(message):
        if isinstance(value, bytes) and ELF in value:
            if value.startswith(ELF):
                yield list(around), value
            else:
                yield from _elves(value, around)


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """Number and value of a message's fields, an int or bytes."""
    unknown = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    return [(field.field_number, field.data) for field in unknown]


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where the next thing begins."""
    found = shift = 0
    while True:
        byte = data[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return found, at
