"""The frozen weights under a run of low-rank updates (`run.lora`), read anew at each start.

Checkpoints hold the adapters alone. They name the base, with its step, and have a mark of it: another base is refused.
"""

import math
from pathlib import Path
from typing import Any

import jax

from zaya_jax.checkpoint import boxes, merged, partial
from zaya_jax.checkpoint.source import Source
from zaya_jax.cluster import multihost
from zaya_jax.training.logs import say


def put_under(state: dict[str, Any], like: Any, base: Source, meta: dict[str, Any]) -> dict[str, Any]:
    """Adds the frozen weights to a state, and before its first step the base's balancing biases.

    `like` is the whole state (`state.abstract`), `meta` the checkpoint's that the state comes from, or empty. Gives the
    part of the metadata that names the base.
    """
    wanted = {"params": like["frozen"], "balance": {"bias": like["balance"].bias}}
    partial.require_fit(base, boxes.of_tree(wanted))
    if meta:
        multihost.from_first("base", lambda: merged.check_mark(base, meta, "this run"))
    found = base.restore(wanted)
    mark = multihost.from_first("mark", lambda: merged.mark_of(base))
    state["frozen"] = found["params"]
    if not meta:
        state["balance"] = state["balance"]._replace(bias=found["balance"]["bias"])
    count, of = (sum(math.prod(x.shape) for x in jax.tree.leaves(like[part])) for part in ("params", "frozen"))
    say(f"trains {count:,} numbers of low-rank updates over {base.name}{base.warning}, {of:,} frozen ones")
    return {"base": {"name": lasting_name(base), "mark": mark}}


def lasting_name(source: Source) -> str:
    """A name that means the same step from any folder."""
    place = str(source.place) if "://" in str(source.place) else str(Path(source.place).absolute())
    return f"{place}@{source.step}" if source.workdir else place
