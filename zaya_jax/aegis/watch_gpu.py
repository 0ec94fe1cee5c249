"""Watches the node's GPUs: AMD's through sysfs, NVIDIA's through NVML, with the same limits.

    poll_amd(tree, judge)       /sys/class/drm/card*/device, which needs no permission and no library
    poll_nvidia(tree, judge)    nvidia-ml-py's module `pynvml`, if it can be imported

A figure that a card or a driver does not give is missing in its reading, and is not judged.
"""

import dataclasses
import functools
import importlib
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from zaya_jax.aegis.limits import BY_NAME, Judge, Tree

AMD = "0x1002"
BUSY = 90  # percent: from there on clocks are compared
Counter = tuple[str, str, float | None]  # the finding's name, the source, the value


@dataclasses.dataclass
class Reading:
    """One GPU's figures now."""

    device: str
    identity: str = ""
    counters: list[Counter] = dataclasses.field(default_factory=list)
    busy: float | None = None  # percent
    clock: float | None = None  # MHz of the cores
    failed: float | None = None  # pages or rows that could not be retired


def _judge_all(readings: Sequence[Reading], judge: Judge) -> None:
    """Has a maker's GPUs judged."""
    judge.gone("gpu lost", {reading.device for reading in readings})
    busy = {
        r.device: r.clock for r in readings if r.clock and r.busy is not None and r.busy >= BUSY
    }
    usual = statistics.median(busy.values()) if len(busy) > 2 else None
    for gpu in readings:
        judge.devices.setdefault(gpu.device, f"{gpu.device} {gpu.identity}")
        for name, source, value in gpu.counters:
            judge.counter(name, gpu.device, source, value)
        if gpu.failed is not None:
            seen = f"{gpu.failed:g} pages or rows"
            judge.state("gpu page not retired", gpu.device, gpu.failed > 0, seen)
        clock = busy.get(gpu.device)
        if clock and usual:
            slow = clock <= BY_NAME["gpu slow clock"].least * usual
            seen = f"{clock:g} MHz at {gpu.busy:g} % load, the busy GPUs' median is {usual:g} MHz"
            judge.state("gpu slow clock", gpu.device, slow, seen)


def poll_amd(tree: Tree, judge: Judge) -> None:
    """Reads the files of the amdgpu driver. Outputs (card0-DP-1) and partitions without a vendor
    are no cards."""
    cards = [name for name in tree.names("sys/class/drm") if re.fullmatch(r"card\d+", name)]
    places = {card: f"sys/class/drm/{card}/device" for card in cards}
    readings = [
        _read_amd(tree, card, place)
        for card, place in places.items()
        if tree.text(f"{place}/vendor") == AMD
    ]
    _judge_all(readings, judge)


def _read_amd(tree: Tree, card: str, place: str) -> Reading:
    gpu = Reading(card, tree.text(f"{place}/unique_id") or "")
    gpu.busy = tree.number(f"{place}/gpu_busy_percent")
    # The level with a star: `1: 2100Mhz *`.
    levels = tree.text(f"{place}/pp_dpm_sclk") or ""
    clock = re.search(r"^\w+: *(\d+)[Mm][Hh]z \*\s*$", levels, re.M)
    gpu.clock = float(clock[1]) if clock else None
    for name in tree.names(f"{place}/ras"):
        if name.endswith("_err_count"):
            block = name.removesuffix("_err_count")
            gpu.counters += _amd_counters(tree, block, f"{place}/ras/{name}")
    # `0x027f5d43 : 0x00001000 : R`: a page, its size, and R retired, P pending, F could not be.
    pages = tree.text(f"{place}/ras/gpu_vram_bad_pages")
    gpu.failed = len(re.findall(r": *F\s*$", pages, re.M)) if pages is not None else None
    return gpu


def _amd_counters(tree: Tree, block: str, path: str) -> Iterator[Counter]:
    """`ue: 0`, `ce: 0` (corrected, which is usual) and, of newer drivers, `de: 0`."""
    text = tree.text(path)
    found = dict(re.findall(r"\b(ue|de)\s*[:=]\s*(\S+)", text or ""))
    if text and "ue" not in found:
        tree.note(f"{path}: {text[:40]!r} has no count of uncorrectable errors")
    names = {"ue": "gpu uncorrectable error", "de": "gpu deferred error"}
    if block == "umc":
        names["ue"] = "gpu uncorrectable memory error"
    for kind, value in found.items():
        count = tree.parse(value.rstrip(",;"), f"{path} {kind}")
        yield names[kind], f"{block} {kind}", count


@functools.cache
def _nvml(tree: Tree) -> Any:
    """The library; None where it is not installed, or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml
    except ImportError:  # a node without such GPUs has no need of it
        return None
    except Exception as error:  # the library has its own
        tree.note(f"pynvml: {error}")
        return None


def poll_nvidia(tree: Tree, judge: Judge) -> None:
    """Asks NVML. Every call may fail for a card that does not have it; one that all fail for is
    lost."""
    nvml = _nvml(tree)

    def ask(name: str, *arguments: Any) -> Any:
        """The answer of a function; None, and a note, where it fails."""
        try:
            return getattr(nvml, name)(*arguments)
        except Exception as error:  # the library has its own; an older one lacks a function
            tree.note(f"{name}: {error}")
            return None

    readings = []
    count = ask("nvmlDeviceGetCount") if nvml else None
    for index in range(count or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        # A card that has fallen off the bus keeps its handle, and answers nothing.
        identity = None if handle is None else ask("nvmlDeviceGetUUID", handle)
        if identity is None:
            continue
        gpu = Reading(f"gpu{index}", str(identity))
        # uncorrected, since the driver was loaded
        errors = ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)
        gpu.counters.append(("gpu uncorrectable memory error", "uncorrected errors", errors))
        # corrected, uncorrected, pending, failed
        rows = ask("nvmlDeviceGetRemappedRows", handle)
        gpu.failed = float(bool(rows[3])) if rows is not None else None
        use = ask("nvmlDeviceGetUtilizationRates", handle)
        gpu.busy = float(use.gpu) if use is not None else None
        gpu.clock = ask("nvmlDeviceGetClockInfo", handle, 1)  # of the SMs
        readings.append(gpu)
    _judge_all(readings, judge)
