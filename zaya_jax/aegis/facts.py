"""The facts that `decide.Decider` takes, and the actions that it returns."""

import enum
from typing import Any, NamedTuple

from zaya_jax.cluster.events import Finding


class Came(NamedTuple):
    """A node's agent is there."""

    node: int
    host: str = ""


class Ready(NamedTuple):
    """Nothing of the run is on this node (any more)."""

    node: int


class Lost(NamedTuple):
    """A node's agent is gone or silent."""

    node: int
    why: str


class Exited(NamedTuple):
    """A process has ended; a code below zero is the signal that killed it."""

    node: int
    process: int
    code: int


class Found(NamedTuple):
    """A rule or a watcher found something on a node."""

    node: int
    finding: Finding


class Hung(NamedTuple):
    """A process stands still, for so many seconds: the one that stood still first."""

    node: int
    process: int
    seen: str
    concluded: str
    seconds: float
    alike: bool = (
        False  # all wait in one step's program, each with a sign of life: as when a link is away
    )


class Collected(NamedTuple):
    """The stacks of all are kept; in words where the first silent one is."""

    text: str


class Saved(NamedTuple):
    """The newest whole checkpoint."""

    step: int


class Stepped(NamedTuple):
    """The newest step that has ended in this start."""

    step: int


class Asked(NamedTuple):
    """A person or a scheduler wants the run to save and stop; the second time, to stop at once."""

    name: str  # of the signal


class Tick(NamedTuple):
    """Time has passed."""


class Checked(NamedTuple):
    """The findings of the check before a start, by node (-1: of no single one), and how long it
    took."""

    findings: tuple[tuple[int, Finding], ...]
    seconds: float


Fact = (
    Came
    | Ready
    | Lost
    | Exited
    | Found
    | Hung
    | Collected
    | Saved
    | Stepped
    | Asked
    | Checked
    | Tick
)


class Check(NamedTuple):
    """Try these nodes and the links between them, then say `Checked`."""

    nodes: tuple[int, ...]


class Start(NamedTuple):
    """Start the run's processes on these nodes, in this order."""

    number: int
    nodes: tuple[int, ...]


class Order(enum.Enum):
    """An order to all nodes of the start."""

    ASK = "ask"  # SIGTERM to all processes: they save and end with 75
    COLLECT = "collect"  # keep the stacks of all processes, then say `Collected`
    KILL = "kill"  # end all processes at once


class Drop(NamedTuple):
    """This node does not answer: its line is cut, and its processes end with it."""

    node: int


class End(NamedTuple):
    """All agents end with this code."""

    code: int
    text: str


class Say(NamedTuple):
    """An event for the log."""

    kind: str
    given: dict[str, Any]


Action = Check | Start | Order | Drop | End | Say
