"""The chip that a program is being made for, and the implementation of an operator for it.

A program is made *for* a chip, often by another one: compiled ahead of time, lowered in a test, on a machine whose GPU
does not take part. So nothing asks the machine while it traces. The builder of a program names the chip:

    target = chip.made_for(mesh)
    with chip.making(target):
        ...                                     # inside the traced function, or around the call of one

The name is a part of `jax.jit`'s cache key, so a function is traced again for another chip; it reaches the backward
passes of `custom_vjp`, and the bodies of loops, of `jax.checkpoint` and of `shard_map`. If no chip is named it is
that of the mesh around, and otherwise the device on which JAX puts arrays by default.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

# The operators with kernels for GPUs, `triton.py` in their folders.
OPERATORS: tuple[str, ...] = (
    "attention",
    "cca_mix",
    "cross_entropy",
    "grouped_mlp",
    "linear_attention",
    "newton_schulz",
    "residual_norm",
)

# AMD's chips by parts of their names, for devices that do not say their architecture: an abstract mesh's, absent ones.
ARCHITECTURES = {"MI2": "gfx90a", "MI300": "gfx942", "MI308": "gfx942", "MI325": "gfx942", "MI35": "gfx950"}


class Chip(NamedTuple):
    """A kind of device, in JAX's words; AMD's by their architecture."""

    platform: str  # "cpu"; "gpu", "cuda" or "rocm"
    kind: str  # "NVIDIA H200", "gfx942"
    kernels: tuple[str, ...] = OPERATORS  # the operators whose own kernels for GPUs may run

    @property
    def maker(self) -> str:
        """ "cpu", "cuda", "rocm": JAX calls the devices of both kinds of GPU "gpu".

        Chip("cpu", "gfx942") is a CPU that runs programs made for that GPU, their kernels interpreted.
        """
        kind = self.kind.lower()
        if "nvidia" in kind:
            return "cuda"
        return "rocm" if "amd" in kind or kind.startswith("gfx") else self.platform

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's."""
        return self.platform == "cpu"

    def taking(self, operators: tuple[str, ...]) -> "Chip":
        """The same chip with own kernels for these operators at most; ("all",) takes none away, ("none",) all."""
        if operators == ("all",):
            return self
        return self._replace(kernels=tuple(name for name in self.kernels if name in operators))

    def unrolls(self, repeats: int, numbers: int) -> bool:
        """Whether a loop over layers, with streams of this many numbers, is faster written out.

        A CPU runs a loop's body on one core, but for matrix products. That costs a tenth of a step where arrays are
        large enough to be split; compiling the layers written out costs twice as much.
        """
        return self.platform == "cpu" and repeats <= 8 and numbers >= 1 << 18


_named = jax.make_user_context(None)


def making(chip: Chip) -> AbstractContextManager[None]:
    """A context in which programs are made for this chip."""
    return _named(chip)


def made_for(where: Mesh | AbstractMesh | Any) -> Chip:
    """The chip that the code around has named, otherwise that of a mesh, or of the arrays of a tree."""
    if _named.value is not None:
        return _named.value
    if isinstance(where, Mesh):  # its devices know more of themselves than the abstract mesh inside a program
        return chip_of(where.devices.flat[0])
    return (_of_mesh(where) or current()) if isinstance(where, AbstractMesh) else holding(where)


def holding(tree: Any) -> Chip:
    """The chip that holds the arrays of a tree; `current` if they are on no chip, or not yet, while tracing."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return chip_of(next(iter(x.devices())))
    return current()


def current() -> Chip:
    """The chip that a program is being made for."""
    return _named.value or _of_mesh(jax.sharding.get_abstract_mesh()) or chip_of(_default_device())


def choose[Implementation](offered: Mapping[str, Implementation]) -> Implementation:
    """The chip's own implementation of an operator, otherwise XLA's.

    They are named by `Chip.maker`; "triton" are the kernels for both kinds of GPU, where the chip lets them run.
    """
    made_for = current()
    kernel: Any = offered.get("triton")
    if kernel and made_for.maker in ("cuda", "rocm") and kernel.__name__.split(".")[-2] in made_for.kernels:
        return kernel
    return offered.get(made_for.maker, offered["xla"])


def chip_of(device: Any) -> Chip:
    """The chip that a device is, also one of an abstract mesh."""
    # ROCm's devices have product names ("AMD Instinct MI300X"); their abilities follow from the architecture.
    kind = device.device_kind
    capability = str(getattr(device, "compute_capability", "")).split(":")[0]
    if capability.startswith("gfx"):
        return Chip(device.platform, capability)
    named = (architecture for name, architecture in ARCHITECTURES.items() if name in kind)
    return Chip(device.platform, next(named, kind) if "AMD" in kind else kind)


def _of_mesh(mesh: AbstractMesh) -> Chip | None:
    device = mesh.abstract_device
    return None if device is None else chip_of(device)


def _default_device() -> jax.Device:
    named = jax.config.jax_default_device  # a part of jit's cache key too
    if named is None or isinstance(named, str):
        return jax.devices(named)[0]
    return named
