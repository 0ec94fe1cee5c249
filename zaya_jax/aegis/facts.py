"""The facts that `decide.Decider` takes, and the actions that it returns."""

import enum
from typing import Any, NamedTuple

from zaya_jax.cluster.events import Finding


class AgentConnected(NamedTuple):
    """A node's agent is there."""

    node: int
    host: str = ""


class Ready(NamedTuple):
    """No process of the run is on this node (any more)."""

    node: int


class AgentLost(NamedTuple):
    """A node's agent is gone or silent."""

    node: int
    why: str


class Exited(NamedTuple):
    """A process has ended; a code below zero is the signal that killed it."""

    node: int
    process: int
    code: int


class Observed(NamedTuple):
    """A rule or a watcher found something on a node."""

    node: int
    finding: Finding


class Hung(NamedTuple):
    """A process has made no progress for `seconds`; it was the first to stop."""

    process: int
    seen: str
    concluded: str
    seconds: float
    # All wait in one step's program, each with a sign of life: as when a link is away.
    all_wait: bool = False


class StacksCollected(NamedTuple):
    """All stacks are saved; `text` says where the first stalled process is."""

    text: str


class CheckpointSeen(NamedTuple):
    """The newest whole checkpoint."""

    step: int


class Stepped(NamedTuple):
    """The newest step that has ended in this start."""

    step: int


class StopRequested(NamedTuple):
    """A person or a scheduler wants the run to save and stop; the second time, to stop at once."""

    signal_name: str


class Tick(NamedTuple):
    """Time has passed."""


class NodesChecked(NamedTuple):
    """The findings of the check before a start, by node (-1: of no single one), and how long it
    took."""

    findings: tuple[tuple[int, Finding], ...]
    seconds: float


Fact = (
    AgentConnected
    | Ready
    | AgentLost
    | Exited
    | Observed
    | Hung
    | StacksCollected
    | CheckpointSeen
    | Stepped
    | StopRequested
    | NodesChecked
    | Tick
)


class CheckNodes(NamedTuple):
    """Test these nodes and the links between them, then report `NodesChecked`."""

    nodes: tuple[int, ...]


class Start(NamedTuple):
    """Start the run's processes on these nodes, in this order."""

    number: int
    nodes: tuple[int, ...]


class Command(enum.Enum):
    """A command to all nodes of the start; its value is the order, a method of `node.Node`."""

    SAVE = "save"  # SIGTERM to all processes: they save and end with 75
    DUMP_STACKS = "dump_stacks"  # save the stacks of all processes, then report `StacksCollected`
    KILL = "kill"  # end all processes at once


class Disconnect(NamedTuple):
    """This node does not answer: cut its connection, and its processes end with it."""

    node: int


class EndAll(NamedTuple):
    """All agents end with this code."""

    code: int
    text: str


class LogEvent(NamedTuple):
    """An event for the log."""

    kind: str
    fields: dict[str, Any]


Action = CheckNodes | Start | Command | Disconnect | EndAll | LogEvent
