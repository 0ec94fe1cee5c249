"""The report's pictures of saving: what the training waits for, and the whole, over the run."""

from collections.abc import Sequence

import numpy as np

from zaya_jax.checkpoint.times import Event, read
from zaya_jax.report import svg
from zaya_jax.report.read import Workdir

POINTS = 400
FEW = 12  # up to so many saves are points with their values
WAITS = "The training waits for the copy, on a GPU only for its part on the device; the rest runs beside it."


def saves_section(run: Workdir) -> str:
    """Seconds of each save; empty where the run saved nothing."""
    saves = list(read(run.path).get("save", {}).values())
    return svg.section("Checkpoints", WAITS, save_curves(saves))


def save_curves(saves: Sequence[Event]) -> str:
    """Two pictures: the slowest process's copy, and from begin to commit; nothing for a single save."""
    if len(saves) < 2:
        return ""
    starts = range(0, len(saves), -(-len(saves) // POINTS))
    note = f"Each point is the slowest of {starts.step} saves." if starts.step > 1 else ""
    steps = [saves[min(s + starts.step // 2, len(saves) - 1)].step for s in starts]
    pictures = ""
    for color, title, values in (
        (1, "Copy", [save.slowest("copy") for save in saves]),
        (0, "Whole save", [save.whole() for save in saves]),
    ):
        slowest = np.fmax.reduceat(values, list(starts))
        if not np.isfinite(slowest).any():
            continue
        unit, scale = (" s", 1.0) if np.nanmax(slowest) >= 0.1 else (" ms", 1e3)
        line = svg.Line(
            "slowest process" if color else "begin to commit",
            list(zip(map(float, steps), (slowest * scale).tolist(), strict=True)),
            color,
            "line" if len(saves) > FEW else "dots",
        )
        pictures += svg.line_chart(
            title, [line], x_range=(steps[0], steps[-1]), unit=unit, note=note,
            y_range=(0.0, float(np.nanmax(slowest)) * scale * 1.08 or 1.0),
            describe=f"{title}: median {np.nanmedian(values):.3g} s, longest {np.nanmax(values):.3g} s.",
        )  # fmt: skip
    return pictures
