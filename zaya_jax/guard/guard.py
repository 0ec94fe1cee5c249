"""Watches a run's loss and gradients during training, and decides when the run must go back.

    guard = Guard(config.guard, workdir, decided, meta, ...)     as it stood at the checkpoint that the run resumes from
    guard.record_step(step, phase, figures)                      for each step, in order, in all processes
    guard.spike                                                  the spike for which the run must go back, or None
    guard.go_back(saved)                                         writes down where to; None if it may not go back again
    guard.replay_is_due(step)                                    whether gradients must be computed again now (`replay`)
    guard.record_replay(step, finding, ...)                      takes the result; a decision if a device is wrong

The training loop carries a decision out: it stops where it is and starts over, in the same process
or another, without the checkpoints that the decision gives up.
"""

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from zaya_jax.cluster import events, multihost
from zaya_jax.config import Guard as Settings
from zaya_jax.guard import decisions
from zaya_jax.guard.decisions import Decision
from zaya_jax.guard.replay import Mismatch
from zaya_jax.guard.spikes import Spike, Spikes

MOST_PROCESSES = 16  # that the line about a wrong device names
MOST_WEIGHTS = 3


class Guard:
    """Watches the steps of one start."""

    def __init__(
        self,
        settings: Settings,
        workdir: Path,
        decided: Sequence[Decision],
        meta: Mapping[str, Any],
        reached: int,
        steps_before: int,
    ):
        """`steps_before` is the step before the run's first one: 0, or a fork's."""
        self._settings, self._workdir, self._decided = settings, workdir, list(decided)
        self._steps_before = steps_before
        self._spikes = Spikes(settings, meta.get("spikes"))
        self.spike: Spike | None = None
        self._finite, self._suspect, self._reproducible = True, False, True
        # The last step that was checked and right. A run that was never checked has no better one.
        self._clean: int = meta.get("clean", reached)
        if multihost.is_writer():
            decisions.write_events(workdir, self._decided)

    def record_step(self, step: int, phase: int, figures: Mapping[str, Any]) -> None:
        """Judges a step's figures, which are the same in all processes."""
        loss, norm = float(figures["loss"]), float(figures["grad_norm"])
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self._finite and not finite:
            self._suspect = True
            done = "the update is left out" if figures.get("skipped") else "the update is made"
            self._tell("not finite", step, f"loss {loss:.4g}, gradient norm {norm:.4g}", done)
        self._finite = finite
        if self.spike is None:
            self.spike = self._spikes.add(step, phase, loss, norm)

    def checkpoint_fields(self) -> dict[str, Any]:
        """The guard's part of a checkpoint's metadata."""
        fields: dict[str, Any] = {}
        if self._settings.spike_steps:
            fields["spikes"] = self._spikes.state()
        if self._settings.replay_every:
            fields["clean"] = self._clean
        if self._decided:
            fields["decisions"] = [*self._decided]
        return fields

    def checkpoint_figures(self) -> dict[str, float]:
        """Marks a checkpoint as unsafe to go back to while a possible spike is under way."""
        return {"suspicious": 1.0} if self._spikes.suspicious else {}

    def go_back(self, saved: Sequence[int]) -> Decision | None:
        """Decides to which of these checkpoints the run goes back, or to its start.

        Returns None if it has gone back as often as it may.
        """
        spike = self.spike
        assert spike is not None
        rollbacks = sum(decision["kind"] == "spike" for decision in self._decided)
        if rollbacks >= self._settings.rollbacks:
            done = f"ended: it went back {self._settings.rollbacks} times before"
            self._tell("spike", spike.step, str(spike), done)
            return None
        return self._decide(
            lambda: decisions.after_spike(spike, saved, self._decided, self._steps_before)
        )

    def replay_is_due(self, step: int) -> bool:
        """Whether gradients must be computed again now; asked once after each step, since the answer
        uses up what `record_step` has seen.

        Due every `replay_every` steps, after a figure that is not finite, and after a spike: a
        device's fault may have caused either of the two.
        """
        every = self._settings.replay_every
        suspect = self._suspect or self.spike is not None
        self._suspect = False
        if not every or not self._reproducible:
            return False
        return suspect or step % every == 0

    def record_replay(
        self,
        step: int,
        finding: Mismatch | None,
        mesh: Mesh,
        wait_for_saved_steps: Callable[[], Sequence[int]],
    ) -> Decision | None:
        """Takes the result after a step. If a device is wrong, returns the decision to go back,
        already written down."""
        if finding is None:
            self._clean = step
            return None
        if finding.kind == "irreproducible":
            self._reproducible = False
            self._tell("irreproducible", step, finding.why, "gradients are no longer compared")
            return None
        saved = wait_for_saved_steps()
        hosts = multihost.gather_to_zero("hosts", socket.gethostname())

        def decide() -> Decision:
            devices = [mesh.devices.flat[i] for i in finding.devices]
            weights = ", ".join(finding.weights[:MOST_WEIGHTS])
            if len(finding.weights) > MOST_WEIGHTS:
                weights += f" and {len(finding.weights) - MOST_WEIGHTS} more"
            return decisions.after_mismatch(step, self._clean, saved, self._steps_before) | {
                "seen": f"{in_words(devices, hosts)} computes wrongly: {finding.why} (in"
                f" {weights})",
                "reproduces": finding.kind == "disagrees",
                "devices": [int(device.id) for device in devices],
                "processes": sorted({device.process_index for device in devices}),
                "hosts": sorted({hosts[device.process_index] for device in devices if hosts}),
            }

        return self._decide(decide)

    def _decide(self, make: Callable[[], Decision]) -> Decision:
        """Process 0 decides; when this returns, the decision is on disk and has its event."""

        def write_down() -> Decision:
            decision = make()
            decided = [*self._decided, decision]
            decisions.write(self._workdir, decided)
            decisions.write_events(self._workdir, decided)
            return decision

        return multihost.broadcast_from_zero("decide", write_down)

    def _tell(self, kind: str, step: int, seen: str, done: str) -> None:
        if multihost.is_writer():
            fields = {"group": "numbers", "step": step, "seen": seen, "done": done}
            events.add(self._workdir, kind, **fields)


def in_words(devices: Sequence[Any], hosts: Sequence[str] | None) -> str:
    """Names the devices that may compute wrongly, with their processes, or only counts many.

    `aegis.cause` reads the suspected processes from the line that the run ends with.
    """
    what = str(devices[0]) if len(devices) == 1 else f"one of {len(devices)} devices"
    processes = sorted({device.process_index for device in devices})
    if not hosts or len(processes) > MOST_PROCESSES:
        return f"{what} of {len(processes)} processes"
    places = [f"process {process} on {hosts[process]}" for process in processes]
    return f"{what} of {', '.join(places)}"
