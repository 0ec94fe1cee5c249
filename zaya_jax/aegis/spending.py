"""What a start's wall clock goes to, by section, written down as events of kind "spent" that `accounts` adds up.

    spending = Spending(); spending.begin(now, step)
    given = spending.see(section, step, now)      each second or so, of process 0; sometimes what an event should hold
    given = spending.end(now)                     the start has ended

    log.add("spent", **given)

Windows grow with the start's age, so that a month is some thousand lines: a hundredth of it, at least LEAST seconds.
"""

from typing import Any

LEAST = 10.0
SHARE = 0.01


class Spending:
    """One start at a time; `now` is of any steady clock, in seconds."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._since = self._at = 0.0
        self._section, self._from, self._step = "", 0, 0
        self._sections: dict[str, float] = {}

    def begin(self, now: float, step: int) -> None:
        """A start that goes on from this step."""
        self._began = self._since = self._at = now
        self._section, self._from, self._step, self._sections = "start", max(step, 0), max(step, 0), {}

    def see(self, section: str, step: int, now: float) -> dict[str, Any] | None:
        """The process is there now: since the last look it was where it was then."""
        if self._began is None:
            return None
        self._add(now)
        self._section = section or self._section
        # A process that has begun step n has ended n - 1; before its first step it says 0.
        done = step - 1 if section in ("step", "compile") else step
        self._step = max(self._step, done)
        due = max(LEAST, SHARE * (now - self._began))
        return self._take(now) if now - self._since >= due else None

    def end(self, now: float) -> dict[str, Any] | None:
        """What is left."""
        if self._began is None:
            return None
        self._add(now)
        self._began = None
        return self._take(now) if self._sections else None

    def _add(self, now: float) -> None:
        if now > self._at:
            self._sections[self._section] = self._sections.get(self._section, 0.0) + now - self._at
            self._at = now

    def _take(self, now: float) -> dict[str, Any]:
        sections = {name: round(seconds, 3) for name, seconds in self._sections.items()}
        given = {
            "seconds": round(now - self._since, 3), "step": self._step,
            "facts": {"sections": sections, "from": self._from},
        }  # fmt: skip
        self._since, self._from, self._sections = now, self._step, {}
        return given
