"""The check before a start, as the leader sees it: all nodes try themselves, then in pairs the links between them.

    checking = Checking(number, nodes, addresses, order, now)
    checking.hear(node, message)        ["checked", number, findings, port] or ["linked", number, bandwidth, wrong]
    checking.turn(now)                  what was found, by node (-1: none alone), once all is over; else None

What is tried is `preflight`'s; a node that gives no answer in time is found too. `order` carries ["check", number] and
["link", number, coordinator, index].
"""

from collections.abc import Callable, Mapping, Sequence

from zaya_jax.aegis import preflight
from zaya_jax.aegis.finding import Finding
from zaya_jax.aegis.preflight import Tried

ANSWER = 10.0  # seconds that an answer may take beyond the time that a node gives itself

Found = list[tuple[int, Finding]]


class Checking:
    """See the module."""

    def __init__(
        self, number: int, nodes: Sequence[int], addresses: Mapping[int, str], order: Callable[[int, list], None],
        now: float,
    ):  # fmt: skip
        self.number, self.nodes, self.begun = number, tuple(nodes), now
        self._addresses, self._order = addresses, order
        self._waiting, self._until = set(nodes), now + preflight.SECONDS + ANSWER
        self._found: Found = []
        self._ports: dict[int, int] = {}
        self._rounds: list[list[tuple[int, int]]] | None = None  # until all nodes have tried themselves
        self._pairs: list[tuple[int, int]] = []  # of this round
        self._tried: dict[int, Tried] = {}  # by the nodes of this round
        self._links: list[tuple[str, str, Tried]] = []
        for node in nodes:
            order(node, ["check", number])

    def hear(self, node: int, message: list) -> None:
        """An answer; of an earlier check's nothing."""
        kind, number, *rest = message
        if number != self.number or node not in self._waiting:
            return
        self._waiting.discard(node)
        if kind == "checked":
            self._found += [(node, Finding(**given)) for given in rest[0]]
            self._ports[node] = rest[1]
        else:
            self._tried[node] = Tried(*rest)

    def woke(self, seconds: float) -> None:
        """An agent stood still for so long: who answers is not late by that."""
        self._until += seconds

    def turn(self, now: float) -> Found | None:
        """What time brings."""
        if self._waiting and now < self._until:
            return None
        if self._rounds is None:
            hung = f"no answer within {preflight.SECONDS + ANSWER:g} s"
            self._found += [
                (node, Finding("check of the node hangs", "critical", "exclude", hung))
                for node in self._waiting
            ]
            unfit = {node for node, finding in self._found if finding.action == "exclude"}
            fit = [str(node) for node in self.nodes if node not in unfit]
            self._rounds = [[(int(a), int(b)) for a, b in pairs] for pairs in preflight.rounds(fit)]
        for pair in self._pairs:
            silent = Tried(0.0, f"no answer within {preflight.LINK_SECONDS + ANSWER:g} s")
            for node in pair:
                self._links.append((_name(pair[0]), _name(pair[1]), self._tried.get(node, silent)))
        if self._rounds:
            self._pairs, self._tried = self._rounds.pop(0), {}
            self._waiting = {node for pair in self._pairs for node in pair}
            self._until = now + preflight.LINK_SECONDS + ANSWER
            for a, b in self._pairs:
                host = self._addresses[a]
                address = f"{f'[{host}]' if ':' in host else host}:{self._ports[a]}"
                self._order(a, ["link", self.number, address, 0])
                self._order(b, ["link", self.number, address, 1])
            return None
        numbers = {_name(node): node for node in self.nodes}
        return self._found + [(numbers.get(f.device, -1), f) for f in preflight.judge(self._links)]


def _name(node: int) -> str:
    return f"node {node}"
