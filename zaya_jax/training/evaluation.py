"""Measures the loss on text that a run does not train on: the held-out part of its sources, and
`eval.named`."""

import functools
from typing import Any

import jax
import numpy as np

from zaya_jax.config import Phase
from zaya_jax.data import stores, windows
from zaya_jax.schedule import Step
from zaya_jax.training import logs, recipe
from zaya_jax.training import step as steps
from zaya_jax.training.figures import Writer
from zaya_jax.training.pace import Pace
from zaya_jax.training.start import PlannedStart


class Evaluation:
    """The evaluations of one start. A phase's windows and program are made when they are first
    needed."""

    def __init__(self, planned: PlannedStart, pace: Pace):
        self._recipe, self._here, self._pace = planned.recipe, planned.phase, pace
        self._tokenizer, self._setup = planned.tokenizer, planned.setup
        self._damaged = planned.stream.damaged
        self._named = windows.named_stores(self._recipe.config, self._tokenizer)
        self.notes = stores.notes_on(self._named.values())
        self.windows = functools.lru_cache(1)(self._windows)
        self._program = functools.cache(self._make)

    def losses(self, state: Any, now: Step) -> dict[str, float]:
        """Mean losses over the targets of each name's windows, in nats; a name without a target has
        none."""
        self._pace.begin("evaluate", now.number, (now.phase_index, "evaluation"))
        step, found = self._program(now.phase_index), self.windows(now.phase)
        sums = {name: [step(state, batch) for batch in batches] for name, batches in found.items()}
        self._pace.at("evaluate", now.number, "wait")
        losses = {}
        for name, parts in jax.device_get(sums).items():
            loss, count = np.asarray(parts, np.float64).sum(0)
            if count:
                losses[name] = float(loss / count)
            else:
                logs.say(
                    f"warning: nothing of {name} could be read, so step {now.number} is without it"
                )
        return losses

    def make_up(self, state: Any, reached: int, writer: Writer) -> None:
        """Makes up for the evaluation after step `reached`, which was due when the run stopped
        there."""
        before = self._recipe.plan.step(reached)
        if self._recipe.phase_of_step(reached).config.mesh != self._here.config.mesh:
            logs.say(
                f"note: step {reached} stays without a held-out loss: its phase has another"
                " mesh now"
            )
        else:
            self._record(
                state, before, reached, writer, "which the stop after that step had put off"
            )

    def before_training(self, state: Any, writer: Writer) -> None:
        """Records the loss of weights that come from elsewhere, before the first step."""
        self._record(state, self._recipe.plan.step(1), 0, writer, "with the weights as they came")

    def _record(self, state: Any, now: Step, number: int, writer: Writer, why: str) -> None:
        if self.windows(now.phase):
            losses = self.losses(state, now)
            writer.write(number, losses)
            # nan: nothing is held out, all windows are named ones
            first = losses.get("eval/loss", np.nan)
            logs.say(f"step {number} | held-out {first:.4f}, {why}")

    def _make(self, phase_index: int) -> Any:
        config = self._recipe.phases[phase_index].config
        return steps.make_eval_step(config, self._setup)

    def _windows(self, phase: Phase) -> dict[str, list]:
        """The batches that a phase is evaluated on, on the devices, by the figure's name."""
        config, spread, mesh = self._recipe.config, self._setup.spread, self._setup.mesh
        rows, count = self._here.rows, recipe.eval_rows(config, phase, spread)
        own = windows.eval_config(config, phase)
        found = {
            "eval/loss": windows.eval_batches(
                own, self._tokenizer, rows, count, damaged=self._damaged
            )
        }
        for name, store in self._named.items():
            found[f"eval/{name}"] = windows.spread_windows(
                own, [store], self._tokenizer.pad_id, rows, count, self._damaged
            )
        put = functools.partial(steps.put_batch, mesh, micro_batches=1, spread=spread)
        return {
            name: [put(batch) for batch in batches] for name, batches in found.items() if batches
        }
