"""A run's figures as columns, for a notebook."""

import os
from pathlib import Path

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.report import read


def metrics(place: str | os.PathLike) -> dict[str, np.ndarray]:
    """A run's figures by name: "step", and one value a step, [T] or [T, L, ..]; NaN where a step has none.

    >>> table = zj.metrics(run)
    >>> table["step"].tolist(), table["loss"].shape, table["load_entropy"].shape
    ([1, 2, 3, 4], (4,), (4, 2))
    """
    path = Path(place) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is not there; give the folder of a run")
    with path.open("rb") as file:
        rows = [row for line in file if (row := read.parse(line))]
    rows = sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["step"])
    table = {"step": np.asarray([row["step"] for row in rows], int)}
    for name in {name: None for row in rows for name in row if name != "step"}:
        held = {at: np.asarray(row[name], float) for at, row in enumerate(rows) if name in row}
        shape = max((x.shape for x in held.values()), key=len)
        table[name] = np.full((len(rows), *shape), np.nan)
        for at, x in held.items():
            table[name][at] = x
    return table
