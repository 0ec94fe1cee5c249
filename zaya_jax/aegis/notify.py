"""Tells somebody of what befalls a run: a command, a webhook, or both. It never waits for them, and never fails a run.

    notifier = Notifier(command="page-me --team=training", webhook="https://...")
    notifier.tell(event)       returns at once
    notifier.close()           waits a moment for what is on its way

The command gets the event as JSON on its standard input, and as ZAYA_EVENT (kind), ZAYA_NODE, ZAYA_GROUP and
ZAYA_TEXT. A webhook gets it as JSON with a `text`, which Slack and its like show. What fails is counted, and what
comes faster than it can be told is dropped and counted.
"""

import dataclasses
import json
import logging
import os
import queue
import shlex
import subprocess
import threading
import urllib.request

from zaya_jax.aegis.events import Event
from zaya_jax.config import UserError

SECONDS = 20.0  # that a command or a webhook may take
WAITING = 100  # events at most
QUIET = frozenset({"spent", "log", "hardware"})  # kinds that are told only where they are more than a note
_log = logging.getLogger("zaya_jax")


def line_of(event: Event) -> str:
    """An event in one line."""
    who = f"process {event.process}" if event.process >= 0 else ""
    where = f"on {event.node}" if event.node else ""
    step = f"at step {event.step}" if event.step >= 0 else ""
    head = " ".join(filter(None, (event.kind, who, where, step)))
    return ": ".join(filter(None, (head, "; ".join(filter(None, (event.seen, event.concluded, event.done))))))


class Notifier:
    """See the module. `failed` and `dropped` are counts."""

    def __init__(self, command: str = "", webhook: str = "", seconds: float = SECONDS):
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise UserError(
                f"the command {command!r} is no command line ({error}); mend its quotes"
            ) from None
        if webhook and not webhook.startswith(("http://", "https://")):
            raise UserError(f"the webhook {webhook!r} is no address; give one that begins with https://")
        self._webhook, self._seconds = webhook, seconds
        self.told = self.failed = self.dropped = 0
        self._queue: queue.Queue[Event | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        if self._command or webhook:
            self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
            self._thread.start()

    def tell(self, event: Event) -> None:
        """Has it told, unless nobody wants to know or too much is waiting."""
        if self._thread is None or (event.kind in QUIET and event.group == "note"):
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def close(self, seconds: float = SECONDS) -> None:
        """Tells what waits, for so long at most."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            ways = [self._by_command] * bool(self._command) + [self._by_webhook] * bool(self._webhook)
            for how in ways:
                try:
                    how(event)
                    self.told += 1
                except Exception as error:
                    self.failed += 1
                    if self.failed == 1:  # once: a service that is down would say it at each event
                        _log.warning("an event could not be told: %s: %s", type(error).__name__, error)

    def _by_command(self, event: Event) -> None:
        words = {"ZAYA_EVENT": event.kind, "ZAYA_NODE": event.node, "ZAYA_GROUP": event.group}
        environ = os.environ | words | {"ZAYA_TEXT": line_of(event)}
        subprocess.run(
            self._command, input=json.dumps(dataclasses.asdict(event)).encode(), env=environ, timeout=self._seconds,
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _by_webhook(self, event: Event) -> None:
        body = json.dumps({"text": line_of(event), **dataclasses.asdict(event)}).encode()
        request = urllib.request.Request(self._webhook, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._seconds):
            pass
