"""A page that follows a run: what is new alone, several viewers, foreign names refused, an end at once."""

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from experiments import report
from zaya_jax.config import UserError
from zaya_jax.report import serve

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(the run's folder, its server) with no pause between two looks."""
    monkeypatch.setattr(serve, "AT_MOST_EVERY", 0.0)
    monkeypatch.setattr(serve, "SHARE", 1.0)
    (tmp_path / "config.json").write_text('{"name": "a<b"}')
    server = serve.Server(0, serve.Pages(report.Watched([tmp_path])))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield tmp_path, server
    server.shutdown()
    server.server_close()


def add(folder, *steps):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps({"step": s, "loss": 1 / s, "lr": 0.5}) + "\n" for s in steps))


def get(server, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_a_viewer_is_sent_what_is_new_alone(served):
    folder, server = served
    answer, page = get(server, "/")
    assert answer.status == 200 and "There is no metrics.jsonl" in page and "<title>a&lt;b</title>" in page
    version = re.search('data-version="([^"]*)"', page)[1]
    assert json.loads(get(server, f"/new?v={version}")[1])["parts"] == {}
    add(folder, 1, 2, 3)
    news = json.loads(get(server, f"/new?v={version}")[1])
    assert {"header", "loss_section", "optimiser_section"} <= set(news["parts"]) <= set(news["order"])
    assert "config_section" in news["order"] and "config_section" not in news["parts"]
    assert news["title"].endswith("after 3 steps")
    assert json.loads(get(server, f"/new?v={news['version']}")[1])["parts"] == {}
    add(folder, 4)
    for behind in (version, news["version"]):  # two viewers, one of them later
        assert "loss_section" in json.loads(get(server, f"/new?v={behind}")[1])["parts"]
    for foreign in ("", "0123abcd.7", f"{version}²", "x.y"):
        found = json.loads(get(server, f"/new?v={urllib.parse.quote(foreign)}")[1])
        assert set(found["parts"]) == set(found["order"])


def test_a_part_that_is_gone_is_told(served):
    folder, server = served
    add(folder, *range(1, 30))
    before = json.loads(get(server, "/new")[1])
    (folder / "metrics.jsonl").write_text("")
    after = json.loads(get(server, f"/new?v={before['version']}")[1])
    assert "loss_section" in before["order"] and "loss_section" not in after["order"]
    assert "no complete step" in after["parts"]["header"]


def test_other_hosts_paths_and_methods_are_refused(served):
    _, server = served
    port = server.server_port
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}"):
        assert get(server, "/", host)[0].status == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port}.evil.example",
        f"[::1]:{port}",
    ):
        answer, body = get(server, "/new", host)
        assert answer.status == 403 and "loss" not in body
    for path in (
        "/metrics.jsonl",
        "/../config.json",
        "/new/",
        "/index.html",
        "/%2e%2e/",
        "http://[",
    ):
        assert get(server, path)[0].status in (400, 404), path
    assert get(server, "/", method="POST")[0].status == 501
    head, body = get(server, "/", method="HEAD")
    assert head.status == 200 and body == "" and int(head.headers["Content-Length"]) > 1000
    assert "default-src 'none'" in head.headers["Content-Security-Policy"]
    assert head.headers["Access-Control-Allow-Origin"] is None
    for names in (f"Host: 127.0.0.1:{port}\r\nHost: evil\r\n", ""):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(f"GET / HTTP/1.1\r\n{names}Connection: close\r\n\r\n".encode())
            assert b" 403 " in raw.recv(100)
    assert server.server_address[0] == "127.0.0.1"


def test_many_viewers_at_once_and_one_that_says_nothing(served):
    folder, server = served
    add(folder, 1, 2, 3)
    silent = socket.create_connection(("127.0.0.1", server.server_port))
    found = []
    viewers = [threading.Thread(target=lambda: found.append(get(server, "/")[1])) for _ in range(12)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join(60)
    assert len(found) == 12 and len(set(found)) == 1
    silent.close()


def test_trouble_is_told_and_what_was_there_stays(capsys):
    looks = iter([("t", {"a": "1"}), OSError("gone\nfar"), OSError("gone\nfar"), ("t", {"a": "2"})])

    def look():
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    pages = serve.Pages(look)
    seen = []
    for _ in range(4):
        pages._next = 0.0
        seen.append(pages.new(""))
    assert [one["parts"]["a"] for one in seen] == ["1", "1", "1", "2"]
    assert [one["trouble"] for one in seen] == ["", *["The files cannot be read now: gone"] * 2, ""]
    assert capsys.readouterr().err.count("warning") == 1


def test_a_run_that_is_slow_to_draw_is_drawn_less_often():
    calls = []

    def look():
        calls.append(1)
        time.sleep(0.3)
        return "t", {}

    pages = serve.Pages(look)
    for _ in range(50):
        pages.new("")
    assert len(calls) == 1 and pages._next - time.monotonic() > 0.6


def test_a_port_that_is_taken_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--serve={port}: .*give another port"):
            serve.Server(port, serve.Pages(lambda: None))


def test_an_interrupt_ends_it_at_once_with_a_viewer_there(tmp_path):
    add(tmp_path, 1, 2)
    said, seen = [], []

    def watch():
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/ ", said[0])[1])
        viewer = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        viewer.request("GET", "/")
        seen.append(viewer.getresponse().read())
        seen.append(viewer)  # whose connection stays open
        os.kill(os.getpid(), signal.SIGINT)

    def say(words):
        said.append(words)
        if len(said) == 1:
            threading.Thread(target=watch).start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        serve.serve(report.Watched([tmp_path]), 0, say)
    finally:
        signal.signal(signal.SIGINT, before)
    assert said[1:] == ["ended"] and b"after 2 steps" in seen[0]
    seen[1].close()


@pytest.mark.slow
def test_the_program_says_its_address_and_ends_at_once_with_a_viewer_there(tmp_path):
    add(tmp_path, 1, 2)
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.report", str(tmp_path), "--serve"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert select.select([process.stdout], [], [], 120)[0]
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/ ", process.stdout.readline())[1])
        viewer = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        viewer.request("GET", "/")
        assert b"after 2 steps" in viewer.getresponse().read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    viewer.close()
    assert (process.returncode, out, err) == (0, "ended\n", "")
