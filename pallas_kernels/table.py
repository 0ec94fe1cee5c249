"""The table of tiles: which tile each kernel for GPUs runs with, and how far that is known.

`tiles.json`, beside this file, has a row for each kernel of an architecture:

    {"gfx942": {"attention_forward": {"tile": {"rows": 128, ..}, "source": "modelled"}, ..}, ..}

A row is "modelled", chosen from compiled programs, or "measured", with `chip`, `date`, `jax` and
`ms`. Kernels are named as in a profile. A variant stands behind the name: "64" for heads of at most
64 channels, "wide" for float32 and for wider heads. Rows of "gpu" serve every architecture.

`python -m pallas_kernels.tune` measures rows on a machine and writes them to `measured_file()`, from
where the starts of runs take them (`read_measured`), as long as card, driver, JAX and the kernels'
source are the same.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SHIPPED: dict[str, Any] = json.loads(
    Path(__file__).with_name("tiles.json").read_text(encoding="utf-8")
)
BEGIN = {  # how the names of an operator's kernels begin
    "attention": "attention_",
    "cca_mix": "mix",
    "grouped_mlp": "experts_",
    "linear_attention": "linear_",
    "residual_norm": "residual_",
}


def has(architecture: str) -> bool:
    """Whether tiles were chosen for an architecture."""
    return architecture in SHIPPED and architecture != "gpu"


@functools.cache
def rows(architecture: str) -> dict[str, Row]:
    """The row of each kernel on an architecture; the wide ones, which fit every card, for kernels
    without one."""
    shared, of_chip = SHIPPED["gpu"], SHIPPED.get(architecture, {})
    if isinstance(of_chip, str):  # as another architecture
        of_chip = SHIPPED[of_chip]
    return {name.removesuffix(" wide"): row for name, row in shared.items()} | shared | of_chip


def variant_of(channels: int, number_bytes: int) -> str:
    """The variant for heads of so many channels, in a format of so many bytes."""
    if number_bytes > 2 or channels > 128:
        return "wide"
    return "64" if channels <= 64 else ""


def rows_of_operators(found: dict[str, Row], operators: Iterable[str]) -> dict[str, Row]:
    """The rows of these operators' kernels, without variants."""
    begin = tuple(BEGIN[name] for name in operators)
    return {name: row for name, row in found.items() if name.startswith(begin) and " " not in name}


def counted(found: dict[str, Row]) -> str:
    """How many rows were measured, and where: "9 measured on NVIDIA H100, 2 modelled"."""
    measured = [row for row in found.values() if row["source"] == "measured"]
    chips = ", ".join(dict.fromkeys(row["chip"] for row in measured))
    parts = [f"{len(measured)} measured on {chips}"] if measured else []
    if len(found) > len(measured):
        parts.append(f"{len(found) - len(measured)} modelled")
    return ", ".join(parts)


# ################################################################################################
# What this machine measured
# ################################################################################################


def measured_file() -> Path:
    """Where `tune` writes: below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "zaya_jax" / "tiles.json"


def key(kind: str) -> dict[str, str]:
    """What makes this machine's rows invalid when it changes."""
    return {"kind": kind, "driver": driver(), "jax": version("jax"), "code": code()}


def driver() -> str:
    """The version of the GPUs' driver, from the files of the driver itself."""
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        with contextlib.suppress(OSError):
            return path.read_text().split("\n")[0].strip()
    return ""


@functools.cache
def code() -> str:
    """A hash of the kernels' source."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def read_measured(kind: str) -> tuple[dict[str, Any] | None, str]:
    """What `tune` found on a card of this kind, {"kernels": [..], "tiles": {kernel: row}}; None if
    nothing, or nothing that is still valid, and then the reason."""
    try:
        entries = json.loads(measured_file().read_text(encoding="utf-8"))
        found = entries.get(kind)
        if found is None:
            return None, ""
        tiles, kernels = found["tiles"], list(found["kernels"])
        changed = [name for name, value in key(kind).items() if found["key"][name] != value]
        if not all({"tile", "source", "chip"} <= {*row} for row in tiles.values()):
            raise ValueError("a row is not whole")
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return None, f"{measured_file()} cannot be read ({error!r})"
    if changed:
        return None, f"{measured_file()} is for another {', '.join(changed)}"
    return {"kernels": kernels, "tiles": tiles}, ""


def write_measured(kind: str, found: dict[str, Any]) -> None:
    """Writes what `tune` found, all of it or nothing; what other kinds of cards have stays."""
    path, entries = measured_file(), dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, TypeError):
        entries = dict(json.loads(path.read_text(encoding="utf-8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(entries | {kind: found}, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
