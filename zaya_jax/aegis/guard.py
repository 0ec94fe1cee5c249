"""What the training asks of its guardian, and is told: a run's numbers are watched from inside it.

    guard = Guard(config.guard, workdir, made, meta)    as it stood at the checkpoint that the run goes on from
    guard.see(step, phase, figures)                     of each step, in order, in all processes
    guard.spike                                         what is to be done something about
    guard.go_back(saved, begin)                         decides what, and writes it down; None: not once more

The training acts on it: it ends what it was doing and begins again, which sets aside what was decided to be given up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis import decisions, events
from zaya_jax.aegis.decisions import Decision
from zaya_jax.aegis.spikes import Spike, Spikes
from zaya_jax.cluster import multihost
from zaya_jax.config import Guard as Settings


class Guard:
    """One start's."""

    def __init__(self, settings: Settings, workdir: Path, made: Sequence[Decision], meta: Mapping[str, Any]):
        self._settings, self._workdir, self.made = settings, workdir, list(made)
        self._spikes = Spikes(settings, meta.get("spikes"))
        self.spike: Spike | None = None
        if multihost.is_writer():
            decisions.tell(workdir, self.made)

    def see(self, step: int, phase: int, figures: Mapping[str, Any]) -> None:
        """A step's figures, which are the same in all processes."""
        if self.spike is None:
            self.spike = self._spikes.add(step, phase, float(figures["loss"]), float(figures["grad_norm"]))

    def meta(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        spikes = {"spikes": self._spikes.state()} if self._settings.spike_steps else {}
        return spikes | ({"decisions": self.made} if self.made else {})

    def doubt(self) -> dict[str, float]:
        """A figure by which a checkpoint is no way back, if the last steps may be a spike's."""
        return {"suspicious": 1.0} if self._spikes.suspicious else {}

    def figures(self, step: int) -> dict[str, int]:
        """How many batches were left out just before a step, if any were."""
        count = sum(batches for at, batches in decisions.left_out(self.made) if at + 1 == step)
        return {"data/left_out": count} if count else {}

    def go_back(self, saved: Sequence[int], begin: int) -> Decision | None:
        """Where to, of these checkpoints or to the begin; None where it went back as often as it may."""
        assert self.spike is not None
        if decisions.spikes(self.made) >= self._settings.rollbacks:
            if multihost.is_writer():
                events.Log(self._workdir, "run").add(
                    "spike", group="numbers", step=self.spike.step, seen=str(self.spike),
                    done=f"ended: it went back {self._settings.rollbacks} times before",
                )  # fmt: skip
            return None

        def decide() -> Decision:
            assert self.spike is not None
            new = decisions.of_spike(self.spike, saved, self.made, begin)
            decisions.add(self._workdir, self.made, new)
            return new

        return multihost.from_first("go back", decide)
