"""What `tune` and its child (`trying`) say to each other, each message a line of JSON."""

import json
from typing import Any, NamedTuple

# What became of one implementation in one case: "operator", "case", "name", "tiles", and then
# "errors", "error" and "seconds", or a "fault" in words.
Outcome = dict[str, Any]


class TileTask(NamedTuple):
    """What the parent asks for; without a request only which device is there."""

    request: dict[str, Any] | None = None  # zaya_jax.training.kernels.tuning_request
    outcomes: (
        tuple[Outcome, ...] | list[Outcome]
    ) = ()  # of earlier children; they are not tried again
    seconds: float = 0.0  # after which no further tile is begun
    one_at_a_time: bool = False  # compile so, to learn which implementation crashes
    pretend: tuple[str, str] | list[str] | None = None  # a card's platform and kind, for tests


class Device(NamedTuple):
    """The child's first message."""

    platform: str
    kind: str
    name: str
    devices: int
    memory: int | None


class Begin(NamedTuple):
    """What comes next, so that the parent knows what a crash or an endless kernel was."""

    operator: str
    case: str
    name: str  # of the implementation; empty while several compile


class Compiled(NamedTuple):
    """A sign of life."""

    name: str


class Tried(NamedTuple):
    """One implementation was judged."""

    outcome: Outcome


class Done(NamedTuple):
    """All of an operator was tried."""

    operator: str


class End(NamedTuple):
    """The child has nothing more to say."""


class Fault(NamedTuple):
    """Why a child ended, or was ended; the parent's own last message."""

    text: str


ChildMessage = Device | Begin | Compiled | Tried | Done | End | Fault
KINDS = {kind.__name__: kind for kind in (TileTask, *ChildMessage.__args__)}


def encode(message: TileTask | ChildMessage) -> str:
    """A line of JSON."""
    return json.dumps([type(message).__name__, *message])


def decode(line: str) -> Any:
    """The message of a line."""
    kind, *fields = json.loads(line)
    return KINDS[kind](*fields)
