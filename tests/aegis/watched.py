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


class Nvml:
    """Eight H200: `cards[i]` holds what may be changed."""

    def __init__(self):
        self.loaded = True
        self.cards = [
            dict(errors={(1, 0): 0}, rows=(0, 0, 0, 0), busy=99, clock=1700 + 10 * i, lost=False)
            for i in range(8)
        ]

    def nvmlInit(self):
        if not self.loaded:
            raise RuntimeError("Driver Not Loaded")

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        short = name.removeprefix("nvmlDeviceGet")

        def call(*given):
            if short == "Count":
                return len(self.cards)
            if short == "HandleByIndex":
                return given[0]
            card = self.cards[given[0]]
            if card["lost"]:
                raise RuntimeError("GPU is lost")
            return {
                "UUID": lambda: f"GPU-{given[0]:04d}",
                "TotalEccErrors": lambda: card["errors"][given[1:]],
                "RemappedRows": lambda: card["rows"],
                "UtilizationRates": lambda: SimpleNamespace(gpu=card["busy"]),
                "ClockInfo": lambda: card["clock"],
            }[short]()

        return call
