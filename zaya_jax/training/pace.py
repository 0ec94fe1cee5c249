"""Where the loop is, said as it goes (`cluster.beats`), and what each step's seconds went to.

    pace.fetch(number, program)      waits for a batch; the first step of a program counts as "compile"
    pace.dispatch(), pace.came()    the program is called; the call has come back
    pace.at(section, number, mark)   any other place; pace.mark(mark): the same section and step go on
    pace.lap()                       the step has ended

A step's own seconds leave out the time that this process waited for data, figures or other processes.
"""

import time
from collections import defaultdict
from collections.abc import Hashable

import jax

from zaya_jax.cluster import beats

OTHERS = ("fetch", "wait")  # marks at which a process does nothing itself


class Pace:
    """One start's; `device`: one of those that compute."""

    def __init__(self, device: jax.Device):
        # A CPU computes in the call itself, so that it is there that processes wait for each other.
        self._calling = "wait" if device.platform == "cpu" else "dispatch"
        self._known, self._compiled = set[Hashable](), False
        self._spent = defaultdict[tuple[str, str], float](float)
        self._place, self._step, self._since = ("start", ""), 0, time.perf_counter()

    def at(self, section: str, step: int, mark: str = "") -> None:
        """The loop has come here; until now it was where it had said before."""
        now = time.perf_counter()
        self._spent[self._place] += now - self._since
        self._place, self._step, self._since = (section, mark), step, now
        beats.at(section, step, mark)

    def mark(self, mark: str) -> None:
        """Likewise, within the same section."""
        self.at(self._place[0], self._step, mark)

    def fetch(self, step: int, program: Hashable) -> None:
        """A step begins; a program that was not called before is compiled in it."""
        self.at(self._section("step", program), step, "fetch")

    def dispatch(self) -> None:
        """Its batch is there, and its program is called."""
        self.mark("dispatch" if self._place[0] == "compile" else self._calling)

    def came(self) -> None:
        """The call has come back: what was compiled is."""
        self.at("step", self._step, "wait")

    def evaluate(self, step: int, program: Hashable) -> None:
        """An evaluation begins."""
        self.at(self._section("evaluate", program), step, "dispatch")

    def evaluating(self) -> None:
        """Its program has been called."""
        self.at("evaluate", self._step, "wait")

    def lap(self) -> None:
        """The step has ended; one that compiled has no times that could be compared."""
        self.mark(self._place[1])
        spent, self._spent = self._spent, defaultdict(float)
        compiled, self._compiled = self._compiled, False
        if compiled:
            return
        here = {mark: seconds for (section, mark), seconds in spent.items() if section == "step"}
        own = sum(seconds for mark, seconds in here.items() if mark not in OTHERS)
        beats.lap(self._step, sum(here.values()), own, here.get("fetch", 0.0))

    def _section(self, section: str, program: Hashable) -> str:
        if program in self._known:
            return section
        self._known.add(program)
        self._compiled = True
        return "compile"
