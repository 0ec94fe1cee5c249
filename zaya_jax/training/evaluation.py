"""Measures the loss on text that a run does not train on: the held-out part of its sources, and
`eval.named`."""

import functools
from typing import Any

import jax

from zaya_jax.config import Phase
from zaya_jax.data import windows
from zaya_jax.schedule import Step
from zaya_jax.training import logs, recipe
from zaya_jax.training import step as steps
from zaya_jax.training.pace import Pace
from zaya_jax.training.start import PlannedStart


class Evaluation:
    """The evaluations of one start. A phase's batches and program are made when they are first
    needed."""

    def __init__(self, planned: PlannedStart, pace: Pace):
        self._planned = planned
        self._pace = pace
        self._stores = windows.named_stores(planned.recipe.config, planned.tokenizer)
        self.notes = [store.note for store in self._stores.values() if store.note]
        self.batches = functools.lru_cache(1)(self._batches)  # on the devices only for one phase
        self._program = functools.cache(self._make_program)

    def losses(self, state: Any, now: Step) -> dict[str, float]:
        """Mean losses over the windows of each name, and their parts but `z`; a name without a
        target has none."""
        self._pace.begin("evaluate", now.number, (now.phase_index, "evaluation"))
        program = self._program(now.phase_index)
        sums = {}
        for name, batches in self.batches(now.phase).items():
            sums[name] = [program(state, batch) for batch in batches]
        self._pace.at("evaluate", now.number, "wait")
        losses = {}
        for name, of_batches in jax.device_get(sums).items():
            count = sum(float(count) for _, count in of_batches)
            if not count:
                logs.say(
                    f"warning: no text of {name} could be read; step {now.number} has no loss for"
                    " it"
                )
                continue
            for part in sorted(of_batches[0][0].keys() - {"z"}):
                figure = name if part == "loss" else f"{name.removesuffix('/loss')}/{part}"
                losses[figure] = sum(float(parts[part]) for parts, _ in of_batches) / count
        return losses

    def _make_program(self, phase_index: int) -> Any:
        config = self._planned.recipe.phases[phase_index].config
        return steps.make_eval_step(config, self._planned.setup)

    def _batches(self, phase: Phase) -> dict[str, list]:
        """The batches that a phase is evaluated on, on the devices, by the figure's name."""
        planned, tokenizer = self._planned, self._planned.tokenizer
        config, setup = planned.recipe.config, planned.setup
        local_rows, rows = planned.placed.rows, recipe.eval_rows(config, phase, setup.spread)
        damaged = planned.stream.damaged
        eval_config = windows.eval_config(config, phase)
        by_name = {
            "eval/loss": windows.eval_batches(
                eval_config, tokenizer, local_rows, rows, damaged=damaged
            )
        }
        for name, store in self._stores.items():
            by_name[f"eval/{name}"] = windows.spread_windows(
                eval_config, [store], tokenizer.pad_id, local_rows, rows, damaged
            )
        put = functools.partial(steps.put_batch, setup.mesh, micro_batches=1, spread=setup.spread)
        return {
            name: [put(batch) for batch in batches] for name, batches in by_name.items() if batches
        }
