"""What a start needs, checked before anything is compiled or written."""

import dataclasses
import functools
from pathlib import Path

import jax

from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError
from zaya_jax.data import pipeline, token_ids, tokenizers, windows
from zaya_jax.parallel.mesh import rows_of_process
from zaya_jax.training import fork, memory, recipe
from zaya_jax.training.recipe import Recipe, Stage


@dataclasses.dataclass(frozen=True)
class Layout:
    """A start after step `reached`: all that follows from config, devices and data."""

    reached: int
    recipe: Recipe
    stage: Stage  # the phase of the next step, whose mesh this program has
    end: int  # the last step on this mesh
    tokenizer: tokenizers.Tokenizer
    stream: pipeline.Stream  # of this process's rows
    notes: list[str]


def check(config: Config, folder: Path) -> Layout:
    """The layout of a start from the newest checkpoint that is in the folder; UserError where something is wrong."""
    found = multihost.from_first("fork", functools.partial(fork.find, config, folder))
    config = fork.settle(config, found)
    tokenizer = tokenizers.load(config.data.tokenizer)
    config = token_ids.agree(config, tokenizer)
    whole = recipe.make(config, jax.devices())
    memory.check_host_batch(whole.plan, jax.process_count())
    reached = multihost.from_first("look", functools.partial(recipe.peek, folder)) or config.run.fork_step
    return lay_out(whole, tokenizer, min(reached, whole.last_step))


def lay_out(whole: Recipe, tokenizer: tokenizers.Tokenizer, reached: int) -> Layout:
    """The layout of a start after this step."""
    if reached > whole.last_step:
        raise UserError(
            f"config.run.num_steps={whole.last_step}, but the run has already reached step {reached}; "
            "give at least as many steps, or a new workdir"
        )
    said = recipe.check(whole, reached) + memory.check_phases(whole, reached)
    first = min(reached + 1, whole.last_step)
    stage = whole.stage(first)
    assert stage.mesh is not None  # `recipe.check`
    stream = pipeline.train_stream(whole.config, tokenizer, rows_of_process(stage.mesh))
    said += stream.batches.notes + windows.named_notes(whole.config, tokenizer)
    return Layout(reached, whole, stage, whole.last_step_here(first), tokenizer, stream, said)
