"""Serves the report of a run that goes on, on the loopback address alone: the page, and what of it is new.

    GET /            the page
    GET /new?v=V     JSON: the parts that have changed since version V, all of them where V is another server's

Everything is drawn once for all viewers, at most once a second. Other hosts' names in the Host header are refused, so
that no page of another site can read this one through a name that it points here (DNS rebinding).
"""

import http.server
import json
import secrets
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from zaya_jax.config import UserError, fields
from zaya_jax.report import live, page

ADDRESS = "127.0.0.1"
AT_MOST_EVERY = 1.0  # seconds between two looks at the files
SHARE = 0.25  # of the time that drawing may take, where the run is large
PATIENCE = 20  # seconds that a viewer may take to say what it wants
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

# What there is to show: the title and the parts; None where nothing has changed since the last time.
Look = Callable[[], tuple[str, dict[str, str]] | None]


class Pages:
    """The newest parts, each with the version in which it came."""

    def __init__(self, look: Look):
        self._look, self._lock = look, threading.Lock()
        self._epoch, self._number = secrets.token_hex(4), 0
        self._title, self._parts, self._since = "", dict[str, str](), dict[str, int]()
        self._next, self._trouble = 0.0, ""

    def _refresh(self) -> None:
        begun = time.monotonic()
        if begun < self._next:
            return
        try:
            found = self._look()
            trouble = ""
        except Exception as error:  # the viewers keep what they have, and are told
            found, trouble = None, f"The files cannot be read now: {fields.first_line(error)}"
            if trouble != self._trouble:
                print(f"warning: {trouble}", file=sys.stderr, flush=True)
        self._trouble = trouble
        if found is not None:
            self._title, parts = found
            changed = [name for name, html in parts.items() if self._parts.get(name) != html]
            if changed or parts.keys() != self._parts.keys():
                self._number += 1
                self._since = {n: self._number if n in changed else self._since[n] for n in parts}
                self._parts = parts
        now = time.monotonic()
        self._next = now + max(AT_MOST_EVERY, (now - begun) * (1 / SHARE - 1))

    def whole(self) -> str:
        """The page."""
        with self._lock:
            self._refresh()
            return page.shell(self._title, self._parts, live.parts_of_page(self._version))

    def new(self, version: str) -> dict[str, Any]:
        """What a viewer with that version does not have."""
        with self._lock:
            self._refresh()
            epoch, _, number = version.partition(".")
            known = epoch == self._epoch and number.isascii() and number.isdigit()
            had = int(number[:18]) if known else -1
            parts = {n: html for n, html in self._parts.items() if self._since[n] > had}
            return {
                "version": self._version, "title": self._title, "order": list(self._parts), "parts": parts,
                "trouble": self._trouble,
            }  # fmt: skip

    @property
    def _version(self) -> str:
        return f"{self._epoch}.{self._number}"


class Handler(http.server.BaseHTTPRequestHandler):
    """One viewer's connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "zaya_jax", ""
    timeout = PATIENCE
    server: "Server"

    def do_GET(self) -> None:
        """The page, what is new, or a refusal."""
        hosts = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        if self.server.server_port == 80:  # which a browser leaves out
            hosts += [ADDRESS, "localhost"]
        given = self.headers.get_all("Host") or []
        if len(given) != 1 or given[0].strip().lower() not in hosts:
            self._answer(403, "text/plain", f"this is {' or '.join(hosts)}\n")
            return
        try:
            url = urllib.parse.urlsplit(self.path)
        except ValueError:
            self._answer(400, "text/plain", "no address\n")
            return
        if url.path == "/":
            self._answer(200, "text/html", self.server.pages.whole())
        elif url.path == "/new":
            version = urllib.parse.parse_qs(url.query).get("v", [""])[0]
            self._answer(200, "application/json", json.dumps(self.server.pages.new(version)))
        else:
            self._answer(404, "text/plain", "there are / and /new alone\n")

    do_HEAD = do_GET

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """No line for each question."""


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection; none of them holds up the end."""

    daemon_threads, block_on_close = True, False

    def __init__(self, port: int, pages: Pages):
        self.pages = pages
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UserError(
                f"--serve={port}: {ADDRESS}:{port} cannot be listened at ({error.strerror}); "
                "give another port, or --serve alone for any that is free"
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that goes in the middle is no news; anything else is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve(look: Look, port: int, say: Callable[[str], None]) -> None:
    """Until Ctrl-C; port 0: any that is free."""
    with Server(port, Pages(look)) as server:
        say(f"http://{ADDRESS}:{server.server_port}/ (on this machine alone; Ctrl-C ends)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")
