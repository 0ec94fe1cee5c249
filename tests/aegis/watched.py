"""Recorded trees of a node, unpacked into a folder, and an NVML that answers as a test wants."""

from pathlib import Path
from types import SimpleNamespace

TREES = Path(__file__).parent / "trees"


def lay(root, name):
    """Writes a recorded tree, or what another changes in it, below `root`."""
    for line in (TREES / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            path, _, text = line.partition(" | ")
            place = Path(root) / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text.replace("\\n", "\n") + "\n")
    return root


class Clock:
    """Seconds that a test moves on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class NoNvml:
    """A node without NVIDIA's driver."""

    def nvmlInit(self):
        raise RuntimeError("Driver Not Loaded")


class Nvml:
    """Eight H200: `cards[i]` holds what may be changed."""

    def __init__(self, count=8):
        self.cards = [
            dict(
                errors={(1, 0): 0, (0, 0): 3}, rows=(0, 0, 0, 0), busy=99, clock=1700 + 10 * i, degrees=62, limit=87,
                reasons=0x4, width=16, links=[True] * LINKS, counters={}, lost=False,
            )
            for i in range(count)
        ]  # fmt: skip

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        short = name.removeprefix("nvmlDeviceGet")

        def call(*given):
            if name == "nvmlInit":
                return None
            if short == "Count":
                return len(self.cards)
            if short == "HandleByIndex":
                return given[0]
            card = self.cards[given[0]]
            if card["lost"]:
                raise RuntimeError("GPU is lost")
            if short == "NvLinkState":
                if given[1] >= len(card["links"]):
                    raise RuntimeError("Invalid Argument")
                return card["links"][given[1]]
            return {
                "UUID": lambda: f"GPU-{given[0]:04d}",
                "TotalEccErrors": lambda: card["errors"][given[1:]],
                "RemappedRows": lambda: card["rows"],
                "UtilizationRates": lambda: SimpleNamespace(gpu=card["busy"]),
                "ClockInfo": lambda: card["clock"],
                "Temperature": lambda: card["degrees"],
                "TemperatureThreshold": lambda: card["limit"],
                "CurrentClocksThrottleReasons": lambda: card["reasons"],
                "CurrPcieLinkWidth": lambda: card["width"],
                "MaxPcieLinkWidth": lambda: 16,
                "NvLinkErrorCounter": lambda: card["counters"].get(given[1:], 0),
            }[short]()

        return call


LINKS = 18


def disk(free=0.5, inodes=0.9):
    """`os.statvfs` of folders that are so full."""

    def statvfs(folder):
        return SimpleNamespace(
            f_bavail=int(1e9 * free), f_blocks=10**9, f_frsize=4096, f_favail=int(1e6 * inodes), f_files=10**6
        )

    return statvfs
