"""The chip that a program is being made for, and the implementation of an operator for it.

A program is made *for* a chip, often by another one: compiled ahead of time, lowered in a test, on
a machine whose GPU does not take part. So nothing asks the machine while it traces. The builder of
a program names the chip:

    target = chip.made_for(mesh)
    with chip.making(target):
        ...                                     # inside the traced function, or around the call of one

The name is a part of `jax.jit`'s cache key, so a function is traced again for another chip; it
reaches the backward passes of `custom_vjp`, and the bodies of loops, of `jax.checkpoint` and of
`shard_map`. If no chip is named it is that of the mesh around, and otherwise the device on which
JAX puts arrays by default.

A GPU's kernels of ours run where the table of tiles (`pallas_kernels.table`) knows the
architecture. `use` adds what `pallas_kernels.tune` found on this machine's card, for the programs
that this process makes afterwards.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels import table

# The operators with kernels for GPUs, `triton.py` in their folders.
OPERATORS: tuple[str, ...] = (
    "attention",
    "cca_mix",
    "grouped_mlp",
    "linear_attention",
    "residual_norm",
)

AUTO = "auto"  # as a config's kernels: those of the table

# Architectures by parts of their chips' names. The first part that a name contains counts, so
# longer names come before shorter ones ("A100", "A10"), and "Ada" before "RTX 2000 Ada". AMD's
# devices say their architecture, except an abstract mesh's and absent ones; NVIDIA's are always
# known by name.
ARCHITECTURES = {
    "MI100": "gfx908",
    "MI2": "gfx90a",
    "MI300": "gfx942",
    "MI308": "gfx942",
    "MI325": "gfx942",
    "MI35": "gfx950",
    "Ada": "sm_89",
    "V100": "sm_70",
    "T4": "sm_75",
    "Quadro RTX": "sm_75",
    "TITAN RTX": "sm_75",
    "RTX 20": "sm_75",
    "GTX 16": "sm_75",
    "A100": "sm_80",
    "A800": "sm_80",
    "A30": "sm_80",
    "RTX 40": "sm_89",
    "L40": "sm_89",
    "L4": "sm_89",
    "A40": "sm_86",
    "A10": "sm_86",
    "RTX 30": "sm_86",
    "RTX A": "sm_86",
    "H100": "sm_90",
    "H200": "sm_90",
    "H800": "sm_90",
    "H20": "sm_90",
    "B200": "sm_100",
    "B300": "sm_103",
    "RTX 50": "sm_120",
    "RTX PRO": "sm_120",
}

Tile = tuple[tuple[str, int], ...]  # its sizes by name, as a part of jit's cache key


class Chip(NamedTuple):
    """A kind of device, in JAX's words; AMD's by their architecture."""

    platform: str  # "cpu"; "gpu", "cuda" or "rocm"
    kind: str  # "NVIDIA H200", "gfx942"
    kernels: tuple[str, ...] = OPERATORS  # the operators whose own kernels for GPUs may run
    tiles: tuple[tuple[str, Tile], ...] = ()  # of kernels that do not have the table's

    @property
    def maker(self) -> str:
        """ "cpu", "cuda", "rocm": JAX calls the devices of both kinds of GPU "gpu".

        Chip("cpu", "gfx942") is a CPU that runs programs made for that GPU, their kernels
        interpreted.
        """
        kind = self.kind.lower()
        if any(word in kind for word in ("nvidia", "tesla", "geforce", "quadro")):
            return "cuda"
        return "rocm" if "amd" in kind or kind.startswith("gfx") else self.platform

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's."""
        return self.platform == "cpu"

    @property
    def architecture(self) -> str:
        """ "gfx942", "sm_90"; "gfx" or "sm" of a chip without a known name, "" of a CPU."""
        if self.kind.startswith("gfx"):
            return self.kind
        if self.maker not in ("cuda", "rocm"):
            return ""
        prefix = "gfx" if self.maker == "rocm" else "sm"
        for part, name in ARCHITECTURES.items():
            if part in self.kind and name.startswith(prefix):
                return name
        return prefix

    @property
    def lanes(self) -> int:
        """Threads of a warp."""
        return 64 if self.maker == "rocm" and not self.kind.startswith("gfx1") else 32

    @property
    def formats(self) -> tuple[str, ...]:
        """Number formats of its matrix units, whole: NVIDIA's take float32 as TF32."""
        if self.architecture in ("sm_70", "sm_75"):
            return ("float16",)
        if self.maker == "cuda":
            return "bfloat16", "float16"
        return "bfloat16", "float16", "float32"

    def taking(self, operators: tuple[str, ...]) -> "Chip":
        """The same chip with own kernels for these operators at most, and this machine's tiles.

        ("all",) takes none away, ("none",) all. ("auto",) leaves those that `use` was given, or
        all on an architecture that the table knows, and none on others.
        """
        kernels, tiles = _used.get(self.kind, (None, self.tiles))
        chip = self._replace(tiles=tiles)
        if operators == (AUTO,):
            known = table.has(self.architecture) or self.maker not in ("cuda", "rocm")
            operators = OPERATORS if known else ()
            if kernels is not None:
                operators = kernels
        if operators == ("all",):
            return chip
        return chip._replace(kernels=tuple(name for name in self.kernels if name in operators))

    def unrolls(self, repeats: int, numbers: int) -> bool:
        """Whether a loop over layers, with streams of this many numbers, is faster written out.

        A CPU runs a loop's body on one core, but for matrix products. That costs a tenth of a step
        where arrays are large enough to be split; layers written out take a quarter more time to
        compile.
        """
        return self.platform == "cpu" and repeats <= 8 and numbers >= 1 << 18


_named = jax.make_user_context(None)
_used: dict[str, tuple[tuple[str, ...], tuple[tuple[str, Tile], ...]]] = {}


def use(kind: str, found: Mapping[str, Any] | None) -> None:
    """From now on programs for this kind of card take what `tune` found (`table.read_measured`); None:
    the table alone."""
    _used.pop(kind, None)
    if found:
        tiles = {name: tuple(row["tile"].items()) for name, row in found["tiles"].items()}
        _used[kind] = tuple(found["kernels"]), tuple(tiles.items())


def making(chip: Chip) -> AbstractContextManager[None]:
    """A context in which programs are made for this chip."""
    return _named(chip)


def made_for(where: Mesh | AbstractMesh | Any) -> Chip:
    """The chip that the code around has named, otherwise that of a mesh, or of the arrays of a
    tree; `current` if they are on no chip, or not yet, while tracing."""
    if _named.value is not None:
        return _named.value
    # its devices know more of themselves than the abstract mesh inside a program
    if isinstance(where, Mesh):
        return chip_of(where.devices.flat[0])
    if isinstance(where, AbstractMesh):
        return _of_mesh(where) or current()
    for x in jax.tree.leaves(where):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return chip_of(next(iter(x.devices())))
    return current()


def current() -> Chip:
    """The chip that a program is being made for."""
    return _named.value or _of_mesh(jax.sharding.get_abstract_mesh()) or chip_of(_default_device())


def runs_kernels(operator: str) -> bool:
    """Whether the operator's own kernels for GPUs run in the program that is being made."""
    made_for = current()
    return made_for.maker in ("cuda", "rocm") and operator in made_for.kernels


def choose[Implementation](operator: str, offered: Mapping[str, Implementation]) -> Implementation:
    """The chip's own implementation of an operator, otherwise XLA's.

    They are named by `Chip.maker`; "triton" are the kernels for both kinds of GPU.
    """
    if "triton" in offered and runs_kernels(operator):
        return offered["triton"]
    return offered.get(current().maker, offered["xla"])


def chip_of(device: Any) -> Chip:
    """The chip that a device is, also one of an abstract mesh."""
    # ROCm's devices have product names ("AMD Instinct MI300X"); their abilities follow from the
    # architecture.
    kind = device.device_kind
    capability = str(getattr(device, "compute_capability", "")).split(":")[0]
    if capability.startswith("gfx"):
        return Chip(device.platform, capability)
    found = Chip(device.platform, kind)
    if "AMD" in kind and found.architecture != "gfx":
        return found._replace(kind=found.architecture)
    return found


def _of_mesh(mesh: AbstractMesh) -> Chip | None:
    device = mesh.abstract_device
    return None if device is None else chip_of(device)


def _default_device() -> jax.Device:
    named = jax.config.jax_default_device  # a part of jit's cache key too
    if named is None or isinstance(named, str):
        return jax.devices(named)[0]
    return named
