"""The facts that `decide.Decider` takes, and the actions that it returns."""

import dataclasses
import enum
from typing import Any

from zaya_jax.aegis.events import Finding


@dataclasses.dataclass(frozen=True)
class Came:
    """A node's agent is there."""

    node: int
    host: str = ""


@dataclasses.dataclass(frozen=True)
class Ready:
    """Nothing of the run is on this node (any more)."""

    node: int


@dataclasses.dataclass(frozen=True)
class Lost:
    """A node's agent is gone or silent."""

    node: int
    why: str


@dataclasses.dataclass(frozen=True)
class Exited:
    """A process has ended; a code below zero is the signal that killed it."""

    node: int
    process: int
    code: int


@dataclasses.dataclass(frozen=True)
class Found:
    """A rule or a watcher found something on a node."""

    node: int
    finding: Finding


@dataclasses.dataclass(frozen=True)
class Hung:
    """A process stands still, for so many seconds."""

    node: int
    process: int
    seen: str
    concluded: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Collected:
    """The stacks of all are kept; in words where the first silent one is."""

    text: str


@dataclasses.dataclass(frozen=True)
class Saved:
    """The newest whole checkpoint."""

    step: int


@dataclasses.dataclass(frozen=True)
class Stepped:
    """The newest step that has ended in this start."""

    step: int


@dataclasses.dataclass(frozen=True)
class Asked:
    """A person or a scheduler wants the run to save and stop; the second time, to stop at once."""

    name: str  # of the signal


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """The findings of the check before a start, by node (-1: of no single one), and how long it took."""

    findings: tuple[tuple[int, Finding], ...]
    seconds: float


Fact = Came | Ready | Lost | Exited | Found | Hung | Collected | Saved | Stepped | Asked | Checked | Tick


@dataclasses.dataclass(frozen=True)
class Check:
    """Try these nodes and the links between them, then say `Checked`."""

    nodes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Start:
    """Start the run's processes on these nodes, in this order."""

    number: int
    nodes: tuple[int, ...]


class Order(enum.Enum):
    """An order to all nodes of the start."""

    ASK = "ask"  # SIGTERM to all processes: they save and end with 75
    COLLECT = "collect"  # keep the stacks of all processes, then say `Collected`
    KILL = "kill"  # end all processes at once


@dataclasses.dataclass(frozen=True)
class Drop:
    """This node does not answer: its line is cut, and its processes end with it."""

    node: int


@dataclasses.dataclass(frozen=True)
class End:
    """All agents end with this code."""

    code: int
    text: str


@dataclasses.dataclass(frozen=True)
class Say:
    """An event for the log."""

    kind: str
    given: dict[str, Any]


Action = Check | Start | Order | Drop | End | Say
