"""A small Hugging Face hub on loopback: the calls that huggingface_hub makes to publish a model."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_ann"


class Hub:
    """Its state: repositories by name, and the calls that came."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.repositories: dict[str, dict] = {}  # name: {"private", "files": {path: content}}
        self.calls: list[str] = []
        self.fails = ""  # the calls with this text are refused

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> tuple[int, object]:
        """The status and the content of an answer."""
        self.calls.append(f"{method} {path}")
        if self.fails and self.fails in path:
            return 400, {"error": "the hub is in a bad mood"}
        if path == "/api/validate-yaml":
            errors = [] if "license: secret" not in body.decode() else [{"message": "no license"}]
            return (400 if errors else 200), {"errors": errors, "warnings": []}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"name": "ann", "orgs": [{"name": "lab"}]}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3]).removesuffix(".git")
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        return self._of_repository(self.repositories[name], path, body)

    def _create(self, given: dict) -> tuple[int, object]:
        name = f"{given['organization']}/{given['name']}"
        if name in self.repositories:
            return 409, {"error": "You already have it", "url": f"{self.address}/{name}"}
        private = given.get("visibility") == "private"
        self.repositories[name] = {"id": name, "private": private, "files": {}}
        return 200, {"url": f"{self.address}/{name}"}

    def _of_repository(self, found: dict, path: str, body: bytes) -> tuple[int, object]:
        files = found["files"]
        if path.endswith("/preupload/main"):
            about = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return 200, {"files": [about | {"path": x["path"]} for x in json.loads(body)["files"]]}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    files[line["value"]["path"]] = content
            return 200, {"commitUrl": f"{self.address}/{found['id']}/commit/1", "commitOid": "1"}
        about = {name: found[name] for name in ("id", "private")}
        return 200, about | {"siblings": [{"rfilename": name} for name in files], "sha": "1"}


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = self.headers.get("Authorization")
            status, content = hub.answer(self.command, self.path.split("?")[0], token, body)
            sent = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
