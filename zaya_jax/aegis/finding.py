"""What a rule or a watcher has found: the agent makes events and decisions of these."""

import dataclasses

from zaya_jax.aegis import events

# "note": only written down; "warn": it may explain an end; "exclude": restart without the node; "stop": a person is
# wanted.
ACTIONS = ("note", "warn", "restart", "exclude", "stop")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was seen, and what should be done about it."""

    name: str  # of the rule or watcher: "gpu uncorrectable memory error", "nic down", ...
    group: str  # one of events.CLASSES
    action: str  # one of ACTIONS
    seen: str  # the evidence: the line, or the counter with before and after
    process: int = -1
    device: str = ""  # "card0", "mlx5_1", ...

    def __post_init__(self):
        assert self.group in events.CLASSES and self.action in ACTIONS, (self.group, self.action)
