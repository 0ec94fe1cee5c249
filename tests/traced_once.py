"""Programs of the runs that tests start in this process: each is traced once, however many runs
have it."""

import dataclasses
from collections.abc import Iterator

import pytest

from zaya_jax import config
from zaya_jax.training import step as steps

# Parts of a config that no program depends on.
OF_RUN = ("skip_update", "spike_deviations", "lora", "base", "preference", "beta")
OF_THE_HOST = {
    name: getattr(config.Config(), name)
    for name in ("checkpoint", "data", "eval", "guard", "log", "schedule")
}


@pytest.fixture(autouse=True, scope="session")
def traced_once() -> Iterator[None]:
    """Tracing a training step anew takes 2 s of every start."""
    made: dict = {}

    def once(make):
        def call(given, setup, inject=None):
            of_run = {name: getattr(given.run, name) for name in OF_RUN}
            run = dataclasses.replace(config.Run(), **of_run)
            key = make, dataclasses.replace(given, run=run, **OF_THE_HOST), setup.mesh
            if inject:  # faults on purpose
                return make(given, setup, inject)
            if key not in made:
                made[key] = make(given, setup)
            return made[key]

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_train_step", "make_eval_step"):
            patch.setattr(steps, name, once(getattr(steps, name)))
        yield
