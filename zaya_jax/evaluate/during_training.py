"""Runs lm-eval's tasks while a run trains (`eval.tasks`), on the run's mesh and with its own state.

    tasks = TaskScores(planned, pace)     UserError without lm-eval, or for a task that cannot be run
    tasks.scores(state, now)              {"eval/arc_easy/acc": 0.31, ..}, the same in all processes

All processes do the same: each reads the tasks, and they compute each batch together. The weights
are those of the state, so no copy is made; adapters (`run.lora`) are added to the frozen weights.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pallas_kernels import chip
from zaya_jax import functions
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError
from zaya_jax.evaluate import harness
from zaya_jax.model import decode, lora
from zaya_jax.model.sampling import Sampling
from zaya_jax.schedule import Step
from zaya_jax.training import logs, recipe
from zaya_jax.training.pace import Pace
from zaya_jax.training.start import PlannedStart


class StateModel:
    """A run's state after a step, as `evaluate` asks a model."""

    def __init__(self, planned: PlannedStart, config: Config, state: Any, now: Step, pace: Pace):
        self.config = config
        self.tokenizer = planned.tokenizer
        self.mesh = planned.setup.mesh
        self.source = f"step {now.number}"
        self._params = state["params"]
        self._balance = state["balance"].bias
        if config.run.lora:
            shardings = functions.shardings(config, self.mesh)["params"]
            frozen = state["frozen"]["params"]
            self._params = jax.jit(lora.merged, out_shardings=shardings)(frozen, self._params)
        self._now = now
        self._pace = pace

    def scores(self, ids: Any, labels: Any, *, segments: Any) -> tuple[np.ndarray, np.ndarray]:
        """See `library.LanguageModel.scores`; all processes call it with the same rows."""
        program = ("tasks", self._now.phase_index, ids.shape)
        self._pace.begin("evaluate", self._now.number, program)
        with chip.making(chip.made_for(self.mesh)):
            scored = _score_program(self.mesh)(
                functions.essence(self.config, self.mesh),
                self._params,
                self._balance,
                ids,
                labels,
                segments=segments,
                mesh=self.mesh,
            )
        self._pace.at("evaluate", self._now.number, "wait")
        log_probs, likeliest = map(np.asarray, scored)
        return log_probs, likeliest

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        seed: int | Sequence[int],
        ends: Sequence[int],
        **sampling: Any,
    ) -> decode.Continuation:
        """See `library.LanguageModel.continued`; on one device, in a single process."""
        self._pace.begin("evaluate", self._now.number, ("tasks", self._now.phase_index))
        return decode.Continuation(
            self._decoder, prompts, num_tokens, sampling=Sampling(**sampling), seeds=seed, ends=ends
        )

    @functools.cached_property
    def _decoder(self) -> decode.Decoder:
        config = self.config
        first = self.mesh.devices.flat[0]
        params, balance = jax.device_put((self._params, self._balance), first)
        return decode.Decoder(
            config.model, params, balance, config.precision, kernels=config.kernels
        )


@functools.cache
def _score_program(mesh: Any) -> Any:
    """`functions.scores`, with results that each process has whole."""
    everywhere = NamedSharding(mesh, functions.REPLICATED)
    return jax.jit(
        functions.scores, static_argnames=("config", "mesh"), out_shardings=(everywhere, everywhere)
    )


class TaskScores:
    """The tasks of one start, loaded."""

    def __init__(self, planned: PlannedStart, pace: Pace):
        self._planned = planned
        self._pace = pace
        self._keys = planned.recipe.config.eval
        self._loaded = harness.load_tasks(
            self._keys.tasks,
            self._keys.tasks_path or None,
            "config.eval.tasks",
            "config.eval.tasks_path",
        )
        in_few_bits = planned.recipe.config.run.base != "compute"
        if in_few_bits or (self._loaded.generating and jax.process_count() > 1):
            raise UserError(
                f"config.eval.tasks={','.join(self._keys.tasks)} would have to decode all weights of"
                " config.run.base at once, or to generate text in several processes, which a run"
                " cannot do while it trains; leave them out, and run them on checkpoints by"
                " `python -m experiments.evaluate --tasks`"
            )

    def scores(self, state: Any, now: Step) -> dict[str, float]:
        """Each task's metrics, by the names that they have in metrics.jsonl."""
        planned = self._planned
        phase = now.phase
        config = planned.recipe.phases[now.phase_index].config
        # as many tokens at once as in a batch of held-out text
        rows = recipe.eval_rows(planned.recipe.config, phase, planned.setup.spread)
        results = harness.run(
            StateModel(planned, config, state, now, self._pace),
            self._loaded,
            limit=self._keys.tasks_limit or None,
            tokens=rows * phase.eval_seq_len,
            seed=planned.recipe.config.run.seed,
            bootstraps=0,
            log_samples=False,
        )
        metrics = {}
        for task, table in harness.figures(results or {}).items():
            for label, (value, _) in table.items():
                metric = label.replace(" (", "/").removesuffix(")")  # "acc (strict)": a filter's
                metrics[f"eval/{task}/{metric}"] = value
        # lm-eval may give them only to process 0 (LOCAL_RANK).
        metrics = multihost.broadcast_from_zero("scores of tasks", lambda: metrics)
        shown = ", ".join(f"{name.removeprefix('eval/')} {x:.4f}" for name, x in metrics.items())
        logs.say(f"step {now.number} | tasks: {shown}")
        return metrics
