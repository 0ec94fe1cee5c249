"""The run's guardian as Prometheus metrics: what befell the run, and where its processes are.

    metrics = Metrics()
    metrics.event(event)                     each event once
    metrics.beat(process, node, ...)         where a process is, every few seconds
    metrics.text()                           the exposition format
    metrics.serve(9464)                      the same over HTTP at /metrics, in a thread; the port that was taken

TABLE is all there is, docs/watching.md shows it, and a test holds that.
"""

from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from zaya_jax.aegis.events import Event
from zaya_jax.cluster.beats import SECTIONS
from zaya_jax.config import UserError

SECONDS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)  # buckets


class Row(NamedTuple):
    """One metric."""

    name: str
    kind: type
    labels: tuple[str, ...]
    meaning: str


_NUMBERED = ", ".join(f"{i} {section}" for i, section in enumerate(SECTIONS))
TABLE = (
    Row("zaya_events_total", Counter, ("kind", "group"), "events by kind and class"),
    Row("zaya_findings_total", Counter, ("name", "node"), "findings of logs and hardware by rule or watcher"),
    Row("zaya_interruptions_total", Counter, ("kind", "group"), "starts that ended before the run was done"),
    Row("zaya_detect_seconds", Histogram, ("kind",), "from the fault until it was noticed"),
    Row("zaya_recover_seconds", Histogram, ("kind",), "from the fault until the first new step"),
    Row("zaya_starts_total", Counter, (), "starts of the training"),
    Row("zaya_excluded_nodes", Gauge, (), "nodes that no start has any more"),
    Row("zaya_running", Gauge, (), "1 from a start until its end"),
    Row("zaya_section_seconds_total", Counter, ("section",), "wall clock by section of the run"),
    Row("zaya_step", Gauge, (), "the newest step that any process has begun"),
    Row("zaya_process_step", Gauge, ("process", "node"), "the step that a process is at"),
    Row("zaya_process_section", Gauge, ("process", "node"), f"its section: {_NUMBERED}"),
    Row("zaya_process_silent_seconds", Gauge, ("process", "node"), "how long it has been at its place"),
    Row("zaya_process_step_seconds", Gauge, ("process", "node"), "its last step"),
    Row("zaya_process_own_seconds", Gauge, ("process", "node"), "its own work in that step"),
    Row("zaya_process_data_seconds", Gauge, ("process", "node"), "what it waited for data in that step"),
)  # fmt: skip
INTERRUPTIONS = ("died", "hangs", "lost", "found")


class Metrics:
    """A registry of its own, so that other libraries' metrics stay out."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._of: dict[str, Any] = {}
        for row in TABLE:
            more = {"buckets": SECONDS} if row.kind is Histogram else {}
            self._of[row.name] = row.kind(row.name, row.meaning, row.labels, registry=self._registry, **more)
        self._step, self._excluded = 0, set[str]()

    def event(self, event: Event) -> None:
        """Takes in one event."""
        of = self._of
        of["zaya_events_total"].labels(event.kind, event.group).inc()
        if event.kind in ("log", "hardware"):
            of["zaya_findings_total"].labels(event.concluded or event.seen[:80], event.node).inc()
        elif event.kind in INTERRUPTIONS and "start" in event.facts:
            of["zaya_interruptions_total"].labels(event.kind, event.group).inc()
            of["zaya_detect_seconds"].labels(event.kind).observe(event.seconds)
            of["zaya_running"].set(0)
        elif event.kind == "started":
            of["zaya_starts_total"].inc()
            of["zaya_running"].set(1)
        elif event.kind == "restarted":
            kind = event.concluded.rpartition(" ")[2] or "?"
            of["zaya_recover_seconds"].labels(kind).observe(event.seconds)
        elif event.kind == "excluded":
            self._excluded.add(event.node)
            of["zaya_excluded_nodes"].set(len(self._excluded))
        elif event.kind == "ended":
            of["zaya_running"].set(0)
        elif event.kind == "spent":
            for section, seconds in event.facts.get("sections", {}).items():
                of["zaya_section_seconds_total"].labels(section).inc(seconds)

    def beat(
        self, process: int, node: str, section: str, step: int, silent: float,
        lap: tuple[float, float, float] | None = None,
    ) -> None:  # fmt: skip
        """Where a process is, and for how long; `lap`: its last step's whole, own and data seconds."""
        if section in SECTIONS:
            self._put("section", process, node, SECTIONS.index(section))
        self._put("step", process, node, step)
        self._put("silent_seconds", process, node, silent)
        for name, value in zip(("step", "own", "data"), lap or (), strict=False):
            self._put(f"{name}_seconds", process, node, value)
        self._step = max(self._step, step)
        self._of["zaya_step"].set(self._step)

    def _put(self, name: str, process: int, node: str, value: float) -> None:
        self._of[f"zaya_process_{name}"].labels(str(process), node).set(value)

    def forget(self) -> None:
        """A new start: its processes may lie elsewhere, and step back."""
        self._step = 0
        for row in TABLE:
            if "process" in row.labels:
                self._of[row.name].clear()

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        return prometheus_client.generate_latest(self._registry).decode()

    def serve(self, port: int, address: str = "0.0.0.0") -> int:
        """Answers there until the process ends; port 0: any. UserError where the port is taken."""
        try:
            server, _ = prometheus_client.start_http_server(port, address, self._registry)
        except OSError as error:
            raise UserError(
                f"metrics cannot be served at port {port} ({error.strerror}); give another"
            ) from None
        return server.server_port
