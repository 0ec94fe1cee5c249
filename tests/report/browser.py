"""Drives Chromium through chromedriver's own protocol, with the standard library alone."""

import base64
import json
import pathlib
import shutil
import subprocess
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
KEYS = {
    "right": "\ue014",
    "left": "\ue012",
    "down": "\ue015",
    "escape": "\ue00c",
    "home": "\ue011",
    "end": "\ue010",
}


class Browser:
    """One window of a given size and colour scheme; use it in a with statement."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False):
        self.process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if "started successfully on port" in line:
                self.at = f"http://127.0.0.1:{int(line.rsplit(maxsplit=1)[1].rstrip('.'))}"
                break
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += ["--blink-settings=preferredColorScheme=" + ("0" if dark else "1")]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self.session = ""
        self.session = f"/session/{self._ask('POST', '/session', wanted)['sessionId']}"
        # The window cannot be narrower than 500 pixels: the device's size is emulated.
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.devtools("Emulation.setDeviceMetricsOverride", size)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", self.session)
        finally:
            self.process.terminate()
            self.process.communicate(timeout=20)

    def _ask(self, method: str, path: str, body: dict | None = None):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.at}{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def devtools(self, command: str, params: dict):
        """One of DevTools' commands."""
        return self._ask("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str | pathlib.Path) -> None:
        """Goes to a page."""
        url = url.resolve().as_uri() if isinstance(url, pathlib.Path) else url
        self._ask("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str, *args: object):
        """What a script returns."""
        return self._ask("POST", f"{self.session}/execute/sync", {"script": script, "args": list(args)})

    def mouse(self, *moves: tuple, kind: str = "mouse") -> None:
        """("move", x, y), ("down",), ("up",) in pixels of the window."""
        kinds = {"move": "pointerMove", "down": "pointerDown", "up": "pointerUp"}
        actions = []
        for move, *place in moves:
            action = {"type": kinds[move]}
            action |= {"x": round(place[0]), "y": round(place[1]), "duration": 0} if place else {"button": 0}
            actions.append(action)
        mouse = {"type": "pointer", "id": kind, "parameters": {"pointerType": kind}, "actions": actions}
        self._ask("POST", f"{self.session}/actions", {"actions": [mouse]})

    def keys(self, *names: str) -> None:
        """Presses keys one after the other, where the focus is."""
        actions = []
        for name in names:
            value = KEYS.get(name, name)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self._ask(
            "POST",
            f"{self.session}/actions",
            {"actions": [{"type": "key", "id": "keys", "actions": actions}]},
        )

    def picture(self, path: pathlib.Path) -> None:
        """A screenshot of what is seen."""
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self.session}/screenshot")))
