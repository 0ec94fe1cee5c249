"""Events told to a command, a webhook and Prometheus: never waited for, failures counted."""

import http.server
import json
import re
import socket
import sys
import threading
import time
import urllib.request

import pytest

from zaya_jax.aegis.events import Event
from zaya_jax.aegis.notify import Notifier, line_of
from zaya_jax.aegis.prometheus import TABLE, Metrics
from zaya_jax.config import UserError

DIED = Event(
    "died",
    10.0,
    "distributed",
    "node3",
    7,
    1200,
    "SIGKILL",
    "disk full",
    "restart at once",
    0.25,
    {"start": 1},
)


def script(tmp_path, text):
    path = tmp_path / "tell.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def test_a_command_gets_the_event(tmp_path):
    out = tmp_path / "out"
    told = Notifier(
        script(
            tmp_path,
            f"import os, sys\nopen({str(out)!r}, 'w').write(os.environ['ZAYA_TEXT'] + sys.stdin.read())",
        )
    )
    told.tell(DIED)
    told.close()
    words, _, body = out.read_text().partition("{")
    assert (
        words == line_of(DIED) == "died process 7 on node3 at step 1200: SIGKILL; disk full; restart at once"
    )
    assert json.loads("{" + body)["kind"] == "died" and (told.told, told.failed) == (1, 0)


def test_notes_of_the_watchers_are_not_told(tmp_path):
    told = Notifier(script(tmp_path, ""))
    for kind in ("spent", "log", "hardware"):
        told.tell(Event(kind, 1.0))
    told.close()
    assert told.told == 0
    told = Notifier(script(tmp_path, ""))
    told.tell(Event("hardware", 1.0, "critical"))
    told.close()
    assert told.told == 1


def test_what_hangs_is_not_waited_for_and_what_fails_is_counted(tmp_path, caplog):
    told = Notifier(script(tmp_path, "import time; time.sleep(60)"), seconds=0.5)
    begin = time.monotonic()
    for _ in range(300):
        told.tell(DIED)
    assert time.monotonic() - begin < 5
    assert told.dropped >= 199  # a hundred wait, one or so is being told
    time.sleep(1.2)
    assert told.failed >= 1 and told.told == 0
    failing = Notifier("/nowhere/at/all", "http://127.0.0.1:1/none")
    failing.tell(DIED)
    failing.close()
    assert failing.failed == 2


def test_a_webhook_gets_json():
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told = Notifier(webhook=f"http://127.0.0.1:{server.server_port}/hook")
    told.tell(DIED)
    told.close()
    server.shutdown()
    server.server_close()
    assert got[0]["text"] == line_of(DIED) and got[0]["process"] == 7 and told.told == 1


def test_nobody_to_tell_is_no_thread():
    before = threading.active_count()
    told = Notifier()
    told.tell(DIED)
    told.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("given", [{"command": "a 'b"}, {"webhook": "example.net/hook"}])
def test_what_cannot_be_is_refused(given):
    with pytest.raises(UserError, match=r"no command line|no address"):
        Notifier(**given)


def filled():
    metrics = Metrics()
    metrics.event(Event("started", 1.0, step=-1))
    metrics.event(Event("spent", 2.0, seconds=20.0, facts={"sections": {"step": 18.0, "save": 2.0}}))
    metrics.event(DIED)
    metrics.event(Event("lost", 3.0, node="node9"))  # a spare
    metrics.event(Event("excluded", 3.0, node="node3"))
    metrics.event(Event("excluded", 4.0, node="node3"))
    metrics.event(Event("restarted", 5.0, seconds=4.5, concluded="after it died"))
    metrics.event(
        Event("hardware", 5.0, "critical", "node2", seen="ue: 0 -> 1", concluded="gpu uncorrectable error")
    )
    metrics.beat(3, "node1", "step", 17, 0.4, (2.0, 1.5, 0.1))
    return metrics


def test_metrics_say_what_the_events_said():
    text = filled().text()
    for line in (
        'zaya_events_total{group="distributed",kind="died"} 1.0',
        'zaya_interruptions_total{group="distributed",kind="died"} 1.0',
        'zaya_findings_total{name="gpu uncorrectable error",node="node2"} 1.0',
        'zaya_section_seconds_total{section="step"} 18.0',
        'zaya_recover_seconds_sum{kind="died"} 4.5',
        'zaya_detect_seconds_bucket{kind="died",le="0.5"} 1.0',
        "zaya_excluded_nodes 1.0", "zaya_starts_total 1.0", "zaya_running 0.0", "zaya_step 17.0",
        'zaya_process_section{node="node1",process="3"} 2.0',
        'zaya_process_own_seconds{node="node1",process="3"} 1.5',
    ):  # fmt: skip
        assert line in text.splitlines(), line


def test_a_lost_spare_interrupts_nothing():
    assert 'zaya_interruptions_total{group="note",kind="lost"}' not in filled().text()


def test_every_metric_of_the_table_is_there_with_its_meaning():
    text = filled().text()
    for row in TABLE:
        assert re.search(rf"^# HELP {row.name} {re.escape(row.meaning)}$", text, re.M), row.name
        assert re.search(rf"^{row.name}(_sum|_count)?[ {{]", text, re.M), row.name


def test_a_new_start_forgets_processes():
    metrics = filled()
    metrics.forget()
    assert 'process="3"' not in metrics.text()
    metrics.beat(0, "node1", "start", 3, 0.0)
    assert "zaya_step 3.0" in metrics.text()


def test_metrics_over_http():
    metrics = filled()
    port = metrics.serve(0, "127.0.0.1")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"zaya_step 17.0" in answer.read()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="give another"):
        metrics.serve(taken.getsockname()[1], "127.0.0.1")
