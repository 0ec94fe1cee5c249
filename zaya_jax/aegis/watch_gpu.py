"""Watches the node's GPUs: AMD's through sysfs, NVIDIA's through NVML, with the same limits.

    Amd(tree)             /sys/class/drm/card*/device, which needs no permission and no library
    Nvidia(tree)          nvidia-ml-py's module `pynvml`, if it can be imported

A figure that a card or a driver does not give is missing in its reading, and is not judged.
"""

import abc
import dataclasses
import functools
import importlib
import re
import statistics
from collections.abc import Iterator
from typing import Any

from zaya_jax.aegis.limits import BY_NAME, Judge, Tree, Watcher
from zaya_jax.cluster.events import Finding

AMD = "0x1002"
BUSY = 90  # percent: from there on clocks are compared


@dataclasses.dataclass
class Reading:
    """One GPU's figures now. Counters: (finding's name, source, value)."""

    device: str
    identity: str = ""
    counters: list[tuple[str, str, float | None]] = dataclasses.field(default_factory=list)
    busy: float | None = None  # percent
    clock: float | None = None  # MHz of the cores
    failed: float | None = None  # pages or rows that could not be retired


class _Gpus(Watcher):
    """Judges readings, which the classes below take."""

    def __init__(self, tree: Tree):
        super().__init__(tree)
        self._seen: dict[str, str] = {}

    @abc.abstractmethod
    def read(self) -> list[Reading]:
        """All GPUs that answer."""

    def poll(self, judge: Judge) -> Iterator[Finding]:
        readings = self.read()
        here = {reading.device for reading in readings}
        for device, identity in self._seen.items():
            yield from judge.state(
                "gpu lost", device, device not in here, f"{device} {identity} is no longer here"
            )
        busy = {
            r.device: r.clock for r in readings if r.clock and r.busy is not None and r.busy >= BUSY
        }
        usual = statistics.median(busy.values()) if len(busy) > 2 else None
        for gpu in readings:
            self._seen.setdefault(gpu.device, gpu.identity)
            for name, source, value in gpu.counters:
                yield from judge.counter(name, gpu.device, source, value)
            if gpu.failed is not None:
                seen = f"{gpu.failed:g} pages or rows"
                yield from judge.state("gpu page not retired", gpu.device, gpu.failed > 0, seen)
            clock = busy.get(gpu.device)
            if clock and usual:
                slow = clock <= BY_NAME["gpu slow clock"].at * usual
                seen = (
                    f"{clock:g} MHz at {gpu.busy:g} % load, the busy GPUs' median is {usual:g} MHz"
                )
                yield from judge.state("gpu slow clock", gpu.device, slow, seen)


class Amd(_Gpus):
    """Reads the files of the amdgpu driver."""

    name = "amd"

    def read(self) -> list[Reading]:
        """Cards of AMD; outputs (card0-DP-1) and partitions without a vendor are none."""
        cards = [n for n in self.tree.names("sys/class/drm") if re.fullmatch(r"card\d+", n)]
        places = {card: f"sys/class/drm/{card}/device" for card in cards}
        return [
            self._card(card, place)
            for card, place in places.items()
            if self.tree.text(f"{place}/vendor") == AMD
        ]

    def _card(self, card: str, place: str) -> Reading:
        tree = self.tree
        gpu = Reading(card, tree.text(f"{place}/unique_id") or "")
        gpu.busy = tree.number(f"{place}/gpu_busy_percent")
        gpu.clock = self._clock(f"{place}/pp_dpm_sclk")
        for name in tree.names(f"{place}/ras"):
            if name.endswith("_err_count"):
                self._errors(gpu, name.removesuffix("_err_count"), f"{place}/ras/{name}")
        # `0x027f5d43 : 0x00001000 : R`: a page, its size, and R retired, P pending, F could not be.
        pages = tree.text(f"{place}/ras/gpu_vram_bad_pages")
        gpu.failed = len(re.findall(r": *F\s*$", pages, re.M)) if pages is not None else None
        return gpu

    def _errors(self, gpu: Reading, block: str, path: str) -> None:
        """`ue: 0`, `ce: 0` (corrected, which is usual) and, of newer drivers, `de: 0`."""
        text = self.tree.text(path)
        found = re.findall(r"\b(ue|de)\s*[:=]\s*(\S+)", text or "")
        if text and "ue" not in dict(found):
            self.tree.note(f"{path}: {text[:40]!r} has no count of uncorrectable errors")
        uncorrectable = (
            "gpu uncorrectable memory error" if block == "umc" else "gpu uncorrectable error"
        )
        for kind, value in dict(found).items():
            name = uncorrectable if kind == "ue" else "gpu deferred error"
            count = self.tree.parse(value.rstrip(",;"), f"{path} {kind}")
            gpu.counters.append((name, f"{block} {kind}", count))

    def _clock(self, path: str) -> float | None:
        """The level with a star: `1: 2100Mhz *`."""
        found = re.search(r"^\w+: *(\d+)[Mm][Hh]z \*\s*$", self.tree.text(path) or "", re.M)
        return float(found[1]) if found else None


class Nvidia(_Gpus):
    """Asks NVML. Every call may fail for a card that does not have it; one that all fail for is
    lost."""

    name = "nvidia"

    @functools.cached_property
    def _nvml(self) -> Any:
        """The library; None where it is not installed, or finds no driver."""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            return nvml
        except ImportError:  # a node without such GPUs has no need of it
            return None
        except Exception as error:  # the library has its own
            self.tree.note(f"pynvml: {error}")
            return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer of a function; None, and a note, where it fails."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except Exception as error:  # the library has its own; an older one lacks a function
            self.tree.note(f"{name}: {error}")
            return None

    def read(self) -> list[Reading]:
        if self._nvml is None:
            return []
        count = self._ask("nvmlDeviceGetCount") or 0
        handles = [(i, self._ask("nvmlDeviceGetHandleByIndex", i)) for i in range(count)]
        named = [
            (i, handle, self._ask("nvmlDeviceGetUUID", handle))
            for i, handle in handles
            if handle is not None
        ]
        # A card that has fallen off the bus keeps its handle, and answers nothing.
        return [self._card(i, handle, name) for i, handle, name in named if name is not None]

    def _card(self, index: int, handle: Any, name: Any) -> Reading:
        gpu = Reading(f"gpu{index}", str(name))
        # uncorrected, since the driver was loaded
        errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)
        gpu.counters.append(("gpu uncorrectable memory error", "uncorrected errors", errors))
        # corrected, uncorrected, pending, failed
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        gpu.failed = float(bool(rows[3])) if rows is not None else None
        use = self._ask("nvmlDeviceGetUtilizationRates", handle)
        gpu.busy = float(use.gpu) if use is not None else None
        gpu.clock = self._ask("nvmlDeviceGetClockInfo", handle, 1)  # of the SMs
        return gpu
