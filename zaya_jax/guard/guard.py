"""Watches a run's loss and gradients during training, and decides when the run must go back.

    guard = Guard(config.guard, workdir, made, meta, reached)    as it stood at the checkpoint that the run goes on from
    guard.see(step, phase, figures)                     of each step, in order, in all processes
    guard.spike                                         the spike that calls for going back, if there is one
    guard.go_back(saved, begin)                         decides where to, and writes it down; None: not again
    guard.due(step)                                     whether gradients are to be computed again now (`replay`)
    guard.checked(step, finding, mesh, saved, begin)    takes the result; a decision if a device is wrong

The training carries a decision out: it stops where it is, and begins again, in the same process or
another, without the checkpoints that the decision gives up.
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

NAMED = 16  # processes at most in the line of a device that computes wrongly


class Guard:
    """One start's."""

    def __init__(
        self,
        settings: Settings,
        workdir: Path,
        made: Sequence[Decision],
        meta: Mapping[str, Any],
        reached: int,
    ):
        self._settings, self._workdir, self.made = settings, workdir, list(made)
        self._spikes = Spikes(settings, meta.get("spikes"))
        self.spike: Spike | None = None
        self._finite, self._suspect, self._reproducible = True, False, True
        # The last step that was checked and right; a run that was never checked has no better one.
        self._clean: int = meta.get("clean", reached)
        if multihost.is_writer():
            decisions.write_events(workdir, self.made)

    def see(self, step: int, phase: int, figures: Mapping[str, Any]) -> None:
        """A step's figures, which are the same in all processes."""
        loss, norm = float(figures["loss"]), float(figures["grad_norm"])
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self._finite and not finite:
            self._suspect = True
            done = "the update is left out" if figures.get("skipped") else "the update is made"
            self._tell("not finite", step, f"loss {loss:.4g}, gradient norm {norm:.4g}", done)
        self._finite = finite
        if self.spike is None:
            self.spike = self._spikes.add(step, phase, loss, norm)

    def meta(self) -> dict[str, Any]:
        """The guard's part of a checkpoint's meta data."""
        spikes = {"spikes": self._spikes.state()} if self._settings.spike_steps else {}
        clean = {"clean": self._clean} if self._settings.replay_every else {}
        return spikes | clean | ({"decisions": [*self.made]} if self.made else {})

    def doubt(self) -> dict[str, float]:
        """A figure by which a checkpoint is no way back, if the last steps may be a spike's."""
        return {"suspicious": 1.0} if self._spikes.suspicious else {}

    def figures(self, step: int) -> dict[str, int]:
        """How many batches were left out just before a step, if any were."""
        count = sum(batches for at, batches in decisions.left_out(self.made) if at + 1 == step)
        return {"data/left_out": count} if count else {}

    def go_back(self, saved: Sequence[int], begin: int) -> Decision | None:
        """Where to, of these checkpoints or to the begin; None where it went back as often as it
        may."""
        spike = self.spike
        assert spike is not None
        if sum(one["kind"] == "spike" for one in self.made) >= self._settings.rollbacks:
            self._tell(
                "spike",
                spike.step,
                str(spike),
                f"ended: it went back {self._settings.rollbacks} times before",
            )
            return None
        return self._decide(lambda: decisions.after_spike(spike, saved, self.made, begin))

    def due(self, step: int) -> bool:
        """Every so many steps, and when something has become suspicious: not finite, or a spike."""
        every, suspect = self._settings.replay_every, self._suspect or self.spike is not None
        self._suspect = False
        return bool(every) and self._reproducible and (step % every == 0 or suspect)

    def checked(
        self,
        step: int,
        finding: Mismatch | None,
        mesh: Mesh,
        saved: Callable[[], Sequence[int]],
        begin: int,
    ) -> Decision | None:
        """Takes the result after a step; the decision to go back, written down, if a device is
        wrong."""
        if finding is None:
            self._clean = step
            return None
        if finding.kind == "program":
            self._reproducible = False
            self._tell("irreproducible", step, finding.why, "gradients are not compared any more")
            return None
        steps, hosts = saved(), multihost.gather_to_zero("hosts", socket.gethostname())

        def decide() -> Decision:
            devices = [mesh.devices.flat[i] for i in finding.devices]
            return decisions.after_mismatch(step, self._clean, steps, begin) | {
                "seen": (
                    f"{in_words(devices, hosts)} computes wrongly: {finding.why} (of {', '.join(finding.weights[:3])}"
                    + (
                        f" and {len(finding.weights) - 3} more)"
                        if len(finding.weights) > 3
                        else ")"
                    )
                ),
                "reproduces": finding.kind == "others",
                "devices": [int(d.id) for d in devices],
                "processes": sorted({d.process_index for d in devices}),
                "hosts": sorted({hosts[d.process_index] for d in devices if hosts}),
            }

        return self._decide(decide)

    def _decide(self, what: Callable[[], Decision]) -> Decision:
        """Made by process 0; when this returns, the decision is on the disk and has its event."""

        def decide() -> Decision:
            new = what()
            decisions.write_events(self._workdir, decisions.add(self._workdir, self.made, new))
            return new

        return multihost.broadcast_from_zero("decide", decide)

    def _tell(self, kind: str, step: int, seen: str, done: str) -> None:
        if multihost.is_writer():
            events.EventLog(self._workdir, "run").add(
                kind, group="numbers", step=step, seen=seen, done=done
            )


def in_words(devices: Sequence[Any], hosts: Sequence[str] | None) -> str:
    """Which of them computes wrongly: `aegis.cause` reads the suspected processes from the line that
    the run ends with. More than a line holds are counted."""
    what = str(devices[0]) if len(devices) == 1 else f"one of {len(devices)} devices"
    processes = sorted({device.process_index for device in devices})
    if not hosts or len(processes) > NAMED:
        return f"{what} of {len(processes)} processes"
    return f"{what} of {', '.join(f'process {p} on {hosts[p]}' for p in processes)}"
