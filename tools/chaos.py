"""Hurts a small run on purpose, and compares its agent's findings and losses with the injected
faults.

    python -m tools.chaos --workdir=DIR [--minutes=10] [--seed=0]

One agent with four processes of a small model on this machine's CPU. Faults come in random order
(the hardware's last, and only once, since an agent reports a counter once an hour), each of them
once before any comes again, each when the run has gone on from the one before. At the end the run
is asked to save and stop. Then a second run of the same config, to which only the corrupt data and
the not-finite gradients are done (at the same places), must have the same bits in its checkpoint of
the same step. The exit code is 1 where a fault was not found, the run did not go on from one, or
bits differ.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import faults
from tools.faults import Victim
from zaya_jax.aegis import machine
from zaya_jax.aegis.cause import EXPLAINS
from zaya_jax.checkpoint import folders, layout
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.cluster import events
from zaya_jax.cluster.beats import Beat
from zaya_jax.cluster.events import RunEvent
from zaya_jax.cluster.leaving import PREEMPTED
from zaya_jax.config import UserError, files
from zaya_jax.guard import decisions

PROCESSES = 4
PATIENCE = 180.0  # seconds until a fault must have been found, and until the run must have gone on
SETTLED = 12  # steps between two faults
LEARNED = 150  # before the first: the loss of noise is a spike once something has been learned
CONFIG: dict[str, object] = {
    "name": "chaos",
    "model.hidden_size": 32,
    "model.num_hidden_layers": 2,
    "model.head_dim": 8,
    "model.moe_intermediate_size": 32,
    "model.num_experts": 4,
    "model.router_hidden_size": 8,
    "data.seq_len": 64,
    "data.global_batch": 16,
    "eval.every": 10**6,
    "log.every": 10**6,
    "log.sample_tokens": 2,
    "checkpoint.every_steps": 10,
    "checkpoint.keep": 20,
    "precision.compute": "float32",
    "precision.newton_schulz": "float32",
    "guard.replay_every": 5,
    "guard.rollbacks": 1000,  # of many rounds, each of which goes back several times
    "optim.lr": 0.01,
    "schedule.warmup_fraction": 1e-5,
    "run.num_steps": 10**6,  # so many that the learning rate does not depend on where it is stopped
}
DECIDED = ("data", "nonfinite")  # faults of the program about which the run itself decides
# A GPU and a network card as the watchers find them in /sys, healthy.
CARD, PORT = "sys/class/drm/card0/device", "sys/class/infiniband/mlx5_0/ports/1"
TREE = {
    f"{CARD}/vendor": "0x1002",
    f"{CARD}/ras/umc_err_count": "ue: 0\nce: 0",
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/phys_state": "5: LinkUp",
    f"{PORT}/counters/symbol_error": "0",
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of harm: the function that does it (and may return its undoing), and the event that
    names it correctly."""

    name: str
    harm: Callable[["Chaos", Victim], Callable[[], object] | None]
    named: Callable[[RunEvent, Victim], bool]
    ends: bool = True  # whether the run starts again for it
    back: bool = False  # whether it goes back without
    store: bool = False  # whether it needs a store of its own
    hardware: bool = False


@dataclasses.dataclass
class Outcome:
    """The outcome of one fault; -1 seconds: it did not happen."""

    fault: str
    process: int
    step: int
    found: float = -1.0
    recovered: float = -1.0
    cause: str = ""


class Chaos:
    """See the module."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        say: Callable[[str], None],
        processes: int = PROCESSES,
        training: Sequence[str] = (),
        devices: int = 1,
    ):
        """`training`: options of a run of your own, without its workdir; `devices`: of each
        process."""
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--workdir={folder} is not empty; give a new folder")
        self.folder, self.tree = folder, folder / "tree"
        self.workdir, self.calm_workdir = folder / "hurt", folder / "calm"
        self.processes, self._say, self._random = processes, say, random.Random(seed)
        self.store: faults.Store | None = None
        self.orders: list[dict] = []  # the faults asked of `faults`
        self.outcomes: list[Outcome] = []
        self._agent: subprocess.Popen
        self._training, self._devices = training, devices
        if not training:
            corpus(folder / "corpus")
            keys = [f"--config.{key}={value}" for key, value in CONFIG.items()]
            self._training = [f"--config.data.path={folder / 'corpus'}", *keys]
        for name, content in TREE.items():
            self.write(name, content)
        self._write_orders()

    def run(self, minutes: float) -> int:
        """Hurts a run for so long, but with each fault once at least; its exit code."""
        self.store = faults.Store()
        until, left = time.monotonic() + 60 * minutes, self._shuffled(FAULTS)
        with self._supervised(self.workdir) as agent:
            self._settle(LEARNED)
            while left and agent.poll() is None:
                self._hurt(left.pop())
                if not left and time.monotonic() < until:
                    left = self._shuffled([fault for fault in FAULTS if not fault.hardware])
                    time.sleep(EXPLAINS)
            agent.send_signal(signal.SIGTERM)
            code = agent.wait(PATIENCE)
        self.store.die()
        self.store = None  # the calm run's copies would change no bits
        self._say(f"the run that was hurt was asked to stop and ended with {code}")
        return code

    def _shuffled(self, of: Sequence[Fault]) -> list[Fault]:
        """To be done from the last on: the hardware's come after all others, since an agent explains
        by them how a process ends in the minute after."""
        return sorted(self._random.sample(of, len(of)), key=lambda fault: not fault.hardware)

    def run_plan(self, plan: Sequence[tuple[int, Fault]]) -> int:
        """Does each fault once the run has come to its step, until the run ends by itself; its exit
        code."""
        if any(fault.store for _, fault in plan):
            self.store = faults.Store()
        with self._supervised(self.workdir) as agent:
            for step, fault in plan:
                if self._until(functools.partial(self._is_at, step), math.inf):
                    self._hurt(fault)
            return agent.wait()

    def run_calm(self, until: int | None = None) -> int:
        """The same run with the faults alone that the run decides about, to its end or to a step;
        its exit code."""
        self.orders = [order for order in self.orders if order["kind"] in DECIDED]
        self._write_orders()
        with self._supervised(self.calm_workdir) as agent:
            if until is None:
                return agent.wait()
            saved = self.calm_workdir / "checkpoints"
            self._until(lambda: until in folders.steps_in(saved), math.inf)
            agent.send_signal(signal.SIGTERM)
            return agent.wait(PATIENCE)

    def same_bits(self) -> tuple[bool, int]:
        """Whether a run that is left alone has the same bits, and at which step."""
        steps = folders.steps_in(self.workdir / "checkpoints")
        step = max(s for s in steps if s % int(str(CONFIG["checkpoint.every_steps"])) == 0)
        self.run_calm(step)
        if step not in folders.steps_in(self.calm_workdir / "checkpoints"):
            return False, step
        return bits(self.workdir, step) == bits(self.calm_workdir, step), step

    def table(self) -> list[str]:
        """Lines of Markdown: each fault, how often, and medians and worst of seconds."""
        lines = [
            "| fault | times | named rightly | found after s, median (worst) | went on after s,"
            " median (worst) |"
        ]
        lines.append("|---|---|---|---|---|")
        by_fault = collections.defaultdict(list)
        for outcome in self.outcomes:
            by_fault[outcome.fault].append(outcome)
        for name, outcomes in by_fault.items():
            waits = [o.found for o in outcomes if o.found >= 0]
            again = [o.recovered for o in outcomes if o.recovered >= 0]
            lines.append(
                f"| {name} | {len(outcomes)} | {len(waits)} | {_spread(waits)} | {_spread(again)} |"
            )
        return lines

    def survived(self) -> bool:
        """Whether all faults were found, and the run went on from each."""
        return all(o.found >= 0 and o.recovered >= 0 for o in self.outcomes)

    # The faults

    def write(self, name: str, content: str) -> None:
        """A file of the tree that the watchers look at."""
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content.encode() + b"\n")

    def order(self, **fault: object) -> Callable[[], None] | None:
        """Asks the program for a fault; returns the function that takes it back, but of those that
        the calm run must have too."""
        self.orders.append(fault)
        self._write_orders()

        def undo() -> None:
            self.orders = [order for order in self.orders if order is not fault]
            self._write_orders()

        return None if fault["kind"] in DECIDED else undo

    def _write_orders(self) -> None:
        files.write(self.folder / "faults.json", json.dumps(self.orders).encode())

    def step(self) -> int:
        """The step that the run is at."""
        return max(self._steps(), default=0)

    def victims(self) -> dict[int, Victim]:
        """The processes, all of them."""
        return faults.processes_of(self._agent.pid)

    def _steps(self) -> list[int]:
        return [beat.step for beat in self._beats()]

    def _beats(self) -> list[Beat]:
        return list(filter(None, (victim.beat() for victim in self.victims().values())))

    def _hurt(self, fault: Fault) -> None:
        """Does it, and waits until it is found and the run goes on."""
        victim = self.victims()[self._random.randrange(self.processes)]
        outcome = Outcome(fault.name, victim.number, self.step())
        self._say(f"step {outcome.step}: {fault.name}, process {victim.number}")
        began = time.time()
        undo = fault.harm(self, victim)
        try:
            event = self._event(lambda e: e.time >= began - 0.5 and fault.named(e, victim))
        finally:
            if undo:
                undo()
        if event:
            outcome.found = max(event.time - began, 0.0)
            outcome.cause = ": ".join(filter(None, (event.kind, event.concluded or event.seen)))
            if fault.ends:
                again = self._event(lambda e: e.kind == "restarted" and e.time >= began)
                outcome.recovered = again.time - began if again else -1.0
                self._settle(SETTLED)
            elif self._settle(SETTLED):
                outcome.recovered = 0.0  # it went on all the time, but where it went back
                if fault.back:  # past the step where it was
                    self._until(lambda: min(self._steps(), default=0) > event.step)
                    outcome.recovered = time.time() - began
                    self._settle(SETTLED)
        self.outcomes.append(outcome)
        self._say(
            f"  {outcome.cause or 'NOT FOUND'}; found {outcome.found:.1f} s, went on"
            f" {outcome.recovered:.1f} s"
        )

    def _is_at(self, step: int) -> bool:
        return self.step() >= step

    def _until(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Its first true result; None if the time is up or the agent has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._agent.poll() is None:
            if found := condition():
                return found
            time.sleep(0.1)
        return None

    def _event(self, fits: Callable[[RunEvent], bool]) -> RunEvent | None:
        return self._until(lambda: next(filter(fits, events.read(self.workdir)), None))

    def _settle(self, steps: int) -> bool:
        """Waits until all processes have gone on so far."""
        reached: list[int] = []

        def gone_on() -> bool:
            beats = self._beats()
            if len(beats) < self.processes or {beat.section for beat in beats} - {"step", "save"}:
                return False
            reached.append(min(beat.step for beat in beats))
            return reached[-1] >= min(reached) + steps

        return bool(self._until(gone_on))

    @contextlib.contextmanager
    def _supervised(self, workdir: Path) -> Iterator[subprocess.Popen]:
        """The agent with its processes; nothing of them is left afterwards."""
        command = [
            sys.executable,
            "-m",
            "experiments.supervise",
            f"--processes={self.processes}",
            "--restarts=3",
            "--",
            f"--workdir={workdir}",
            *self._training,
        ]
        variables = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self._devices}",
            faults.VARIABLE: str(self.folder / "faults.json"),
            machine.ROOT: str(self.tree),
        }
        if self.store:
            command.append(f"--config.checkpoint.durable=s3://{self.store.BUCKET}/{workdir.name}")
            variables |= self.store.variables
        with (self.folder / f"{workdir.name}.log").open("wb") as log:
            agent = subprocess.Popen(
                command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT
            )
        self._agent = agent
        try:
            yield agent
        finally:
            if agent.poll() is None:  # its processes end with it
                agent.kill()
                agent.wait()


def bits(workdir: Path, step: int) -> Mapping[str, object]:
    """The checksums of all arrays of a checkpoint."""
    sums = Vault(workdir / "checkpoints").read_seal(step).files
    return {name: entry for name, entry in sums.items() if name.startswith(f"{layout.STATE}/")}


def corpus(folder: Path) -> None:
    """Some text to learn from."""
    folder.mkdir(parents=True)
    for i in range(200):
        text = "".join(f"line {j} of file {i}, {i * j % 97}\n" for j in range(100))
        (folder / f"{i}.txt").write_text(text)


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "never"


def _damage(chaos: Chaos, victim: Victim) -> None:
    saved = chaos.workdir / "checkpoints"
    newest = saved / str(max(folders.steps_in(saved)))
    written = [path for path in newest.rglob("*") if path.is_file()]
    faults.flip(max(written, key=lambda path: path.stat().st_size))
    faults.kill(victim)


def _cut(chaos: Chaos, victim: Victim) -> None:
    others = [other for index, other in chaos.victims().items() if index != victim.number]
    if not faults.cut(victim, others[0]):
        raise RuntimeError(
            f"processes {victim.number} and {others[0].number} have no connection to cut"
        )


def _dead(chaos: Chaos, victim: Victim) -> Callable[[], object]:
    assert chaos.store
    chaos.store.die()
    return chaos.store.live


def _nonfinite(chaos: Chaos, victim: Victim) -> None:
    step = chaos.step() + 5
    chaos.order(kind="nonfinite", device=victim.number, first=step, last=step, passing=True)


def _spike(chaos: Chaos, victim: Victim) -> None:
    # The order names places in the data, which are ahead of the steps after a rollback.
    left_out = decisions.skipped_batches(decisions.read(chaos.workdir))
    place = chaos.step() + 5 + sum(batches for _, batches in left_out)
    chaos.order(kind="data", first=place, last=place + 40)


def _memory(chaos: Chaos, victim: Victim) -> None:
    chaos.write(f"{CARD}/ras/umc_err_count", f"ue: {len(chaos.outcomes) + 1}\nce: 0")


def _link(chaos: Chaos, victim: Victim) -> None:
    chaos.write(f"{PORT}/counters/symbol_error", str(1000 * (len(chaos.outcomes) + 1)))


def _of(kind: str) -> Callable[[RunEvent, Victim], bool]:
    return lambda event, victim: event.kind == kind and event.process == victim.number


def _rule(kind: str, name: str) -> Callable[[RunEvent, Victim], bool]:
    return lambda event, _: event.kind == kind and name in event.concluded


FAULTS = [
    Fault("a process is killed", lambda _, victim: faults.kill(victim), _of("died")),
    Fault("a process is stopped (SIGSTOP)", lambda _, victim: faults.stop(victim), _of("hangs")),
    Fault(
        "a process is slow",
        lambda chaos, victim: chaos.order(kind="slow", process=victim.number, seconds=0.1),
        lambda event, victim: event.concluded == "straggler" and event.process == victim.number,
        ends=False,
    ),
    Fault(
        "a full disk",
        lambda _, victim: faults.fill_disk(victim),  # the next start has another limit
        lambda event, victim: _of("died")(event, victim) and event.group == "storage",
    ),
    Fault(
        "a cut connection",
        _cut,
        lambda event, victim: (
            re.search(rf"connection between .*\b{victim.number}\b", event.concluded) is not None
        ),
    ),
    Fault("a dead remote store", _dead, _rule("log", "store unreachable"), ends=False, store=True),
    Fault(
        "gradients that are not finite",
        _nonfinite,
        lambda event, _: event.kind == "not finite",
        ends=False,
    ),
    Fault("corrupt data", _spike, lambda event, _: event.kind == "spike", ends=False, back=True),
    Fault(
        "a flipped bit in a gradient",
        lambda chaos, victim: chaos.order(kind="flip", device=victim.number),
        _of("corrupt"),
    ),
    Fault(
        "a GPU's memory error",
        _memory,
        _rule("hardware", "gpu uncorrectable memory error"),
        ends=False,
        hardware=True,
    ),
    Fault(
        "a link's errors", _link, _rule("hardware", "nic link errors"), ends=False, hardware=True
    ),
]

# For a run with checkpoint.on_corrupt=previous and two checkpoints; others stop at it.
DAMAGED = Fault("a damaged checkpoint", _damage, _of("died"))


def main() -> int:
    """Prints each fault as it is done, then the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("--workdir", type=Path, required=True, help="a new folder")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    args = parser.parse_args()
    chaos = Chaos(args.workdir, args.seed, functools.partial(print, flush=True))
    code = chaos.run(args.minutes)
    same, step = chaos.same_bits()
    bits_of = "the same bits" if same else "other bits"
    table = "\n".join([*chaos.table(), "", f"checkpoint of step {step}: {bits_of}"])
    (args.workdir / "chaos.md").write_text(table + "\n")
    print(table)
    return 0 if same and chaos.survived() and code == PREEMPTED else 1


if __name__ == "__main__":
    sys.exit(main())
