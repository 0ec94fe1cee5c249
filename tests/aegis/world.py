"""A decider in a world of nodes, and the facts of ends and of processes' lines."""

import collections

from zaya_jax.aegis import cause, log_rules
from zaya_jax.aegis.decide import Decider, Rules
from zaya_jax.aegis.facts import AgentConnected, Command, Exited, LogEvent, Observed, Ready, Tick
from zaya_jax.cluster.events import Finding
from zaya_jax.guard import guard


class World:
    """A decider with its clock, and nodes that obey, but for those that are deaf or absent."""

    def __init__(self, nodes, agents=None, min_nodes=None, each=1, deaf=(), absent=(), **rules):
        self.now, self.deaf = 0.0, deaf
        self.decider = Decider(
            Rules(nodes, agents or nodes, min_nodes or nodes, processes=each, **rules), 0.0
        )
        self.seen: list = []
        for node in sorted({*range(self.decider.rules.agents)} - {*absent}):
            self.take(AgentConnected(node, f"host{node}"), Ready(node))

    def take(self, *facts):
        """The actions that facts call for; a number is the seconds that pass before the next."""
        out = []
        for fact in facts:
            if isinstance(fact, int | float):
                self.now, fact = self.now + fact, Tick()
            found = self.decider.take(fact, self.now)
            out += found
            self.seen += found
            if Command.KILL in found:
                out += self.take(*[Ready(n) for n in self.decider.nodes if n not in self.deaf])
        return out

    def events(self, kind):
        return [
            action.fields
            for action in self.seen
            if isinstance(action, LogEvent) and action.kind == kind
        ]


def ended(*codes):
    """Processes end so, one a node, in this order: (node, code)."""
    return [fact for node, code in codes for fact in (Exited(node, node, code), Ready(node))]


def finding(action, group="critical", name="x"):
    return Finding(name, group, action, "seen so")


def says(process, line):
    """The finding in a line of a process of node 0."""
    (found,) = log_rules.Matcher().feed(process, line)
    return Observed(0, found)


Device = collections.namedtuple("Device", "name process_index")
Device.__str__ = lambda self: self.name


def wrong(processes, hosts=("host0", "host1", "host2")):
    """The finding in the line of a run that ends because a device of these processes is wrong."""
    devices = [Device(f"cpu:{2048 * p}", p) for p in processes]
    found = says(0, f"error: {guard.in_words(devices, hosts)} computes wrongly: it gave other bits")
    assert found.finding.name == cause.WRONG
    return found
