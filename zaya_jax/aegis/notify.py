"""Runs a command at each event, without waiting for it; a failing command never fails the run.

    hook = Hook("page-me --team=training")
    hook.tell(event)       returns at once
    hook.close()           waits a moment for the events on their way

The command gets the event as JSON on its standard input, and as ZAYA_EVENT (kind), ZAYA_NODE, ZAYA_GROUP and
ZAYA_TEXT. Failures are counted, and events that come faster than the command takes them are dropped and counted.
"""

import dataclasses
import json
import logging
import os
import queue
import shlex
import subprocess
import threading

from zaya_jax.aegis.events import Event
from zaya_jax.config import UserError

SECONDS = 20.0  # that the command may take
WAITING = 100  # events at most
_log = logging.getLogger("zaya_jax")


def line_of(event: Event) -> str:
    """An event in one line."""
    who = f"process {event.process}" if event.process >= 0 else ""
    where = f"on {event.node}" if event.node else ""
    step = f"at step {event.step}" if event.step >= 0 else ""
    head = " ".join(filter(None, (event.kind, who, where, step)))
    return ": ".join(filter(None, (head, "; ".join(filter(None, (event.seen, event.concluded, event.done))))))


class Hook:
    """See the module. `failed` and `dropped` are counts."""

    def __init__(self, command: str, seconds: float = SECONDS):
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise UserError(f"the command {command!r} is no command line ({error}); mend its quotes") from None
        self._seconds = seconds
        self.told = self.failed = self.dropped = 0
        self._queue: queue.Queue[Event | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        if self._command:
            self._thread.start()

    def tell(self, event: Event) -> None:
        """Passes it on, unless there is no command or too much is waiting."""
        if not self._command:
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def close(self, seconds: float = SECONDS) -> None:
        """Tells the events that wait, for so long at most."""
        if self._command:
            try:
                self._queue.put(None, timeout=seconds)
                self._thread.join(seconds)
            except queue.Full:
                return

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            words = {"ZAYA_EVENT": event.kind, "ZAYA_NODE": event.node, "ZAYA_GROUP": event.group}
            environ = os.environ | words | {"ZAYA_TEXT": line_of(event)}
            body = json.dumps(dataclasses.asdict(event)).encode()
            try:
                subprocess.run(
                    self._command, input=body, env=environ, timeout=self._seconds, check=True,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                self.told += 1
            except (OSError, subprocess.SubprocessError) as error:
                self.failed += 1
                if self.failed == 1:  # once: a service that is down would say it at each event
                    _log.warning("an event could not be told: %s: %s", type(error).__name__, error)
